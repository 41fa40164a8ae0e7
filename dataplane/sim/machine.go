package sim

import (
	"math"
	"math/rand/v2"
)

// machine is what one replica and its antagonists run on.
type machine struct {
	Machines
	level    int
	demand   float64 // of antagonists, in cores
	wanted   float64 // by the replica, in cores
	pressure float64 // wanted, averaged
	hobbled  bool
}

// grant returns the cores that a number of requests get, and the speed of each.
func (m *machine) grant(requests float64) (cores, quick float64) {
	m.wanted = min(requests, m.Most)
	there := max(m.Cores-m.demand, m.Allocation)
	pressed := m.HobbleAfter == 0 || m.pressure > there
	switch {
	case !pressed:
		m.hobbled = false
	case m.wanted > there:
		m.hobbled = true
	case m.wanted <= m.left(there):
		m.hobbled = false
	}
	if m.hobbled {
		there = m.left(there)
	}
	return min(m.wanted, there), 1 - m.Interference*m.crowding(m.wanted)
}

// left returns how many of the cores that are there a hobbled replica gets.
func (m *machine) left(there float64) float64 {
	return m.Hobble * (m.Allocation + (1-m.HobbleLoses)*(there-m.Allocation))
}

// pass lets time go by.
func (m *machine) pass(nanoseconds float64) {
	if m.HobbleAfter > 0 {
		m.pressure = m.wanted + (m.pressure-m.wanted)*math.Exp(-nanoseconds/float64(m.HobbleAfter))
	}
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

// addAntagonists gives every machine a first level: each level as many machines as its share says.
func (s *simulation) addAntagonists() {
	var cpus []*replica
	for i := range s.replicas {
		if s.replicas[i].serve == CPU {
			cpus = append(cpus, &s.replicas[i])
		}
	}
	a := s.cfg.Machines.Antagonists
	if len(a.Levels) == 0 {
		return
	}
	for i, at := range s.randoms.antagonists.Perm(len(cpus)) {
		cpus[at].machine.level = a.level((float64(i) + 0.5) / float64(len(cpus)))
	}
	for _, r := range cpus {
		s.drawDemand(r)
	}
}

// level returns the level at a point from 0 to 1 of all levels laid end to end.
func (a Antagonists) level(point float64) int {
	total := 0.0
	for _, l := range a.Levels {
		total += l.Share
	}
	point *= total
	for i, l := range a.Levels {
		if point -= l.Share; point < 0 {
			return i
		}
	}
	return len(a.Levels) - 1
}

// changeLevel ends a demand of antagonists and draws the next.
func (s *simulation) changeLevel(r *replica) {
	m := &r.machine
	if !m.Antagonists.Stay {
		m.level = m.Antagonists.level(s.randoms.antagonists.Float64())
	}
	r.advance(s.now)
	s.drawDemand(r)
	s.settle(r)
}

func (s *simulation) drawDemand(r *replica) {
	m, rng := &r.machine, s.randoms.antagonists
	m.demand = m.Antagonists.Levels[m.level].Demand.draw(rng) * m.Cores
	if lasts := m.Antagonists.Lasts; lasts > 0 {
		s.put(int64(rng.ExpFloat64()*float64(lasts)), level, int32(r.index))
	}
}

func (g Range) draw(rng *rand.Rand) float64 { return g.Min + (g.Max-g.Min)*rng.Float64() }
