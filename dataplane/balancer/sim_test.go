package balancer

import (
	"container/heap"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
)

// sim plays a service in virtual time: agents that place requests, replicas that serve them, and the messages between.
type sim struct {
	now      time.Time
	events   events
	rng      *rand.Rand
	agents   []*Balancer
	records  []registry.Endpoint
	replicas map[registry.EndpointID]*simReplica
	took     []time.Duration
	failed   int
	failures Outcome // as which the agents see a failed request
	next     func() Request
	classes  map[Class]int // of the picks
}

// simReplica serves any number of requests at once, or as many as it has slots.
type simReplica struct {
	load    load.Tracker
	serve   func() (time.Duration, load.Outcome)
	slots   int // 0: no limit
	busy    int
	waiting []func()
	arrived int
}

// hop is the time that a message takes from one agent to another.
const hop = 250 * time.Microsecond

// newSim returns a service with n replicas and agents that balance by a rule, each on its own.
func newSim(p policy.Policy, agents, n int, replica func(s *sim, i int) *simReplica) *sim {
	s := &sim{now: start, rng: rand.New(rand.NewPCG(1, 2)), records: replicas(n), replicas: map[registry.EndpointID]*simReplica{}, failures: Failed,
		next: func() Request { return Request{} }, classes: map[Class]int{}}
	for i, r := range s.records {
		s.replicas[r.ID()] = replica(s, i)
	}
	for i := range agents {
		fleet := NewFleet(Place{})
		fleet.Update(s.now, s.records, policy.Scope{})
		s.agents = append(s.agents, New(p, fleet, 1, uint64(i)))
	}
	return s
}

// run plays Poisson arrivals at a rate a second for some time, and then what is under way.
func (s *sim) run(rate float64, lasts time.Duration) {
	end := s.now.Add(lasts)
	var arrive, tick func()
	arrive = func() {
		if s.now.Before(end) {
			s.request(s.agents[s.rng.IntN(len(s.agents))])
			s.after(time.Duration(s.rng.ExpFloat64()/rate*float64(time.Second)), arrive)
		}
	}
	tick = func() {
		if s.now.Before(end) {
			for _, b := range s.agents {
				s.probe(b, b.Idle(s.now, 0, nil))
			}
			s.after(100*time.Millisecond, tick)
		}
	}
	s.after(0, arrive)
	s.after(0, tick)
	for len(s.events) > 0 {
		next := heap.Pop(&s.events).(event)
		s.now = next.at
		next.do()
	}
}

func (s *sim) replica(i int) *simReplica { return s.replicas[s.records[i].ID()] }

func (s *sim) request(b *Balancer) {
	began := s.now
	picked, err := b.Pick(s.now, s.next())
	if err != nil {
		panic(err)
	}
	s.classes[picked.Class]++
	s.probe(b, picked.Due(nil))
	s.after(hop, func() {
		s.replicas[picked.Endpoint.ID].take(s, func(outcome load.Outcome, r load.Report) {
			s.after(hop, func() { s.answered(picked, began, outcome, r) })
		})
	})
}

func (s *sim) answered(picked Picked, began time.Time, outcome load.Outcome, r load.Report) {
	picked.Responded(s.now, s.now.Sub(began), &r)
	if outcome == load.OK {
		picked.Done(s.now, Succeeded)
		s.took = append(s.took, s.now.Sub(began))
		return
	}
	picked.Done(s.now, s.failures)
	s.failed++
}

func (s *sim) probe(b *Balancer, targets []*Endpoint) {
	for _, e := range targets {
		s.after(hop, func() {
			r := s.replicas[e.ID].load.Report(s.now)
			s.after(hop, func() { b.Probed(s.now, 0, e, r) })
		})
	}
}

func (r *simReplica) take(s *sim, done func(load.Outcome, load.Report)) {
	token := r.load.Begin(s.now)
	r.arrived++
	work := func() {
		r.busy++
		lasts, outcome := r.serve()
		s.after(lasts, func() {
			r.busy--
			report := r.load.ReportLeaving(s.now)
			r.load.End(s.now, token, outcome)
			done(outcome, report)
			if len(r.waiting) > 0 {
				next := r.waiting[0]
				r.waiting = r.waiting[1:]
				next()
			}
		})
	}
	if r.slots > 0 && r.busy == r.slots {
		r.waiting = append(r.waiting, work)
		return
	}
	work()
}

