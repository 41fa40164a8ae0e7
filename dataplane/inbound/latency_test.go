package inbound

import (
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/dataplane/probe"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
)

// What a replica says of its latency follows the policy, and it knows both at any time.
func TestLatencyFollowsThePolicy(t *testing.T) {
	e := endpoint(1, registry.Ready)
	in := withPolicy(func(*policy.Policy) {}, e)
	tracker := in.Replica(e.ID()).Load
	now := time.Unix(1000, 0)
	for _, took := range []time.Duration{20, 20, 20, 20, 500} {
		token := tracker.Begin(now)
		now = now.Add(took * time.Millisecond)
		tracker.End(now, token, load.OK)
	}
	says := func() time.Duration { return in.Probe(now, probe.Request{Endpoint: e.ID()}).Report.Latency }
	mean := says()
	in.UpdatePolicies(snapshot(func(p *policy.Policy) { p.Prequal.Latency = policy.LatencyMedian }))
	if got := says(); got != 20*time.Millisecond || mean < 3*got {
		t.Errorf("got a median of %v, a mean of %v; want 20ms, and much more", got, mean)
	}
	in.UpdatePolicies(snapshot(func(*policy.Policy) {}))
	if got := says(); got != mean {
		t.Errorf("got %v; want the mean again, %v", got, mean)
	}
}
