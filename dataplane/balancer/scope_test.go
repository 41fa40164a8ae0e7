package balancer

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
	"pgregory.net/rapid"
)

// scoped returns the records that a scope selects, by what its documentation says, in order of their ranks.
func scoped(place Place, scope policy.Scope, records []registry.Endpoint, usable func(registry.Endpoint) bool) []registry.Endpoint {
	var own, others []registry.Endpoint
	registered := 0
	for _, r := range records {
		same := scope.Zone != policy.ZonePrefer || r.Zone == place.Zone
		if same {
			registered++
		}
		switch {
		case !usable(r):
		case same:
			own = append(own, r)
		default:
			others = append(others, r)
		}
	}
	if len(own) >= 2 && 2*len(own) >= registered {
		others = nil
	}
	first := func(all []registry.Endpoint) []registry.Endpoint {
		agent := hashOf(string(place.Node))
		slices.SortFunc(all, func(a, b registry.Endpoint) int {
			if rank(agent, &a) < rank(agent, &b) {
				return -1
			}
			return 1
		})
		if k := scope.Subset; k > 0 && k < len(all) {
			return all[:k]
		}
		return all
	}
	return append(first(own), first(others)...)
}

func idsOf(records []registry.Endpoint) (ids []string) {
	for _, r := range records {
		ids = append(ids, string(r.ID()))
	}
	slices.Sort(ids)
	return ids
}

func idsInUse(f *Fleet, now time.Time) (ids []string) {
	for _, e := range f.Set(now).Endpoints {
		ids = append(ids, string(e.ID))
	}
	return ids
}

// Whatever happens, those in use are what the scope selects of those that take requests. A replica that comes, goes or
// changes its state changes no subset by more than itself and one other; and counters are kept while they count.
func TestScopesAgreeWithModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		place := Place{Node: "agent", Zone: "a"}
		all := replicas(rapid.IntRange(1, 60).Draw(t, "replicas"))
		for i := range all {
			all[i].Zone = string(rune('a' + i%3))
		}
		scope := policy.Scope{
			Subset: rapid.IntRange(0, 20).Draw(t, "subset"),
			Zone:   rapid.SampledFrom([]policy.Zone{policy.ZoneAny, policy.ZonePrefer}).Draw(t, "zone"),
		}
		f, now := NewFleet(place), start
		records := slices.Clone(all[:len(all)/2])
		f.Update(now, slices.Clone(records), scope)
		avoided := map[registry.EndpointID]time.Time{}
		var held []*Endpoint
		state := func() *rapid.Generator[registry.State] {
			return rapid.SampledFrom([]registry.State{registry.Ready, registry.Ready, registry.Unhealthy, registry.Draining})
		}
		model := func() []string {
			usable := func(r registry.Endpoint) bool { return r.State == registry.Ready && !now.Before(avoided[r.ID()]) }
			chosen := scoped(place, scope, records, usable)
			if len(chosen) == 0 {
				chosen = scoped(place, scope, records, func(r registry.Endpoint) bool { return r.State == registry.Ready })
			}
			return idsOf(chosen)
		}
		moved := func(t *rapid.T, change func()) {
			before := idsInUse(f, now)
			change()
			after := idsInUse(f, now)
			if scope.Zone == policy.ZonePrefer || len(avoided) > 0 {
				return // all change at once where too few of a zone, or of all, are left
			}
			if len(without(before, after)) > 1 || len(without(after, before)) > 1 {
				t.Fatalf("one replica changed: lost %v, won %v", without(before, after), without(after, before))
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"join": func(t *rapid.T) {
				r := rapid.SampledFrom(all).Draw(t, "replica")
				if slices.ContainsFunc(records, func(o registry.Endpoint) bool { return o.ID() == r.ID() }) {
					return
				}
				moved(t, func() {
					records = append(records, r)
					f.Update(now, slices.Clone(records), scope)
				})
			},
			"leave": func(t *rapid.T) {
				if len(records) > 0 {
					i := rapid.IntRange(0, len(records)-1).Draw(t, "which")
					delete(avoided, records[i].ID())
					moved(t, func() {
						records = slices.Delete(records, i, i+1)
						f.Update(now, slices.Clone(records), scope)
					})
				}
			},
			"state": func(t *rapid.T) {
				if len(records) > 0 {
					i := rapid.IntRange(0, len(records)-1).Draw(t, "which")
					old := records[i].State
					records[i].State = state().Draw(t, "state")
					if old != records[i].State {
						delete(avoided, records[i].ID()) // declining ends when the registry has caught up
					}
					moved(t, func() { f.Update(now, slices.Clone(records), scope) })
				}
			},
			"decline": func(t *rapid.T) {
				if set := f.Set(now); len(set.Endpoints) > 0 {
					e := rapid.SampledFrom(set.Endpoints).Draw(t, "endpoint")
					avoided[e.ID] = now.Add(declinedFor)
					f.Decline(now, e)
				}
			},
			"wait": func(t *rapid.T) {
				now = now.Add(time.Duration(rapid.IntRange(0, 3000).Draw(t, "ms")) * time.Millisecond)
				maps.DeleteFunc(avoided, func(_ registry.EndpointID, until time.Time) bool { return !now.Before(until) })
			},
			"hold": func(t *rapid.T) {
				if set := f.Set(now); len(set.Endpoints) > 0 {
					e := rapid.SampledFrom(set.Endpoints).Draw(t, "endpoint")
					hold(e, 1)
					held = append(held, e)
				}
			},
			"": func(t *rapid.T) {
				if got, want := idsInUse(f, now), model(); !slices.Equal(got, want) {
					t.Fatalf("got %v in use; want %v", got, want)
				}
				inFlight := map[registry.EndpointID]*Endpoint{}
				for _, e := range held {
					inFlight[e.ID] = e
				}
				f.Each(now, func(e *Endpoint, _ Avoidance) {
					if h := inFlight[e.ID]; h != nil && e != h && e.RIF() > 0 {
						t.Fatalf("%s is counted twice", e.ID)
					}
				})
			},
		})
	})
}

