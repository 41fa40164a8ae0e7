package sim

import (
	"math"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// TestLRU compares with a list.
func TestLRU(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.IntRange(0, 5).Draw(t, "size")
		l := newLRU(size)
		var latest []int32
		for _, item := range rapid.SliceOf(rapid.Int32Range(0, 9)).Draw(t, "items") {
			i := slices.Index(latest, item)
			if got := l.use(item); got != (i >= 0) {
				t.Fatalf("item %d is cached: %v; want those of %v", item, got, latest)
			}
			if i >= 0 {
				latest = slices.Delete(latest, i, i+1)
			}
			latest = append([]int32{item}, latest...)
			latest = latest[:min(size, len(latest))]
		}
	})
}

// scripted is an event of a script that is played both by the simulation and by the model below.
type scripted struct {
	at     int64
	work   float64 // of a request that comes
	demand float64 // of antagonists from now on; negative: a request comes
	cancel int     // the request that is taken back, -1: none
	stall  int     // 1: the replica stands still from now on, -1: it goes on
}

// TestServiceIsShared compares with a model that goes by tiny steps.
func TestServiceIsShared(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const step = 1000 // nanoseconds
		g := Group{Serve: rapid.SampledFrom([]Serving{CPU, Slots, Delay}).Draw(t, "serve"), Speed: rapid.SampledFrom([]float64{0.5, 1, 3}).Draw(t, "speed")}
		if g.Serve == Slots {
			g.Slots = rapid.IntRange(1, 3).Draw(t, "slots")
		}
		m := Machines{Cores: 4, Allocation: 1.5, Most: 3.5, Hobble: 0.8, Interference: 0.3, InterferenceFrom: 0.5}
		script := drawScript(t, step)
		got := playScript(g, m, script)
		want := stepThrough(g, m, script, step)
		for i := range want {
			if d := got[i] - want[i]; math.Abs(float64(d)) > 30*step && want[i] != never || want[i] == never && got[i] != never {
				t.Fatalf("request %d ended at %d, want about %d\n%+v", i, got[i], want[i], script)
			}
		}
	})
}

func drawScript(t *rapid.T, step int64) []scripted {
	var script []scripted
	now, requests, stalled := int64(0), 0, false
	for range rapid.IntRange(1, 20).Draw(t, "events") {
		now += step * rapid.Int64Range(0, 300).Draw(t, "gap")
		e := scripted{at: now, demand: -1, cancel: -1}
		switch kind := rapid.IntRange(0, 9).Draw(t, "kind"); {
		case kind == 0:
			e.demand = rapid.Float64Range(0, 5).Draw(t, "demand")
		case kind == 1 && requests > 0:
			e.cancel = rapid.IntRange(0, requests-1).Draw(t, "cancel")
		case kind == 2:
			stalled = !stalled
			e.stall = -1
			if stalled {
				e.stall = 1
			}
		default:
			e.work = float64(step * rapid.Int64Range(1, 500).Draw(t, "work"))
			requests++
		}
		script = append(script, e)
	}
	if stalled {
		script = append(script, scripted{at: now + step, demand: -1, cancel: -1, stall: -1})
	}
	return script
}

// playScript returns when the replica was done with each request; never for those taken back before.
func playScript(g Group, m Machines, script []scripted) []int64 {
	s := newSimulation(Config{
		Load: Load{Work: Work{Mean: 1}}, Agents: []Agents{{}}, Replicas: []Group{g}, Machines: m, Duration: 1,
		Network: Network{Delay: time.Hour}, // answers, which have a lane of their own, are not of interest
	}.withDefaults())
	r := &s.replicas[0]
	var tries []*try
	var ends []int64
	canceled := map[*try]bool{}
	until := func(at int64) {
		for {
			if len(s.agenda.heap) == 0 || s.agenda.heap[0].at > at {
				break
			}
			e := s.agenda.pop()
			s.now, s.clock = e.at, epoch(e.at)
			s.handle(e)
			for i, t := range tries {
				if t.state == ended && ends[i] == never {
					ends[i] = s.now
				}
			}
		}
		s.now, s.clock = at, epoch(at)
	}
	for _, e := range script {
		until(e.at)
		switch {
		case e.demand >= 0:
			r.advance(s.now)
			r.machine.demand = e.demand
			s.settle(r)
		case e.cancel >= 0:
			if t := tries[e.cancel]; !canceled[t] && t.state != ended {
				canceled[t] = true
				s.cancel(t)
			}
		case e.stall != 0:
			r.advance(s.now)
			r.stalled += e.stall
			s.settle(r)
		default:
			id, t := int32(len(tries)), &try{agent: &s.agents[0], replica: r, work: e.work, tracker: r.tracker}
			t.id = id
			tries, ends = append(tries, t), append(ends, never)
			s.tries.items = append(s.tries.items, t)
			s.arrive(t)
		}
	}
	until(never - 1)
	return ends
}

// stepThrough does the same in steps.
func stepThrough(g Group, m Machines, script []scripted, step int64) []int64 {
	hobbled := false
	type request struct {
		left float64
		gone bool
	}
	var requests []request
	var ends []int64
	demand, stalled := 0.0, false
	for now := int64(0); ; now += step {
		for len(script) > 0 && script[0].at <= now {
			e := script[0]
			script = script[1:]
			switch {
			case e.demand >= 0:
				demand = e.demand
			case e.cancel >= 0:
				requests[e.cancel].gone = true
			case e.stall != 0:
				stalled = e.stall > 0
			default:
				requests = append(requests, request{left: e.work})
				ends = append(ends, never)
			}
		}
		var served []int
		for i, q := range requests {
			if !q.gone && (g.Serve != Slots || len(served) < g.Slots) {
				served = append(served, i)
			}
		}
		if len(served) == 0 && len(script) == 0 {
			return ends
		}
		each := g.Speed
		if n := float64(len(served)); g.Serve == CPU && n > 0 && !stalled {
			wanted := math.Min(n, m.Most)
			cores, there := wanted, math.Max(m.Cores-demand, m.Allocation)
			if wanted > there {
				hobbled = true
			} else if wanted <= m.Hobble*there {
				hobbled = false
			}
			if hobbled {
				there *= m.Hobble
			}
			cores = math.Min(wanted, there)
			busy := math.Min(1, (wanted+demand)/m.Cores)
			slower := m.Interference * math.Max(0, (busy-m.InterferenceFrom)/(1-m.InterferenceFrom))
			each *= cores / n * (1 - slower)
		}
		if stalled {
			each = 0
		}
		for _, i := range served {
			if requests[i].left -= each * float64(step); requests[i].left <= 0 {
				requests[i].gone = true
				ends[i] = now + step
			}
		}
	}
}
