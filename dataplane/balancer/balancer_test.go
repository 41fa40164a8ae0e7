package balancer

import (
	"testing"

	"github.com/headroom-mesh/headroom/policy"
)

// The number in flight counts requests from Pick to Done, however they end.
func TestPickedRequestsAreCounted(t *testing.T) {
	for _, outcome := range []Outcome{Succeeded, Failed, Unconnected, Abandoned} {
		b, es := balancerOf(policy.BalancerRoundRobin, 1)
		picked := pick(t, b, start)
		if es[0].RIF() != 1 || es[0].Picks() != 1 || (flights{all: b.inFlight}).total() != 1 {
			t.Errorf("picked: got %d in flight, %d picks; want 1 and 1", es[0].RIF(), es[0].Picks())
		}
		picked.Done(start, outcome)
		failed := uint64(0)
		if outcome == Failed || outcome == Unconnected {
			failed = 1
		}
		if es[0].RIF() != 0 || es[0].Picks() != 1 || es[0].Errors() != failed || (flights{all: b.inFlight}).total() != 0 {
			t.Errorf("done, outcome %d: got %d in flight, %d picks, %d errors", outcome, es[0].RIF(), es[0].Picks(), es[0].Errors())
		}
	}
}

// A caller that goes away says nothing of the replica.
func TestAbandonedRequestsDontCount(t *testing.T) {
	b, es := balancerOf(policy.BalancerRoundRobin, 2)
	picked := func() Picked { return Picked{Endpoint: es[0], shard: b.shards[0], balancer: b} }
	for range 4 {
		picked().Done(start, Failed)
		picked().Done(start, Abandoned)
	}
	if len(b.fleet.Set(start).Endpoints) != 2 {
		t.Error("ejected after four failures")
	}
	picked().Done(start, Failed)
	if len(b.fleet.Set(start).Endpoints) != 1 {
		t.Error("not ejected after five failures with abandoned requests between them")
	}
}
