//go:build linux

package meshtest_test

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/agent/meshtest"
	"github.com/headroom-mesh/headroom/policy"
)

// rules is a mesh whose service changes its balancer while requests are made. One of its replicas is slow.
type rules struct {
	*meshtest.Mesh
	t     *testing.T
	agent *meshtest.Agent // of the caller
	load  *meshtest.Load
	slow  *meshtest.Replica
}

// ruleRate is low: half of the replicas are idle at any time.
const ruleRate = 80

// TestEveryBalancer switches a live service through all balancers. No request fails, and each does what it is for.
func TestEveryBalancer(t *testing.T) {
	tests := []struct {
		balancer policy.Balancer
		flags    []string
		check    func(*rules)
	}{
		{policy.BalancerRandom, nil, (*rules).wantFairShare},
		{policy.BalancerRoundRobin, nil, (*rules).wantFairShare},
		{policy.BalancerLeastLoaded, nil, (*rules).wantSlowShunned},
		{policy.BalancerP2C, nil, (*rules).wantSlowShunned},
		{policy.BalancerPrequal, nil, (*rules).wantSlowShunned},
		{policy.BalancerPrequalSync, []string{"--prequal-sync-probes", "6", "--hash-path"}, (*rules).wantRepeatsHome},
		{policy.BalancerWeightedRoundRobin, []string{"--wrr-blackout", "100ms", "--wrr-update-interval", "100ms"}, (*rules).wantReportsHeeded},
		{policy.BalancerYARP, []string{"--yarp-poll-interval", "100ms"}, (*rules).wantPolls},
		{policy.BalancerLinear, nil, (*rules).wantSlowShunned},
		{policy.BalancerC3, nil, (*rules).wantSlowShunned},
		{policy.BalancerPeakEWMA, nil, (*rules).wantSlowShunned},
		{policy.BalancerRingHash, []string{"--hash-path", "--load-factor", "50"}, (*rules).wantSticky},
		{policy.BalancerMaglev, []string{"--hash-path", "--load-factor", "50"}, (*rules).wantSticky},
		{policy.BalancerLateBinding, []string{"--slots", "1"}, (*rules).wantOneAtATime},
		{policy.BalancerJoinIdleQueue, []string{"--slots", "1"}, (*rules).wantOneAtATime},
	}
	cfg := config(t)
	cfg.Replicas = 2
	m, agents := meshtest.Start(t, cfg)
	r := &rules{Mesh: m, t: t, agent: agents["a"], load: agents["a"].Load(ruleRate), slow: m.Replicas[2]}
	r.slow.SetSlower(150 * time.Millisecond)
	tried := map[policy.Balancer]bool{}
	for _, tt := range tests {
		tried[tt.balancer] = true
		wantApplied(t, agents["b"], "3/3", append([]string{"--balancer", string(tt.balancer)}, tt.flags...)...)
		if name := r.top().Seen.Balancer; name != string(tt.balancer) {
			t.Errorf("top shows balancer %s, want %s", name, tt.balancer)
		}
		began := time.Now()
		tt.check(r)
		t.Logf("%s: seen after %v", tt.balancer, time.Since(began).Round(time.Millisecond))
	}
	for _, b := range policy.Balancers() {
		if !tried[b] {
			t.Errorf("balancer %s was not tried", b)
		}
	}
	o := r.load.Stop()
	o.WantNoLoss(t)
	t.Log(o)
}

type topService struct {
	Service          string
	Seen             struct{ Balancer string }
	ProbesPerRequest float64
}

// top returns the service as meshctl top shows it.
func (r *rules) top() topService {
	r.t.Helper()
	var view struct{ Services []topService }
	out := r.agent.MustMeshctl("top", meshtest.Service, "-o", "json")
	if err := json.Unmarshal([]byte(out), &view); err != nil || len(view.Services) != 1 {
		r.t.Fatalf("top: %v, want one service in %s", err, out)
	}
	return view.Services[0]
}

// window is how many requests a share is taken of.
const window = ruleRate

// eventually wants what holds of a window of requests to hold of one soon.
func (r *rules) eventually(what string, holds func(since time.Time) bool) {
	r.t.Helper()
	meshtest.Eventually(r.t, patience, what, func() bool {
		since := time.Now()
		r.load.More(window)
		return holds(since)
	})
}

