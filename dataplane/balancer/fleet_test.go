package balancer

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
	"pgregory.net/rapid"
)

// ready returns the indexes, among the given records, of the replicas that take requests at a time.
func ready(f *Fleet, now time.Time, records []registry.Endpoint) (is []int) {
	for _, e := range f.Set(now).Endpoints {
		is = append(is, slices.IndexFunc(records, func(r registry.Endpoint) bool { return r.ID() == e.ID }))
	}
	slices.Sort(is)
	return is
}

func wantReady(t *testing.T, when string, f *Fleet, now time.Time, records []registry.Endpoint, want ...int) {
	t.Helper()
	if got := ready(f, now, records); !slices.Equal(got, want) {
		t.Errorf("%s: got %v in use; want %v", when, got, want)
	}
}

// fleetOf returns a fleet with these replicas, and them in the order of the records.
func fleetOf(records []registry.Endpoint) (*Fleet, []*Endpoint) {
	f := NewFleet(Place{})
	f.Update(start, slices.Clone(records), policy.Scope{})
	es := make([]*Endpoint, len(records))
	f.Each(start, func(e *Endpoint, _ Avoidance) {
		es[slices.IndexFunc(records, func(r registry.Endpoint) bool { return r.ID() == e.ID })] = e
	})
	return f, es
}

func avoidance(f *Fleet, now time.Time, e *Endpoint) (found Avoidance) {
	f.Each(now, func(o *Endpoint, why Avoidance) {
		if o == e {
			found = why
		}
	})
	return found
}

func after(d time.Duration) time.Time { return start.Add(d) }

func TestPickWithoutReplicas(t *testing.T) {
	f := NewFleet(Place{})
	b := New(policy.Default(), f, 1, 1)
	if _, err := b.Pick(start, Request{}); !errors.Is(err, ErrNoEndpoints) {
		t.Errorf("empty service: got %v; want %v", err, ErrNoEndpoints)
	}
	records := replicas(2)
	records[0].State, records[1].State = registry.Unhealthy, registry.Draining
	f.Update(start, slices.Clone(records), policy.Scope{})
	if _, err := b.Pick(start, Request{}); !errors.Is(err, ErrNoneReady) {
		t.Errorf("none ready: got %v; want %v", err, ErrNoneReady)
	}
	records[1].State = registry.Ready
	f.Update(start, slices.Clone(records), policy.Scope{})
	if picked, err := b.Pick(start, Request{}); err != nil || picked.Endpoint.ID != records[1].ID() {
		t.Errorf("one ready: got %v, %v", picked.Endpoint, err)
	}
	f.Update(start, nil, policy.Scope{})
	if _, err := b.Pick(start, Request{}); !errors.Is(err, ErrNoEndpoints) {
		t.Errorf("empty again: got %v; want %v", err, ErrNoEndpoints)
	}
}

func TestFleetFollowsTheRegistry(t *testing.T) {
	records := replicas(4)
	f, es := fleetOf(records)
	wantReady(t, "at first", f, start, records, 0, 1, 2, 3)
	hold(es[2], 5)

	records[0].State, records[1].State = registry.Unhealthy, registry.Draining
	f.Update(start, slices.Clone(records), policy.Scope{})
	wantReady(t, "one unhealthy, one draining", f, start, records, 2, 3)

	records[2].Zone = "b"
	f.Update(start, slices.Clone(records[:3]), policy.Scope{})
	wantReady(t, "one gone", f, start, records, 2)
	if now := f.Set(start).Endpoints[0]; now != es[2] || now.RIF() != 5 || now.Picks() != 5 || now.Record().Zone != "b" {
		t.Errorf("the one that stays: got %v, %d in flight; want the same with its counters and its new record", now, now.RIF())
	}
	if got := f.Set(start).Registered; got != 3 {
		t.Errorf("registered: got %d; want 3", got)
	}

	f.Update(start, slices.Clone(records), policy.Scope{})
	_, back := fleetOf(records)
	if back[3] == es[3] || back[3].RIF() != 0 {
		t.Error("a replica that comes back starts anew")
	}
}

// TestFleetSaysWhatIsLost expects a service to be lost from when it has no replica any more until it has one again.
func TestFleetSaysWhatIsLost(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := NewFleet(Place{})
		now, had, lost := start, false, time.Time{}
		var back <-chan struct{}
		for range rapid.IntRange(1, 20).Draw(t, "steps") {
			now = now.Add(time.Second)
			records := replicas(rapid.IntRange(0, 2).Draw(t, "replicas"))
			has := false
			for i := range records {
				records[i].State = rapid.SampledFrom([]registry.State{registry.Ready, registry.Unhealthy, registry.Draining}).Draw(t, "state")
				has = has || records[i].State == registry.Ready
			}
			f.Update(now, records, policy.Scope{})
			switch {
			case has:
				lost = time.Time{}
			case had:
				lost = now
			}
			had = has
			set := f.Set(now)
			if f.Empty() == has || !set.Lost.Equal(lost) || (set.Back != nil) == lost.IsZero() {
				t.Fatalf("has %t: empty %t, lost %v (back %v), want %v", has, f.Empty(), set.Lost, set.Back, lost)
			}
			if back != nil && isClosed(back) != has {
				t.Fatalf("has %t: those who wait are told %t", has, isClosed(back))
			}
			back = set.Back
		}
	})
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// fail lets requests to a replica fail in a row.
func fail(f *Fleet, now time.Time, e *Endpoint, n int) {
	for range n {
		f.failed(now, e, false)
	}
}

