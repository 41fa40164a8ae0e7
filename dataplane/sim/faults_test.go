package sim_test

import (
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/sim"
	"github.com/headroom-mesh/headroom/policy"
)

// service is a small one: ten replicas that serve one request of 100 ms at a time.
func service(rule policy.Balancer, rate float64) sim.Config {
	return sim.Config{
		Policy:   by(rule),
		Load:     sim.Load{Stages: steady(rate), Work: sim.Work{Mean: 100 * ms}},
		Agents:   []sim.Agents{{Count: 3}},
		Replicas: []sim.Group{{Name: "bad", Serve: sim.Slots}, {Count: 9, Serve: sim.Slots}},
		Duration: 20 * sec,
	}
}

// Replicas that the registry does not call ready get no requests, and get them again afterwards.
func TestReplicasThatTakeNoRequests(t *testing.T) {
	t.Parallel()
	for _, kind := range []sim.FaultKind{sim.Unhealthy, sim.Drain, sim.Leave} {
		c := service(policy.BalancerRandom, 50)
		c.Faults = []sim.Fault{{Kind: kind, At: 5 * sec, Lasts: 5 * sec, Group: "bad"}}
		r := run(t, c)
		if before, meanwhile, after := picks(r, 0, 0, 5*sec), picks(r, 0, 5*sec, 10*sec), picks(r, 0, 10*sec, 20*sec); before == 0 || meanwhile != 0 || after == 0 || r.Errors.Total() != 0 {
			t.Errorf("%s: got %d requests before, %d meanwhile, %d after; %+v", kind, before, meanwhile, after, r.Errors)
		}
	}
}

func TestNobodyIsThere(t *testing.T) {
	t.Parallel()
	c := service(policy.BalancerPrequal, 50)
	c.Faults = []sim.Fault{{Kind: sim.Leave, At: 5 * sec}}
	r := run(t, c)
	near(t, "unplaced", float64(r.Errors.Unplaced), 50*15, 0.1)
	if r.Errors.Total() != r.Errors.Unplaced {
		t.Errorf("got %+v", r.Errors)
	}
}

// Requests to a node that can't be connected to are sent elsewhere. Only those that were there are lost.
func TestCrash(t *testing.T) {
	t.Parallel()
	c := service(policy.BalancerRandom, 50)
	c.Faults = []sim.Fault{{Kind: sim.Crash, At: 5 * sec, Lasts: 5 * sec, Group: "bad"}}
	r := run(t, c)
	if r.Errors.Total() != r.Errors.Failed || r.Errors.Failed > 5 || r.Retries == 0 || picks(r, 0, 11*sec, 20*sec) == 0 {
		t.Errorf("got %+v, %d retries, %d requests afterwards", r.Errors, r.Retries, picks(r, 0, 11*sec, 20*sec))
	}
}

// A replica that stands still answers nothing, and a request to it takes as long as the caller's patience.
func TestTimeouts(t *testing.T) {
	t.Parallel()
	for _, kind := range []sim.FaultKind{sim.Stall, sim.Freeze} {
		c := service(policy.BalancerRoundRobin, 50)
		c.Caller.Timeout = sec
		c.Without.Ejection = true
		c.Faults = []sim.Fault{{Kind: kind, Group: "bad"}}
		r := run(t, c)
		near(t, string(kind)+": timeouts", float64(r.Errors.Timeout), float64(r.Requests)/10, 0.02)
		if r.Latency.Max != sec || r.Errors.Total() != r.Errors.Timeout {
			t.Errorf("%s: got a latency of %v at most, %+v; want the timeout", kind, r.Latency.Max, r.Errors)
		}
	}
}

func TestSlowReplicas(t *testing.T) {
	t.Parallel()
	c := service(policy.BalancerRoundRobin, 5)
	c.Replicas = c.Replicas[:1]
	c.Load.Even = true
	c.Faults = []sim.Fault{{Kind: sim.Slow, Factor: 0.5, At: 10 * sec, Lasts: 5 * sec}}
	r := run(t, c)
	near(t, "mean", r.Latency.Mean.Seconds(), 0.1005+0.25*0.1, 0.01)
}

// A queue with a limit refuses what does not fit.
func TestQueueLimit(t *testing.T) {
	t.Parallel()
	c := service(policy.BalancerRandom, 200)
	for i := range c.Replicas {
		c.Replicas[i].Queue = 2
	}
	c.Without.Ejection = true
	r := run(t, c)
	if r.Errors.Refused == 0 || r.Errors.Refused != r.Errors.Total() || r.Latency.Max > 302*ms {
		t.Errorf("got %+v, latency %v at most; want some refused, and nobody to wait for more than two", r.Errors, r.Latency.Max)
	}
	near(t, "goodput", r.Goodput, 100, 0.1)
}

