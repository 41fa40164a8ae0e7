package sim_test

import (
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/sim"
	"github.com/headroom-mesh/headroom/policy"
)

// What the rules do, where it takes agents, replicas and time to see it.

// about is work that differs by a tenth.
func about(mean time.Duration) sim.Work {
	return sim.Work{Distribution: sim.Uniform, Mean: mean, Spread: 0.1}
}

func steady(rate float64) []sim.Stage { return []sim.Stage{{Rate: rate}} }

// picks returns the requests that were sent to a group of replicas in a span of time, in whole buckets.
func picks(r sim.Result, group int, from, to time.Duration) (n int) {
	for _, b := range r.Series {
		if b.Start >= from && b.Start < to {
			n += b.Picks[group]
		}
	}
	return n
}

// Two of sixteen replicas are sixteen times slower than the others.
func TestPrequalAvoidsSlowReplicas(t *testing.T) {
	t.Parallel()
	of := map[policy.Balancer]sim.Result{}
	for _, rule := range []policy.Balancer{policy.BalancerPrequal, policy.BalancerRoundRobin, policy.BalancerLeastLoaded} {
		r := run(t, sim.Config{
			Policy:   by(rule),
			Load:     sim.Load{Stages: steady(300), Work: about(50 * ms)},
			Agents:   []sim.Agents{{}},
			Replicas: []sim.Group{{Name: "slow", Count: 2, Serve: sim.Delay, Speed: 1. / 16}, {Count: 14, Serve: sim.Delay}},
			Duration: 20 * sec,
		})
		t.Logf("%-12s %+v; %.2f %% at the slow replicas", rule, r.Latency, 100*r.Groups[0].Share)
		of[rule] = r
	}
	prequal, roundRobin := of[policy.BalancerPrequal], of[policy.BalancerRoundRobin]
	if prequal.Groups[0].Share >= 0.01 {
		t.Errorf("prequal sent %.2f %% to the slow replicas; want less than 1 %%", 100*prequal.Groups[0].Share)
	}
	if 6*prequal.Latency.P99 > roundRobin.Latency.P99 {
		t.Errorf("p99: prequal %v, round robin %v; want a sixth of it", prequal.Latency.P99, roundRobin.Latency.P99)
	}
}

// Among a few equal replicas there is little to gain, but little may be lost: round robin is hard to beat there. Both see
// the very same requests.
func TestPrequalInASmallFleet(t *testing.T) {
	t.Parallel()
	for _, agents := range []int{1, 4} {
		of := map[policy.Balancer]sim.Latency{}
		for _, rule := range []policy.Balancer{policy.BalancerPrequal, policy.BalancerRoundRobin} {
			of[rule] = run(t, sim.Config{
				Policy:   by(rule),
				Load:     sim.Load{Stages: steady(0.75), OfCapacity: true, Work: exponential(50 * ms)},
				Agents:   []sim.Agents{{Count: agents}},
				Replicas: []sim.Group{{Count: 4, Serve: sim.Slots, Slots: 4}},
				Duration: 40 * sec,
			}).Latency
			t.Logf("%d agents: %-12s %+v", agents, rule, of[rule])
		}
		prequal, roundRobin := of[policy.BalancerPrequal], of[policy.BalancerRoundRobin]
		if 100*prequal.P50 > 115*roundRobin.P50 || 100*prequal.P99 > 103*roundRobin.P99 {
			t.Errorf("%d agents: prequal %+v, round robin %+v", agents, prequal, roundRobin)
		}
	}
}

// A replica that was slow is left alone, but not for ever: half a minute after its last answer it is tried again.
func TestRecoveredReplicasGetRequestsAgain(t *testing.T) {
	t.Parallel()
	const rate, n = 300, 16
	r := run(t, sim.Config{
		Load:     sim.Load{Stages: steady(rate), Work: about(50 * ms)},
		Agents:   []sim.Agents{{Count: 4}},
		Replicas: []sim.Group{{Name: "slow", Serve: sim.Delay}, {Count: n - 1, Serve: sim.Delay}},
		Faults:   []sim.Fault{{Kind: sim.Slow, Factor: 1. / 16, Lasts: 20 * sec, Group: "slow"}},
		Duration: 65 * sec,
	})
	whileSlow, later := picks(r, 0, 0, 20*sec), picks(r, 0, 55*sec, 65*sec)
	t.Logf("%d requests in 20 slow seconds, %d in the next 35, %d in the 10 after", whileSlow, picks(r, 0, 20*sec, 55*sec), later)
	if fair := 10 * rate / n; whileSlow > 20 || 10*later < fair {
		t.Errorf("got %d requests while slow, %d when recovered; want at most 20, and a tenth of %d", whileSlow, later, fair)
	}
}

// Replicas that fail at once look idle and fast. They must not attract requests: by their own load reports, even where
// the callers' agents take the failures for answers, and all the more where they eject them.
func TestFailingReplicasAttractNothing(t *testing.T) {
	t.Parallel()
	failing := func(agents int, without sim.Without) float64 {
		r := run(t, sim.Config{
			Without:  without,
			Load:     sim.Load{Stages: steady(300), Work: about(50 * ms)},
			Agents:   []sim.Agents{{Count: agents}},
			Replicas: []sim.Group{{Count: 16, Serve: sim.Delay}},
			Faults:   []sim.Fault{{Kind: sim.Fail, Latency: ms, Count: 2}},
			Duration: 10 * sec,
		})
		t.Logf("%d agents, without %+v: %.2f %% failed", agents, without, 100*r.ErrorRate)
		return r.ErrorRate
	}
	for _, agents := range []int{1, 4} {
		for _, without := range []sim.Without{{}, {Ejection: true}} {
			if got := failing(agents, without); got > 0.01 {
				t.Errorf("%d agents, without %+v: %.2f %% failed; want at most 1 %%", agents, without, 100*got)
			}
		}
		if got := failing(agents, sim.Without{ErrorAversion: true}); got < 0.5 {
			t.Errorf("%d agents, without any error aversion: %.2f %% failed; want most", agents, 100*got)
		}
	}
}