func without(a, b []string) []string {
	return slices.DeleteFunc(slices.Clone(a), func(id string) bool { return slices.Contains(b, id) })
}

// Each replica is in about as many subsets as any other: the chi-square test with 99 degrees of freedom, where chance
// exceeds 149 once in a thousand times.
func TestSubsetsSpreadEvenly(t *testing.T) {
	const agents, n, k = 400, 100, 10
	uses := map[registry.EndpointID]int{}
	records := replicas(n)
	for i := range agents {
		f := NewFleet(Place{Node: registry.NodeName(fmt.Sprintf("agent-%d", i))})
		f.Update(start, records, policy.Scope{Subset: k})
		if got := len(f.Set(start).Endpoints); got != k {
			t.Fatalf("agent %d uses %d; want %d", i, got, k)
		}
		for _, e := range f.Set(start).Endpoints {
			uses[e.ID]++
		}
	}
	expected, chi2 := float64(agents*k)/n, 0.0
	for _, r := range records {
		chi2 += math.Pow(float64(uses[r.ID()])-expected, 2) / expected
	}
	if chi2 > 149 || chi2 < 40 {
		t.Errorf("χ² of the uses of %d replicas: got %.1f; want chance, 40 to 149", n, chi2)
	}
}

func TestASubsetDoesNotShrink(t *testing.T) {
	records := replicas(100)
	f := NewFleet(Place{Node: "a"})
	f.Update(start, records, policy.Scope{Subset: 10})
	home := f.Set(start).Endpoints
	for _, e := range home {
		f.failed(start, e, true)
	}
	if got := len(f.Set(start).Endpoints); got != 10 {
		t.Errorf("after failures: got %d in use; want 10", got)
	}
	// Where most fail, the fault is elsewhere: an agent doesn't go through the whole fleet in search of better ones.
	if left := without(idsInUse(f, start), namesOf(home)); len(left) != 5 {
		t.Errorf("after failures of all ten: got %d replaced; want half", len(left))
	}
	if got := idsInUse(f, after(time.Second)); !slices.Equal(got, namesOf(home)) {
		t.Errorf("after the ejections: got %v; want %v", got, namesOf(home))
	}
	down := slices.Clone(records)
	for i := range down {
		if home[0].ID == down[i].ID() || home[3].ID == down[i].ID() {
			down[i].State = registry.Draining
		}
	}
	f.Update(after(time.Minute), down, policy.Scope{Subset: 10})
	if got := f.Set(after(time.Minute)).Endpoints; len(got) != 10 || slices.Contains(got, home[0]) || slices.Contains(got, home[3]) {
		t.Errorf("with two draining: got %v; want ten others", got)
	}
}

