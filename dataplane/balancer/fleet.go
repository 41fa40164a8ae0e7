package balancer

import (
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
)

// Fleet is the set of replicas of one service, and what this agent's own experience says of each. It outlives the
// balancers that choose from it. It is safe for concurrent use.
type Fleet struct {
	place   Place
	current atomic.Pointer[Set]

	mu sync.Mutex
	// mu guards the fields below.

	endpoints map[registry.EndpointID]*Endpoint
	down      map[netip.AddrPort]bool // agents that don't answer, by address
	counters  counters
	inFlight  []*inFlight
	version   uint64
}

// inFlight counts requests in flight to a service, in part: those of one shard of every balancer that the fleet has had,
// as the requests of an earlier one still weigh on the replicas.
type inFlight struct {
	_ apart
	atomic.Int64
	_ apart
}

// flights is what one shard knows of the requests in flight to the service.
type flights struct {
	own *inFlight // those of the shard itself: no other processor writes it
	all []*inFlight
}

// atLeast returns a lower bound of total that costs less: others' parts have to be fetched from other processors.
func (f flights) atLeast() int { return int(max(f.own.Load(), 0)) }

// total returns how many requests are in flight.
func (f flights) total() int {
	total := int64(0)
	for _, part := range f.all {
		total += part.Load()
	}
	return int(total)
}

// Set is the replicas to choose from at one moment. It is immutable and shared.
type Set struct {
	// Endpoints are those that take requests now, sorted by ID.
	Endpoints []*Endpoint
	// Registered counts all endpoints of the service, whatever their state.
	Registered int

	seats   []seat
	seatsOf map[*Endpoint]int32 // how many each of Endpoints has
	all     []*Endpoint         // sorted by ID
	review  time.Time           // when an avoidance ends; zero if none is in force
	version uint64
	ring    func() *circle // built on first use, as is maglev
	maglev  func() *circle
}

// has reports whether e is among the replicas to choose from.
func (s *Set) has(e *Endpoint) bool { return s.seatsOf[e] > 0 }

func byID(a, b *Endpoint) int { return strings.Compare(string(a.ID), string(b.ID)) }

// Avoidance says why a replica that the registry calls ready gets no requests.
type Avoidance string

const (
	NotAvoided  Avoidance = ""
	Ejected     Avoidance = "ejected"     // it failed too often in a row
	Unreachable Avoidance = "unreachable" // its agent does not answer
	Declined    Avoidance = "declined"    // its agent said that it takes no requests
)

const (
	// A replica is ejected after this many failures in a row, or at once if it could not be connected to.
	failuresToEject = 5
	// The first ejection lasts this long, each further one in a row twice as long, up to the longest.
	firstEjection   = time.Second
	longestEjection = 30 * time.Second
	// A replica whose agent declined is left out until the registry must have caught up.
	declinedFor = 2 * time.Second
)

// Place is where an agent is: it decides on the replicas that the agent uses.
type Place struct {
	Node registry.NodeName
	Zone string
}

// NewFleet returns a fleet without replicas, as seen from a place.
func NewFleet(place Place) *Fleet {
	f := &Fleet{place: place, endpoints: map[registry.EndpointID]*Endpoint{}, down: map[netip.AddrPort]bool{}}
	f.current.Store(&Set{})
	return f
}

// inFlightParts returns all parts, n at least.
func (f *Fleet) inFlightParts(n int) []*inFlight {
	f.mu.Lock()
	defer f.mu.Unlock()
	for len(f.inFlight) < n {
		f.inFlight = append(f.inFlight, new(inFlight))
	}
	return slices.Clone(f.inFlight)
}

// Set returns the replicas to choose from now.
func (f *Fleet) Set(now time.Time) *Set {
	set := f.current.Load()
	if !set.review.IsZero() && !now.Before(set.review) {
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.current.Load() == set {
			f.rebuildLocked(now)
		}
		return f.current.Load()
	}
	return set
}

// Update replaces the registered endpoints, and says which of them to use.
func (f *Fleet) Update(now time.Time, records []registry.Endpoint, scope policy.Scope) {
	f.mu.Lock()
	defer f.mu.Unlock()
	registered := make(map[registry.EndpointID]bool, len(records))
	for i := range records {
		record := records[i]
		id := record.ID()
		registered[id] = true
		e := f.endpoints[id]
		if e == nil {
			e = &Endpoint{ID: id, counter: f.counters.take()}
			f.endpoints[id] = e
		}
		if old := e.record.Swap(&record); old != nil && old.State != record.State && e.avoided == Declined {
			e.avoidEnds = now // the registry has caught up with what the agent said
		}
	}
	for id := range f.endpoints {
		if !registered[id] {
			delete(f.endpoints, id)
		}
	}
	f.rebuildLocked(now)
}