func TestFleetEjectsWhatFails(t *testing.T) {
	records := replicas(4)
	f, es := fleetOf(records)
	fail(f, start, es[0], 4)
	wantReady(t, "four failures", f, start, records, 0, 1, 2, 3)
	f.succeeded(es[0])
	fail(f, start, es[0], 4)
	wantReady(t, "four more after a success", f, start, records, 0, 1, 2, 3)
	fail(f, start, es[0], 1)
	wantReady(t, "five in a row", f, start, records, 1, 2, 3)
	if got := avoidance(f, start, es[0]); got != Ejected {
		t.Errorf("got avoidance %q; want %q", got, Ejected)
	}
	wantReady(t, "just before its second is over", f, after(time.Second-1), records, 1, 2, 3)
	wantReady(t, "when its second is over", f, after(time.Second), records, 0, 1, 2, 3)
	if got := avoidance(f, after(time.Second), es[0]); got != NotAvoided {
		t.Errorf("got avoidance %q; want none", got)
	}
	if got := es[0].Errors(); got != 9 {
		t.Errorf("errors: got %d; want 9", got)
	}
}

func TestFleetEjectsWhatCannotBeConnectedToAtOnce(t *testing.T) {
	records := replicas(4)
	f, es := fleetOf(records)
	f.failed(start, es[0], true)
	wantReady(t, "not connected", f, start, records, 1, 2, 3)
}

func TestEjectionsGrowUntilASuccess(t *testing.T) {
	records := replicas(4)
	f, es := fleetOf(records)
	now := start
	lasts := func() time.Duration {
		f.failed(now, es[0], true)
		began := now
		for slices.Equal(ready(f, now, records), []int{1, 2, 3}) {
			now = now.Add(time.Second / 2)
		}
		return now.Sub(began)
	}
	var got []time.Duration
	for range 8 {
		got = append(got, lasts()/time.Second)
	}
	if want := []time.Duration{1, 2, 4, 8, 16, 30, 30, 30}; !slices.Equal(got, want) {
		t.Errorf("ejections last %v seconds; want %v", got, want)
	}
	f.succeeded(es[0])
	if got := lasts(); got != time.Second {
		t.Errorf("after a success: got %v; want 1s", got)
	}
	for range 100 {
		lasts() // the doubling must not overflow
	}
	if got := lasts(); got != 30*time.Second {
		t.Errorf("after a hundred ejections: got %v; want 30s", got)
	}
}

// Failures of requests that were on their way when the replica was ejected don't make the ejection longer.
func TestAnEjectionIsCountedOnce(t *testing.T) {
	records := replicas(4)
	f, es := fleetOf(records)
	fail(f, start, es[0], 5)
	fail(f, after(900*time.Millisecond), es[0], 50)
	wantReady(t, "when the first second is over", f, after(time.Second), records, 0, 1, 2, 3)
}

func TestAtMostHalfOfTheReadyFleetIsEjected(t *testing.T) {
	for n, most := range map[int]int{1: 0, 2: 1, 3: 1, 4: 2, 5: 2, 10: 5} {
		records := replicas(n + 3)
		for i := n; i < n+3; i++ {
			records[i].State = registry.Unhealthy // they don't count
		}
		f, es := fleetOf(records)
		for _, e := range es {
			fail(f, start, e, 10)
		}
		if got := n - len(ready(f, start, records)); got != most {
			t.Errorf("all of %d fail: %d ejected; want %d", n, got, most)
		}
	}
}

func TestDeclinedReplicasAreLeftOutForAMoment(t *testing.T) {
	records := replicas(3)
	f, es := fleetOf(records)
	f.Decline(start, es[1])
	wantReady(t, "declined", f, start, records, 0, 2)
	if got := avoidance(f, start, es[1]); got != Declined {
		t.Errorf("got avoidance %q; want %q", got, Declined)
	}
	wantReady(t, "just before the end", f, after(2*time.Second-1), records, 0, 2)
	wantReady(t, "at the end", f, after(2*time.Second), records, 0, 1, 2)

	f.Decline(after(time.Minute), es[1])
	records[1].State = registry.Draining
	f.Update(after(time.Minute), slices.Clone(records), policy.Scope{})
	records[1].State = registry.Ready
	f.Update(after(time.Minute), slices.Clone(records), policy.Scope{})
	wantReady(t, "when the registry has caught up", f, after(time.Minute), records, 0, 1, 2)
}