func namesOf(endpoints []*Endpoint) (ids []string) {
	for _, e := range endpoints {
		ids = append(ids, string(e.ID))
	}
	return ids
}

// A fleet remembers no more than it uses, and what it must of those that have left.
func TestMemoryOfASubset(t *testing.T) {
	const k = 20
	scope := policy.Scope{Subset: k}
	records := replicas(5000)
	f := NewFleet(Place{Node: "a"})
	now := start
	var held *Endpoint
	for i := range 200 { // a window that slides over the records
		f.Update(now, records[i*20:i*20+1000], scope)
		for _, e := range f.Set(now).Endpoints {
			f.failed(now, e, true)
		}
		if i == 0 {
			held = f.Set(now).Endpoints[0]
		}
		if got := len(f.endpoints); got > 3*k {
			t.Fatalf("remembers %d endpoints; want %d at most", got, 3*k)
		}
		now = now.Add(100 * time.Millisecond)
	}

	// Requests in flight to a replica that leaves the subset still count if it comes back.
	var better []registry.Endpoint
	agent := hashOf("a")
	for _, r := range records {
		if rank(agent, &r) < rank(agent, held.record.Load()) {
			better = append(better, r)
		}
	}
	alone := []registry.Endpoint{held.Record()}
	scope.Subset = 1
	f = NewFleet(Place{Node: "a"})
	f.Update(now, alone, scope)
	held = f.Set(now).Endpoints[0]
	hold(held, 3)
	both := slices.Concat(alone, better[:1])
	f.Update(now, both, scope)
	if got := f.Set(now).Endpoints; len(got) != 1 || got[0] == held {
		t.Fatalf("got %v; want the better one alone", got)
	}
	f.Update(now, alone, scope)
	if got := f.Set(now).Endpoints; len(got) != 1 || got[0] != held || got[0].RIF() != 3 {
		t.Errorf("got %v; want the first one back, with its three requests in flight", got)
	}
	for range 3 {
		held.counter.end()
	}
	f.Update(now, both, scope)
	if len(f.endpoints) != 1 {
		t.Errorf("remembers %d endpoints; want 1", len(f.endpoints))
	}
}

func TestZones(t *testing.T) {
	const ready, unhealthy = registry.Ready, registry.Unhealthy
	for _, tt := range []struct {
		name   string
		own    []registry.State // in the agent's zone
		others []registry.State
		subset int
		zone   policy.Zone
		wantIn int // in use, of the own zone
		want   int // in use
	}{
		{"any", []registry.State{ready, ready, ready}, []registry.State{ready, ready}, 0, policy.ZoneAny, 3, 5},
		{"prefer", []registry.State{ready, ready, ready}, []registry.State{ready, ready}, 0, policy.ZonePrefer, 3, 3},
		{"half of them", []registry.State{ready, ready, unhealthy, unhealthy}, []registry.State{ready}, 0, policy.ZonePrefer, 2, 2},
		{"less than half", []registry.State{ready, ready, unhealthy, unhealthy, unhealthy}, []registry.State{ready}, 0, policy.ZonePrefer, 2, 3},
		{"only one", []registry.State{ready}, []registry.State{ready, unhealthy}, 0, policy.ZonePrefer, 1, 2},
		{"none", nil, []registry.State{ready, ready}, 0, policy.ZonePrefer, 0, 2},
		{"no others", []registry.State{ready}, nil, 0, policy.ZonePrefer, 1, 1},
		{"none ready", []registry.State{unhealthy, unhealthy}, []registry.State{unhealthy}, 0, policy.ZonePrefer, 0, 0},
		{"subset of the zone", []registry.State{ready, ready, ready, ready, ready}, []registry.State{ready, ready}, 3, policy.ZonePrefer, 3, 3},
		{"subset of both", []registry.State{ready, ready, unhealthy, unhealthy, unhealthy}, []registry.State{ready, ready, ready, ready}, 3, policy.ZonePrefer, 2, 5},
	} {
		t.Run(tt.name, func(t *testing.T) {
			records := replicas(len(tt.own) + len(tt.others))
			for i := range records {
				records[i].Zone, records[i].State = "own", slices.Concat(tt.own, tt.others)[i]
				if i >= len(tt.own) {
					records[i].Zone = "other"
				}
			}
			f := NewFleet(Place{Node: "a", Zone: "own"})
			f.Update(start, records, policy.Scope{Subset: tt.subset, Zone: tt.zone})
			in := 0
			for _, e := range f.Set(start).Endpoints {
				if e.Record().Zone == "own" {
					in++
				}
			}
			if got := len(f.Set(start).Endpoints); got != tt.want || in != tt.wantIn {
				t.Errorf("got %d in use, %d of the own zone; want %d and %d", got, in, tt.want, tt.wantIn)
			}
		})
	}
}