func (s *sim) after(d time.Duration, do func()) {
	heap.Push(&s.events, event{s.now.Add(d), do})
}

// quantile returns a quantile of the latencies of requests that succeeded.
func (s *sim) quantile(q float64) time.Duration {
	slices.Sort(s.took)
	return s.took[int(q*float64(len(s.took)-1))].Round(100 * time.Microsecond)
}

type event struct {
	at time.Time
	do func()
}

type events []event

func (es events) Len() int           { return len(es) }
func (es events) Less(i, j int) bool { return es[i].at.Before(es[j].at) }
func (es events) Swap(i, j int)      { es[i], es[j] = es[j], es[i] }
func (es *events) Push(e any)        { *es = append(*es, e.(event)) }
func (es *events) Pop() any {
	last := (*es)[len(*es)-1]
	*es = (*es)[:len(*es)-1]
	return last
}

func by(rule policy.Balancer) policy.Policy {
	p := policy.Default()
	p.Balancer = rule
	return p
}

// about serves requests in about a time, a tenth more or less.
func (s *sim) about(d time.Duration) func() (time.Duration, load.Outcome) {
	return func() (time.Duration, load.Outcome) {
		return time.Duration(float64(d) * (0.9 + 0.2*s.rng.Float64())), load.OK
	}
}

func (s *sim) exponential(mean time.Duration) func() (time.Duration, load.Outcome) {
	return func() (time.Duration, load.Outcome) {
		return time.Duration(s.rng.ExpFloat64() * float64(mean)), load.OK
	}
}

func exactly(d time.Duration) func() (time.Duration, load.Outcome) {
	return func() (time.Duration, load.Outcome) { return d, load.OK }
}

// Two of sixteen replicas are sixteen times slower than the others.
func TestPrequalAvoidsSlowReplicas(t *testing.T) {
	t.Parallel()
	const n, slow = 16, 2
	p99, share := map[policy.Balancer]time.Duration{}, map[policy.Balancer]float64{}
	for _, rule := range []policy.Balancer{policy.BalancerPrequal, policy.BalancerRoundRobin, policy.BalancerLeastLoaded} {
		s := newSim(by(rule), 1, n, func(s *sim, i int) *simReplica {
			if i < slow {
				return &simReplica{serve: s.about(800 * time.Millisecond)}
			}
			return &simReplica{serve: s.about(50 * time.Millisecond)}
		})
		s.run(300, time.Minute)
		at := 0
		for i := range slow {
			at += s.replica(i).arrived
		}
		p99[rule], share[rule] = s.quantile(0.99), 100*float64(at)/float64(len(s.took))
		t.Logf("%-12s p50 %v, p99 %v, p99.9 %v; %.2f %% at the slow replicas", rule, s.quantile(0.5), p99[rule], s.quantile(0.999), share[rule])
	}
	if share[policy.BalancerPrequal] >= 1 {
		t.Errorf("prequal sent %.2f %% to the slow replicas; want less than 1 %%", share[policy.BalancerPrequal])
	}
	if 6*p99[policy.BalancerPrequal] > p99[policy.BalancerRoundRobin] {
		t.Errorf("p99: prequal %v, round robin %v; want a sixth of it", p99[policy.BalancerPrequal], p99[policy.BalancerRoundRobin])
	}
}

// Among a few equal replicas there is little to gain, but nothing may be lost: the median within a tenth, the tail no
// longer.
func TestPrequalInASmallFleet(t *testing.T) {
	t.Parallel()
	for _, agents := range []int{1, 4} {
		p50, p99 := map[policy.Balancer]time.Duration{}, map[policy.Balancer]time.Duration{}
		for _, rule := range []policy.Balancer{policy.BalancerPrequal, policy.BalancerRoundRobin} {
			s := newSim(by(rule), agents, 4, func(s *sim, _ int) *simReplica {
				return &simReplica{slots: 4, serve: s.exponential(50 * time.Millisecond)}
			})
			s.run(0.75*4*4/0.050, 30*time.Second)
			p50[rule], p99[rule] = s.quantile(0.5), s.quantile(0.99)
			t.Logf("%d agents: %-12s p50 %v, p99 %v", agents, rule, p50[rule], p99[rule])
		}
		if 10*p50[policy.BalancerPrequal] > 11*p50[policy.BalancerRoundRobin] || p99[policy.BalancerPrequal] > p99[policy.BalancerRoundRobin] {
			t.Errorf("%d agents: prequal p50 %v, p99 %v; round robin %v, %v", agents, p50[policy.BalancerPrequal],
				p99[policy.BalancerPrequal], p50[policy.BalancerRoundRobin], p99[policy.BalancerRoundRobin])
		}
	}
}

