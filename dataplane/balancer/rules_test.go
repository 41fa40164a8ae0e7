package balancer

import (
	"math"
	"slices"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/policy"
	"pgregory.net/rapid"
)

var start = time.Unix(1_000_000, 0)

// balancerOf returns a balancer of one shard over n ready replicas, and these by index.
func balancerOf(rule policy.Balancer, n int) (*Balancer, []*Endpoint) {
	p := policy.Default()
	p.Balancer = rule
	return balancerWith(p, n)
}

func balancerWith(p policy.Policy, n int) (*Balancer, []*Endpoint) {
	fleet := NewFleet(Place{})
	fleet.Update(start, replicas(n), policy.Scope{})
	b := New(p, fleet, 1, 1)
	b.Idle(start, 0, nil) // sees the fleet
	return b, fleet.Set(start).Endpoints
}

func pick(t testing.TB, b *Balancer, now time.Time) Picked {
	t.Helper()
	picked, err := b.Pick(now, Request{})
	if err != nil {
		t.Fatal(err)
	}
	return picked
}

// hold puts requests in flight on a replica.
func hold(e *Endpoint, n int) {
	for range n {
		e.counter.begin()
	}
}

func indexOf(es []*Endpoint, e *Endpoint) int {
	for i, o := range es {
		if o == e {
			return i
		}
	}
	return -1
}

func TestRoundRobinTakesTurns(t *testing.T) {
	p := policy.Default()
	p.Balancer = policy.BalancerRoundRobin
	fleet := NewFleet(Place{})
	fleet.Update(start, replicas(7), policy.Scope{})
	b := New(p, fleet, 3, 1)
	es := fleet.Set(start).Endpoints
	last := map[int]int{} // by shard
	for range 1000 {
		picked := pick(t, b, start)
		i := indexOf(es, picked.Endpoint)
		if before, ok := last[picked.Shard()]; ok && i != (before+1)%7 {
			t.Fatalf("shard %d: picked %d after %d", picked.Shard(), i, before)
		}
		last[picked.Shard()] = i
	}
}

func TestRandomIsUniform(t *testing.T) {
	const n, picks = 20, 20_000
	b, es := balancerOf(policy.BalancerRandom, n)
	for range picks {
		pick(t, b, start)
	}
	wantUniform(t, es, picks)
}

// wantUniform is the chi-square test: with 19 degrees of freedom, chance exceeds 43.8 once in a thousand times.
func wantUniform(t *testing.T, es []*Endpoint, picks float64) {
	t.Helper()
	expected, chi2 := picks/float64(len(es)), 0.0
	for _, e := range es {
		chi2 += math.Pow(float64(e.Picks())-expected, 2) / expected
	}
	if len(es) != 20 || chi2 > 43.8 {
		t.Errorf("χ² of %v picks over %d replicas: got %.1f; want at most 43.8", picks, len(es), chi2)
	}
}

// Least loaded is the first with the lowest number in flight, counted from the one after the last pick.
func TestLeastLoadedAgreesWithModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 12).Draw(t, "replicas")
		b, es := balancerOf(policy.BalancerLeastLoaded, n)
		first, _ := b.Pick(start, Request{})
		inFlight := []Picked{first}
		last := indexOf(es, first.Endpoint)
		t.Repeat(map[string]func(*rapid.T){
			"pick": func(t *rapid.T) {
				want := (last + 1) % n
				for i := range n {
					if j := (last + 1 + i) % n; es[j].RIF() < es[want].RIF() {
						want = j
					}
				}
				picked, _ := b.Pick(start, Request{})
				inFlight = append(inFlight, picked)
				if last = indexOf(es, picked.Endpoint); last != want {
					t.Fatalf("picked %d; want %d", last, want)
				}
			},
			"done": func(t *rapid.T) {
				if len(inFlight) > 0 {
					i := rapid.IntRange(0, len(inFlight)-1).Draw(t, "which")
					inFlight[i].Done(start, Succeeded)
					inFlight = append(inFlight[:i], inFlight[i+1:]...)
				}
			},
		})
	})
}