// A late answer does not cut an ejection short.
func TestDecliningDoesNotShortenAnEjection(t *testing.T) {
	records := replicas(3)
	f, es := fleetOf(records)
	now := start
	for range 4 {
		f.failed(now, es[1], true)
		now = now.Add(10 * time.Second)
	}
	f.failed(now, es[1], true) // for 16 seconds
	f.Decline(now, es[1])
	wantReady(t, "after the time for declining", f, now.Add(3*time.Second), records, 0, 2)
	wantReady(t, "after the ejection", f, now.Add(16*time.Second), records, 0, 1, 2)
}

func TestReplicasBehindASilentAgentAreLeftOut(t *testing.T) {
	records := replicas(18) // sixteen on the first node, two on the second
	f, es := fleetOf(records)
	f.SetReachable(start, records[0].Agent, false)
	wantReady(t, "the first agent silent", f, start, records, 16, 17)
	if got := avoidance(f, start, es[0]); got != Unreachable {
		t.Errorf("got avoidance %q; want %q", got, Unreachable)
	}
	wantReady(t, "an hour later", f, after(time.Hour), records, 16, 17)
	f.SetReachable(start, records[16].Agent, false)
	if got := len(ready(f, start, records)); got != 18 {
		t.Errorf("all agents silent: got %d replicas in use; want all 18", got)
	}
	f.SetReachable(start, records[0].Agent, true)
	if got := ready(f, start, records); len(got) != 16 || got[15] != 15 {
		t.Errorf("the first agent back: got %v in use; want the sixteen on it", got)
	}
	// It holds for replicas that come later, too.
	f.Update(start, slices.Clone(records[:17]), policy.Scope{})
	if got := len(ready(f, start, records)); got != 16 {
		t.Errorf("after an update: got %d; want the sixteen", got)
	}
}

func TestAllAvoidedMeansAllAreUsed(t *testing.T) {
	records := replicas(4)
	records[3].State = registry.Draining
	f, es := fleetOf(records)
	f.failed(start, es[0], true)
	f.Decline(start, es[1])
	wantReady(t, "one ejected, one declined", f, start, records, 2)
	f.Decline(start, es[2])
	wantReady(t, "all avoided", f, start, records, 0, 1, 2)
	wantReady(t, "the first is back", f, after(time.Second), records, 0)
	wantReady(t, "all are back", f, after(2*time.Second), records, 0, 1, 2)
}

// Whatever happens to a fleet, those in use are ready; some are in use if any is ready; and an agent's own experience
// never takes out more than the whole.
func TestFleetInvariants(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		records := replicas(rapid.IntRange(1, 40).Draw(t, "replicas"))
		f, es := fleetOf(records)
		now := start
		some := rapid.IntRange(0, len(records)-1)
		t.Repeat(map[string]func(*rapid.T){
			"fail":        func(t *rapid.T) { f.failed(now, es[some.Draw(t, "i")], rapid.Bool().Draw(t, "unconnected")) },
			"succeed":     func(t *rapid.T) { f.succeeded(es[some.Draw(t, "i")]) },
			"decline":     func(t *rapid.T) { f.Decline(now, es[some.Draw(t, "i")]) },
			"unreachable": func(t *rapid.T) { f.SetReachable(now, records[some.Draw(t, "i")].Agent, rapid.Bool().Draw(t, "up")) },
			"state": func(t *rapid.T) {
				records[some.Draw(t, "i")].State = registry.State(rapid.IntRange(0, 2).Draw(t, "state"))
				f.Update(now, slices.Clone(records), policy.Scope{})
			},
			"wait": func(t *rapid.T) {
				now = now.Add(time.Duration(rapid.IntRange(0, 5000).Draw(t, "ms")) * time.Millisecond)
			},
			"": func(t *rapid.T) {
				inUse := map[*Endpoint]bool{}
				for _, e := range f.Set(now).Endpoints {
					inUse[e] = true
				}
				ready, fine := 0, 0
				f.Each(now, func(e *Endpoint, why Avoidance) {
					if e.Record().State != registry.Ready {
						if inUse[e] {
							t.Fatalf("%s is in use though %s", e.ID, e.Record().State)
						}
						return
					}
					ready++
					if why == NotAvoided {
						fine++
					}
				})
				if fine > 0 && len(inUse) != fine || fine == 0 && len(inUse) != ready {
					t.Fatalf("%d in use of %d ready, of which %d are fine", len(inUse), ready, fine)
				}
			},
		})
	})
}

// BenchmarkFleetUpdate is what a change of the registry costs an agent.
func BenchmarkFleetUpdate(b *testing.B) {
	for _, subset := range []int{0, 100} {
		b.Run(fmt.Sprintf("subset=%d", subset), func(b *testing.B) {
			b.ReportAllocs()
			f, records := NewFleet(Place{Node: "a"}), replicas(10_000)
			for b.Loop() {
				f.Update(start, records, policy.Scope{Subset: subset})
			}
		})
	}
}
