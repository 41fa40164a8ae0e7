package balancer

import (
	"math"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/policy"
	"pgregory.net/rapid"
)

func peakOf(n int) (*Balancer, []*Endpoint, *peakEWMA) {
	b, es := balancerOf(policy.BalancerPeakEWMA, n)
	return b, es, b.shards[0].picker.(*peakEWMA)
}

func failed(b *Balancer, now time.Time, e *Endpoint) {
	e.counter.begin()
	Picked{Endpoint: e, shard: b.shards[0], balancer: b}.Done(now, Abandoned)
	b.shards[0].picker.(Watcher).Failed(now, e)
}

func TestPeakEWMAFollowsLatency(t *testing.T) {
	const tau = 10 * time.Second
	b, es, p := peakOf(1)
	want := func(when string, at time.Duration, want time.Duration) {
		t.Helper()
		p.costs[es[0]].observe(after(at), 0, tau)
		if got := p.costs[es[0]].nanoseconds; math.Abs(got-float64(want)) > 1e-3*float64(want) {
			t.Errorf("%s: got a cost of %v; want %v", when, time.Duration(got), want)
		}
	}
	want("new", 0, 30*ms)
	responded(b, start, es[0], 500*ms)
	want("a peak: up at once", 0, 500*ms)
	responded(b, after(time.Second), es[0], 100*ms)
	want("down slowly", time.Second, 461935*time.Microsecond) // 100 + 400/e^0.1 + (1-e^-0.1)·0
	want("looking is a sample of 0", 11*time.Second, 169936*time.Microsecond)
	failed(b, after(11*time.Second), es[0])
	want("a failure", 11*time.Second, 5*time.Second)
	responded(b, after(11*time.Second), es[0], 9*time.Second)
	failed(b, after(11*time.Second), es[0])
	want("a failure is no better than what was there", 11*time.Second, 9*time.Second)
	failed(b, after(12*time.Second), es[0])
	want("nor later", 12*time.Second, 9*time.Second)
	responded(b, after(10*time.Second), es[0], ms)
	want("a clock that goes back", 12*time.Second, 9*time.Second)
	want("forgotten in the end", 3*time.Hour, 0)
}

// Whatever the samples, the cost is that of the definition, and lies between the sample and the cost before.
func TestPeakEWMAAgreesWithModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const tau = 10 * time.Second
		c := cost{float64(30 * ms), start}
		want, now := float64(30*ms), start
		for range rapid.IntRange(1, 50).Draw(t, "samples") {
			passed := time.Duration(rapid.Int64Range(0, int64(20*time.Second)).Draw(t, "passed"))
			sample := float64(rapid.Int64Range(0, int64(time.Second)).Draw(t, "sample"))
			now = now.Add(passed)
			before := want
			if w := math.Pow(math.E, -passed.Seconds()/10); sample > want {
				want = sample
			} else {
				want = w*want + (1-w)*sample
			}
			c.observe(now, sample, tau)
			if math.Abs(c.nanoseconds-want) > 1e-6*want+1e-6 {
				t.Fatalf("got %v; want %v", c.nanoseconds, want)
			}
			if c.nanoseconds < sample*(1-1e-9) || c.nanoseconds > max(before, sample)*(1+1e-9) {
				t.Fatalf("%v is not between the sample %v and the cost before %v", c.nanoseconds, sample, before)
			}
		}
	})
}

