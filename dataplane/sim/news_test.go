package sim_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/sim"
	"github.com/headroom-mesh/headroom/policy"
)

// News of the registry's reach each agent at a time of its own.
func TestRegistryDelay(t *testing.T) {
	t.Parallel()
	c := service(policy.BalancerRandom, 50)
	c.Agents[0].Count = 20
	c.Replicas[0].Absent = true
	c.Registry = sim.Registry{Delay: 2 * sec, Spread: 4 * sec}
	c.Faults = []sim.Fault{{Kind: sim.Join, At: 5 * sec, Group: "bad"}}
	r := run(t, c)
	early, some, all := picks(r, 0, 0, 7*sec), picks(r, 0, 7*sec, 11*sec), picks(r, 0, 11*sec, 15*sec)
	if early != 0 || some == 0 || all < some*5/4 {
		t.Errorf("the new replica got %d requests before any agent knew of it, %d while they got to know, %d then; want none, some, more", early, some, all)
	}
}

// An agent that starts learns all that the registry says, however old.
func TestRestartedAgentsKnowTheLatest(t *testing.T) {
	t.Parallel()
	c := service(policy.BalancerRandom, 50)
	c.Replicas[0].Absent = true
	c.Registry.Delay = 10 * sec
	c.Faults = []sim.Fault{{Kind: sim.Join, At: 5 * sec, Group: "bad"}, {Kind: sim.Restart, At: 7 * sec}}
	if r := run(t, c); picks(r, 0, 0, 7*sec) != 0 || picks(r, 0, 7*sec, 12*sec) == 0 {
		t.Errorf("the new replica got %d requests before the restart, %d after; want none, some", picks(r, 0, 0, 7*sec), picks(r, 0, 7*sec, 12*sec))
	}
}

// News may overtake each other: an agent goes by the latest.
func TestNewsOvertake(t *testing.T) {
	t.Parallel()
	c := service(policy.BalancerRandom, 50)
	c.Agents[0].Count = 50
	c.Registry.Spread = 5 * sec
	c.Faults = []sim.Fault{{Kind: sim.Leave, At: 5 * sec, Lasts: sec, Group: "bad"}, {Kind: sim.Leave, At: 7 * sec, Group: "bad"}}
	if got := picks(run(t, c), 0, 12*sec, 20*sec); got != 0 {
		t.Errorf("a replica got %d requests after all agents must have heard that it left", got)
	}
}

// What takes no requests says so when it is probed. So agents stop to use it, whatever the rule and the registry say.
func TestRepliesToProbesAreFasterThanTheRegistry(t *testing.T) {
	t.Parallel()
	for _, rule := range policy.Balancers() {
		for _, kind := range []sim.FaultKind{sim.Unhealthy, sim.Drain, sim.Leave} {
			c := service(rule, 60)
			c.Registry.Delay = 10 * sec
			c.Faults = []sim.Fault{{Kind: kind, At: 5 * sec, Group: "bad"}}
			r := run(t, c)
			late := r.Overdue > 2*sec && rule != policy.BalancerJoinIdleQueue // which may use what it was told long ago
			if r.Unwanted > 6 || late || r.Errors.Total() != 0 {
				t.Errorf("%s, %s: got %d unwanted requests, the last %v after; %+v", rule, kind, r.Unwanted, r.Overdue, r.Errors)
			}
		}
	}
}

