package load

import (
	"cmp"
	"math"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

const ms = time.Millisecond

// served is a request that ended some time ago.
type served struct {
	ago     time.Duration
	rif     int32
	latency time.Duration
}

// medianOf returns an estimator that has seen the requests, in the order of their ends.
func medianOf(now time.Duration, requests []served) *median {
	m := new(median)
	slices.SortStableFunc(requests, func(a, b served) int { return cmp.Compare(b.ago, a.ago) })
	for _, r := range requests {
		m.add(now-r.ago, r.rif, r.latency)
	}
	return m
}

func TestEstimate(t *testing.T) {
	for _, tt := range []struct {
		name string
		seen []served
		rif  int32
		want time.Duration // 0: unknown
	}{
		{"nothing seen", nil, 0, 0},
		{"median at the RIF", []served{{0, 4, 10 * ms}, {0, 4, 90 * ms}, {0, 4, 20 * ms}}, 4, 20 * ms},
		{"of an even number the upper", []served{{0, 4, 10 * ms}, {0, 4, 20 * ms}, {0, 4, 30 * ms}, {0, 4, 40 * ms}}, 4, 30 * ms},
		{"enough at the RIF: neighbours don't count",
			[]served{{0, 4, 10 * ms}, {0, 4, 10 * ms}, {0, 4, 10 * ms}, {0, 5, 90 * ms}, {0, 5, 90 * ms}, {0, 5, 90 * ms}, {0, 5, 90 * ms}}, 4, 10 * ms},
		{"too few at the RIF: neighbours count",
			[]served{{0, 4, 10 * ms}, {0, 5, 90 * ms}, {0, 6, 90 * ms}}, 4, 90 * ms},
		{"three away is not near",
			[]served{{0, 4, 10 * ms}, {0, 7, 90 * ms}, {0, 7, 90 * ms}}, 4, 10 * ms},
		{"the nearest neighbours are enough",
			[]served{{0, 4, 30 * ms}, {0, 3, 20 * ms}, {0, 5, 40 * ms}, {0, 6, 900 * ms}, {0, 2, 900 * ms}}, 4, 30 * ms},
		{"the last moments count before older ones",
			[]served{{60 * ms, 4, 90 * ms}, {60 * ms, 4, 90 * ms}, {60 * ms, 4, 90 * ms}, {60 * ms, 4, 90 * ms}, {50 * ms, 4, 10 * ms}, {0, 4, 10 * ms}, {0, 4, 10 * ms}}, 4, 10 * ms},
		{"too few of the last moments: those of the last second",
			[]served{{900 * ms, 4, 30 * ms}, {800 * ms, 4, 30 * ms}, {0, 4, 10 * ms}}, 4, 30 * ms},
		{"time before RIF: near in the last second beats far in the last moments",
			[]served{{900 * ms, 4, 30 * ms}, {0, 100, 10 * ms}, {0, 100, 10 * ms}, {0, 100, 10 * ms}}, 4, 30 * ms},
		{"RIF before age: far in the last second beats near but older",
			[]served{{2 * time.Second, 4, 30 * ms}, {900 * ms, 100, 10 * ms}}, 4, 10 * ms},
		{"far: the nearest",
			[]served{{900 * ms, 100, 50 * ms}, {900 * ms, 30, 10 * ms}, {900 * ms, 1000, 90 * ms}}, 4, 10 * ms},
		{"older: near first",
			[]served{{9 * time.Second, 6, 30 * ms}, {2 * time.Second, 100, 10 * ms}}, 4, 30 * ms},
		{"older and far: better than nothing", []served{{9 * time.Second, MaxRIF, 30 * ms}}, 0, 30 * ms},
		{"half a minute: still known", []served{{forgotten, 4, 30 * ms}}, 4, 30 * ms},
		{"later: forgotten", []served{{forgotten + 1, 4, 30 * ms}}, 4, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			now := 1000 * time.Second
			got, known := medianOf(now, tt.seen).estimate(now, tt.rif)
			if got != tt.want || known != (tt.want != 0) {
				t.Errorf("estimate at RIF %d: got %v, known %v; want %v", tt.rif, got, known, tt.want)
			}
		})
	}
}

func TestEstimateOfInstantRequestsIsKnown(t *testing.T) {
	now := 1000 * time.Second
	if got, known := medianOf(now, []served{{0, 0, 0}}).estimate(now, 0); got != 0 || !known {
		t.Errorf("got %v, known %v; want a known latency of 0", got, known)
	}
}

func TestEstimateKeepsTheLastSamplesOfARIF(t *testing.T) {
	now := 1000 * time.Second
	seen := slices.Repeat([]served{{40 * ms, 4, 90 * ms}}, 1000)
	seen = append(seen, slices.Repeat([]served{{0, 4, 10 * ms}}, ringSize)...)
	if got, _ := medianOf(now, seen).estimate(now, 4); got != 10*ms {
		t.Errorf("got %v; want the latency of the last %d, 10ms", got, ringSize)
	}
}

// Whatever was seen in whichever order, the estimate is a latency that was seen in the last half minute, and there is
// one exactly if anything was seen in that time.
func TestEstimateIsOneOfTheRecentLatencies(t *testing.T) {
	rifs := rapid.OneOf(rapid.Int32Range(0, 20), rapid.Int32Range(0, MaxRIF), rapid.Int32())
	rapid.Check(t, func(t *rapid.T) {
		now := 1000 * time.Second
		e := new(median)
		latencies := map[time.Duration]time.Duration{} // all different, by the time when they were seen
		for i := range rapid.IntRange(0, 60).Draw(t, "requests") {
			now += time.Duration(rapid.IntRange(0, 3000).Draw(t, "later")) * ms
			latency := time.Duration(i+1) * ms
			e.add(now, rifs.Draw(t, "rif"), latency)
			latencies[latency] = now
		}
		now += time.Duration(rapid.IntRange(0, 12000).Draw(t, "asked")) * ms

		anyRecent := false
		for _, at := range latencies {
			anyRecent = anyRecent || now-at <= forgotten
		}
		got, known := e.estimate(now, rifs.Draw(t, "asked at"))
		if known != anyRecent {
			t.Fatalf("known: %v, though seen in the last %v: %v", known, forgotten, anyRecent)
		}
		if at, seen := latencies[got]; known && (!seen || now-at > forgotten) {
			t.Fatalf("estimate %v was not seen lately", got)
		}
	})
}

func TestBucketsAreMonotoneAndBounded(t *testing.T) {
	if got := bucketOf(math.MinInt32); got != 0 {
		t.Errorf("bucket of the lowest RIF: got %d; want 0", got)
	}
	last := 0
	for rif := int32(-2); rif < MaxRIF+2; rif++ {
		b := bucketOf(rif)
		if b != last && b != last+1 {
			t.Fatalf("bucket of RIF %d: got %d; want %d or the next", rif, b, last)
		}
		last = b
	}
	if last != bucketCount-1 || bucketOf(math.MaxInt32) != last {
		t.Errorf("last buckets: got %d and %d; want %d", last, bucketOf(math.MaxInt32), bucketCount-1)
	}
}

func TestBucketsAreNarrow(t *testing.T) {
	lowest := map[int]int32{}
	for rif := range int32(MaxRIF) {
		low, seen := lowest[bucketOf(rif)]
		if !seen {
			lowest[bucketOf(rif)] = rif
		} else if 4*(rif-low) > low {
			t.Fatalf("RIF %d shares a bucket with %d: more than a quarter apart", rif, low)
		}
	}
}
