package inbound

import (
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/headroom-mesh/headroom/dataplane/probe"
	"github.com/headroom-mesh/headroom/dataplane/relay"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
)

func endpoint(n int, state registry.State) registry.Endpoint {
	address := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(8000+n))
	return registry.Endpoint{Service: "web", Node: "a", Address: address, State: state}
}

// withPolicy returns an Inbound with replicas of a service that has a policy.
func withPolicy(change func(*policy.Policy), endpoints ...registry.Endpoint) *Inbound {
	in := New(Config{Relay: relay.New(relay.Config{})})
	in.Update(endpoints)
	in.UpdatePolicies(snapshot(change))
	return in
}

func snapshot(change func(*policy.Policy)) *registry.Snapshot {
	p := policy.Default()
	change(&p)
	return &registry.Snapshot{Services: map[registry.ServiceName]*registry.Service{"web": {Name: "web", Policy: p}}}
}

// told is what reservations were told, in order.
type told struct {
	mu   sync.Mutex
	what []string
}

func (t *told) reserve(in *Inbound, e registry.Endpoint, name string) *Reservation {
	r, err := in.Reserve(e.ID(), func(granted bool) {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.what = append(t.what, fmt.Sprintf("%s %v", name, granted))
	})
	if err != nil {
		panic(err)
	}
	return r
}

func (t *told) want(tb testing.TB, want ...string) {
	tb.Helper()
	t.mu.Lock()
	defer t.mu.Unlock()
	if !slices.Equal(t.what, want) {
		tb.Errorf("told %q, want %q", t.what, want)
	}
	t.what = nil
}

func TestReservations(t *testing.T) {
	e := endpoint(0, registry.Ready)
	in := withPolicy(func(p *policy.Policy) { p.Slots = 1 }, e)
	var told told

	first := told.reserve(in, e, "first")
	second := told.reserve(in, e, "second")
	third := told.reserve(in, e, "third")
	told.want(t, "first true")

	// The request claims the slot: to release the reservation now gives nothing back.
	f := fly(in, e, first.ID)
	in.Release(first)
	told.want(t)
	f.End(relay.Ending{}, time.Now())
	told.want(t, "second true")

	// A slot that no request claims is given back, and so is a place in the line.
	in.Release(third)
	in.Release(second)
	in.Release(second)
	told.want(t)
	fourth := told.reserve(in, e, "fourth")
	told.want(t, "fourth true")

	// Requests without a reservation, or with one that has ended, take a slot as well.
	in.Release(fourth)
	f1, f2 := fly(in, e, ""), fly(in, e, fourth.ID)
	fifth := told.reserve(in, e, "fifth")
	f1.End(relay.Ending{}, time.Now())
	told.want(t)
	f2.End(relay.Ending{}, time.Now())
	told.want(t, "fifth true")
	in.Release(fifth)
	if n := in.Replica(e.ID()).line.free(); n != 1 {
		t.Errorf("%d slots are free, want 1", n)
	}
}

func TestReservationForAnotherReplica(t *testing.T) {
	e, other := endpoint(0, registry.Ready), endpoint(1, registry.Ready)
	in := withPolicy(func(p *policy.Policy) {}, e, other)
	var told told
	r := told.reserve(in, e, "r")
	f := fly(in, other, r.ID)
	in.Release(r)
	if n := in.Replica(e.ID()).line.free(); n != 1 {
		t.Errorf("%d slots are free, want 1", n)
	}
	f.End(relay.Ending{}, time.Now())
}

func TestReserveRefused(t *testing.T) {
	in := withPolicy(func(*policy.Policy) {}, endpoint(0, registry.Draining), endpoint(1, registry.Unhealthy))
	for i := range 3 {
		if _, err := in.Reserve(endpoint(i, 0).ID(), func(bool) { t.Error("told something") }); err == nil {
			t.Errorf("replica %d: no error", i)
		}
	}
}

// TestLineChanges changes the number of slots, and removes the replica, while others wait.
func TestLineChanges(t *testing.T) {
	e := endpoint(0, registry.Ready)
	in := withPolicy(func(p *policy.Policy) { p.Slots = 1 }, e)
	var told told
	all := []*Reservation{}
	for i := range 7 {
		all = append(all, told.reserve(in, e, fmt.Sprint(i)))
	}
	told.want(t, "0 true")
	in.UpdatePolicies(snapshot(func(p *policy.Policy) { p.Slots = 2 }))
	told.want(t, "1 true")
	e.Weight = 2
	in.Update([]registry.Endpoint{e})
	told.want(t, "2 true", "3 true")
	in.UpdatePolicies(snapshot(func(p *policy.Policy) { p.Slots = 1 }))
	in.Release(all[0])
	told.want(t)
	in.Update(nil)
	told.want(t, "4 false", "5 false", "6 false")
	for _, r := range all {
		in.Release(r)
	}
}