// The two choices are never the same replica: of two replicas the less loaded one always wins.
func TestP2CComparesTwo(t *testing.T) {
	b, es := balancerOf(policy.BalancerP2C, 2)
	hold(es[0], 3)
	for range 3 {
		if picked := pick(t, b, start); picked.Endpoint != es[1] {
			t.Fatal("picked the replica with more requests in flight")
		}
	}
	counts := map[*Endpoint]int{}
	for range 200 { // now equal: chance decides
		picked := pick(t, b, start)
		counts[picked.Endpoint]++
		picked.Done(start, Succeeded)
	}
	if counts[es[0]] < 70 || counts[es[1]] < 70 {
		t.Errorf("of two equals: got %d and %d picks; want about 100 each", counts[es[0]], counts[es[1]])
	}
}

// Every pair is equally likely: the only idle one of five replicas is in two of five pairs, whichever it is.
func TestP2CChoosesPairsUniformly(t *testing.T) {
	const n, picks = 5, 10_000
	for idle := range n {
		b, es := balancerOf(policy.BalancerP2C, n)
		for i, e := range es {
			if i != idle {
				hold(e, 1)
			}
		}
		for range picks {
			pick(t, b, start).Done(start, Succeeded)
		}
		if share := float64(es[idle].Picks()) / picks; share < 0.38 || share > 0.42 {
			t.Errorf("replica %d, the only idle one: got %.3f of the picks; want 0.4", idle, share)
		}
	}
}

func known(rif int32, latency time.Duration) load.Report {
	return load.Report{RIF: rif, Latency: latency, Known: true}
}

func TestPrequalGoesByProbes(t *testing.T) {
	b, es := balancerWith(asPublished(), 100)
	if picked := pick(t, b, start); picked.Class != Fallback {
		t.Errorf("without probes: got class %v; want fallback", picked.Class)
	}
	b.Probed(start, 0, es[1], known(1, 50*time.Millisecond))
	if picked := pick(t, b, start); picked.Class != Fallback {
		t.Errorf("with one probe: got class %v; want fallback", picked.Class)
	}
	b.Probed(start, 0, es[2], known(1, 20*time.Millisecond))
	b.Probed(start, 0, es[3], known(1, 30*time.Millisecond))
	if picked := pick(t, b, start); picked.Endpoint != es[2] || picked.Class != Cold {
		t.Errorf("got %v, class %v; want the fastest, cold", picked.Endpoint.ID, picked.Class)
	}
	// The request that it is about to get makes a replica hot.
	for range 60 {
		b.Probed(start, 0, es[1], known(0, 10*time.Millisecond))
	}
	b.Probed(start, 0, es[2], known(9, 20*time.Millisecond))
	b.Probed(start, 0, es[1], known(5, 90*time.Millisecond))
	b.Probed(start, 0, es[3], known(6, 10*time.Millisecond))
	if picked := pick(t, b, start); picked.Endpoint != es[1] || picked.Class != Hot {
		t.Errorf("got %v, class %v; want the one with the fewest in flight, hot", picked.Endpoint.ID, picked.Class)
	}
}

func TestPrequalFallbackIsUniform(t *testing.T) {
	const n, picks = 20, 20_000
	b, es := balancerOf(policy.BalancerPrequal, n)
	for range picks {
		pick(t, b, start)
	}
	wantUniform(t, es, picks)
}

// A request that went to a replica at random counts there too, if a probe of it is pooled.
func TestPrequalFallbackIsCharged(t *testing.T) {
	b, es := balancerOf(policy.BalancerPrequal, 3)
	b.Probed(start, 0, es[0], known(5, 10*time.Millisecond))
	at := int32(0)
	for range 30 {
		if pick(t, b, start).Endpoint == es[0] {
			at++
		}
	}
	if got := b.View(start).FreshestProbes[es[0]].Report.RIF; at == 0 || got != 5+at {
		t.Errorf("RIF of the pooled probe after %d requests: got %d; want %d", at, got, 5+at)
	}
}

