package balancer

import (
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
)

func TestPickAllocatesNothing(t *testing.T) {
	for _, rule := range everyBalancer {
		b, now := warm(rule, 100, 2)
		targets := make([]*Endpoint, 0, 16)
		key := uint64(0)
		request := func() {
			key++
			picked, err := b.Pick(now, Request{Key: mix(key), Keyed: true})
			if err != nil {
				t.Fatal(err)
			}
			for i, e := range picked.Due(targets) {
				b.Probed(now, picked.Shard(), e, known(int32(i), time.Millisecond))
			}
			picked.Responded(now, new(known(1, time.Millisecond)))
			picked.Done(now, Succeeded)
		}
		request() // the ring is built when it is first used
		if n := testing.AllocsPerRun(1000, request); n != 0 {
			t.Errorf("%s: got %v allocations a request; want none", rule, n)
		}
	}
}

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

func TestSameSeedSameChoices(t *testing.T) {
	for _, rule := range everyBalancer {
		a, as := balancerOf(rule, 50)
		b, bs := balancerOf(rule, 50)
		for range 100 {
			if i, j := indexOf(as, pick(t, a, start).Endpoint), indexOf(bs, pick(t, b, start).Endpoint); i != j {
				t.Fatalf("%s: picked %d and %d", rule, i, j)
			}
		}
	}
}

// TestConcurrentUse lets everything happen at once, on a fleet that changes like a window that slides over the replicas:
// the lowest one leaves, a new one joins.
func TestConcurrentUse(t *testing.T) {
	const steps, window = 150, 8
	for _, rule := range everyBalancer {
		t.Run(string(rule), func(t *testing.T) {
			p := policy.Default()
			p.Balancer = rule
			records := replicas(steps + window)
			slices.SortFunc(records, func(a, b registry.Endpoint) int { return a.Address.Compare(b.Address) })
			rank := map[registry.EndpointID]int64{}
			for i, r := range records {
				rank[r.ID()] = int64(i)
			}
			fleet := NewFleet(Place{})
			fleet.Update(time.Now(), records[:window], policy.Scope{})
			b := New(p, fleet, 4, 1)

			var lowest atomic.Int64 // replicas below have left
			var picks atomic.Uint64
			var seen sync.Map // *Endpoint
			done := make(chan struct{})
			running := func() bool {
				select {
				case <-done:
					return false
				default:
					return true
				}
			}
			var wg sync.WaitGroup
			for g := range uint64(4) {
				rng := rand.New(rand.NewPCG(7, g))
				wg.Go(func() {
					var inFlight []Picked
					for n := 0; running() || n < 100; n++ {
						before := lowest.Load()
						picked, err := b.Pick(time.Now(), Request{Key: rng.Uint64N(100), Keyed: rng.IntN(4) > 0})
						if err != nil {
							t.Errorf("pick: %v", err)
							break
						}
						if rank[picked.Endpoint.ID] < before {
							t.Errorf("picked replica %d after those below %d had left", rank[picked.Endpoint.ID], before)
						}
						picks.Add(1)
						seen.Store(picked.Endpoint, true)
						for _, e := range picked.Due(nil) {
							b.Probed(time.Now(), picked.Shard(), e, known(rng.Int32N(5), time.Duration(rng.IntN(50))))
						}
						inFlight = append(inFlight, picked)
						if len(inFlight) > 10 {
							i := rng.IntN(len(inFlight))
							inFlight[i].Responded(time.Now(), new(known(rng.Int32N(5), time.Duration(rng.IntN(50)))))
							inFlight[i].Done(time.Now(), Outcome(rng.IntN(4)))
							inFlight = slices.Delete(inFlight, i, i+1)
						}
					}
					for _, picked := range inFlight {
						picked.Done(time.Now(), Succeeded)
					}
				})
			}
			wg.Go(func() {
				rng := rand.New(rand.NewPCG(7, 99))
				for running() {
					for shard := range b.Shards() {
						b.Idle(time.Now(), shard, nil)
					}
					b.View(time.Now())
					fleet.Each(time.Now(), func(e *Endpoint, _ Avoidance) {
						if rng.IntN(50) == 0 {
							fleet.Decline(time.Now(), e)
						}
						fleet.SetReachable(time.Now(), e.Record().Agent, rng.IntN(2) == 0)
						b.Forget(e)
					})
					runtime.Gosched()
				}
			})
			for i := range steps {
				fleet.Update(time.Now(), records[i+1:i+1+window], policy.Scope{})
				lowest.Store(int64(i + 1))
				runtime.Gosched()
			}
			close(done)
			wg.Wait()

			total := uint64(0)
			seen.Range(func(e, _ any) bool {
				total += e.(*Endpoint).Picks()
				if rif := e.(*Endpoint).RIF(); rif != 0 {
					t.Errorf("%s: got %d in flight at the end; want 0", e.(*Endpoint).ID, rif)
				}
				return true
			})
			if total != picks.Load() || (flights{all: b.inFlight}).total() != 0 {
				t.Errorf("got %d picks, %d in flight; want %d, 0", total, flights{all: b.inFlight}.total(), picks.Load())
			}
		})
	}
}
