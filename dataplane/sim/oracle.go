package sim

import (
	"math"

	"github.com/headroom-mesh/headroom/registry"
)

// foresee returns the replica at which a request of mean size would end first; nil if none is to be had. Of equals it
// returns any.
func (s *simulation) foresee(a *agent) *replica {
	var best *replica
	least, equals := math.Inf(1), 0
	for i := range s.replicas {
		r := &s.replicas[i]
		if !r.registered || r.state() != registry.Ready {
			continue
		}
		takes := s.expected(r) + 2*float64(s.nominalDelay(a.zone, r.zone))
		switch {
		case takes < least || best == nil:
			best, least, equals = r, takes, 1
		case takes == least:
			if equals++; s.randoms.rest.IntN(equals) == 0 {
				best = r
			}
		}
	}
	return best
}

// expected returns how long a request of mean size would take, if nothing else came after it.
func (s *simulation) expected(r *replica) float64 {
	r.advance(s.now)
	speed := r.speed * r.slow
	if r.stalled+r.frozen+r.crashed > 0 || speed <= 0 || r.failShare > 0 {
		return math.Inf(1)
	}
	switch r.serve {
	case CPU:
		cores, quick := r.machine.grant(float64(r.busy() + r.coming + 1))
		return max(s.mean, (s.mean+s.ahead(r))/cores) / (quick * speed)
	case Slots:
		if r.rif()+r.coming < r.slots {
			return s.mean / speed
		}
		return (s.backlog(r)/float64(r.slots) + s.mean) / speed
	default:
		return s.mean / speed
	}
}

// ahead returns the work that equal sharing does before a request of mean size ends.
func (s *simulation) ahead(r *replica) float64 {
	sum := float64(r.coming) * s.mean
	for _, j := range r.jobs {
		sum += min(j.mark-r.attained, s.mean)
	}
	return sum
}

// backlog returns all work that is at the replica or on its way.
func (s *simulation) backlog(r *replica) float64 {
	sum := float64(r.coming) * s.mean
	for _, j := range r.jobs {
		sum += j.mark - r.attained
	}
	for _, t := range r.line.tries[r.line.first:] {
		if t.state == waiting {
			sum += t.work
		}
	}
	return sum
}

func (s *simulation) nominalDelay(from, to string) int64 {
	if from != to {
		return int64(s.cfg.Network.ZoneDelay)
	}
	return int64(s.cfg.Network.Delay)
}