// A new replica gets one request from an agent, and hardly another until it has answered: the answer to a probe may have
// crossed the first, and the new one is the least loaded where all others are hot.
func TestNewReplicasAreNotFlooded(t *testing.T) {
	t.Parallel()
	for _, rate := range []float64{300, 2000} {
		r := run(t, sim.Config{
			Load:     sim.Load{Stages: steady(rate), Work: sim.Work{Mean: 50 * ms}},
			Agents:   []sim.Agents{{}},
			Replicas: []sim.Group{{Name: "new", Serve: sim.Delay, Speed: 0.025, Absent: true}, {Count: 15, Serve: sim.Delay}},
			Faults:   []sim.Fault{{Kind: sim.Join, At: 2 * sec, Group: "new"}},
			Duration: 3900 * ms,
			Bucket:   100 * ms,
		})
		if before, got := picks(r, 0, 0, 2*sec), picks(r, 0, 2*sec, 3900*ms); before != 0 || got < 1 || got > 5 {
			t.Errorf("%v requests a second: the new replica got %d before it was there and %d before its first answer; want none, and 1 to 5", rate, before, got)
		}
	}
}

// Requests of very different length, of which one may wait behind another: whoever waits in two lines waits less.
func TestLateBindingHelpsWhereLengthsDiffer(t *testing.T) {
	t.Parallel()
	mean := map[policy.Balancer]time.Duration{}
	for _, rule := range []policy.Balancer{policy.BalancerP2C, policy.BalancerLateBinding, policy.BalancerJoinIdleQueue, policy.BalancerRandom} {
		r := run(t, sim.Config{
			Policy: by(rule),
			Load: sim.Load{Stages: steady(0.75), OfCapacity: true, Work: sim.Work{Mix: []sim.Class{
				{Share: 9, Work: exponential(50 * ms)}, {Share: 1, Work: exponential(500 * ms)}}}},
			Agents:   []sim.Agents{{Count: 5}},
			Replicas: []sim.Group{{Count: 10, Serve: sim.Slots}},
			Duration: 60 * sec,
		})
		mean[rule] = r.Latency.Mean
		t.Logf("%-15s %+v %v", rule, r.Latency, r.Choices)
	}
	if late := mean[policy.BalancerLateBinding]; 3*late > 2*mean[policy.BalancerP2C] {
		t.Errorf("mean: late binding %v, two choices %v; want two thirds of it", late, mean[policy.BalancerP2C])
	}
	if idle := mean[policy.BalancerJoinIdleQueue]; 2*idle > mean[policy.BalancerRandom] {
		t.Errorf("mean: join idle queue %v, random %v; want half of it", idle, mean[policy.BalancerRandom])
	}
}

// Where caches decide, requests for an item should go where it is.
func TestKeysFindTheirCaches(t *testing.T) {
	t.Parallel()
	hits := map[policy.Balancer]float64{}
	for _, rule := range []policy.Balancer{policy.BalancerRandom, policy.BalancerRingHash, policy.BalancerMaglev, policy.BalancerPrequalSync} {
		p := by(rule)
		p.PrequalSync.Keys = 20 // as many as there is room for in the cache
		r := run(t, sim.Config{
			Policy:   p,
			Load:     sim.Load{Stages: steady(200), Work: sim.Work{Mean: 20 * ms}, Items: 200, Zipf: 1, CacheHit: 4},
			Agents:   []sim.Agents{{Count: 4}},
			Replicas: []sim.Group{{Count: 10, Serve: sim.Slots, Cache: 20}},
			Warmup:   2 * sec,
			Duration: 20 * sec,
		})
		hits[rule] = float64(r.Groups[0].Hits) / float64(r.Requests)
		t.Logf("%-12s %.2f hits, %+v, %.2f probes a request, %v", rule, hits[rule], r.Latency, r.ProbesPerRequest, r.Choices)
	}
	if hits[policy.BalancerRingHash] < 0.85 || hits[policy.BalancerMaglev] < 0.85 || hits[policy.BalancerRandom] > 0.6 {
		t.Errorf("hits: %v", hits)
	}
	if hits[policy.BalancerPrequalSync] < hits[policy.BalancerRandom]+0.05 {
		t.Errorf("hits: %v; want more for requests that ask than for those sent anywhere", hits)
	}
}

// Weighted round robin learns from the replicas' own word what they can bear.
func TestWeightedRoundRobinFollowsCapacity(t *testing.T) {
	t.Parallel()
	c := testbed(0.7, policy.BalancerWeightedRoundRobin)
	c.Machines.Antagonists = sim.Antagonists{}
	c.Replicas = []sim.Group{{Count: 10}, {Count: 10, Speed: 0.5}}
	c.Warmup, c.Duration = 15*sec, 10*sec
	r := run(t, c)
	near(t, "share of the fast ones", r.Groups[0].Share, 2./3, 0.04)
	near(t, "CPU of the slow ones", r.Groups[1].CPU, 0.7, 0.06)
}
