package balancer

import (
	"math"
	"slices"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
	"pgregory.net/rapid"
)

// ask returns the replicas that a rule asks about a request, and how many answers are enough.
func ask(t testing.TB, b *Balancer) ([]*Endpoint, int) {
	t.Helper()
	targets, enough, asks := b.Inquire(start, Request{}, nil)
	if !asks || enough < 1 || enough > len(targets) {
		t.Fatalf("got %d targets, %d answers are enough, asks: %v", len(targets), enough, asks)
	}
	return targets, enough
}

func choose(t testing.TB, b *Balancer, answers ...Answer) Picked {
	t.Helper()
	picked, err := b.Choose(start, Request{}, answers)
	if err != nil {
		t.Fatal(err)
	}
	return picked
}

func TestPrequalSyncAsks(t *testing.T) {
	for _, tt := range []struct{ replicas, probes, targets, enough int }{
		{100, 3, 3, 2}, {100, 5, 5, 4}, {100, 1, 1, 1}, {3, 3, 3, 2}, {2, 3, 2, 1}, {2, 2, 2, 1},
	} {
		p := by(policy.BalancerPrequalSync)
		p.PrequalSync.Probes = tt.probes
		fleet, _ := fleetOf(replicas(tt.replicas))
		targets, enough := ask(t, New(p, fleet, 1, 1))
		if distinct(slices.Clone(targets)) != tt.targets || len(targets) != tt.targets || enough != tt.enough {
			t.Errorf("%d of %d replicas: asked %d, %d are enough; want %d, %d", tt.probes, tt.replicas, len(targets), enough, tt.targets, tt.enough)
		}
	}
	b, _ := balancerOf(policy.BalancerPrequalSync, 1)
	if _, _, asks := b.Inquire(start, Request{}, nil); asks {
		t.Error("asks the only replica")
	}
}

func TestPrequalSyncAsksUniformly(t *testing.T) {
	b, es := balancerOf(policy.BalancerPrequalSync, 20)
	counts := make([]*Endpoint, len(es)) // counted in the picks of stand-ins
	for i := range counts {
		counts[i] = &Endpoint{counter: new(counter)}
	}
	for range 20_000 {
		targets, _ := ask(t, b)
		for _, e := range targets {
			counts[indexOf(es, e)].counter.begin()
		}
	}
	wantUniform(t, counts, 60_000)
}

// The rule is Prequal's: the fastest of those that are not hot by the RIF of earlier answers; if all are hot, the one with the
// least RIF.
func TestPrequalSyncChooses(t *testing.T) {
	p := asPublished()
	p.Balancer = policy.BalancerPrequalSync
	b, es := balancerWith(p, 100)
	const ms = time.Millisecond
	for _, tt := range []struct {
		name    string
		answers []load.Report
		want    int
		class   Class
	}{
		{"no history: latency decides", []load.Report{known(9, 20*ms), known(1, 50*ms)}, 0, Cold},
		{"one is hot", []load.Report{known(10, 1*ms), known(5, 50*ms), known(5, 60*ms)}, 1, Cold},
		{"all are hot", []load.Report{known(30, 10*ms), known(20, 50*ms), known(40, 5*ms)}, 1, Hot},
		{"equally fast", []load.Report{known(3, 10*ms), known(2, 10*ms)}, 1, Cold},
		{"only one has answered", []load.Report{known(500, 10*ms)}, 0, Hot},
	} {
		var answers []Answer
		for i, r := range tt.answers {
			answers = append(answers, Answer{es[i], r})
		}
		picked := choose(t, b, answers...)
		if picked.Endpoint != es[tt.want] || picked.Class != tt.class {
			t.Errorf("%s: got %s, %v; want %s, %v", tt.name, picked.Endpoint.ID, picked.Class, es[tt.want].ID, tt.class)
		}
	}
	if v := b.View(start); !v.HasThreshold || v.Threshold != 40 {
		t.Errorf("got threshold %v, %v; want 40", v.Threshold, v.HasThreshold)
	}
}

// A replica that says a tenth of its load gets the requests whose key it has served.
func TestPrequalSyncFollowsScaledAnswers(t *testing.T) {
	b, es := balancerOf(policy.BalancerPrequalSync, 3)
	busy := known(4, 50*time.Millisecond)
	for range 100 {
		picked := choose(t, b, Answer{es[0], busy}, Answer{es[1], busy.Scaled(0.1)}, Answer{es[2], busy})
		if picked.Endpoint != es[1] {
			t.Fatal("passed over the replica that has served the key")
		}
	}
}

