package sim

import "context"

import (
	"fmt"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/balancer"
)

// Leftovers plays c and then ten seconds more, in which all that is under way must come to an end. It returns what did
// not.
func Leftovers(c Config) (left []string) {
	s := newSimulation(c.withDefaults())
	s.play(context.Background())
	for end := s.now + int64(10*time.Second); s.now < end; {
		e, _ := s.agenda.next()
		s.now, s.clock = e.at, epoch(e.at)
		s.handle(e)
	}
	note := func(what string, n int) {
		if n != 0 {
			left = append(left, fmt.Sprintf("%s: %d", what, n))
		}
	}
	note("requests", s.alive)
	note("request structs", len(s.requests.items)-len(s.requests.free))
	note("try structs", len(s.tries.items)-len(s.tries.free))
	note("question structs", len(s.questions.items)-len(s.questions.free))
	note("inquiry structs", len(s.inquiries.items)-len(s.inquiries.free))
	for i := range s.replicas {
		r := &s.replicas[i]
		note("RIF", r.rif())
		note("coming", r.coming)
		note("RIF by the tracker", int(r.tracker.Report(s.clock).RIF))
		holding, waiting := r.slotLine.Len()
		note("slots held", holding)
		note("waiting for slots", waiting)
	}
	for i := range s.agents {
		s.agents[i].fleet.Each(s.clock, func(e *balancer.Endpoint, _ balancer.Avoidance) { note("RIF by the agent", e.RIF()) })
	}
	return left
}