// What is retried succeeds elsewhere, as often as the caller tries and the budget allows.
func TestRetries(t *testing.T) {
	t.Parallel()
	failing := func(caller sim.Caller, share float64) sim.Result {
		c := service(policy.BalancerRandom, 50)
		c.Without.Ejection = true
		c.Policy.RetryBudget = policy.RetryBudget{Ratio: 0.1, Window: 10 * sec}
		c.Caller = caller
		c.Faults = []sim.Fault{{Kind: sim.Fail, Latency: ms, Share: share}}
		return run(t, c)
	}
	near(t, "without", failing(sim.Caller{}, 0.2).ErrorRate, 0.2, 0.15)
	near(t, "one retry", failing(sim.Caller{Retries: 1}, 0.2).ErrorRate, 0.04, 0.3)
	r := failing(sim.Caller{Retries: 1, Budgeted: true}, 0.2)
	if float64(r.Retries) > 0.1*float64(r.Requests) || r.Retries < r.Requests/20 {
		t.Errorf("under the budget: got %d retries of %d requests; want a tenth at most", r.Retries, r.Requests)
	}
	if all := failing(sim.Caller{Retries: 2}, 1); all.Retries != 2*all.Requests || all.ErrorRate != 1 {
		t.Errorf("got %d retries of %d requests, error rate %v; want two each, all in vain", all.Retries, all.Requests, all.ErrorRate)
	}
}

// A hiccup that retries make last: replicas finish what nobody waits for any more, and callers who gave up come back.
func TestMetastableFailure(t *testing.T) {
	t.Parallel()
	lastErrors := func(caller sim.Caller) int {
		c := service(policy.BalancerRandom, 70)
		c.Load.Work = exponential(100 * ms)
		c.Replicas = []sim.Group{{Serve: sim.Slots, Slots: 10}}
		c.Without.Ejection = true
		c.Policy.RetryBudget = policy.RetryBudget{Ratio: 0.1, Window: 10 * sec}
		caller.Timeout, caller.FinishAbandoned = sec, true
		c.Caller = caller
		c.Duration = 120 * sec
		c.Faults = []sim.Fault{{Kind: sim.Stall, At: 10 * sec, Lasts: 10 * sec}}
		errors := 0
		for _, b := range run(t, c).Series {
			if b.Start >= 90*sec && b.Start < 120*sec {
				errors += b.Errors
			}
		}
		return errors
	}
	if got := lastErrors(sim.Caller{Retries: 1}); got < 70*30*9/10 {
		t.Errorf("naive retries: %d errors long after the hiccup; want it to last", got)
	}
	for _, caller := range []sim.Caller{{}, {Retries: 1, Budgeted: true}} {
		if got := lastErrors(caller); got > 70*30/20 {
			t.Errorf("%+v: %d errors long after the hiccup; want it over", caller, got)
		}
	}
}

// Replicas stop working on what nobody waits for, unless they are said to finish it.
func TestAbandonedWork(t *testing.T) {
	t.Parallel()
	busy := func(finish bool) float64 {
		c := service(policy.BalancerRandom, 50)
		c.Replicas = []sim.Group{{Count: 10, Serve: sim.Slots, Slots: 100}}
		c.Without.Ejection = true
		c.Caller = sim.Caller{Timeout: 50 * ms, FinishAbandoned: finish}
		return run(t, c).Groups[0].RIF
	}
	near(t, "dropped", busy(false), 5*0.05, 0.1)
	near(t, "finished", busy(true), 5*0.1, 0.1)
}

// An agent that restarts knows nothing.
func TestRestart(t *testing.T) {
	t.Parallel()
	c := testbed(0.5, policy.BalancerPrequal)
	c.Policy.Prequal.IdleProbeInterval = 0
	c.Duration = 4 * sec
	before := run(t, c)
	for at := range 40 {
		c.Faults = append(c.Faults, sim.Fault{Kind: sim.Restart, At: 4*sec + time.Duration(at)*50*ms})
	}
	if after := run(t, c); after.Choices["fallback"] <= before.Choices["fallback"] {
		t.Errorf("choices at random: %d with restarts, %d without", after.Choices["fallback"], before.Choices["fallback"])
	}
}
