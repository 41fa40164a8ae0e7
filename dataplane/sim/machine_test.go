package sim

import (
	"math"
	"testing"
	"time"
)

func TestGrant(t *testing.T) {
	for _, tt := range []struct {
		name                 string
		requests, demand     float64
		machines             Machines
		wantCores, wantQuick float64
	}{
		{"idle machine", 5, 0, Machines{}, 5, 1},
		{"beyond its allocation on idle cores", 30, 0.5, Machines{}, 30, 1},
		{"what is idle", 40, 0.5, Machines{}, 32, 1},
		{"its allocation, on a full machine", 40, 1, Machines{}, 6.4, 1},
		{"within its allocation", 6, 2, Machines{}, 6, 1},
		{"hobbled", 40, 1, Machines{Hobble: 0.8}, 5.12, 1},
		{"not hobbled where more is idle", 40, 0.9, Machines{Hobble: 0.8}, 6.4, 1},
		{"no more than it can use", 40, 0, Machines{Most: 16}, 16, 1},
		{"slow on a full machine", 6, 1, Machines{Interference: 0.25}, 6, 0.75},
		{"no slower before", 6, 0.8, Machines{Interference: 0.25}, 6, 1},
		{"ever slower", 6.4, 0.65, Machines{Interference: 0.2, InterferenceFrom: 0.5}, 6.4, 0.9},
	} {
		m := machine{Machines: tt.machines.withDefaults()}
		m.demand = tt.demand * m.Cores
		cores, quick := m.grant(tt.requests)
		if math.Abs(cores-tt.wantCores) > 1e-9 || math.Abs(quick-tt.wantQuick) > 1e-9 {
			t.Errorf("%s: got %v cores at speed %v; want %v at %v", tt.name, cores, quick, tt.wantCores, tt.wantQuick)
		}
	}
}

// Heavy levels take the share of time that they should, however long levels last, on all machines or on the same.
func TestAntagonists(t *testing.T) {
	for _, stay := range []bool{false, true} {
		c := Config{
			Load: Load{Stages: []Stage{{Rate: 1}}, Work: Work{Mean: 1}}, Agents: []Agents{{}}, Replicas: []Group{{Count: 40}},
			Machines: Machines{Antagonists: Antagonists{
				Light: Range{0.2, 0.6}, Heavy: Range{1, 1.4}, HeavyShare: 0.25, LightLasts: 3 * time.Second, HeavyLasts: time.Second, Stay: stay,
			}},
			Duration: 1000 * time.Second, SampleEvery: time.Second,
		}
		s := newSimulation(c.withDefaults())
		s.begin()
		var heavy, demand, samples float64
		ever := map[int]bool{}
		for s.now < s.end {
			e, _ := s.agenda.next()
			s.now, s.clock = e.at, epoch(e.at)
			s.handle(e)
			if e.kind() != sample {
				continue
			}
			for i := range s.replicas {
				m := &s.replicas[i].machine
				if m.heavy {
					heavy++
					ever[i] = true
				}
				demand += m.demand / m.Cores
				samples++
			}
		}
		if got := heavy / samples; math.Abs(got-0.25) > 0.02 {
			t.Errorf("stay %v: heavy for %.3f of the time; want 0.25", stay, got)
		}
		if got := demand / samples; math.Abs(got-0.6) > 0.02 {
			t.Errorf("stay %v: demand %.3f on average; want 0.6", stay, got)
		}
		if want := map[bool]int{true: 10, false: 40}[stay]; len(ever) != want {
			t.Errorf("stay %v: %d machines were heavily loaded; want %d", stay, len(ever), want)
		}
	}
}
