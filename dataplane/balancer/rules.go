package balancer

import (
	"math"
	"math/rand/v2"
	"time"
)

// random picks uniformly at random. It needs no state, and is the yardstick for all others: with it, the number of
// requests on a replica varies as much as chance lets it.
type random struct {
	rng *rand.Rand
	set *Set
}

func (r *random) Update(_ time.Time, set *Set) { r.set = set }

func (r *random) Pick(time.Time, Request) (*Endpoint, Class) {
	return r.set.anyone(r.rng), Ruled
}

// roundRobin picks each replica in turn. It gives every replica the same number of requests, whatever they cost there.
type roundRobin struct {
	_    apart
	set  *Set
	next int
	_    apart
}

func (r *roundRobin) Update(_ time.Time, set *Set) {
	r.set = set
	r.next %= len(set.seats)
}

func (r *roundRobin) Pick(time.Time, Request) (*Endpoint, Class) {
	e := r.set.seats[r.next].Endpoint
	r.next++
	if r.next == len(r.set.seats) {
		r.next = 0
	}
	return e, Ruled
}

// leastLoaded picks the replica to which this agent has the fewest requests in flight; of equals, the next in cyclic
// order after the last pick, as NGINX and Envoy do (Prequal §5.2, "LeastLoaded"). It cannot see the requests of others.
type leastLoaded struct {
	_        apart
	set      *Set
	counters []*counter // of the seats
	weighted bool
	last     int
	_        apart
}

func (l *leastLoaded) Update(_ time.Time, set *Set) {
	l.set = set
	l.counters = l.counters[:0]
	for _, s := range set.seats {
		l.counters = append(l.counters, s.counter)
	}
	l.weighted = len(set.seats) != len(set.Endpoints)
	l.last %= len(set.seats)
}

func (l *leastLoaded) Pick(time.Time, Request) (*Endpoint, Class) {
	if l.weighted {
		l.last = l.leastByWeight()
	} else {
		l.last = l.least()
	}
	return l.set.seats[l.last].Endpoint, Ruled
}

func (l *leastLoaded) least() int {
	next := l.last + 1
	at, least := leastOf(l.counters[next:], math.MaxInt)
	best := next + at
	if at, _ := leastOf(l.counters[:next], least); at >= 0 {
		best = at
	}
	return best
}

func (l *leastLoaded) leastByWeight() int {
	n := len(l.set.seats)
	best := (l.last + 1) % n
	for i := 2; i <= n; i++ {
		if at := (l.last + i) % n; l.set.seats[at].less(l.set.seats[best]) {
			best = at
		}
	}
	return best
}

// leastOf returns the place of the first counter with the lowest RIF, and that RIF; -1 and the limit if none is below the
// limit. It stops at 0: there is nothing lower.
func leastOf(counters []*counter, limit int) (at, least int) {
	at, least = -1, limit
	for i, c := range counters {
		if rif := c.rif(); rif < least {
			at, least = i, rif
			if rif == 0 {
				break
			}
		}
	}
	return at, least
}

// p2c picks the less loaded of two replicas chosen at random, by this agent's own requests in flight ("power of two
// choices"; Prequal §5.2, "LL-Po2C"). The two are drawn without replacement.
type p2c struct {
	rng *rand.Rand
	set *Set
}

func (p *p2c) Update(_ time.Time, set *Set) { p.set = set }

func (p *p2c) Pick(time.Time, Request) (*Endpoint, Class) {
	a, b := p.set.pair(p.rng)
	if b.less(a) {
		return b.Endpoint, Ruled
	}
	return a.Endpoint, Ruled
}

// recall returns what a rule knows of each replica of a set: what it knew before, and for a new one what begin makes of
// nothing.
func recall[State any](set *Set, before map[*Endpoint]*State, begin func(*State)) map[*Endpoint]*State {
	after := make(map[*Endpoint]*State, len(set.Endpoints))
	for _, e := range set.Endpoints {
		if after[e] = before[e]; after[e] == nil {
			after[e] = new(State)
			begin(after[e])
		}
	}
	return after
}