// A replica that was slow is left alone, but not for ever: half a minute after its last answer it is tried again.
func TestRecoveredReplicasGetRequestsAgain(t *testing.T) {
	t.Parallel()
	const rate, n = 300, 16
	for _, agents := range []int{1, 8} {
		recovered := after(20 * time.Second)
		s := newSim(by(policy.BalancerPrequal), agents, n, func(s *sim, i int) *simReplica {
			slow, fast := s.about(800*time.Millisecond), s.about(50*time.Millisecond)
			return &simReplica{serve: func() (time.Duration, load.Outcome) {
				if i == 0 && s.now.Before(recovered) {
					return slow()
				}
				return fast()
			}}
		})
		s.run(rate, 20*time.Second)
		whileSlow := s.replica(0).arrived
		s.run(rate, 35*time.Second)
		before := s.replica(0).arrived
		s.run(rate, 10*time.Second)
		got := s.replica(0).arrived - before
		t.Logf("%d agents: %d requests in 20 slow seconds, %d in the next 35, %d in the 10 after", agents, whileSlow, before-whileSlow, got)
		if fair := 10 * rate / n; whileSlow > 20 || 10*got < fair {
			t.Errorf("%d agents: got %d requests while slow, %d when recovered; want at most 20, and a tenth of %d", agents, whileSlow, got, fair)
		}
	}
}

// Replicas that fail at once look idle and fast. They must not attract requests: by their own load reports, even where
// the callers' agents take the failures for answers, and all the more where they eject them.
func TestFailingReplicasAttractNothing(t *testing.T) {
	t.Parallel()
	for _, agents := range []int{1, 4} {
		for _, seen := range []Outcome{Failed, Succeeded} {
			s := newSim(by(policy.BalancerPrequal), agents, 16, func(s *sim, i int) *simReplica {
				if i < 2 {
					return &simReplica{serve: func() (time.Duration, load.Outcome) { return time.Millisecond, load.Failed }}
				}
				return &simReplica{serve: s.about(50 * time.Millisecond)}
			})
			s.failures = seen
			s.run(300, 20*time.Second)
			share := 100 * float64(s.failed) / float64(s.failed+len(s.took))
			t.Logf("%d agents, failures seen as %d: %d failed, %.2f %%", agents, seen, s.failed, share)
			if share > 1 {
				t.Errorf("%d agents, failures seen as %d: %.2f %% failed; want at most 1 %%", agents, seen, share)
			}
		}
	}
}

// A new replica gets one request from an agent, and hardly another until it has answered: it is the least loaded where all
// others are hot.
func TestNewReplicasAreNotFlooded(t *testing.T) {
	t.Parallel()
	for _, rate := range []float64{300, 2000} {
		s := newSim(by(policy.BalancerPrequal), 1, 16, func(s *sim, i int) *simReplica {
			if i == 0 {
				return &simReplica{serve: exactly(2 * time.Second)} // it has yet to warm up
			}
			return &simReplica{serve: s.about(50 * time.Millisecond)}
		})
		s.agents[0].fleet.Update(s.now, s.records[1:], policy.Scope{})
		s.run(rate, 2*time.Second)
		s.agents[0].fleet.Update(s.now, s.records, policy.Scope{})
		s.run(rate, 1900*time.Millisecond)
		if r := s.replica(0); r.arrived < 1 || r.arrived > 10 {
			t.Errorf("%v requests a second: the new replica got %d before its first answer; want 1 to 10", rate, r.arrived)
		}
	}
}