// The pool has room for all of a small fleet, and follows it.
func TestPrequalPoolFollowsTheFleet(t *testing.T) {
	b, _ := balancerOf(policy.BalancerPrequal, 100)
	for _, tt := range []struct{ replicas, pool int }{{100, 16}, {32, 16}, {31, 31}, {3, 3}, {1, 2}, {100, 16}} {
		b.fleet.Update(start, replicas(tt.replicas), policy.Scope{})
		pick(t, b, start) // sees the new fleet
		if got := b.View(start).PoolCapacity; got != tt.pool {
			t.Errorf("%d replicas: got a pool of %d; want %d", tt.replicas, got, tt.pool)
		}
	}
}

func TestPrequalUsesLoadReports(t *testing.T) {
	b, es := balancerOf(policy.BalancerPrequal, 100)
	b.Probed(start, 0, es[1], known(1, 10*time.Millisecond))
	b.Probed(start, 0, es[2], known(1, 20*time.Millisecond))
	b.Probed(start, 0, es[3], known(1, 30*time.Millisecond))
	picked := Picked{Endpoint: es[1], shard: b.shards[0], balancer: b}
	picked.Responded(start, 0, new(known(1, 90*time.Millisecond)))
	if got := pick(t, b, start).Endpoint; got != es[2] {
		t.Errorf("got %v; want the one that is the fastest by now", got.ID)
	}
}

func TestPrequalForgets(t *testing.T) {
	b, es := balancerOf(policy.BalancerPrequal, 100)
	for i := range 3 {
		b.Probed(start, 0, es[i], known(1, time.Duration(10+i)*time.Millisecond))
	}
	b.Forget(es[0])
	if got := pick(t, b, start).Endpoint; got != es[1] {
		t.Errorf("got %v; want the fastest that is not forgotten", got.ID)
	}
}

// A probe of a replica that can't be connected to is void, even if too many are ejected already to eject it too.
func TestPrequalForgetsWhatItCannotConnectTo(t *testing.T) {
	b, es := balancerOf(policy.BalancerPrequal, 3)
	b.fleet.failed(start, es[2], true)
	picked := Picked{Endpoint: es[0], shard: b.shards[0], balancer: b}
	for i := range 2 {
		b.Probed(start, 0, es[i], known(1, time.Millisecond))
	}
	picked.Done(start, Unconnected)
	if v := b.View(start); v.Pooled != 1 || len(b.fleet.Set(start).Endpoints) != 2 {
		t.Errorf("got %d probes of %d replicas; want one of the two", v.Pooled, len(b.fleet.Set(start).Endpoints))
	}
}

// An answer may come after its replica has left.
func TestPrequalIgnoresStrangers(t *testing.T) {
	b, es := balancerOf(policy.BalancerPrequal, 10)
	gone := es[0]
	b.fleet.Update(start, replicas(10)[1:], policy.Scope{})
	pick(t, b, start) // sees the new fleet
	b.Probed(start, 0, gone, known(0, time.Millisecond))
	Picked{Endpoint: gone, shard: b.shards[0], balancer: b}.Responded(start, 0, new(known(0, time.Millisecond)))
	if v := b.View(start); v.Pooled != 0 {
		t.Errorf("got %d probes; want none of a replica that has left", v.Pooled)
	}
}

// asPublished is Prequal with the parameters and the means of the paper.
func asPublished() policy.Policy {
	p := policy.Default()
	p.Prequal.ProbesPerRequest, p.Prequal.RemovalsPerRequest, p.Prequal.QRIF = 3, 1, 0.84
	p.Prequal.Latency, p.Prequal.ProbeTargets = policy.LatencyMedian, policy.ProbeRandom
	return p
}

// As published, probes go to replicas chosen uniformly at random without replacement.
func TestPrequalRandomProbeTargets(t *testing.T) {
	const n, requests = 20, 20_000
	b, es := balancerWith(asPublished(), n)
	wantUniform(t, probed(t, b, es, start, requests, 3), 3*requests)
}

