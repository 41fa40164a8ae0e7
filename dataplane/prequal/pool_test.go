package prequal

import (
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/policy"
	"pgregory.net/rapid"
)

// TestReuseBudget checks Eq. 1 against the parameters of the paper's experiments.
func TestReuseBudget(t *testing.T) {
	for _, tt := range []struct {
		name                    string
		probes, removals, delta float64
		m, n                    int
		want                    float64
	}{
		{"baseline, §5", 3, 1, 1, 16, 100, 1.32},
		{"probe rates, §5.3", 4, 0.25, 1, 16, 100, 1},
		{"probe rates, §5.3", 2 * math.Sqrt2, 0.25, 1, 16, 100, 1},
		{"probe rates, §5.3", 2, 0.25, 1, 16, 100, 1.40},
		{"probe rates, §5.3", math.Sqrt2, 0.25, 1, 16, 100, 2.13},
		{"probe rates, §5.3", 1, 0.25, 1, 16, 100, 3.39},
		{"probe rates, §5.3", math.Sqrt(0.5), 0.25, 1, 16, 100, 5.81},
		{"probe rates, §5.3", 0.5, 0.25, 1, 16, 100, 11.76},
		{"the smallest fleet for a pool of 16", 3, 1, 1, 16, 32, 4},
		{"a denominator of 0", 3, 1, 1, 16, 24, maxReuse},
		{"a negative denominator", 3, 1, 1, 16, 16, maxReuse},
		{"a tiny denominator", 3, 1.49, 1, 16, 32, maxReuse},
		{"no probes", 0, 1, 1, 16, 100, maxReuse},
		{"no replicas", 3, 1, 1, 2, 0, maxReuse},
	} {
		cfg := policy.Prequal{ProbesPerRequest: tt.probes, RemovalsPerRequest: tt.removals, Delta: tt.delta}
		if got := reuseBudget(cfg, tt.m, tt.n); math.Abs(got-tt.want) > 0.005 {
			t.Errorf("%s: r_probe %.2f, r_remove %v, m %d, n %d: got b_reuse %.3f; want %v",
				tt.name, tt.probes, tt.removals, tt.m, tt.n, got, tt.want)
		}
	}
}

func TestRoundRandomlyKeepsTheExpectation(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	for _, x := range []float64{1, 1.32, 2.5, 5.81, 11.76, 16} {
		const draws = 100_000
		sum := 0
		for range draws {
			got := roundRandomly(x, rng)
			if float64(got) != math.Floor(x) && float64(got) != math.Ceil(x) {
				t.Fatalf("%v was rounded to %d", x, got)
			}
			sum += got
		}
		// The mean varies by at most 0.5/√100000 = 0.0016.
		if mean := float64(sum) / draws; math.Abs(mean-x) > 0.008 {
			t.Errorf("%v was rounded to %v on average", x, mean)
		}
	}
}

// A pooled probe gets b_reuse uses on average, one of the two whole numbers next to it each time.
func TestProbesAreUsedAsOftenAsEquation1Says(t *testing.T) {
	const draws = 20_000
	p := New[int](published(), time.Time{}, rand.New(rand.NewPCG(1, 1)), nil, nil)
	p.Resize(100, func(int) bool { return true })
	got := map[int32]int{}
	for i := range draws {
		p.Add(time.Time{}, i, load.Report{})
		got[p.entries[p.find(i)].uses]++
	}
	// 2/1.52 = 1.3158; the share of twos varies by at most 0.5/√20000 = 0.0035.
	if twos := float64(got[2]) / draws; got[1]+got[2] != draws || math.Abs(twos-0.3158) > 0.015 {
		t.Errorf("got uses %v; want 1 or 2, 1.3158 on average", got)
	}
}

// A pool that goes by a score uses the lowest and removes the highest, whatever is hot; in all else it is the same.
func TestScoredPool(t *testing.T) {
	cfg := published()
	cfg.ProbesPerRequest = 16 // so many that a probe is used once
	now := time.Unix(1000, 0)
	score := func(key string, rif, latency float64) float64 { return 100*rif + latency }
	p := New(cfg, now, rand.New(rand.NewPCG(1, 1)), func(string) int32 { return 2 }, score)
	p.Resize(100, func(string) bool { return true })
	for i, r := range []load.Report{
		{RIF: 4, Latency: 70, Known: true}, // a: 2·100 + 70
		{RIF: 2, Latency: 90, Known: true}, // b: 1·100 + 90
		{RIF: 8, Latency: 10, Known: true}, // c: 4·100 + 10
		{RIF: 0},                           // d: as fast as the fastest, as it is idle: 0·100 + 10
		{RIF: 2},                           // e: slower than all, as it is busy and nothing is known
		{RIF: 2, Latency: 80, Known: true}, // f: 1·100 + 80
	} {
		p.Add(now.Add(time.Duration(i)), string(rune('a'+i)), r)
	}
	if _, ok := p.Threshold(); ok {
		t.Error("there is a threshold")
	}
	for _, want := range []struct{ chosen, left string }{{"d", "bcef"}, {"f", "bc"}} { // the oldest goes, a; then the worst, e
		key, class, ok := p.Select(now)
		left := keys(p)
		slices.Sort(left)
		if key != want.chosen || strings.Join(left, "") != want.left || class != Cold || !ok {
			t.Errorf("got %q, class %d, %v, left %v; want %+v", key, class, ok, left, want)
		}
	}
}

