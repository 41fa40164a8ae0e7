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

	records []registry.Endpoint // all that are registered
	scope   policy.Scope
	// endpoints are those in scope, and those that something must be remembered of.
	endpoints map[identity]*Endpoint
	avoided   map[identity]*Endpoint  // those of them that have been, lately
	down      map[netip.AddrPort]bool // agents that don't answer, by address
	ready     int                     // of all that are registered
	counters  counters
	inFlight  []*inFlight
	back      chan struct{} // closed when there is something to choose from again; nil if there is, or never was
	version   uint64
	updates   uint64
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
	// Lost is since when there has been nothing to choose from; zero if there is, or never was. Back is closed when there is again.
	Lost time.Time
	Back <-chan struct{}

	seats   []seat
	seatsOf map[*Endpoint]int32 // how many each of Endpoints has
	all     []*Endpoint         // also those that take no requests, sorted by ID
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
	f := &Fleet{
		place:     place,
		endpoints: map[identity]*Endpoint{},
		avoided:   map[identity]*Endpoint{},
		down:      map[netip.AddrPort]bool{},
	}
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

// Update replaces the registered endpoints, and says which of them to use. The fleet keeps records: nobody may change them.
func (f *Fleet) Update(now time.Time, records []registry.Endpoint, scope policy.Scope) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.records, f.scope = records, scope
	f.updates++
	if len(f.endpoints) > 0 {
		for i := range records {
			if e := f.endpoints[identityOf(&records[i])]; e != nil {
				e.updateLocked(now, &records[i], f.updates)
			}
		}
	}
	for id, e := range f.endpoints {
		if e.updated != f.updates {
			delete(f.endpoints, id)
			delete(f.avoided, id)
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
	if slices.ContainsFunc(f.records, func(r registry.Endpoint) bool { return r.Agent == agent }) {
		f.rebuildLocked(now)
	}
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

// failed counts a failure and ejects the endpoint if there were too many in a row. At most half of those to choose from
// are ejected at a time: where most fail, the fault is elsewhere, and the rest would drown.
func (f *Fleet) failed(now time.Time, e *Endpoint, unconnected bool) {
	e.errors.Add(1)
	if e.failures.Add(1) < failuresToEject && !unconnected {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if e.avoided == Ejected && now.Before(e.avoidEnds) || 2*(f.ejectedLocked(now)+1) > f.choiceLocked() {
		return
	}
	e.failures.Store(0)
	lasts := min(firstEjection<<min(e.ejections.Add(1)-1, 10), longestEjection)
	f.avoidLocked(now, e, Ejected, lasts)
}

func (f *Fleet) ejectedLocked(now time.Time) int {
	n := 0
	for _, e := range f.avoided {
		if e.avoided == Ejected && now.Before(e.avoidEnds) && e.record.Load().State == registry.Ready {
			n++
		}
	}
	return n
}

// choiceLocked returns how many there would be to choose from, were none avoided.
func (f *Fleet) choiceLocked() int {
	if f.scope.Subset > 0 {
		return min(f.ready, max(f.scope.Subset, 2))
	}
	return f.ready
}

func (f *Fleet) avoidLocked(now time.Time, e *Endpoint, why Avoidance, lasts time.Duration) {
	id := identityOf(e.record.Load())
	if f.endpoints[id] != e || now.Add(lasts).Before(e.avoidEnds) {
		return
	}
	longer := f.avoided[id] == e && now.Before(e.avoidEnds)
	e.avoided, e.avoidEnds = why, now.Add(lasts)
	f.avoided[id] = e
	if !longer { // else the Set stays as it is; its review comes no later than it must
		f.rebuildLocked(now)
	}
}

// rebuildLocked makes the next Set: of the endpoints in scope, those that are ready and not avoided; if there are none,
// all that are ready ("panic" in other balancers), as experience may be wrong and a request that may fail beats one that
// must.
func (f *Fleet) rebuildLocked(now time.Time) {
	f.version++
	set := &Set{Registered: len(f.records), version: f.version}
	for id, e := range f.avoided {
		if !now.Before(e.avoidEnds) {
			delete(f.avoided, id)
		} else if set.review.IsZero() || e.avoidEnds.Before(set.review) {
			set.review = e.avoidEnds
		}
	}
	chosen := f.choose(func(r *registry.Endpoint) bool {
		return !f.down[r.Agent] && (len(f.avoided) == 0 || f.avoided[identityOf(r)] == nil)
	})
	f.ready = chosen.ready
	home := f.endpointsLocked(chosen.home)
	set.Endpoints = home
	if !slices.Equal(chosen.home, chosen.using) {
		set.Endpoints = f.endpointsLocked(chosen.using)
	}
	set.all = f.keepLocked(home)
	set.seats = seatsOf(set.Endpoints)
	set.seatsOf = make(map[*Endpoint]int32, len(set.Endpoints))
	for _, s := range set.seats {
		set.seatsOf[s.Endpoint] = s.of
	}
	set.ring = sync.OnceValue(func() *circle { return newRing(set) })
	set.maglev = sync.OnceValue(func() *circle { return newMaglev(set) })
	f.replaceLocked(now, set)
}

// replaceLocked puts a new Set into force, and tells those who wait for a replica if it has one again.
func (f *Fleet) replaceLocked(now time.Time, set *Set) {
	before := f.current.Load()
	back := f.back
	switch {
	case len(set.Endpoints) > 0:
		f.back = nil
	case len(before.Endpoints) > 0:
		f.back, set.Lost = make(chan struct{}), now
	default:
		set.Lost = before.Lost
	}
	set.Back = f.back
	f.current.Store(set)
	if back != nil && f.back == nil {
		close(back)
	}
}

// Empty reports whether there is nothing to choose from.
func (f *Fleet) Empty() bool { return len(f.current.Load().Endpoints) == 0 }

// endpointsLocked returns the endpoints that records describe, sorted by ID. They are in scope of the Set to come.
func (f *Fleet) endpointsLocked(records []*registry.Endpoint) []*Endpoint {
	endpoints := make([]*Endpoint, 0, len(records))
	for _, r := range records {
		id := identityOf(r)
		e := f.endpoints[id]
		if e == nil {
			e = &Endpoint{ID: r.ID(), counter: f.counters.take()}
			e.updateLocked(time.Time{}, r, f.updates)
			f.endpoints[id] = e
		}
		e.inScope = f.version
		endpoints = append(endpoints, e)
	}
	slices.SortFunc(endpoints, byID)
	return slices.Compact(endpoints)
}

// keepLocked drops the endpoints that have left the scope, unless there is something to remember of them. It returns the
// others, sorted by ID.
func (f *Fleet) keepLocked(home []*Endpoint) []*Endpoint {
	if len(f.endpoints) == len(home) {
		return home
	}
	kept := make([]*Endpoint, 0, len(f.endpoints))
	for id, e := range f.endpoints {
		if e.inScope != f.version && f.avoided[id] == nil && e.RIF() == 0 {
			delete(f.endpoints, id)
			continue
		}
		kept = append(kept, e)
	}
	slices.SortFunc(kept, byID)
	return kept
}

// Each calls yield for every endpoint in scope, and those that something is remembered of, in the order of their IDs.
func (f *Fleet) Each(now time.Time, yield func(*Endpoint, Avoidance)) {
	set := f.Set(now)
	f.mu.Lock()
	calm := len(f.avoided) == 0 && len(f.down) == 0
	f.mu.Unlock()
	for _, e := range set.all {
		why := NotAvoided
		if !calm {
			why = f.avoidance(now, e)
		}
		yield(e, why)
	}
}

func (f *Fleet) avoidance(now time.Time, e *Endpoint) Avoidance {
	f.mu.Lock()
	defer f.mu.Unlock()
	if now.Before(e.avoidEnds) {
		return e.avoided
	}
	if f.down[e.record.Load().Agent] {
		return Unreachable
	}
	return NotAvoided
}
