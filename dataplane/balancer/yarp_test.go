package balancer

import (
	"slices"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/policy"
)

func TestYARPPollsEveryReplicaAtIntervals(t *testing.T) {
	fleet := NewFleet(Place{})
	fleet.Update(start, replicas(10), policy.Scope{})
	b := New(defaults(policy.BalancerYARP), fleet, 1, 1)
	polls := 0
	for now := start; now.Before(after(10 * time.Second)); now = now.Add(100 * time.Millisecond) {
		targets := b.Idle(now, 0, nil)
		if len(targets) > 0 && !slices.Equal(targets, fleet.Set(now).Endpoints) {
			t.Fatalf("polled %d replicas; want all", len(targets))
		}
		if now.Equal(start) && len(targets) == 0 {
			t.Error("nothing is known, and nobody polled")
		}
		polls += len(targets) / 10
		if due := pick(t, b, now).Due(nil); len(due) > 0 {
			t.Fatalf("a request has %d replicas probed; want none", len(due))
		}
	}
	if polls < 20 || polls > 22 {
		t.Errorf("got %d polls in 10 s; want one each 500 ms", polls)
	}
}

// Agents that start together don't poll together, and after a while without requests each keeps to its own moments.
func TestYARPPollsAreSpread(t *testing.T) {
	const agents = 200
	at := make([]int, 5) // polls in each tenth of a second of an interval
	for seed := range uint64(agents) {
		fleet := NewFleet(Place{})
		fleet.Update(start, replicas(2), policy.Scope{})
		b := New(defaults(policy.BalancerYARP), fleet, 1, seed)
		b.Idle(start, 0, nil)
		b.Idle(after(time.Second), 0, nil)
		for i := range 5 {
			if len(b.Idle(after(time.Hour+time.Duration(i)*100*time.Millisecond), 0, nil)) > 0 && i > 0 {
				at[i]++
			}
		}
	}
	for _, n := range at[1:] {
		if n < agents/5/2 || n > agents/5*2 {
			t.Errorf("got %v polls in the parts of an interval; want about %d in each", at, agents/5)
		}
	}
}

func TestYARPGoesByPolledLoad(t *testing.T) {
	b, es := balancerOf(policy.BalancerYARP, 2)
	hold(es[0], 3)
	all := func(when string, want *Endpoint) {
		t.Helper()
		for range 20 {
			if got := b.mustPick(start); got != want {
				t.Fatalf("%s: picked %s; want %s", when, got.ID, want.ID)
			}
		}
	}
	all("nothing polled: own requests in flight", es[1])
	b.Probed(start, 0, es[1], known(4, time.Millisecond))
	all("one polled: against the other's own", es[0])
	b.Probed(start, 0, es[0], known(5, time.Millisecond))
	all("both polled", es[1])
	b.Forget(es[0])
	all("forgotten", es[0])
	v := b.View(after(time.Millisecond))
	if got := v.FreshestProbes[es[1]]; len(v.FreshestProbes) != 1 || got.Report.RIF != 4 || got.Age != time.Millisecond {
		t.Errorf("shown: %+v; want what was polled a millisecond ago", v.FreshestProbes)
	}
}

// A replica of weight 3 bears three times the load. Of its three seats and the other's one, half of all pairs are two of
// its own.
func TestYARPHeedsWeights(t *testing.T) {
	records := replicas(2)
	records[1].Weight = 3
	b, es := ruled(defaults(policy.BalancerYARP), records)
	b.Probed(start, 0, es[0], known(4, 0))
	b.Probed(start, 0, es[1], known(11, 0))
	if got := shares(t, b, es, start, 1000); got[0] != 0 {
		t.Errorf("4 at weight 1, 11 at weight 3: got shares %v; want all at weight 3", got)
	}
	b.Probed(start, 0, es[1], known(13, 0))
	if got := shares(t, b, es, start, 1000); got[0] < 450 || got[0] > 550 {
		t.Errorf("4 at weight 1, 13 at weight 3: got shares %v; want them even", got)
	}
}

// Two of equal load are equally likely, and the choice is always between two different ones.
func TestYARPChoosesPairsUniformly(t *testing.T) {
	const n, picks = 5, 10_000
	for idle := range n {
		b, es := balancerOf(policy.BalancerYARP, n)
		for i, e := range es {
			rif := int32(1)
			if i == idle {
				rif = 0
			}
			b.Probed(start, 0, e, known(rif, 0))
		}
		for range picks {
			b.mustPick(start)
		}
		if share := float64(es[idle].Picks()) / picks; share < 0.38 || share > 0.42 {
			t.Errorf("replica %d, the only idle one: got %.3f of the picks; want 0.4", idle, share)
		}
	}
}
