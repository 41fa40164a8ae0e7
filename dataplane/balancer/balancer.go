// Package balancer places each request on a replica: one contract for all balancing rules, the fleet they choose from,
// and the concurrent shell that runs a rule on every processor.
package balancer

import (
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/policy"
)

var (
	// ErrNoEndpoints means that the service has no replicas at all.
	ErrNoEndpoints = errors.New("the service has no endpoints")
	// ErrNoneReady means that no replica of the service takes requests.
	ErrNoneReady = errors.New("no endpoint of the service is ready")
)

// Request is what a rule may know of the request that it places.
type Request struct {
	// Key is the hash of the request's affinity key.
	Key uint64
	// Keyed reports whether there is one.
	Keyed bool
}

// Class says how a replica was chosen.
type Class uint8

const (
	Ruled    Class = iota // by the rule; it knows no classes
	Cold                  // Prequal: the fastest of those not hot
	Hot                   // Prequal: all pooled were hot, the one with the least RIF
	Fallback              // at random, as the rule had nothing to go by
	Overflow              // hash: the key's own replica was full
)

// String returns the value that metrics carry.
func (c Class) String() string {
	return [...]string{"rule", "cold", "hot", "fallback", "overflow"}[c]
}

// Picker is a balancing rule at work on one service. It is a pure state machine: no goroutines, no I/O; time and
// randomness come from its owner. It serves one goroutine at a time; Balancer runs one on each processor.
type Picker interface {
	// Update replaces the replicas to choose from. There is at least one.
	Update(now time.Time, set *Set)
	// Pick chooses one of them. It never blocks and does not allocate.
	Pick(now time.Time, req Request) (*Endpoint, Class)
}

// Prober is a Picker that lives on probes.
type Prober interface {
	Picker
	// Due appends the replicas to probe on account of a request that was just picked.
	Due(dst []*Endpoint) []*Endpoint
	// Idle appends the replicas to probe if none was for too long.
	Idle(now time.Time, dst []*Endpoint) []*Endpoint
	// Probed takes in the answer to a probe.
	Probed(now time.Time, e *Endpoint, r load.Report)
	// Reported takes in a load report that came with a response.
	Reported(now time.Time, e *Endpoint, r load.Report)
	// Forget drops what is known of a replica.
	Forget(e *Endpoint)
	// View describes what the rule goes by.
	View(now time.Time, v *View)
}

// newPicker returns the rule that a policy names.
func newPicker(p policy.Policy, rng *rand.Rand, flights flights) Picker {
	switch p.Balancer {
	case policy.BalancerRoundRobin:
		return &roundRobin{next: rng.Int()}
	case policy.BalancerRandom:
		return &random{rng: rng}
	case policy.BalancerLeastLoaded:
		return &leastLoaded{last: rng.Int()}
	case policy.BalancerP2C:
		return &p2c{rng: rng}
	case policy.BalancerRingHash:
		return &ringHash{rng: rng, factor: p.Hash.LoadFactor, flights: flights}
	default:
		return &prequalPicker{cfg: p.Prequal, rng: rng}
	}
}

// Balancer applies a rule to a fleet. It is safe for concurrent use.
//
// The rule runs once a processor, each with a state of its own (a "shard"). That keeps processors out of each other's
// way, and, for Prequal, keeps one busy agent from being one big client whose every request follows the same few probes.
type Balancer struct {
	Policy   policy.Policy
	fleet    *Fleet
	shards   []*shard
	inFlight []*inFlight

	// mine remembers which shard a processor used last: sync.Pool keeps one item a processor at hand.
	mine  sync.Pool
	dealt atomic.Uint32
}

type shard struct {
	_        apart
	index    int // among the balancer's shards
	inFlight *inFlight

	mu sync.Mutex
	// mu guards the fields below.

	picker Picker
	set    *Set
	source rand.PCG
	_      apart
}

// apart keeps what one processor writes all the time away from what others write: processors hand memory to one another in
// lines of 64 bytes, and fetch two at once.
type apart [128]byte

// New returns a balancer over a fleet. Its rule starts with empty hands. The same seed gives the same choices.
func New(p policy.Policy, fleet *Fleet, shards int, seed uint64) *Balancer {
	b := &Balancer{Policy: p, fleet: fleet, inFlight: fleet.inFlightParts(shards)}
	for i := range shards {
		s := &shard{index: i, inFlight: b.inFlight[i]}
		s.source.Seed(seed, uint64(i))
		s.picker = newPicker(p, rand.New(&s.source), flights{own: s.inFlight, all: b.inFlight})
		b.shards = append(b.shards, s)
	}
	b.mine.New = func() any { return b.shards[int(b.dealt.Add(1))%len(b.shards)] }
	return b
}

// Picked is a request placed on a replica. Done must be called exactly once.
type Picked struct {
	Endpoint *Endpoint
	Class    Class
	shard    *shard
	balancer *Balancer
}

