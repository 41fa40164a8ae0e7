package balancer

import (
	"hash/fnv"
	"math"
	"math/rand/v2"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/policy"
)

// hashPicker keeps requests with the same key on the same replica, the key's home, while that has room: consistent
// hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", SODA '18). With
// m requests in flight to the service, no replica that bears w of W seats may hold more than ⌈c·(m+1)·w/W⌉, the arriving
// request counted in. If the home is full, the next owner on the circle that is not gets the request. ring_hash and maglev
// differ only in the circle.
//
// What is in flight is this agent's own requests, which it knows exactly, and those of others, which the replicas tell: a
// replica's RIF in an answer to a probe or a report on a response, less this agent's own there at that moment, smoothed. That counts
// as long as it is fresh (Prequal.MaxAge); a replica of which nothing fresh is known is taken for an average one. The average
// comes from probes to replicas chosen at random, as the homes of busy keys are no fair sample. Before there are enough
// of these, only this agent's own requests count. c is Hash.LoadFactor, 1.25 by default; 0 stands for no bound: plain
// consistent hashing.
//
// Use it where a replica is better at keys that it has seen (caches, sessions), not to spread load evenly: within the bound
// it doesn't look at load at all.
type hashPicker struct {
	_        apart
	factor   float64 // c
	prequal  policy.Prequal
	circleOf func(*Set) *circle
	rng      *rand.Rand
	flights  flights

	set      *Set
	circle   *circle
	replicas []hashReplica // by place in set.Endpoints
	fair     fairSample    // of requests of others by seat
	epoch    time.Time
	asOf     time.Duration // the last request, since the epoch

	walk      uint64 // along the circle, counted
	home      int32  // of its key; -1: it had none
	probesDue float64
	fairNext  bool          // homes and random replicas take turns
	fairAsked time.Duration // when the last random replica was
	_         apart
}

// hashReplica is what is known of a replica.
type hashReplica struct {
	seats      float64
	others     float64 // requests of others in flight, smoothed
	freshUntil time.Duration
	asked      bool   // as one of the fair sample
	seen       uint64 // the last walk that came by
}

// circle maps keys to replicas: each key to a point, and each point to an owner, by its place in Set.Endpoints. Overflow
// goes on to the next points.
type circle struct {
	owners []int32
	find   func(key uint64) int
	places map[*Endpoint]int32
}

func newCircle(set *Set, owners []int32, find func(key uint64) int) *circle {
	c := &circle{owners, find, make(map[*Endpoint]int32, len(set.Endpoints))}
	for i, e := range set.Endpoints {
		c.places[e] = int32(i)
	}
	return c
}

func newHashPicker(p policy.Policy, rng *rand.Rand, flights flights, circleOf func(*Set) *circle) *hashPicker {
	return &hashPicker{factor: p.Hash.LoadFactor, prequal: p.Prequal, circleOf: circleOf, rng: rng, flights: flights, home: -1}
}

func (h *hashPicker) Update(now time.Time, set *Set) {
	if h.set == nil {
		h.epoch = now
	}
	replicas := make([]hashReplica, len(set.Endpoints))
	for i, e := range set.Endpoints {
		if known := h.replica(e); known != nil {
			replicas[i] = *known
		}
		replicas[i].seats = float64(set.seatsOf[e])
	}
	h.set, h.replicas, h.circle, h.home = set, replicas, h.circleOf(set), -1
}

// replica returns what is known of an endpoint; nil if it is not in the set.
func (h *hashPicker) replica(e *Endpoint) *hashReplica {
	if h.circle == nil {
		return nil
	}
	at, ok := h.circle.places[e]
	if !ok {
		return nil
	}
	return &h.replicas[at]
}

func (h *hashPicker) Pick(now time.Time, req Request) (*Endpoint, Class) {
	h.asOf = now.Sub(h.epoch)
	if !req.Keyed {
		h.home = -1
		return h.set.anyone(h.rng), Fallback
	}
	at, class := h.choose(req.Key)
	return h.set.Endpoints[at], class
}

func (h *hashPicker) choose(key uint64) (int32, Class) {
	point := h.circle.find(key)
	h.home = h.circle.owners[point]
	if h.factor == 0 || h.spare(h.home, h.bound(h.flights.atLeast())) > 0 {
		return h.home, Ruled
	}
	b := h.bound(h.flights.total())
	if h.spare(h.home, b) > 0 {
		return h.home, Ruled
	}
	return h.overflow(point, b), Overflow
}

// overflow returns the first owner after a point that has room. If all are full, which is when others pick at the same
// moment or load has just risen, it is the one with the least too much.
func (h *hashPicker) overflow(point int, b bound) int32 {
	owners := h.circle.owners
	best, most := owners[point], math.Inf(-1)
	h.walk++
	left := len(h.replicas) // to look at
	for range owners {
		if r := &h.replicas[owners[point]]; r.seen != h.walk {
			spare := h.spare(owners[point], b)
			if spare > 0 {
				return owners[point]
			}
			if spare > most {
				best, most = owners[point], spare
			}
			r.seen = h.walk
			if left--; left == 0 {
				break
			}
		}
		if point++; point == len(owners) {
			point = 0
		}
	}
	return best
}

// bound is what a seat may hold and, of that, what others have there on average.
type bound struct {
	most   float64 // c·(m+1)/W
	others float64
	known  bool // whether others count
}

