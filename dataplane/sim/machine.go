package sim

import "math/rand/v2"

// machine is what one replica and its antagonists run on.
type machine struct {
	Machines
	demand float64 // of antagonists, in cores
	heavy  bool
}

// grant returns the cores that a number of requests get, and the speed of each.
func (m *machine) grant(requests float64) (cores, quick float64) {
	wanted := min(requests, m.Most)
	cores = wanted
	if wanted > m.Allocation && wanted+m.demand > m.Cores {
		cores = min(wanted, max(m.Cores-m.demand, m.Hobble*m.Allocation))
	}
	return cores, 1 - m.Interference*m.crowding(wanted)
}

// crowding goes from 0 to 1 as the busy part of the machine goes from InterferenceFrom to 1.
func (m *machine) crowding(wanted float64) float64 {
	busy := min(1, (wanted+m.demand)/m.Cores)
	if busy >= 1 {
		return 1
	}
	if m.InterferenceFrom >= 1 {
		return 0
	}
	return max(0, (busy-m.InterferenceFrom)/(1-m.InterferenceFrom))
}

// addAntagonists gives every machine a first level: as many as HeavyShare says are heavy.
func (s *simulation) addAntagonists() {
	var cpus []*replica
	for i := range s.replicas {
		if s.replicas[i].serve == CPU {
			cpus = append(cpus, &s.replicas[i])
		}
	}
	rng := s.randoms.antagonists
	heavy := int(s.cfg.Machines.Antagonists.HeavyShare*float64(len(cpus)) + 0.5)
	for i, at := range rng.Perm(len(cpus)) {
		cpus[at].machine.heavy = i < heavy
	}
	for _, r := range cpus {
		s.drawLevel(r)
	}
}

// changeLevel ends a level of antagonists and draws the next.
func (s *simulation) changeLevel(r *replica) {
	m := &r.machine
	if a := m.Antagonists; !a.Stay {
		m.heavy = s.randoms.antagonists.Float64() < a.heavyLevels()
	}
	r.advance(s.now)
	s.drawLevel(r)
	s.settle(r)
}

// heavyLevels returns the part of levels that must be heavy for HeavyShare of the time to be.
func (a Antagonists) heavyLevels() float64 {
	heavy := a.HeavyShare / a.HeavyLasts.Seconds()
	light := (1 - a.HeavyShare) / a.LightLasts.Seconds()
	return heavy / (heavy + light)
}

func (s *simulation) drawLevel(r *replica) {
	m, rng := &r.machine, s.randoms.antagonists
	demand, lasts := m.Antagonists.Light, m.Antagonists.LightLasts
	if m.heavy {
		demand, lasts = m.Antagonists.Heavy, m.Antagonists.HeavyLasts
	}
	m.demand = demand.draw(rng) * m.Cores
	if lasts > 0 {
		s.put(int64(rng.ExpFloat64()*float64(lasts)), level, int32(r.index))
	}
}

func (g Range) draw(rng *rand.Rand) float64 { return g.Min + (g.Max-g.Min)*rng.Float64() }