// By default, they go to the better of two, by what is known of their latencies.
func TestPrequalProbesTheBetterOfTwo(t *testing.T) {
	const n, requests = 40, 20_000
	b, es := balancerOf(policy.BalancerPrequal, n)
	for i, e := range es {
		b.Probed(start, 0, e, known(0, time.Duration(1+i)*time.Millisecond))
	}
	for i, e := range probed(t, b, es, start, requests, 1) {
		want := 2. * float64(n-1-i) / (n * (n - 1)) // it is one of the two, and the other one is slower
		if got := float64(e.Picks()) / requests; math.Abs(got-want) > 0.01 {
			t.Errorf("replica %d of %d by latency: got %.3f of the probes; want %.3f", i+1, n, got, want)
		}
	}
	// After a while all are asked again, whatever they said, and once only as long as they don't answer.
	for i, e := range probed(t, b, es, after(hearsayLasts+1), 10*n, 1)[1:] {
		if got := e.Picks(); got < 1 || got > 20 {
			t.Errorf("replica %d: got %d probes after a while; want some", i+2, got)
		}
	}
}

// probed returns how often each endpoint is probed on account of some requests, counted in the picks of stand-ins.
func probed(t *testing.T, b *Balancer, es []*Endpoint, now time.Time, requests, each int) []*Endpoint {
	t.Helper()
	picked := pick(t, b, now)
	counts := make([]*Endpoint, len(es))
	for i := range counts {
		counts[i] = &Endpoint{counter: new(counter)}
	}
	for range requests {
		targets := picked.Due(nil)
		if len(targets) != each {
			t.Fatalf("got %d targets; want %d", len(targets), each)
		}
		for i, e := range targets {
			if slices.Contains(targets[:i], e) {
				t.Fatal("the same replica twice")
			}
			counts[indexOf(es, e)].counter.begin()
		}
	}
	return counts
}

// A replica that says nothing is not asked again and again.
func TestPrequalAsksTheSilentOnce(t *testing.T) {
	b, es := balancerOf(policy.BalancerPrequal, 40)
	for _, e := range es[1:] {
		b.Probed(start, 0, e, known(0, time.Millisecond))
	}
	if got := probed(t, b, es, after(time.Millisecond), 1000, 1)[0].Picks(); got != 1 {
		t.Errorf("got %d probes; want 1", got)
	}
}

// A replica has at least the requests in flight that this agent has there, whatever it said when some were on their way.
func TestPrequalCountsItsOwnRequestsInASmallFleet(t *testing.T) {
	for _, tt := range []struct {
		policy      policy.Policy
		own         int
		wantRIF     int32
		wantLatency time.Duration
	}{
		{by(policy.BalancerPrequal), 2, 3, 10 * time.Millisecond},
		{by(policy.BalancerPrequal), 7, 7, 20 * time.Millisecond},
		{asPublished(), 7, 3, 10 * time.Millisecond},
	} {
		b, es := balancerWith(tt.policy, 4)
		hold(es[0], tt.own)
		b.Probed(start, 0, es[0], known(3, 10*time.Millisecond))
		if got := b.View(start).FreshestProbes[es[0]].Report; got.RIF != tt.wantRIF || got.Latency != tt.wantLatency {
			t.Errorf("%d of its own: got %+v; want RIF %d, latency %v", tt.own, got, tt.wantRIF, tt.wantLatency)
		}
	}
}

// In a small fleet, replicas are not probed whose load has just been reported; by what the paper says, they are.
func TestPrequalSparesProbesInASmallFleet(t *testing.T) {
	const n = 4
	for _, tt := range []struct {
		name     string
		policy   policy.Policy
		replicas int
		age      time.Duration
		want     int
	}{
		{"just reported", by(policy.BalancerPrequal), n, 9 * time.Millisecond, 0},
		{"reported longer ago than requests take", by(policy.BalancerPrequal), n, 21 * time.Millisecond, 100},
		{"as published", asPublished(), n, 0, 300},
		{"in a large fleet", by(policy.BalancerPrequal), 100, 0, 100},
	} {
		b, es := balancerWith(tt.policy, tt.replicas)
		for _, e := range es {
			b.Probed(start, 0, e, known(0, 20*time.Millisecond))
		}
		picked, got := pick(t, b, after(tt.age)), 0
		for range 100 {
			got += len(picked.Due(nil))
		}
		if got != tt.want {
			t.Errorf("%s: got %d probes on account of 100 requests; want %d", tt.name, got, tt.want)
		}
	}
}

