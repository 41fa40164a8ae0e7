package balancer

import (
	"math"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
	"pgregory.net/rapid"
)

func defaults(rule policy.Balancer) policy.Policy {
	p := policy.Default()
	p.Balancer = rule
	return p
}

// ruled returns a balancer of one shard over some replicas, which has seen them, and these by index.
func ruled(p policy.Policy, records []registry.Endpoint) (*Balancer, []*Endpoint) {
	fleet := NewFleet(Place{})
	fleet.Update(start, records, policy.Scope{})
	b := New(p, fleet, 1, 1)
	b.Idle(start, 0, nil)
	return b, fleet.Set(start).Endpoints
}

// weighted returns a weighted round robin without blackout.
func weighted(records []registry.Endpoint) (*Balancer, []*Endpoint) {
	p := defaults(policy.BalancerWeightedRoundRobin)
	p.WRR.Blackout = 0
	return ruled(p, records)
}

// reported lets a response of a replica bring a report.
func reported(b *Balancer, now time.Time, e *Endpoint, r load.Report) {
	Picked{Endpoint: e, shard: b.shards[0], balancer: b}.Responded(now, 0, &r)
}

// shares picks n times and returns how many picks each replica got.
func shares(t testing.TB, b *Balancer, es []*Endpoint, now time.Time, n int) []int {
	t.Helper()
	counts := make([]int, len(es))
	for range n {
		picked := pick(t, b, now)
		counts[indexOf(es, picked.Endpoint)]++
		picked.Done(now, Succeeded)
	}
	return counts
}

// wantShares wants picks in given proportions, within two of each.
func wantShares(t *testing.T, when string, b *Balancer, es []*Endpoint, now time.Time, want ...float64) {
	t.Helper()
	const n = 1000
	sum := 0.0
	for _, w := range want {
		sum += w
	}
	got := shares(t, b, es, now, n)
	for i, w := range want {
		if math.Abs(float64(got[i])-n*w/sum) > 2 {
			t.Errorf("%s: got shares %v; want them as %v", when, got, want)
			return
		}
	}
}

func TestWeightOf(t *testing.T) {
	for _, tt := range []struct {
		name    string
		r       load.Report
		penalty float64
		want    float64
	}{
		{"q/u", load.Report{Rate: 100, Utilization: 0.5}, 0, 200},
		{"q/u, whatever fails", load.Report{Rate: 100, ErrorRate: 50, Utilization: 0.5}, 0, 200},
		{"A58: a fifth as many fail", load.Report{Rate: 100, ErrorRate: 20, Utilization: 0.5}, 1, 100 / 0.7},
		{"A58: more penalty", load.Report{Rate: 100, ErrorRate: 20, Utilization: 0.5}, 2.5, 100},
		{"one that only fails", load.Report{ErrorRate: 20, Utilization: 0.5}, 1, 0},
		{"mean in flight: 1/latency", load.Report{Rate: 100, Utilization: 4}, 0, 1 / 0.040},
	} {
		if got := weightOf(tt.r, tt.penalty); math.Abs(got-tt.want) > 1e-9 {
			t.Errorf("%s: got %v; want %v", tt.name, got, tt.want)
		}
	}
}

// Without reports it is a plain round robin, that starts anywhere.
func TestWeightedWithoutReportsTakesTurns(t *testing.T) {
	firsts := map[int]bool{}
	for seed := range uint64(50) {
		fleet := NewFleet(Place{})
		fleet.Update(start, replicas(7), policy.Scope{})
		b := New(defaults(policy.BalancerWeightedRoundRobin), fleet, 1, seed)
		es := fleet.Set(start).Endpoints
		last := indexOf(es, pick(t, b, start).Endpoint)
		firsts[last] = true
		for range 30 {
			i := indexOf(es, pick(t, b, start).Endpoint)
			if i != (last+1)%7 {
				t.Fatalf("picked %d after %d", i, last)
			}
			last = i
		}
	}
	if len(firsts) != 7 {
		t.Errorf("started at %v; want at each of 7", firsts)
	}
}