// bound reckons with a number of this agent's own requests in flight to the service.
func (h *hashPicker) bound(own int) bound {
	others, known := h.fair.mean(h.asOf)
	return bound{h.factor * (float64(own+1)/float64(len(h.set.seats)) + others), others, known}
}

// rounding is more than what floating point adds to a bound that is a whole number.
const rounding = 1e-9

// spare is positive if a replica has room. An integer is below ⌈x⌉ exactly if it is below x; where others count, which is an
// estimate, it is below x.
func (h *hashPicker) spare(at int32, b bound) float64 {
	r := &h.replicas[at]
	others := b.others * r.seats
	if b.known && h.asOf < r.freshUntil {
		others = r.others
	}
	return b.most*r.seats - rounding - others - float64(h.set.Endpoints[at].RIF())
}

// Due probes at most one replica a request, in turn the key's home, so that the bound is fresh when the key comes again,
// and a random one.
func (h *hashPicker) Due(dst []*Endpoint) []*Endpoint {
	if !h.probes() {
		return dst
	}
	h.probesDue += min(h.prequal.ProbesPerRequest, 1)
	if h.probesDue < 1 {
		return dst
	}
	h.probesDue--
	h.fairNext = !h.fairNext
	if h.fairNext || h.home < 0 {
		return h.askFairly(dst)
	}
	return append(dst, h.set.Endpoints[h.home])
}

// probes reports whether there is a bound to keep.
func (h *hashPicker) probes() bool { return h.factor > 0 && len(h.set.Endpoints) > 1 }

func (h *hashPicker) Idle(now time.Time, dst []*Endpoint) []*Endpoint {
	every := h.prequal.IdleProbeInterval
	if !h.probes() || every <= 0 || now.Sub(h.epoch)-h.fairAsked < every {
		return dst
	}
	h.asOf = now.Sub(h.epoch)
	return h.askFairly(dst)
}

// askFairly appends one replica for the fair sample: each seat has the same chance.
func (h *hashPicker) askFairly(dst []*Endpoint) []*Endpoint {
	h.fairAsked = h.asOf
	e := h.set.anyone(h.rng)
	h.replica(e).asked = true
	return append(dst, e)
}

func (h *hashPicker) Probed(now time.Time, e *Endpoint, r load.Report) {
	others := float64(max(int(r.RIF)-e.RIF(), 0)) // less than none is what is still on its way there
	known := h.learn(now, e, others)
	if known != nil && known.asked {
		known.asked = false
		h.fair.add(now.Sub(h.epoch), h.prequal.MaxAge, others/known.seats)
	}
}

// Reported takes in a report that comes with the end of a request, which the replica no longer counts but this agent does.
func (h *hashPicker) Reported(now time.Time, e *Endpoint, r load.Report) {
	h.learn(now, e, float64(max(int(r.RIF)-(e.RIF()-1), 0)))
}

// learn notes how many requests of others a replica has, and returns what is known of it; nil if it has left.
func (h *hashPicker) learn(now time.Time, e *Endpoint, others float64) *hashReplica {
	known := h.replica(e)
	if known == nil {
		return nil
	}
	if now.Sub(h.epoch) < known.freshUntil {
		known.others += othersGain * (others - known.others)
	} else {
		known.others = others
	}
	known.freshUntil = now.Sub(h.epoch) + h.prequal.MaxAge
	return known
}

func (h *hashPicker) Forget(e *Endpoint) {
	if known := h.replica(e); known != nil {
		known.freshUntil = 0
	}
}

// othersGain is what an answer counts against those before it. Agents that went by the last one alone would all crowd where
// there just was room, and then all stay away.
const othersGain = 0.125

const (
	// fairSize is how many answers make the sample, fairLeast how many it takes to say anything.
	fairSize  = 64
	fairLeast = 8
	// fairAges is how much longer than other answers these count: the load of a service changes less than a replica's.
	fairAges = 10
)

// fairSample estimates the mean requests of others by seat from the answers of replicas chosen at random.
type fairSample struct {
	answers [fairSize]fairAnswer
	first   int // the oldest
	n       int
	sum     float64
}

type fairAnswer struct {
	until time.Duration
	share float64
}

func (s *fairSample) add(now, maxAge time.Duration, share float64) {
	if s.n == fairSize {
		s.drop()
	}
	s.answers[(s.first+s.n)%fairSize] = fairAnswer{now + fairAges*maxAge, share}
	s.n++
	s.sum += share
}

func (s *fairSample) drop() {
	s.sum -= s.answers[s.first].share
	s.first = (s.first + 1) % fairSize
	if s.n--; s.n == 0 {
		s.sum = 0 // whatever rounding has left
	}
}

// mean returns false while there are too few answers.
func (s *fairSample) mean(now time.Duration) (float64, bool) {
	for s.n > 0 && s.answers[s.first].until <= now {
		s.drop()
	}
	if s.n < fairLeast {
		return 0, false
	}
	return max(s.sum, 0) / float64(s.n), true
}

// hashOf returns a hash with evenly spread bits.
func hashOf(s string) uint64 {
	h := fnv.New64a()
	h.Write([]byte(s))
	return mix(h.Sum64())
}

// mix spreads the bits of x evenly (the finalizer of SplitMix64, Steele, Lea and Flood 2014).
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// HashKey returns the hash of an affinity key.
func HashKey(key string) uint64 { return hashOf(key) }