// Nobody answers: at random. Those that answer have left: at random among the others.
func TestAskersWithoutAnswers(t *testing.T) {
	for _, rule := range []policy.Balancer{policy.BalancerPrequalSync, policy.BalancerLateBinding} {
		b, es := balancerOf(rule, 20)
		for range 20_000 {
			picked := choose(t, b)
			picked.Done(start, Succeeded)
			if picked.Class != Fallback {
				t.Fatalf("%s: got class %v; want fallback", rule, picked.Class)
			}
		}
		wantUniform(t, es, 20_000)
		gone := es[0]
		b.fleet.Update(start, replicas(20)[1:], policy.Scope{})
		for range 200 {
			if picked := choose(t, b, Answer{gone, known(0, 1)}); picked.Endpoint == gone || picked.Class != Fallback {
				t.Fatalf("%s: got %s, %v, though it has left", rule, picked.Endpoint.ID, picked.Class)
			}
		}
	}
}

// Of replicas that all say the same for their weight, each gets what its weight says.
func TestPrequalSyncHeedsWeights(t *testing.T) {
	records := replicas(4)
	for i := range records {
		records[i].Weight = []int32{1, 1, 2, 4}[i]
	}
	fleet, es := fleetOf(records)
	b := New(by(policy.BalancerPrequalSync), fleet, 1, 1)
	const requests = 40_000
	for range requests {
		targets, _ := ask(t, b)
		var answers []Answer
		for _, e := range targets {
			answers = append(answers, Answer{e, known(8*e.weight(), time.Millisecond)})
		}
		choose(t, b, answers...)
	}
	for i, e := range es {
		want := requests * float64(records[i].Weight) / 8
		if got := float64(e.Picks()); math.Abs(got-want) > 4*math.Sqrt(want) {
			t.Errorf("weight %d: got %v of %d requests; want about %.0f", records[i].Weight, got, requests, want)
		}
	}
}

// Late binding asks each replica once, whatever its weight, and the first that answers gets the request.
func TestLateBinding(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		records := replicas(rapid.IntRange(1, 6).Draw(t, "replicas"))
		for i := range records {
			records[i].Weight = rapid.Int32Range(0, 5).Draw(t, "weight")
		}
		p := by(policy.BalancerLateBinding)
		p.LateBinding.Reservations = rapid.IntRange(1, 5).Draw(t, "reservations")
		fleet, _ := fleetOf(records)
		b := New(p, fleet, 1, rapid.Uint64().Draw(t, "seed"))
		for range 20 {
			targets, enough, asks := b.Inquire(start, Request{}, nil)
			if !asks || enough != 1 || len(targets) > p.LateBinding.Reservations || distinct(slices.Clone(targets)) != len(targets) {
				t.Fatalf("asked %v, %d are enough", targets, enough)
			}
			var answers []Answer
			for _, i := range rapid.Permutation(targets).Draw(t, "arrival") {
				answers = append(answers, Answer{Endpoint: i})
			}
			first := answers[0].Endpoint
			if picked, err := b.Choose(start, Request{}, answers); err != nil || picked.Endpoint != first || picked.Class != Ruled {
				t.Fatalf("got %v, %v, %v; want the first that answered", picked.Endpoint, picked.Class, err)
			}
		}
	})
}

func TestLateBindingWithoutGrantGoesToTheLessLoadedOfTwo(t *testing.T) {
	b, es := balancerOf(policy.BalancerLateBinding, 2)
	hold(es[0], 3)
	if picked := pick(t, b, start); picked.Endpoint != es[1] || picked.Class != Fallback {
		t.Errorf("got %s, %v; want the less loaded one, as a fallback", picked.Endpoint.ID, picked.Class)
	}
}

// queueModel is the tokens of a join-idle-queue.
type queueModel struct {
	slots  int
	tokens []registry.EndpointID
}

func (q *queueModel) add(id registry.EndpointID, weight int) {
	held := 0
	for _, token := range q.tokens {
		if token == id {
			held++
		}
	}
	if held < q.slots*weight {
		q.tokens = append(q.tokens, id)
	}
}

func (q *queueModel) drop(gone func(registry.EndpointID) bool) {
	q.tokens = slices.DeleteFunc(q.tokens, gone)
}

func TestIdleQueueAgreesWithModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		q := &queueModel{slots: rapid.IntRange(1, 3).Draw(t, "slots")}
		all := replicas(6)
		for i := range all {
			all[i].Weight = int32(1 + i%2) // so that the weights have no common divisor
		}
		p := by(policy.BalancerJoinIdleQueue)
		p.Slots = q.slots
		fleet, es := fleetOf(all)
		b := New(p, fleet, 1, 1)
		b.Idle(start, 0, nil) // sees the fleet
		set := fleet.Set(start)
		t.Repeat(map[string]func(*rapid.T){
			"idled": func(t *rapid.T) {
				e := rapid.SampledFrom(es).Draw(t, "replica")
				b.Idled(start, e)
				if set.has(e) {
					q.add(e.ID, int(set.seatsOf[e]))
				}
			},
			"pick": func(t *rapid.T) {
				picked, err := b.Pick(start, Request{})
				if err != nil {
					t.Fatal(err)
				}
				if len(q.tokens) == 0 {
					if picked.Class != Fallback {
						t.Fatalf("got class %v though nobody is idle", picked.Class)
					}
					return
				}
				if picked.Endpoint.ID != q.tokens[0] || picked.Class != Ruled {
					t.Fatalf("got %s, %v; want the oldest of %v", picked.Endpoint.ID, picked.Class, q.tokens)
				}
				q.tokens = q.tokens[1:]
			},
			"forget": func(t *rapid.T) {
				e := rapid.SampledFrom(es).Draw(t, "replica")
				b.Forget(e)
				q.drop(func(id registry.EndpointID) bool { return id == e.ID })
			},
			"update": func(t *rapid.T) {
				// The first two stay, so that a seat stays what it is; the others become unready, but remain who they are.
				records := slices.Clone(all)
				for i := range records[2:] {
					records[i+2].State = rapid.SampledFrom([]registry.State{registry.Ready, registry.Draining}).Draw(t, "state")
				}
				fleet.Update(start, records, policy.Scope{})
				b.Idle(start, 0, nil) // sees it
				was := set
				set = fleet.Set(start)
				q.drop(func(id registry.EndpointID) bool {
					return !slices.ContainsFunc(set.Endpoints, func(e *Endpoint) bool { return e.ID == id })
				})
				for _, e := range set.Endpoints {
					for range max(0, q.slots*int(set.seatsOf[e])-e.RIF()) {
						if !was.has(e) {
							q.add(e.ID, int(set.seatsOf[e]))
						}
					}
				}
			},
		})
	})
}

// However often a replica says that it is idle, no memory is lost to it, and the others are not forgotten.
func TestIdleQueueIsBounded(t *testing.T) {
	b, es := balancerOf(policy.BalancerJoinIdleQueue, 3)
	b.Idled(start, es[1])
	for range 1000 {
		b.Idled(start, es[0])
	}
	b.Idled(start, es[2])
	for _, want := range []*Endpoint{es[1], es[0], es[2]} {
		if picked := pick(t, b, start); picked.Endpoint != want || picked.Class != Ruled {
			t.Errorf("got %s, %v; want %s", picked.Endpoint.ID, picked.Class, want.ID)
		}
	}
	if picked := pick(t, b, start); picked.Class != Fallback {
		t.Errorf("got class %v; want fallback, as all tokens are used", picked.Class)
	}
}

// A request costs the askers and the idle queue no memory.
func TestAskingAllocatesNothing(t *testing.T) {
	for _, rule := range []policy.Balancer{policy.BalancerPrequalSync, policy.BalancerLateBinding, policy.BalancerJoinIdleQueue} {
		b, es := balancerOf(rule, 100)
		targets, answers := make([]*Endpoint, 0, 8), make([]Answer, 0, 8)
		request := func() {
			b.Idled(start, es[7])
			targets, _, _ := b.Inquire(start, Request{Key: 1, Keyed: true}, targets)
			answers := answers
			for i, e := range targets {
				answers = append(answers, Answer{e, known(int32(i), time.Millisecond)})
			}
			picked, _ := b.Choose(start, Request{Key: 1, Keyed: true}, answers)
			picked.Done(start, Succeeded)
		}
		request()
		if n := testing.AllocsPerRun(1000, request); n != 0 {
			t.Errorf("%s: got %v allocations a request; want none", rule, n)
		}
	}
}