// The number of probes sent is never a whole one away from r_probe times the requests.
func TestProbeRateHolds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rate := rapid.Float64Range(0, 16).Draw(t, "r_probe")
		p := New[int](policy.Prequal{ProbesPerRequest: rate}, time.Time{}, nil, nil, nil)
		sent := 0
		for requests := range 1000 {
			sent += p.ProbesDue()
			if want := rate * float64(requests+1); math.Abs(float64(sent)-want) >= 1+1e-9 {
				t.Fatalf("after %d requests: %d probes; want %v", requests+1, sent, want)
			}
		}
	})
}

// The same holds for removals, as long as there is something to remove.
func TestRemovalRateHolds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rate := rapid.Float64Range(0, 8).Draw(t, "r_remove")
		cfg := policy.Prequal{PoolSize: 256, RemovalsPerRequest: rate, MaxAge: time.Hour, QRIF: 0.84}
		now := time.Unix(1000, 0)
		p := New[int](cfg, now, rand.New(rand.NewPCG(1, 1)), nil, nil)
		p.Resize(1000, func(int) bool { return true })
		removed := 0
		for requests := range 200 {
			for key := range 20 {
				p.Add(now, key, load.Report{RIF: 1, Latency: time.Millisecond, Known: true})
			}
			before := len(p.entries)
			p.Select(now)
			removed += before - len(p.entries)
			if want := rate * float64(requests+1); math.Abs(float64(removed)-want) >= 1+1e-9 {
				t.Fatalf("after %d requests: %d removals; want %v", requests+1, removed, want)
			}
		}
	})
}

func TestPoolAllocatesNothing(t *testing.T) {
	now := time.Unix(1000, 0)
	p := New[int](published(), now, rand.New(rand.NewPCG(1, 1)), nil, nil)
	p.Resize(100, func(int) bool { return true })
	key := 0
	request := func() {
		now = now.Add(time.Millisecond)
		for range p.ProbesDue() {
			key = (key + 1) % 100
			p.Add(now, key, load.Report{RIF: int32(key % 7), Latency: time.Duration(key) * time.Millisecond, Known: true})
		}
		chosen, _, _ := p.Select(now)
		p.Refresh(now, chosen, load.Report{RIF: 3})
	}
	if n := testing.AllocsPerRun(1000, request); n != 0 {
		t.Errorf("got %v allocations a request; want none", n)
	}
}