// A fault can happen to one after the other.
func TestOneAfterTheOther(t *testing.T) {
	t.Parallel()
	c := service(policy.BalancerRoundRobin, 200)
	c.Load.Even = true
	c.Replicas = []sim.Group{{Serve: sim.Delay}, {Name: "three", Count: 3, Serve: sim.Delay}}
	c.Faults = []sim.Fault{
		{Kind: sim.Drain, At: 2 * sec, Lasts: 3 * sec, Every: 4 * sec, Group: "three", First: 1},
		{Kind: sim.Drain, At: 15 * sec, Lasts: 3 * sec, Every: 4 * sec, Group: "three", Count: 1},
	}
	r := run(t, c)
	for _, tt := range []struct{ from, to, there float64 }{{0, 2, 3}, {2, 5, 2}, {5, 6, 3}, {6, 9, 2}, {9, 15, 3}, {15, 18, 2}, {18, 20, 3}} {
		span := tt.to - tt.from
		got := float64(picks(r, 1, time.Duration(tt.from)*sec, time.Duration(tt.to)*sec))
		near(t, fmt.Sprintf("requests a second from %v to %v", tt.from, tt.to), got/span, 200*tt.there/(tt.there+1), 0.1)
	}
}

// The age of the probes that choices go by, and how many come to each replica.
func TestProbesAreWatched(t *testing.T) {
	t.Parallel()
	c := service(policy.BalancerPrequal, 60)
	c.Duration = 100 * sec
	r := run(t, c)
	near(t, "probes at a replica", r.ProbeLoad.Mean, r.ProbesPerRequest*60/10, 0.01)
	if maxAge := c.Policy.Prequal.MaxAge; r.ProbeAge.P50 <= 0 || r.ProbeAge.P50 > r.ProbeAge.P99 || r.ProbeAge.Max > maxAge {
		t.Errorf("the probes that choices went by had ages of %+v; want some, up to %v", r.ProbeAge, maxAge)
	}
	c.Policy = by(policy.BalancerRoundRobin)
	if r := run(t, c); r.ProbeAge.Max != 0 || r.ProbeLoad.Mean != 0 {
		t.Errorf("round robin goes by probes: %+v, %+v", r.ProbeAge, r.ProbeLoad)
	}
}

// Peaks are those of the worst second that counts.
func TestPeaks(t *testing.T) {
	t.Parallel()
	c := service(policy.BalancerRoundRobin, 50)
	c.Warmup, c.Duration = 5*sec, 15*sec
	c.Faults = []sim.Fault{
		{Kind: sim.Stall, At: sec, Lasts: 2 * sec}, // while nothing counts
		{Kind: sim.Stall, At: 10 * sec, Lasts: sec},
	}
	r := run(t, c)
	if r.PeakP99 < sec || r.PeakP99 > 1500*ms || r.PeakRIF < 5 || r.PeakRIF > 10 {
		t.Errorf("a second of standstill: got a latency of %v and a RIF of %d at its worst", r.PeakP99, r.PeakRIF)
	}
	if peak := r.Groups[0].Peak; peak < 0.1 || peak > 0.2 {
		t.Errorf("a tenth of the requests was %v at its most", peak)
	}
}

func TestOver(t *testing.T) {
	t.Parallel()
	c := sim.Config{Replicas: []sim.Group{{Name: "a", Count: 5}, {Name: "b"}}, Agents: []sim.Agents{{Count: 3}, {}}}
	for _, tt := range []struct {
		fault sim.Fault
		want  time.Duration
	}{
		{sim.Fault{Kind: sim.Drain, At: sec, Lasts: 2 * sec}, 3 * sec},
		{sim.Fault{Kind: sim.Drain, At: sec, Lasts: 2 * sec, Every: 10 * sec}, 43 * sec},
		{sim.Fault{Kind: sim.Drain, At: sec, Lasts: 2 * sec, Every: 10 * sec, First: 3}, 13 * sec},
		{sim.Fault{Kind: sim.Drain, At: sec, Lasts: 2 * sec, Every: 10 * sec, Count: 2}, 13 * sec},
		{sim.Fault{Kind: sim.Drain, At: sec, Lasts: 2 * sec, Every: 10 * sec, Group: "b"}, 3 * sec},
		{sim.Fault{Kind: sim.Restart, At: sec, Every: 10 * sec}, 31 * sec},
	} {
		if got := c.Over(tt.fault); got != tt.want {
			t.Errorf("%+v: over at %v, want %v", tt.fault, got, tt.want)
		}
	}
}
