package balancer

import (
	"math/rand/v2"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/policy"
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
	Hot                   // Prequal: all that were known were hot, the one with the least RIF
	Fallback              // at random, as the rule had nothing to go by
	Overflow              // hash: the key's own replica was full
)

// String returns the value that metrics carry.
func (c Class) String() string {
	return [...]string{"rule", "cold", "hot", "fallback", "overflow"}[c]
}

// Picker is a balancing rule at work on one service. It is a pure state machine: no goroutines, no I/O; time and
// randomness come from its owner. It serves one goroutine at a time; Balancer runs one on each processor.
//
// What else a rule can do it says by the interfaces below. Each is one way by which knowledge reaches it.
type Picker interface {
	// Update replaces the replicas to choose from. There is at least one.
	Update(now time.Time, set *Set)
	// Pick chooses one of them. It never blocks and does not allocate.
	Pick(now time.Time, req Request) (*Endpoint, Class)
}

// Prober is a Picker that has replicas probed.
type Prober interface {
	// Due appends the replicas to probe on account of a request that was just placed.
	Due(dst []*Endpoint) []*Endpoint
	// Idle appends the replicas to probe, whether there are requests or not. It is asked every 100 ms or so.
	Idle(now time.Time, dst []*Endpoint) []*Endpoint
	// Probed takes in the answer to a probe.
	Probed(now time.Time, e *Endpoint, r load.Report)
}

// Listener is a Picker that goes by the load reports on responses.
type Listener interface {
	Reported(now time.Time, e *Endpoint, r load.Report)
}

// Watcher is a Picker that goes by how requests fare.
type Watcher interface {
	// Responded notes how long the head of a response took.
	Responded(now time.Time, e *Endpoint, took time.Duration)
	// Failed notes a request that failed.
	Failed(now time.Time, e *Endpoint)
}

// Forgetter is a Picker that must drop what it knows of a replica as soon as that is known to be void.
type Forgetter interface {
	Forget(e *Endpoint)
}

// Asker is a Picker that asks replicas about each request before it places it. Pick is for when that can't be done.
type Asker interface {
	// Ask appends the replicas to ask about a request, and returns how many answers are enough.
	Ask(now time.Time, req Request, dst []*Endpoint) (targets []*Endpoint, enough int)
	// Choose places the request by the answers that came in time: at least one, in the order of their arrival.
	Choose(now time.Time, req Request, answers []Answer) (*Endpoint, Class)
}

// Answer is what a replica said when it was asked about a request.
type Answer struct {
	Endpoint *Endpoint
	Report   load.Report
}

// Dispatcher is a Picker to which replicas say that they have nothing to do.
type Dispatcher interface {
	Idled(now time.Time, e *Endpoint)
}

// Viewer is a Picker that shows what it goes by.
type Viewer interface {
	View(now time.Time, v *View)
}

// newPicker returns the rule that a policy names.
func newPicker(p policy.Policy, rng *rand.Rand, flights flights) Picker {
	switch p.Balancer {
	case policy.BalancerRoundRobin:
		return &roundRobin{next: rng.Int()}
	case policy.BalancerRandom:
		return &random{rng: rng}
	case policy.BalancerWeightedRoundRobin:
		return &weightedRoundRobin{cfg: p.WRR, rng: rng}
	case policy.BalancerLeastLoaded:
		return &leastLoaded{last: rng.Int()}
	case policy.BalancerP2C:
		return &p2c{rng: rng}
	case policy.BalancerYARP:
		return &yarp{cfg: p.YARP, rng: rng}
	case policy.BalancerLinear:
		return newLinear(p, rng)
	case policy.BalancerC3:
		return newC3(p, rng, flights)
	case policy.BalancerPeakEWMA:
		return &peakEWMA{cfg: p.PeakEWMA, rng: rng}
	case policy.BalancerRingHash:
		return newHashPicker(p, rng, flights, func(s *Set) *circle { return s.ring() })
	case policy.BalancerPrequalSync:
		return newSyncPicker(p, rng)
	case policy.BalancerLateBinding:
		return newLateBinding(p, rng)
	case policy.BalancerJoinIdleQueue:
		return newIdleQueue(p, rng)
	case policy.BalancerMaglev:
		return newHashPicker(p, rng, flights, func(s *Set) *circle { return s.maglev() })
	default:
		return &prequalPicker{cfg: p.Prequal, rng: rng}
	}
}
