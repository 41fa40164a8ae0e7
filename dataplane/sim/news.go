package sim

import (
	"github.com/headroom-mesh/headroom/dataplane/balancer"
	"github.com/headroom-mesh/headroom/registry"
)

// news is what the registry says from some moment on.
type news struct {
	records []registry.Endpoint
	unheard int // agents that are still to hear of it
}

// spreadNews sends all agents what the registry says now.
func (s *simulation) spreadNews() {
	s.records = s.registered()
	s.edition++
	s.news[s.edition] = &news{s.records, len(s.agents)}
	delay, spread := int64(s.cfg.Registry.Delay), int64(s.cfg.Registry.Spread)
	for i := range s.agents {
		after := delay
		if spread > 0 {
			after += s.randoms.rest.Int64N(spread)
		}
		if after == 0 {
			s.hear(int32(i), s.edition)
		} else {
			s.agenda.put(s.now, after, hearing, int32(i), s.edition)
		}
	}
}

// hear lets an agent hear what the registry said, unless it knows better by now.
func (s *simulation) hear(id int32, edition uint32) {
	n := s.news[edition]
	if n.unheard--; n.unheard == 0 {
		delete(s.news, edition)
	}
	if a := &s.agents[id]; a.edition < edition {
		a.edition = edition
		a.fleet.Update(s.clock, n.records, s.cfg.Policy.Scope)
	}
}

// declines reports whether the replica's own agent says that it takes no requests.
func (r *replica) declines() bool { return !r.registered || r.state() != registry.Ready }

// declined notes such an answer.
func (s *simulation) declined(a *agent, e *balancer.Endpoint) {
	a.fleet.Decline(s.clock, e)
	for _, b := range a.shards {
		b.Forget(e)
	}
}

// check probes the replicas that requests of an agent are at, and those that it leaves out, whatever the rule, as agents do
// to notice who has fallen silent or is back. Answers tell it nothing else. So these probes are not sent, nor counted,
// before some replica takes no requests.
func (s *simulation) check(a *agent) {
	if !s.checks {
		return
	}
	s.targets = s.targets[:0]
	a.fleet.Each(s.clock, func(e *balancer.Endpoint, why balancer.Avoidance) {
		if e.RIF() > 0 || why != balancer.NotAvoided {
			s.targets = append(s.targets, e)
		}
	})
	s.probe(a, nil, s.targets)
}