// An agent leaves its zone on account of its own experience too, and comes back.
func TestAZoneThatFailsIsLeft(t *testing.T) {
	records := replicas(8)
	for i := range records {
		records[i].Zone = []string{"own", "other"}[i/4]
	}
	f := NewFleet(Place{Node: "a", Zone: "own"})
	f.Update(start, records, policy.Scope{Zone: policy.ZonePrefer})
	wantReady(t, "at first", f, start, records, 0, 1, 2, 3)
	es := f.Set(start).Endpoints
	f.failed(start, es[0], true)
	f.failed(start, es[1], true)
	wantReady(t, "two ejected", f, start, records, 2, 3)
	f.failed(start, es[2], true)
	wantReady(t, "three ejected", f, start, records, 3, 4, 5, 6, 7)
	wantReady(t, "a second later", f, after(time.Second), records, 0, 1, 2, 3)
}

func TestWeightsChangeWithoutLosingCounters(t *testing.T) {
	records := replicas(2)
	f, es := fleetOf(records)
	hold(es[0], 2)
	if got := len(f.Set(start).seats); got != 2 {
		t.Errorf("got %d seats; want 2", got)
	}
	for _, weight := range []int32{3, 100, 1, 0} {
		changed := slices.Clone(records)
		changed[0].Weight = weight
		f.Update(start, changed, policy.Scope{})
		set := f.Set(start)
		if got := int32(len(set.seats)); got != max(weight, 1)+1 {
			t.Errorf("weight %d beside 1: got %d seats", weight, got)
		}
		if set.Endpoints[0] != es[0] || es[0].RIF() != 2 || es[0].Record().Weight != weight {
			t.Errorf("weight %d: got %d in flight, weight %d", weight, es[0].RIF(), es[0].Record().Weight)
		}
	}
}

// Seats are few, proportional to weights, and those of one replica are spread evenly among the others.
func TestSeats(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		records := replicas(rapid.IntRange(1, 12).Draw(t, "replicas"))
		scale := rapid.Int32Range(1, 10).Draw(t, "scale")
		weights := map[registry.EndpointID]int{}
		total := 0
		for i := range records {
			w := rapid.Int32Range(1, 10).Draw(t, "weight")
			records[i].Weight = scale * w
			weights[records[i].ID()] = int(w)
			total += int(w)
		}
		f := NewFleet(Place{})
		f.Update(start, records, policy.Scope{})
		set := f.Set(start)
		if len(set.seats) > total || total%len(set.seats) != 0 {
			t.Fatalf("got %d seats for a total weight of %d", len(set.seats), total)
		}
		unit := total / len(set.seats)
		got := map[registry.EndpointID]float64{}
		for i, seat := range set.seats {
			if int(seat.of)*unit != weights[seat.ID] || seat.nth != int32(got[seat.ID]) {
				t.Fatalf("seat %d of %d of %s, which weighs %d", seat.nth, seat.of, seat.ID, weights[seat.ID])
			}
			got[seat.ID]++
			share := float64(seat.of) / float64(len(set.seats))
			if due := float64(i+1) * share; math.Abs(got[seat.ID]-due) > 0.5+share*float64(len(records))/2+1e-9 {
				t.Fatalf("%s has %v of the first %d seats; it is due %v", seat.ID, got[seat.ID], i+1, due)
			}
		}
	})
}