// share returns which part of the requests since a moment one replica had.
func (r *rules) share(of *meshtest.Replica, since time.Time) float64 {
	all := 0
	for _, o := range r.Replicas {
		all += r.load.Arrived(o.String(), since)
	}
	return float64(r.load.Arrived(of.String(), since)) / float64(max(all, 1))
}

func (r *rules) fair() float64 { return 1 / float64(len(r.Replicas)) }

func (r *rules) wantSlowShunned() {
	r.t.Helper()
	r.eventually("the slow replica has less than half of its share", func(since time.Time) bool {
		return r.share(r.slow, since) < r.fair()/2
	})
}

func (r *rules) wantFairShare() {
	r.t.Helper()
	r.eventually("every replica has about its share", func(since time.Time) bool {
		for _, o := range r.Replicas {
			if share := r.share(o, since); share < r.fair()/2 || share > 2*r.fair() {
				return false
			}
		}
		return true
	})
}

// wantReportsHeeded lets one replica say that it is busy.
func (r *rules) wantReportsHeeded() {
	r.t.Helper()
	busy := r.Replicas[0]
	for _, o := range r.Replicas {
		o.SetReport("TEXT application_utilization=0.1")
	}
	busy.SetReport("TEXT application_utilization=0.9,cpu_utilization=0.1")
	r.eventually("the replica that says it is busy has less than half of its share", func(since time.Time) bool {
		return r.share(busy, since) < r.fair()/2
	})
}

// wantPolls wants all replicas to be probed, about ten times a second each, whatever the requests.
func (r *rules) wantPolls() {
	r.t.Helper()
	r.eventually("replicas are polled", func(time.Time) bool {
		want := float64(10*len(r.Replicas)) / ruleRate
		probes := r.top().ProbesPerRequest
		return probes > want/3 && probes < want*3
	})
	r.wantSlowShunned()
}

// again sends a request for each of so many paths, and then the same again. It returns how many went to the same replica.
func (r *rules) again(paths int) (same int) {
	r.t.Helper()
	caller := r.agent.Caller()
	send := func(path int) string {
		replica, err := caller.Get(context.Background(), fmt.Sprintf("http://%s.mesh/path/%d?take=5ms", meshtest.Service, path))
		if err != nil {
			r.t.Fatal(err)
		}
		return replica
	}
	first := make([]string, paths)
	for i := range first {
		first[i] = send(i)
	}
	for i := range first {
		if send(i) == first[i] {
			same++
		}
	}
	return same
}

func (r *rules) wantSticky() {
	r.t.Helper()
	meshtest.Eventually(r.t, patience, "paths keep their replicas", func() bool { return r.again(20) == 20 })
}

// wantRepeatsHome wants paths to go where they were before far more often than by chance, which is one time of six.
func (r *rules) wantRepeatsHome() {
	r.t.Helper()
	meshtest.Eventually(r.t, patience, "most paths go home", func() bool { return r.again(40) > 20 })
}

// wantOneAtATime wants requests to go to replicas that have none, the slow one included.
func (r *rules) wantOneAtATime() {
	r.t.Helper()
	r.eventually("no replica has two requests at once", func(time.Time) bool {
		most := int64(0)
		for _, o := range r.Replicas {
			most = max(most, o.Most())
		}
		return most == 1
	})
	r.load.More(5 * window)
	for _, o := range r.Replicas {
		if most := o.Most(); most > 1 {
			r.t.Errorf("%s had %d requests at once, want one", o, most)
		}
	}
}

// TestCallerFallsSilentInLine cuts off a node whose requests wait in lines everywhere: they must not keep others from the
// slots that are then granted to them.
func TestCallerFallsSilentInLine(t *testing.T) {
	cfg := config(t)
	cfg.Replicas = 1
	m, agents := meshtest.Start(t, cfg)
	wantApplied(t, agents["b"], "3/3", "--balancer", string(policy.BalancerLateBinding), "--slots", "1")
	answers := agents["a"].Caller().GetAll(60, "http://web.mesh/?take=300ms")
	m.AwaitInFlight(3)
	m.Node("a").Cut()
	cut := time.Now()
	caller := agents["b"].Caller()
	served := 0
	meshtest.Eventually(t, patience, "requests of another node are served", func() bool {
		if _, err := caller.Get(context.Background(), "http://web.mesh/?take=1ms"); err == nil {
			served++
		}
		return served == 20
	})
	took := time.Since(cut)
	t.Logf("20 requests were served %v after the node was cut off", took.Round(time.Millisecond))
	if took > 12*time.Second {
		t.Errorf("20 requests took %v", took)
	}
	answers()
}