func TestPeakEWMALoads(t *testing.T) {
	type replica struct {
		own    int
		took   time.Duration // 0: never asked
		weight int32
	}
	for _, tt := range []struct {
		name string
		a, b replica
		want int
	}{
		{"the faster", replica{0, 100 * ms, 1}, replica{0, 90 * ms, 1}, 1},
		{"latency times requests in flight: 3·40 against 100", replica{2, 40 * ms, 1}, replica{0, 100 * ms, 1}, 1},
		{"latency times requests in flight: 2·40 against 100", replica{1, 40 * ms, 1}, replica{0, 100 * ms, 1}, 0},
		{"new ones start at 30 ms", replica{0, 0, 1}, replica{0, 40 * ms, 1}, 0},
		{"new ones are not flooded: 2·30 against 40", replica{1, 0, 1}, replica{0, 40 * ms, 1}, 1},
	} {
		b, es, _ := peakOf(2)
		for i, r := range []replica{tt.a, tt.b} {
			hold(es[i], r.own)
			if r.took > 0 {
				responded(b, start, es[i], r.took)
			}
		}
		for range 20 {
			if got := b.mustPick(start); got != es[tt.want] {
				t.Fatalf("%s: picked %s; want %s", tt.name, got.ID, es[tt.want].ID)
			}
		}
	}
}

// A replica of weight 3 bears three times the requests. Of its three seats and the other's one, half of all pairs are two of
// its own.
func TestPeakEWMAHeedsWeights(t *testing.T) {
	for _, tt := range []struct {
		own    int // at the heavy one
		lo, hi int // picks of the light one
	}{{2, 0, 0}, {4, 450, 550}} {
		records := replicas(2)
		records[1].Weight = 3
		b, es := ruled(defaults(policy.BalancerPeakEWMA), records)
		hold(es[0], 1)
		hold(es[1], tt.own)
		if got := shares(t, b, es, start, 1000); got[0] < tt.lo || got[0] > tt.hi {
			t.Errorf("1 in flight at weight 1, %d at weight 3: got shares %v", tt.own, got)
		}
	}
}

// After a night without requests nothing is left of the costs. Each replica is then tried by one request at a time.
func TestPeakEWMAAfterALongPause(t *testing.T) {
	b, es, _ := peakOf(8)
	morning := after(8 * time.Hour)
	slow := pick(t, b, morning).Endpoint
	for i, e := range es {
		if e != slow {
			responded(b, morning, es[i], 50*ms)
		}
	}
	if got := shares(t, b, es, morning, 500); got[indexOf(es, slow)] > 0 {
		t.Errorf("got shares %v; want none for the one that is yet to answer", got)
	}
}

// A replica that fails fast draws no requests, for a while.
func TestPeakEWMAAvoidsFailingReplicas(t *testing.T) {
	b, es, _ := peakOf(4)
	fail, now := 0, start
	for range 2000 {
		now = now.Add(10 * ms)
		picked := pick(t, b, now)
		if picked.Endpoint == es[0] {
			fail++
			responded(b, now, es[0], ms)
			b.shards[0].picker.(Watcher).Failed(now, es[0])
		} else {
			responded(b, now, picked.Endpoint, 50*ms)
		}
		picked.Done(now, Abandoned)
	}
	if fail > 3 {
		t.Errorf("%d of 2000 requests in 20 s went to the one that fails; want a few", fail)
	}
}

// A replica that was slow once is tried again.
func TestPeakEWMAForgives(t *testing.T) {
	b, es, _ := peakOf(4)
	now := start
	answer := func(seconds int) (first int) {
		for range 100 * seconds {
			now = now.Add(10 * ms)
			e := b.mustPick(now)
			responded(b, now, e, 50*ms)
			if e == es[0] {
				first++
			}
		}
		return first
	}
	answer(1)
	responded(b, now, es[0], 2*time.Second)
	if got := answer(10); got > 0 {
		t.Errorf("just after a response of 2 s: got %d of 1000", got)
	}
	answer(30)
	if got := answer(10); got < 200 || got > 300 {
		t.Errorf("half a minute later: got %d of 1000; want a quarter", got)
	}
}

func TestPeakEWMAIgnoresStrangers(t *testing.T) {
	b, es, p := peakOf(3)
	b.fleet.Update(start, replicas(2), policy.Scope{})
	pick(t, b, start) // sees the new fleet
	responded(b, start, es[2], ms)
	failed(b, start, es[2])
	if len(p.costs) != 2 {
		t.Errorf("knows %d replicas; want the two that are there", len(p.costs))
	}
}