// The life of weights under the defaults of A58.
func TestWeightsTakeEffectAndExpire(t *testing.T) {
	b, es := ruled(defaults(policy.BalancerWeightedRoundRobin), replicas(4))
	report := func(now time.Time, rates ...float64) {
		for i, rate := range rates {
			reported(b, now, es[i], load.Report{Rate: rate, Utilization: 1})
		}
	}
	report(start, 100)
	wantShares(t, "blackout", b, es, after(9*time.Second), 1, 1, 1, 1)
	wantShares(t, "fewer than two are known", b, es, after(10*time.Second), 1, 1, 1, 1)
	report(after(10*time.Second), 100, 300)
	wantShares(t, "the second's blackout", b, es, after(19*time.Second), 1, 1, 1, 1)
	wantShares(t, "the others get the mean", b, es, after(20*time.Second), 100, 300, 200, 200)
	report(after(20*time.Second), 100, 100)
	wantShares(t, "before the next update", b, es, after(20900*time.Millisecond), 100, 300, 200, 200)
	wantShares(t, "after it", b, es, after(21*time.Second), 100, 100, 100, 100)
	report(after(22*time.Second), 100, 300)
	wantShares(t, "updated", b, es, after(22*time.Second), 100, 300, 200, 200)
	report(after(3*time.Minute), 100)
	wantShares(t, "the second's is still good", b, es, after(3*time.Minute+21*time.Second), 100, 300, 200, 200)
	wantShares(t, "the second's has expired", b, es, after(3*time.Minute+22*time.Second), 1, 1, 1, 1)
	report(after(4*time.Minute), 100, 300)
	wantShares(t, "a blackout again", b, es, after(4*time.Minute+9*time.Second), 1, 1, 1, 1)
	wantShares(t, "and its end", b, es, after(4*time.Minute+10*time.Second), 100, 300, 200, 200)
}

// A replica that has been away is one that nothing is known of.
func TestWeightsEndWithTheReplica(t *testing.T) {
	b, es := ruled(defaults(policy.BalancerWeightedRoundRobin), replicas(3))
	for i, rate := range []float64{100, 200, 300} {
		reported(b, start, es[i], load.Report{Rate: rate, Utilization: 1})
	}
	wantShares(t, "known", b, es, after(10*time.Second), 1, 2, 3)
	b.fleet.failed(after(10*time.Second), es[2], true) // ejects it for a second
	wantShares(t, "ejected", b, es, after(10*time.Second), 1, 2, 0)
	wantShares(t, "back, with the mean", b, es, after(11*time.Second), 1, 2, 1.5)
	reported(b, after(11*time.Second), es[2], load.Report{Rate: 300, Utilization: 1})
	wantShares(t, "blackout", b, es, after(20*time.Second), 1, 2, 1.5)
	wantShares(t, "known again", b, es, after(21*time.Second), 1, 2, 3)
	// A report that comes after its replica has left is no news.
	b.fleet.Update(after(22*time.Second), replicas(2), policy.Scope{})
	pick(t, b, after(22*time.Second))
	reported(b, after(22*time.Second), es[2], load.Report{Rate: 300, Utilization: 1})
}

func TestReportsWithoutWeightChangeNothing(t *testing.T) {
	b, es := weighted(replicas(2))
	for i, rate := range []float64{100, 300} {
		reported(b, start, es[i], load.Report{Rate: rate, Utilization: 1})
	}
	for _, r := range []load.Report{{}, {RIF: 3}, {Rate: 100}, {Utilization: 0.5}, {ErrorRate: 5}} {
		reported(b, start, es[1], r)
	}
	wantShares(t, "known", b, es, after(time.Second), 1, 3)
}

// However bad a replica is, it is heard of again; however good, it does not get everything.
func TestWeightsAreBounded(t *testing.T) {
	b, es := weighted(replicas(30))
	for i, e := range es {
		r := load.Report{Rate: 100, Utilization: 1}
		switch i {
		case 0:
			r = load.Report{ErrorRate: 100, Utilization: 1}
		case 1:
			r.Rate = 1e6
		}
		reported(b, start, e, r)
	}
	got := shares(t, b, es, after(time.Second), 30_000)
	if got[0] == 0 || got[0] > 300 {
		t.Errorf("the one that fails: got %d of 30000; want a few", got[0])
	}
	if got[1] < 25_000 || got[1] > 29_400 {
		t.Errorf("the great one: got %d of 30000; want most, not all", got[1])
	}
}

// Whatever replicas report, every one of them gets requests.
func TestWeightedBearsAnyReports(t *testing.T) {
	number := rapid.OneOf(rapid.SampledFrom([]float64{0, math.SmallestNonzeroFloat64, 1e6}), rapid.Float64Range(0, 1e6))
	rapid.Check(t, func(t *rapid.T) {
		p := defaults(policy.BalancerWeightedRoundRobin)
		p.WRR.Blackout = 0
		p.WRR.ErrorPenalty = rapid.SampledFrom([]float64{0, 1, 100}).Draw(t, "penalty")
		b, es := ruled(p, replicas(4))
		for _, e := range es {
			reported(b, start, e, load.Report{Rate: number.Draw(t, "rate"), ErrorRate: number.Draw(t, "errors"), Utilization: number.Draw(t, "util")})
		}
		seen := map[*Endpoint]bool{}
		for range 5000 {
			seen[b.mustPick(after(time.Second))] = true
		}
		if len(seen) != 4 {
			t.Fatalf("%d of 4 replicas got requests", len(seen))
		}
	})
}