// TestLineNeverOversold reserves, claims, and releases in any order.
func TestLineNeverOversold(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		slots := rapid.IntRange(1, 3).Draw(t, "slots")
		e := endpoint(0, registry.Ready)
		in := withPolicy(func(p *policy.Policy) { p.Slots = slots }, e)
		got := map[*Reservation]bool{} // that hold a slot
		var open []*Reservation
		var flights []*Flight
		t.Repeat(map[string]func(*rapid.T){
			"reserve": func(t *rapid.T) {
				granted := false
				var r *Reservation
				r, _ = in.Reserve(e.ID(), func(bool) {
					granted = true
					if r != nil {
						got[r] = true
					}
				})
				got[r] = granted
				open = append(open, r)
			},
			"release": func(t *rapid.T) {
				if len(open) > 0 {
					r := open[0]
					open = open[1:]
					delete(got, r)
					in.Release(r)
				}
			},
			"request": func(t *rapid.T) {
				i := slices.IndexFunc(open, func(r *Reservation) bool { return got[r] })
				if i < 0 {
					return
				}
				r := open[i]
				open = slices.Delete(open, i, i+1)
				flights = append(flights, fly(in, e, r.ID))
				delete(got, r)
				in.Release(r)
			},
			"done": func(t *rapid.T) {
				if len(flights) > 0 {
					f := flights[0]
					flights = flights[1:]
					f.End(relay.Ending{}, time.Now())
				}
			},
			"": func(t *rapid.T) {
				holding := len(flights)
				for _, granted := range got {
					if granted {
						holding++
					}
				}
				if want := min(slots, len(open)+len(flights)); holding != want {
					t.Fatalf("%d hold one of %d slots, want %d", holding, slots, want)
				}
			},
		})
	})
}

func TestIdle(t *testing.T) {
	e, busy, sick := endpoint(0, registry.Ready), endpoint(1, registry.Ready), endpoint(2, registry.Unhealthy)
	in := withPolicy(func(p *policy.Policy) { p.Slots = 2 }, e, busy, sick)
	var held []*Flight
	for range 3 {
		held = append(held, fly(in, busy, ""))
	}
	counts := map[registry.EndpointID]int{}
	stop := in.ListenIdle("web", func(id registry.EndpointID) { counts[id]++ })
	want := func(what string, n ...int) {
		t.Helper()
		for i, n := range n {
			if got := counts[endpoint(i, 0).ID()]; got != n {
				t.Errorf("%s: replica %d was told %d times, want %d", what, i, got, n)
			}
		}
		clear(counts)
	}
	want("at first, each free slot", 2, 0, 0)
	held[0].End(relay.Ending{}, time.Now())
	want("two slots are still in use", 0, 0, 0)
	held[1].End(relay.Ending{}, time.Now())
	want("one is free", 0, 1, 0)

	other := 0
	stopOther := in.ListenIdle("web", func(registry.EndpointID) { other++ })
	other = 0
	for range 200 {
		fly(in, e, "").End(relay.Ending{}, time.Now())
	}
	if n := counts[e.ID()]; n+other != 200 || n < 50 || other < 50 {
		t.Errorf("one listener was told %d times, the other %d, want 200 in all and either half of that or so", n, other)
	}
	stopOther()
	clear(counts)

	sick.State = registry.Ready
	in.Update([]registry.Endpoint{e, busy, sick})
	want("a replica is well again", 0, 0, 2)
	stop()
	held[2].End(relay.Ending{}, time.Now())
	want("nobody listens", 0, 0, 0)
}

func TestKeysLightenTheLoadTold(t *testing.T) {
	e := endpoint(0, registry.Ready)
	in := withPolicy(func(p *policy.Policy) { p.Balancer, p.PrequalSync.HitScale = policy.BalancerPrequalSync, 0.5 }, e)
	for range 4 {
		fly(in, e, "")
	}
	rif := func(key uint64) int32 {
		return in.Probe(time.Now(), probe.Request{Endpoint: e.ID(), Key: key}).Report.RIF
	}
	f := new(Flight)
	f.begin(in, in.Replica(e.ID()), time.Now(), 0x2a, "")
	f.Answered(answered{}, time.Now())
	f.End(relay.Ending{}, time.Now())
	if rif(0) != 4 || rif(7) != 4 || rif(0x2a) != 2 {
		t.Errorf("told %d without a key, %d with a new one, %d with one served; want 4, 4, 2", rif(0), rif(7), rif(0x2a))
	}
	in.Update([]registry.Endpoint{e})
	if rif(0x2a) != 2 {
		t.Error("an update made the replica forget its keys")
	}
	in.UpdatePolicies(snapshot(func(*policy.Policy) {}))
	if rif(0x2a) != 4 {
		t.Error("another rule gets lightened load")
	}
}

// Who waits at a replica that stops taking requests is told so, and can wait elsewhere.
func TestWaitersLeaveAReplicaThatTakesNoRequests(t *testing.T) {
	for _, state := range []registry.State{registry.Unhealthy, registry.Draining} {
		e := endpoint(0, registry.Ready)
		in := withPolicy(func(p *policy.Policy) { p.Balancer = policy.BalancerLateBinding }, e)
		var told told
		fly(in, e, "")
		told.reserve(in, e, "waits")
		e.State = state
		in.Update([]registry.Endpoint{e})
		told.want(t, "waits false")
	}
}

// Under another rule requests come without reservations, one after the other: who waits for a slot would wait for ever.
func TestNobodyWaitsUnderAnotherRule(t *testing.T) {
	e := endpoint(0, registry.Ready)
	in := withPolicy(func(p *policy.Policy) { p.Balancer = policy.BalancerLateBinding }, e)
	var told told
	fly(in, e, "")
	told.reserve(in, e, "waits")
	in.UpdatePolicies(snapshot(func(p *policy.Policy) { p.Balancer = policy.BalancerRoundRobin }))
	told.want(t, "waits true")
}

// fly counts a call in at a replica.
func fly(in *Inbound, e registry.Endpoint, reservation string) *Flight {
	f := new(Flight)
	f.Begin(in, e.ID(), time.Now(), 0, reservation)
	return f
}

// answered is a good answer.
type answered struct{ header }

func (answered) Status() int { return 200 }
