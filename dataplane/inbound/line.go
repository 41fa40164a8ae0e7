package inbound

import (
	"errors"
	"math"
	"math/rand/v2"
	"strconv"
	"sync"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
)

// line is who has a slot of a replica, and who waits for one. A request that comes without a reservation does not wait: it
// takes a slot even if none is free, and those who wait for one wait the longer.
type line struct {
	mu sync.Mutex
	// mu guards the fields below, and the state of the reservations.

	slots  int
	line   *load.Line[*Reservation]
	closed bool           // the replica has left
	spare  []*Reservation // of requests that have left
}

func newLine(slots int) *line {
	return &line{slots: slots, line: load.NewLine[*Reservation](slots)}
}

// Reservation is a place in the line for a replica, and then a slot.
type Reservation struct {
	// ID is what a request carries to claim the slot.
	ID string

	line    *line
	settled func(granted bool)
	state   reservationState
}

type reservationState int

const (
	waiting reservationState = iota
	granted
	claimed // by a request, whose end frees the slot
	ended
)

var (
	errNoReplica = errors.New("there is no such replica on this node")
	errNotReady  = errors.New("the replica takes no requests")
)

// Reserve joins the line for a replica. settled is called once, maybe at once, by whoever frees the slot: with true when
// the slot is granted, with false when the replica has left. It must be quick. Release is to be called in any case.
func (in *Inbound) Reserve(id registry.EndpointID, settled func(granted bool)) (*Reservation, error) {
	replica := in.Replica(id)
	switch {
	case replica == nil:
		return nil, errNoReplica
	case replica.Endpoint.State != registry.Ready:
		return nil, errNotReady
	}
	r := &Reservation{ID: strconv.FormatUint(rand.Uint64(), 36), line: replica.line, settled: settled}
	in.reservations.Store(r.ID, r)
	replica.line.join(r)
	return r, nil
}

// Release gives up the place in the line, or the slot unless a request has claimed it.
func (in *Inbound) Release(r *Reservation) {
	in.reservations.Delete(r.ID)
	r.line.release(r)
}

// slot counts a request in: it has the slot that it reserved, or else takes one.
func (in *Inbound) slot(l *line, reservation string) *Reservation {
	if reservation == "" {
		return l.take()
	}
	if found, ok := in.reservations.Load(reservation); ok {
		if r := found.(*Reservation); r.line == l && l.claim(r) {
			return r
		}
	}
	return l.take() // the reservation has ended meanwhile
}

// join puts a reservation at the end of the line.
func (l *line) join(r *Reservation) {
	l.mu.Lock()
	closed, got := l.closed, false
	if closed {
		r.state = ended
	} else if got = l.line.Join(r); got {
		r.state = granted
	}
	l.mu.Unlock()
	if closed || got {
		r.settled(got)
	}
}

// claim lets a request have the slot that was granted.
func (l *line) claim(r *Reservation) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if r.state != granted {
		return false
	}
	r.state = claimed
	return true
}

// take lets a request in that has no reservation.
func (l *line) take() *Reservation {
	l.mu.Lock()
	defer l.mu.Unlock()
	var r *Reservation
	if last := len(l.spare) - 1; last >= 0 {
		r, l.spare = l.spare[last], l.spare[:last]
	} else {
		r = &Reservation{line: l}
	}
	r.state = claimed
	l.line.Enter(r)
	return r
}

// release ends a reservation that no request has claimed.
func (l *line) release(r *Reservation) {
	l.mu.Lock()
	if r.state == claimed || r.state == ended {
		l.mu.Unlock()
		return
	}
	next := l.leaveLocked(r)
	l.mu.Unlock()
	next.grant()
}

// leave counts a request out. It returns whether that left a slot to nobody.
func (l *line) leave(r *Reservation) (idle bool) {
	l.mu.Lock()
	next := l.leaveLocked(r)
	holding, waiting := l.line.Len()
	idle = !l.closed && next == nil && waiting == 0 && holding < l.slots
	if r.ID == "" {
		l.spare = append(l.spare, r)
	}
	l.mu.Unlock()
	next.grant()
	return idle
}

// leaveLocked returns the reservation to which that leaves a slot, if any.
func (l *line) leaveLocked(r *Reservation) *Reservation {
	r.state = ended
	next, ok := l.line.Leave(r)
	if !ok {
		return nil
	}
	next.state = granted
	return next
}

// grant tells that a slot was granted.
func (r *Reservation) grant() {
	if r != nil {
		r.settled(true)
	}
}

// resize changes the number of slots.
func (l *line) resize(slots int) {
	l.mu.Lock()
	l.slots = slots
	next := l.resizeLocked(granted)
	l.mu.Unlock()
	for _, r := range next {
		r.settled(true)
	}
}

// close is for a replica that has left: those who wait for it wait in vain.
func (l *line) close() {
	l.mu.Lock()
	l.closed, l.slots = true, math.MaxInt
	vain := l.resizeLocked(ended)
	l.mu.Unlock()
	for _, r := range vain {
		r.settled(false)
	}
}

// dismiss ends the wait of all who wait: with a slot, or without one.
func (l *line) dismiss(state reservationState) {
	l.mu.Lock()
	over := l.line.Resize(math.MaxInt, nil)
	for _, r := range over {
		if r.state = state; state == ended {
			l.line.Leave(r)
		}
	}
	l.line.Resize(l.slots, nil)
	l.mu.Unlock()
	for _, r := range over {
		r.settled(state == granted)
	}
}

// resizeLocked returns those whose wait is over.
func (l *line) resizeLocked(state reservationState) []*Reservation {
	over := l.line.Resize(l.slots, nil)
	for _, r := range over {
		r.state = state
	}
	return over
}

// Slots shows the line for the replica, nil if its policy does not go by slots.
func (r *Replica) Slots() *meshv1.SlotsView {
	switch r.policy.Balancer {
	case policy.BalancerLateBinding, policy.BalancerJoinIdleQueue:
		return r.line.view()
	}
	return nil
}

func (l *line) view() *meshv1.SlotsView {
	l.mu.Lock()
	defer l.mu.Unlock()
	holding, waiting := l.line.Len()
	return &meshv1.SlotsView{Slots: uint32(l.slots), InUse: uint32(holding), Waiting: uint32(waiting)}
}

// free returns how many slots nobody has.
func (l *line) free() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	holding, _ := l.line.Len()
	return max(l.slots-holding, 0)
}
