package balancer

import (
	"cmp"
	"math/rand/v2"
	"slices"
)

// seat is one equal part of a fleet's capacity: a replica of weight 3 has three seats where one of weight 1 has one. The
// rules choose among seats and treat all alike. So every rule heeds weights, and none has to know of them.
type seat struct {
	*Endpoint
	nth, of int32 // of the replica's seats
}

// less reports whether a's replica bears less for its weight than b's, by this agent's own requests in flight.
func (a seat) less(b seat) bool { return a.RIF()*int(b.of) < b.RIF()*int(a.of) }

// seatsOf returns the seats of endpoints, as few as their weights allow. Those of one replica are spread evenly.
func seatsOf(endpoints []*Endpoint) []seat {
	unit, total := int32(0), int32(0)
	for _, e := range endpoints {
		unit = gcd(e.weight(), unit)
		total += e.weight()
	}
	seats := make([]seat, 0, total/max(unit, 1))
	for _, e := range endpoints {
		of := e.weight() / unit
		for nth := range of {
			seats = append(seats, seat{e, nth, of})
		}
	}
	if len(seats) > len(endpoints) {
		slices.SortStableFunc(seats, func(a, b seat) int {
			return cmp.Compare((2*a.nth+1)*b.of, (2*b.nth+1)*a.of) // (nth+½)/of
		})
	}
	return seats
}

func gcd(a, b int32) int32 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// seatOf returns one of the seats of an endpoint that the set has.
func (s *Set) seatOf(rng *rand.Rand, e *Endpoint) seat {
	of := s.seatsOf[e]
	if of <= 1 {
		return seat{e, 0, 1}
	}
	return seat{e, rng.Int32N(of), of}
}

// anyone returns a replica chosen at random.
func (s *Set) anyone(rng *rand.Rand) *Endpoint { return s.seats[rng.IntN(len(s.seats))].Endpoint }

// pair returns two different seats chosen at random, the same one twice if there is no other.
func (s *Set) pair(rng *rand.Rand) (a, b seat) {
	i, j := s.pairAt(rng)
	return s.seats[i], s.seats[j]
}

// pairAt returns where in seats a pair is.
func (s *Set) pairAt(rng *rand.Rand) (i, j int) {
	n := len(s.seats)
	if n == 1 {
		return 0, 0
	}
	i, j = rng.IntN(n), rng.IntN(n-1)
	if j >= i {
		j++
	}
	return i, j
}

// mostSampled bounds a sample.
const mostSampled = 32

// draw appends n different seats, mostSampled at most, chosen uniformly at random without replacement.
func (s *Set) draw(rng *rand.Rand, n int, dst []seat) []seat {
	total := len(s.seats)
	n = min(n, total, mostSampled)
	if n == total {
		return append(dst, s.seats...)
	}
	// Floyd's algorithm: for each j, a random one of the first j+1, or j itself if that one is taken already.
	var taken [mostSampled]int
	for i := range n {
		j := total - n + i
		at := rng.IntN(j + 1)
		if slices.Contains(taken[:i], at) {
			at = j
		}
		taken[i] = at
		dst = append(dst, s.seats[at])
	}
	return dst
}

// sample appends the replicas of as many seats as draw does.
func (s *Set) sample(rng *rand.Rand, n int, dst []*Endpoint) []*Endpoint {
	var seats [mostSampled]seat
	for _, seat := range s.draw(rng, n, seats[:0]) {
		dst = append(dst, seat.Endpoint)
	}
	return dst
}

// seatMemory remembers the latest seats of replicas that have several.
type seatMemory struct {
	seats [2 * mostSampled]seat
	next  int
}

func (m *seatMemory) note(s seat) {
	if s.of > 1 {
		m.seats[m.next] = s
		m.next = (m.next + 1) % len(m.seats)
	}
}

// recall returns a seat, the earliest that is remembered, of a replica that has so many, and forgets it.
func (m *seatMemory) recall(e *Endpoint, of int32) (seat, bool) {
	if of <= 1 {
		return seat{}, false
	}
	for i := range m.seats {
		s := &m.seats[(m.next+i)%len(m.seats)]
		if s.Endpoint == e && s.of == of {
			found := *s
			*s = seat{}
			return found, true
		}
	}
	return seat{}, false
}