// Weights that are registered multiply those that are measured.
func TestRegisteredWeightsMultiply(t *testing.T) {
	records := replicas(3)
	records[1].Weight = 3
	b, es := weighted(records)
	wantShares(t, "nothing measured", b, es, start, 1, 3, 1)
	for i, rate := range []float64{100, 100, 200} {
		reported(b, start, es[i], load.Report{Rate: rate, Utilization: 1})
	}
	wantShares(t, "measured", b, es, after(time.Second), 1, 3, 2)
}

// From any moment to any other, whatever the weights and also when they change in between, every replica gets its part of
// each round to within one request.
func TestWeightedIsSmooth(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(2, 40).Draw(t, "replicas")
		b, es := weighted(replicas(n))
		w := b.shards[0].picker.(*weightedRoundRobin)
		got, due := make([]float64, n), make([]float64, n)
		now := start
		for range rapid.IntRange(1, 4).Draw(t, "weights") {
			now = now.Add(time.Second)
			for _, e := range es {
				reported(b, now, e, load.Report{Rate: rapid.Float64Range(1, 1000).Draw(t, "weight"), Utilization: 1})
			}
			for range rapid.IntRange(1, 200).Draw(t, "picks") {
				first := w.next
				i := indexOf(es, b.mustPick(now))
				for j := first; ; j = (j + 1) % n {
					due[j] += w.turns[j].step
					if j == i {
						break
					}
				}
				got[i]++
				for j := range es {
					if math.Abs(got[j]-due[j]) >= 1+1e-9 {
						t.Fatalf("replica %d got %v picks; %v were due", j, got[j], due[j])
					}
				}
			}
		}
	})
}

// mustPick picks, and ends the request.
func (b *Balancer) mustPick(now time.Time) *Endpoint {
	picked, err := b.Pick(now, Request{})
	if err != nil {
		panic(err)
	}
	picked.Done(now, Succeeded)
	return picked.Endpoint
}

// Against the ideal, which gives each replica the same part of any number of picks, none is ever more than a few ahead or
// behind, and the mean is less than one.
func TestWeightedSharesAreIdeal(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(2, 40).Draw(t, "replicas")
		b, es := weighted(replicas(n))
		weights, sum := make([]float64, n), 0.0
		for i, e := range es {
			weights[i] = rapid.Float64Range(1, 10).Draw(t, "weight")
			sum += weights[i]
			reported(b, start, e, load.Report{Rate: weights[i], Utilization: 1})
		}
		got, off := make([]float64, n), 0.0
		const picks = 1000
		for k := range picks {
			got[indexOf(es, b.mustPick(after(time.Second)))]++
			for i := range es {
				d := math.Abs(got[i] - float64(k+1)*weights[i]/sum)
				off += d
				if d > 3 {
					t.Fatalf("after %d picks replica %d got %v; ideal: %v", k+1, i, got[i], float64(k+1)*weights[i]/sum)
				}
			}
		}
		if off /= float64(picks * n); off > 1 {
			t.Fatalf("off by %.2f on average", off)
		}
	})
}

// The light take turns too: they don't all come at once, between many requests in a row for the heavy.
func TestWeightedMixesHeavyAndLight(t *testing.T) {
	b, es := weighted(replicas(21))
	for i, e := range es {
		reported(b, start, e, load.Report{Rate: map[bool]float64{true: 10, false: 1}[i == 0], Utilization: 1})
	}
	row, longest := 0, 0
	for range 3000 {
		if b.mustPick(after(time.Second)) == es[0] {
			row++
		} else {
			row = 0
		}
		longest = max(longest, row)
	}
	if longest > 4 {
		t.Errorf("got %d requests in a row for the heavy; want at most 4, as it gets a third of all", longest)
	}
}

// A replica that gets twice as fast gets twice the requests, once its rates have told.
func TestWeightedFollowsSpeed(t *testing.T) {
	p := defaults(policy.BalancerWeightedRoundRobin)
	b, es := ruled(p, replicas(4))
	latency := []float64{0.1, 0.1, 0.1, 0.1}
	second := func(now time.Time) []int {
		got := shares(t, b, es, now, 400)
		for i, n := range got {
			reported(b, now, es[i], load.Report{Rate: float64(n), Utilization: float64(n) * latency[i]})
		}
		return got
	}
	for s := range 20 {
		second(after(time.Duration(s) * time.Second))
	}
	if got := second(after(20 * time.Second)); got[0] < 99 || got[0] > 101 {
		t.Errorf("all alike: got %v", got)
	}
	latency[0] = 0.05
	second(after(21 * time.Second))
	if got := second(after(22 * time.Second)); got[0] < 159 || got[0] > 161 {
		t.Errorf("the first twice as fast: got %v; want 160, 80, 80, 80", got)
	}
}
