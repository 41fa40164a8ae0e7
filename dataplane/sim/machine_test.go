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
		{"hobbled beyond its allocation", 40, 0.5, Machines{Hobble: 0.8}, 25.6, 1},
		{"hobbled, and of what is idle nothing left", 40, 0.5, Machines{Hobble: 0.8, HobbleLoses: 1}, 5.12, 1},
		{"not hobbled for what there is", 32, 0.5, Machines{Hobble: 0.8}, 32, 1},
		{"not hobbled for a moment", 40, 0.5, Machines{Hobble: 0.8, HobbleAfter: time.Second}, 32, 1},
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

// A replica that wants too much for long is hobbled until it is content with what that leaves, or has long wanted less.
func TestHobbling(t *testing.T) {
	m := machine{Machines: Machines{Hobble: 0.5, HobbleAfter: time.Second}.withDefaults(), demand: 54}
	for _, step := range []struct {
		after    time.Duration
		requests float64
		want     float64
	}{
		{0, 20, 10}, // at first, what there is
		{500 * time.Millisecond, 20, 10},
		{500 * time.Millisecond, 20, 5}, // the average is 20·(1-1/e) = 12.6
		{time.Second, 9, 5},             // not content yet
		{200 * time.Millisecond, 5, 5},
		{0, 9, 9},                          // it was content
		{time.Second, 30, 5},               // but the average is still too high
		{10 * time.Second, 9, 5},           //
		{3100 * time.Millisecond, 9, 9},    // until it has wanted less for long
		{100 * time.Millisecond, 9.5, 9.5}, //
	} {
		m.pass(float64(step.after))
		if got, _ := m.grant(step.requests); math.Abs(got-step.want) > 1e-9 {
			t.Errorf("%v later, %v requests: got %v cores, want %v (pressure %.2f)", step.after, step.requests, got, step.want, m.pressure)
		}
	}
}

// Each level takes the share of time that it should, on all machines or on the same.
func TestAntagonists(t *testing.T) {
	for _, stay := range []bool{false, true} {
		c := Config{
			Load: Load{Stages: []Stage{{Rate: 1}}, Work: Work{Mean: 1}}, Agents: []Agents{{}}, Replicas: []Group{{Count: 40}},
			Machines: Machines{Antagonists: Antagonists{
				Levels: []Level{{3, Range{0.2, 0.6}}, {1, Range{1, 1.4}}}, Lasts: 3 * time.Second, Stay: stay,
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
				if m.level == 1 {
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