func TestPrequalProbesNoReplicaTwiceInASmallFleet(t *testing.T) {
	p := asPublished()
	for _, p.Prequal.ProbeTargets = range []policy.ProbeTargets{policy.ProbeRandom, policy.ProbeBetterOfTwo} {
		b, es := balancerWith(p, 2)
		if got := pick(t, b, start).Due(nil); len(got) != 2 || got[0] == got[1] || indexOf(es, got[0]) < 0 || indexOf(es, got[1]) < 0 {
			t.Errorf("%s: got %v; want both replicas, once each", p.Prequal.ProbeTargets, got)
		}
	}
}

func TestPrequalIdleProbes(t *testing.T) {
	for _, tt := range []struct {
		name   string
		rate   float64
		every  time.Duration // between requests
		within time.Duration
		idle   int // targets of idle probes
	}{
		{"no requests", 3, 0, 10 * time.Second, 20 * 3},
		{"requests that send probes", 3, 100 * time.Millisecond, 10 * time.Second, 0},
		{"requests that rarely do", 0.01, 100 * time.Millisecond, 10 * time.Second, 19 * 2}, // 1 of 100 does
		{"requests that never do", 0, 100 * time.Millisecond, 10 * time.Second, 20 * 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := policy.Default()
			p.Prequal.ProbesPerRequest = tt.rate
			fleet := NewFleet(Place{})
			fleet.Update(start, replicas(10), policy.Scope{})
			b := New(p, fleet, 1, 1)
			b.Idle(start, 0, nil)
			idle := 0
			for now := start.Add(50 * time.Millisecond); now.Before(start.Add(tt.within + 50*time.Millisecond)); now = now.Add(50 * time.Millisecond) {
				if tt.every > 0 && now.Sub(start)%tt.every == 0 {
					pick(t, b, now).Due(nil)
				}
				idle += len(b.Idle(now, 0, nil))
			}
			if idle != tt.idle {
				t.Errorf("got %d idle probes in %v; want %d", idle, tt.within, tt.idle)
			}
		})
	}
}

func TestIdleProbesAreOffWhereNobodyProbes(t *testing.T) {
	b, _ := balancerOf(policy.BalancerRoundRobin, 3)
	if got := b.Idle(start.Add(time.Hour), 0, nil); got != nil {
		t.Errorf("round robin probes %v", got)
	}
	b, _ = balancerOf(policy.BalancerPrequal, 3)
	b.fleet.Update(start, nil, policy.Scope{})
	if got := b.Idle(start.Add(time.Hour), 0, nil); got != nil {
		t.Errorf("an empty fleet is probed: %v", got)
	}
}

func TestViewShowsTheFreshestProbes(t *testing.T) {
	p := policy.Default()
	fleet := NewFleet(Place{})
	fleet.Update(start, replicas(100), policy.Scope{})
	es := fleet.Set(start).Endpoints
	b := New(p, fleet, 2, 1)
	for shard := range 2 {
		b.Idle(start, shard, nil) // sees the fleet
	}
	b.Probed(start, 0, es[1], known(1, 10*time.Millisecond))
	b.Probed(start, 0, es[2], known(2, 20*time.Millisecond))
	now := start.Add(5 * time.Millisecond)
	b.Probed(now, 1, es[1], known(7, 30*time.Millisecond))
	v := b.View(now.Add(time.Millisecond))
	if v.Pooled != 3 || v.PoolCapacity != 32 || !v.HasThreshold || v.Threshold != 7 {
		t.Errorf("got %+v; want 3 of 32 pooled, threshold 7", v)
	}
	want := PooledProbe{Report: known(7, 30*time.Millisecond), Age: time.Millisecond}
	if got := v.FreshestProbes[es[1]]; len(v.FreshestProbes) != 2 || got != want {
		t.Errorf("got %+v; want two replicas, one with %+v", v.FreshestProbes, want)
	}
}