// TestPoolAgreesWithModel plays random lives of a pool and checks every step against a model that follows the paper
// with no regard for cost.
func TestPoolAgreesWithModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := policy.Prequal{
			PoolSize:           rapid.IntRange(2, 8).Draw(t, "m"),
			ProbesPerRequest:   float64(rapid.IntRange(0, 32).Draw(t, "r_probe in eighths")) / 8,
			RemovalsPerRequest: float64(rapid.IntRange(0, 20).Draw(t, "r_remove in eighths")) / 8,
			Delta:              rapid.Float64Range(0.1, 4).Draw(t, "delta"),
			MaxAge:             time.Second,
			QRIF:               rapid.SampledFrom([]float64{0, 0.3, 0.5, 0.84, 0.999, 1}).Draw(t, "q_rif"),
		}
		now := time.Unix(1000, 0)
		p := New[string](cfg, now, rand.New(rand.NewPCG(1, rapid.Uint64().Draw(t, "seed"))), nil, nil)
		m := &model{cfg: cfg}
		resize := func(n int, gone ...string) {
			p.Resize(n, func(k string) bool { return !in(k, gone) })
			m.resize(n, gone)
		}
		resize(100)
		key := rapid.SampledFrom([]string{"a", "b", "c", "d", "e", "f", "g", "h", "i", "j"})
		report := rapid.Custom(func(t *rapid.T) load.Report {
			r := load.Report{RIF: rapid.Int32Range(0, 6).Draw(t, "rif"), Known: rapid.IntRange(0, 4).Draw(t, "known") > 0}
			if r.Known {
				r.Latency = time.Duration(rapid.IntRange(0, 4).Draw(t, "latency"))
			}
			return r
		})
		t.Repeat(map[string]func(*rapid.T){
			"probe": func(t *rapid.T) {
				k, r := key.Draw(t, "key"), report.Draw(t, "report")
				p.Add(now, k, r)
				m.add(now, k, r, usesOf(p, k))
			},
			"probe more": func(t *rapid.T) {
				for range 4 {
					now = now.Add(time.Microsecond)
					k, r := key.Draw(t, "key"), report.Draw(t, "report")
					p.Add(now, k, r)
					m.add(now, k, r, usesOf(p, k))
				}
			},
			"report": func(t *rapid.T) {
				k, r := key.Draw(t, "key"), report.Draw(t, "report")
				p.Refresh(now, k, r)
				m.refresh(now, k, r, usesOf(p, k))
			},
			"select": func(t *rapid.T) {
				k, class, ok := p.Select(now)
				if err := m.selected(now, k, class, ok, keys(p)); err != "" {
					t.Fatalf("Select: got %q, class %d, %v, left %v: %s\nmodel: %+v", k, class, ok, keys(p), err, m)
				}
			},
			"forget": func(t *rapid.T) {
				k := key.Draw(t, "key")
				p.Forget(k)
				m.entries = without(m.entries, k)
			},
			"resize": func(t *rapid.T) {
				resize(rapid.IntRange(1, 40).Draw(t, "n"), key.Draw(t, "gone"), key.Draw(t, "gone too"))
			},
			"": func(t *rapid.T) {
				// Receipt times differ, so that "the oldest" is one.
				now = now.Add(time.Duration(rapid.Int64Range(1, int64(300*time.Millisecond)).Draw(t, "later")))
				if err := m.compare(p); err != "" {
					t.Fatalf("%s\npool: %+v\nmodel: %+v", err, p.entries, m.entries)
				}
			},
		})
	})
}

// What a pool knows of a replica is fresh for half of what a request takes there.
func TestFresh(t *testing.T) {
	now := time.Unix(1000, 0)
	p := New[string](published(), now, rand.New(rand.NewPCG(1, 1)), nil, nil)
	p.Resize(4, func(string) bool { return true })
	p.Add(now, "known", load.Report{Latency: 20 * time.Millisecond, Known: true})
	p.Add(now, "unknown", load.Report{})
	for _, tt := range []struct {
		key  string
		age  time.Duration
		want bool
	}{
		{"known", 0, true},
		{"known", 10*time.Millisecond - 1, true},
		{"known", 10 * time.Millisecond, false},
		{"unknown", 0, false},
		{"absent", 0, false},
	} {
		if got := p.Fresh(now.Add(tt.age), tt.key); got != tt.want {
			t.Errorf("%s after %v: got %v", tt.key, tt.age, got)
		}
	}
}

// usesOf tells the model how the random rounding of the reuse budget went.
func usesOf(p *Pool[string], key string) int {
	if i := p.find(key); i >= 0 {
		return int(p.entries[i].uses)
	}
	return 0
}

// published returns the parameters of the paper.
func published() policy.Prequal {
	cfg := policy.Default().Prequal
	cfg.ProbesPerRequest, cfg.RemovalsPerRequest, cfg.QRIF = 3, 1, 0.84
	cfg.Latency = policy.LatencyMedian
	return cfg
}

// Where latencies are those to expect at the present RIF, a request makes the next one expect more, by what it adds to the
// share of the load that the probe stands for.
func TestRequestsRaiseExpectedLatency(t *testing.T) {
	for _, tt := range []struct {
		estimate    policy.LatencyEstimate
		rif, weight int32
		want        time.Duration
	}{
		{policy.LatencyMean, 0, 1, 200},
		{policy.LatencyMean, 3, 1, 125},
		{policy.LatencyMean, 3, 3, 150},
		{policy.LatencyMedian, 3, 1, 100},
	} {
		cfg := published()
		cfg.Latency = tt.estimate
		now := time.Unix(1000, 0)
		p := New(cfg, now, rand.New(rand.NewPCG(1, 1)), func(int) int32 { return tt.weight }, nil)
		p.Resize(100, func(int) bool { return true })
		p.Add(now, 1, load.Report{RIF: tt.rif, Latency: 100, Known: true})
		p.Charge(1)
		p.Probes(now, func(got Probe[int]) {
			if got.Report.Latency != tt.want || got.Report.RIF != tt.rif+1 {
				t.Errorf("%+v: got %v; want a latency of %d", tt, got.Report, tt.want)
			}
		})
	}
}
