// Package balancer places each request on a replica: one contract for all balancing rules, the fleet they choose from,
// and the concurrent shell that runs a rule on every processor.
package balancer

import (
	"errors"
	"math/rand/v2"
	"slices"
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
	idled atomic.Uint32
	asks  bool // whether the rule is an Asker
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
	_, b.asks = b.shards[0].picker.(Asker)
	b.mine.New = func() any { return b.shards[b.dealt.Add(1)%uint32(len(b.shards))] }
	return b
}

// Picked is a request placed on a replica. Done must be called exactly once. It has four fields, of a word each: one more, and
// it would not fit registers.
type Picked struct {
	Endpoint *Endpoint
	Class    Class
	shard    *shard
	balancer *Balancer
}

// Pick places a request. The error is ErrNoEndpoints or ErrNoneReady.
func (b *Balancer) Pick(now time.Time, req Request) (Picked, error) {
	s, err := b.enter(now)
	if err != nil {
		return Picked{}, err
	}
	e, class := s.picker.Pick(now, req)
	return b.place(s, e, class), nil
}

// Asks reports whether the rule may ask replicas about a request before it is placed.
func (b *Balancer) Asks() bool { return b.asks }

// Inquire appends the replicas to ask about a request before it is placed, and returns how many answers are enough. With
// these, or those that came in time, the request is for Choose. If asks is false, the rule asks nobody: the request is
// for Pick.
func (b *Balancer) Inquire(now time.Time, req Request, dst []*Endpoint) (targets []*Endpoint, enough int, asks bool) {
	if !b.asks {
		return dst, 0, false
	}
	s, err := b.enter(now)
	if err != nil {
		return dst, 0, false
	}
	targets, enough = s.picker.(Asker).Ask(now, req, dst)
	b.leave(s)
	return targets, enough, len(targets) > len(dst)
}

// Choose places a request by the answers of replicas that Inquire named. Answers of replicas that have left since don't
// count; if none is left the request is placed as by Pick.
func (b *Balancer) Choose(now time.Time, req Request, answers []Answer) (Picked, error) {
	s, err := b.enter(now)
	if err != nil {
		return Picked{}, err
	}
	answers = slices.DeleteFunc(answers, func(a Answer) bool { return !s.set.has(a.Endpoint) })
	var e *Endpoint
	var class Class
	if len(answers) == 0 {
		e, class = s.picker.Pick(now, req)
	} else {
		e, class = s.picker.(Asker).Choose(now, req, answers)
	}
	return b.place(s, e, class), nil
}

// enter locks a shard and lets it see the fleet.
func (b *Balancer) enter(now time.Time) (*shard, error) {
	set := b.fleet.Set(now)
	if len(set.Endpoints) == 0 {
		if set.Registered == 0 {
			return nil, ErrNoEndpoints
		}
		return nil, ErrNoneReady
	}
	s := b.lockShard()
	if s.set != set {
		s.adopt(now, set)
	}
	return s, nil
}

func (b *Balancer) leave(s *shard) {
	s.mu.Unlock()
	b.mine.Put(s)
}

// place counts the request in and gives up the shard.
func (b *Balancer) place(s *shard, e *Endpoint, class Class) Picked {
	e.counter.begin() // before the lock is given up: the next choice must see this one
	b.leave(s)
	s.inFlight.Add(1)
	return Picked{Endpoint: e, Class: class, shard: s, balancer: b}
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

// Responded notes that the head of the response has come, how long after the request was placed, and the replica's load
// report if there was one. It is for answers only: a request that fails is just Done.
func (p Picked) Responded(now time.Time, took time.Duration, r *load.Report) {
	s := p.shard
	watcher, watches := s.picker.(Watcher)
	listener, listens := s.picker.(Listener)
	if !watches && (!listens || r == nil) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if watches {
		watcher.Responded(now, p.Endpoint, took)
	}
	if listens && r != nil {
		listener.Reported(now, p.Endpoint, *r)
	}
}

// Done accounts for the end of the request.
func (p Picked) Done(now time.Time, outcome Outcome) {
	p.Endpoint.counter.end()
	p.shard.inFlight.Add(-1)
	switch outcome {
	case Succeeded:
		p.balancer.fleet.succeeded(p.Endpoint)
	case Failed, Unconnected:
		p.balancer.fleet.failed(now, p.Endpoint, outcome == Unconnected)
		tell(p.shard, func(w Watcher) { w.Failed(now, p.Endpoint) })
		if outcome == Unconnected {
			p.balancer.Forget(p.Endpoint)
		}
	}
}

// Due appends the replicas to probe on account of this request. Their answers belong to its Shard.
func (p Picked) Due(dst []*Endpoint) []*Endpoint {
	tell(p.shard, func(prober Prober) { dst = prober.Due(dst) })
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

// Probed takes in the answer to a probe that was sent for a shard. An answer may come after its replica has left.
func (b *Balancer) Probed(now time.Time, shard int, e *Endpoint, r load.Report) {
	s := b.shards[shard]
	tell(s, func(prober Prober) {
		if s.set.has(e) {
			prober.Probed(now, e, r)
		}
	})
}

// Idled takes in a replica's word that it has nothing to do. It is for one shard, as for one dispatcher, each in turn.
func (b *Balancer) Idled(now time.Time, e *Endpoint) {
	s := b.shards[b.idled.Add(1)%uint32(len(b.shards))]
	set := b.fleet.Set(now)
	if !set.has(e) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.set != set {
		s.adopt(now, set) // a new balancer has none yet; one that has not placed a request since has an old one
	}
	if d, ok := s.picker.(Dispatcher); ok && s.set.has(e) {
		d.Idled(now, e)
	}
}

// Forget drops what the rule knows of a replica.
func (b *Balancer) Forget(e *Endpoint) {
	for _, s := range b.shards {
		tell(s, func(f Forgetter) { f.Forget(e) })
	}
}

// tell lets a shard's rule know something if it is able to take it in.
func tell[Able any](s *shard, f func(Able)) {
	able, ok := s.picker.(Able)
	if !ok {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.set != nil {
		f(able)
	}
}

// View is what a rule goes by at one moment.
type View struct {
	Threshold      float64 // RIF (by weight) above which a replica is hot; only if HasThreshold
	HasThreshold   bool
	Pooled         int
	PoolCapacity   int
	FreshestProbes map[*Endpoint]PooledProbe

	Weights      map[*Endpoint]float64       // as parts of their mean; of those that have one
	Costs        map[*Endpoint]time.Duration // of one more request
	IdleSlots    int                         // known to be free; only if HasIdleSlots
	HasIdleSlots bool
}

// PooledProbe is the freshest probe of a replica in any pool.
type PooledProbe struct {
	Report load.Report
	Age    time.Duration
	Hot    bool
}

// View describes what the rule goes by, all shards taken together; the threshold is the highest of theirs.
func (b *Balancer) View(now time.Time) View {
	v := View{FreshestProbes: map[*Endpoint]PooledProbe{}, Weights: map[*Endpoint]float64{}, Costs: map[*Endpoint]time.Duration{}}
	for _, s := range b.shards {
		tell(s, func(viewer Viewer) { viewer.View(now, &v) })
	}
	return v
}