// Pick places a request. The error is ErrNoEndpoints or ErrNoneReady.
func (b *Balancer) Pick(now time.Time, req Request) (Picked, error) {
	set := b.fleet.Set(now)
	if len(set.Endpoints) == 0 {
		if set.Registered == 0 {
			return Picked{}, ErrNoEndpoints
		}
		return Picked{}, ErrNoneReady
	}
	s := b.lockShard()
	if s.set != set {
		s.adopt(now, set)
	}
	e, class := s.picker.Pick(now, req)
	e.counter.begin() // before the lock is given up: the next choice must see this one
	s.mu.Unlock()
	s.inFlight.Add(1)
	b.mine.Put(s)
	return Picked{Endpoint: e, Class: class, shard: s, balancer: b}, nil
}

// lockShard locks a shard that no other processor is using, preferably the one that this processor used last.
func (b *Balancer) lockShard() *shard {
	mine := b.mine.Get().(*shard)
	if mine.mu.TryLock() {
		return mine
	}
	for _, s := range b.shards {
		if s.mu.TryLock() {
			return s
		}
	}
	mine.mu.Lock()
	return mine
}

// adopt hands a set to the rule unless it already has that one or a later one.
func (s *shard) adopt(now time.Time, set *Set) {
	if s.set == nil || set.version > s.set.version {
		s.set = set
		s.picker.Update(now, set)
	}
}

// Outcome says how a request ended, as the caller's agent saw it.
type Outcome uint8

const (
	Succeeded   Outcome = iota
	Failed              // an answer of 500 or above, none in time, or a broken one
	Unconnected         // the replica could not be connected to: the request is safe to send elsewhere
	Abandoned           // the caller went away: says nothing of the replica
)

// Done accounts for the end of the request.
func (p Picked) Done(now time.Time, outcome Outcome) {
	p.Endpoint.counter.end()
	p.shard.inFlight.Add(-1)
	switch outcome {
	case Succeeded:
		p.balancer.fleet.succeeded(p.Endpoint)
	case Failed, Unconnected:
		p.balancer.fleet.failed(now, p.Endpoint, outcome == Unconnected)
		if outcome == Unconnected {
			p.balancer.Forget(p.Endpoint)
		}
	}
}

// Reported takes in the load report of the response.
func (p Picked) Reported(now time.Time, r load.Report) {
	p.shard.withProber(func(prober Prober) { prober.Reported(now, p.Endpoint, r) })
}

// Due appends the replicas to probe on account of this request. Their answers belong to its Shard.
func (p Picked) Due(dst []*Endpoint) []*Endpoint {
	p.shard.withProber(func(prober Prober) { dst = prober.Due(dst) })
	return dst
}

// Shard identifies the part of the balancer that made the choice.
func (p Picked) Shard() int { return p.shard.index }

// Shards returns how many parts the balancer has.
func (b *Balancer) Shards() int { return len(b.shards) }

// Idle appends the replicas to probe for one shard because none was for too long.
func (b *Balancer) Idle(now time.Time, shard int, dst []*Endpoint) []*Endpoint {
	set := b.fleet.Set(now)
	if len(set.Endpoints) == 0 {
		return dst
	}
	s := b.shards[shard]
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.set != set {
		s.adopt(now, set)
	}
	if prober, ok := s.picker.(Prober); ok {
		dst = prober.Idle(now, dst)
	}
	return dst
}

// Probed takes in the answer to a probe that was sent for a shard.
func (b *Balancer) Probed(now time.Time, shard int, e *Endpoint, r load.Report) {
	b.shards[shard].withProber(func(prober Prober) { prober.Probed(now, e, r) })
}

// Forget drops what the rule knows of a replica.
func (b *Balancer) Forget(e *Endpoint) {
	for _, s := range b.shards {
		s.withProber(func(prober Prober) { prober.Forget(e) })
	}
}

func (s *shard) withProber(f func(Prober)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if prober, ok := s.picker.(Prober); ok && s.set != nil {
		f(prober)
	}
}

// View is what a rule goes by at one moment.
type View struct {
	Threshold      int32 // RIF above which a replica is hot; only if HasThreshold
	HasThreshold   bool
	Pooled         int
	PoolCapacity   int
	FreshestProbes map[*Endpoint]PooledProbe
}

// PooledProbe is the freshest probe of a replica in any pool.
type PooledProbe struct {
	Report load.Report
	Age    time.Duration
	Hot    bool
}

// View describes what the rule goes by, all shards taken together; the threshold is the highest of theirs.
func (b *Balancer) View(now time.Time) View {
	v := View{FreshestProbes: map[*Endpoint]PooledProbe{}}
	for _, s := range b.shards {
		s.withProber(func(prober Prober) { prober.View(now, &v) })
	}
	return v
}