// SetReachable notes whether the agent at an address answers. Endpoints behind a silent agent are left out, unless that
// leaves none.
func (f *Fleet) SetReachable(now time.Time, agent netip.AddrPort, reachable bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.down[agent] == !reachable {
		return
	}
	if reachable {
		delete(f.down, agent)
	} else {
		f.down[agent] = true
	}
	f.rebuildLocked(now)
}

// Decline leaves an endpoint out for a moment because its own agent said that it takes no requests.
func (f *Fleet) Decline(now time.Time, e *Endpoint) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.avoidLocked(now, e, Declined, declinedFor)
}

// succeeded ends a row of failures.
func (f *Fleet) succeeded(e *Endpoint) {
	if e.failures.Load() != 0 {
		e.failures.Store(0)
	}
	if e.ejections.Load() != 0 {
		e.ejections.Store(0)
	}
}

// failed counts a failure and ejects the endpoint if there were too many in a row. At most half of the fleet is ejected
// at a time: where most fail, the fault is elsewhere, and the rest would drown.
func (f *Fleet) failed(now time.Time, e *Endpoint, unconnected bool) {
	e.errors.Add(1)
	if e.failures.Add(1) < failuresToEject && !unconnected {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if e.avoided == Ejected && now.Before(e.avoidEnds) {
		return
	}
	ejected, ready := 0, 0
	for _, o := range f.endpoints {
		if o.record.Load().State != registry.Ready {
			continue
		}
		ready++
		if o.avoided == Ejected && now.Before(o.avoidEnds) {
			ejected++
		}
	}
	if 2*(ejected+1) > ready {
		return
	}
	e.failures.Store(0)
	lasts := min(firstEjection<<min(e.ejections.Add(1)-1, 10), longestEjection)
	f.avoidLocked(now, e, Ejected, lasts)
}

func (f *Fleet) avoidLocked(now time.Time, e *Endpoint, why Avoidance, lasts time.Duration) {
	if f.endpoints[e.ID] != e || now.Add(lasts).Before(e.avoidEnds) {
		return
	}
	e.avoided, e.avoidEnds = why, now.Add(lasts)
	f.rebuildLocked(now)
}

// rebuildLocked makes the next Set: the ready endpoints that are not avoided; if there are none, all that are ready
// ("panic" in other balancers), as experience may be wrong and a request that may fail beats one that must.
func (f *Fleet) rebuildLocked(now time.Time) {
	f.version++
	set := &Set{Registered: len(f.endpoints), version: f.version}
	var ready []*Endpoint
	for _, e := range f.endpoints {
		set.all = append(set.all, e)
		if e.record.Load().State != registry.Ready {
			continue
		}
		ready = append(ready, e)
		if f.avoidanceLocked(now, e) == NotAvoided {
			set.Endpoints = append(set.Endpoints, e)
		}
		if now.Before(e.avoidEnds) && (set.review.IsZero() || e.avoidEnds.Before(set.review)) {
			set.review = e.avoidEnds
		}
	}
	if len(set.Endpoints) == 0 {
		set.Endpoints = ready
	}
	slices.SortFunc(set.Endpoints, byID)
	slices.SortFunc(set.all, byID)
	set.seats = seatsOf(set.Endpoints)
	set.seatsOf = make(map[*Endpoint]int32, len(set.Endpoints))
	for _, s := range set.seats {
		set.seatsOf[s.Endpoint] = s.of
	}
	set.ring = sync.OnceValue(func() *circle { return newRing(set) })
	set.maglev = sync.OnceValue(func() *circle { return newMaglev(set) })
	f.current.Store(set)
}

func (f *Fleet) avoidanceLocked(now time.Time, e *Endpoint) Avoidance {
	if now.Before(e.avoidEnds) {
		return e.avoided
	}
	if f.down[e.record.Load().Agent] {
		return Unreachable
	}
	return NotAvoided
}

// Each calls yield for every registered endpoint in the order of their IDs.
func (f *Fleet) Each(now time.Time, yield func(*Endpoint, Avoidance)) {
	set := f.Set(now)
	for _, e := range set.all {
		f.mu.Lock()
		why := f.avoidanceLocked(now, e)
		f.mu.Unlock()
		yield(e, why)
	}
}
