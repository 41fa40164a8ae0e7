package load

import (
	"math/bits"
	"slices"
	"time"
)

// median answers: how long would a request take that arrives while rif others are in flight? It returns the median of
// recent samples whose tag, the RIF at arrival, is at or near the RIF asked for (Prequal §4). The paper leaves open what
// "recent" and "near" mean; here the search widens, first in time, then in RIF, until it has found something. Both
// operations take constant time. The times that it is told don't go back.
type median struct {
	// Buckets are allocated when first used: most replicas only ever see a few RIF values.
	buckets [bucketCount]*bucket
}

const (
	// At moderate and high rates only requests of the last few hundredths of a second count (§4).
	recent = 50 * time.Millisecond
	// At low rates there may be no such request; an older one is better than none.
	stale = time.Second
	// After this, nothing is known: a replica that was slow once gets another chance, which costs one request. With an
	// eighth of a fleet slow, that is one request in 5,000 at 20 a second and replica.
	forgotten = 30 * time.Second

	enough    = 3  // recent samples that make a median worth having
	near      = 2  // buckets to each side that count as near
	ringSize  = 16 // samples kept a bucket
	exactRIF  = 16 // RIF values below this have a bucket of their own
	perOctave = 4  // above, buckets an octave
)

const bucketCount = exactRIF + (20-4)*perOctave + 1 // up to MaxRIF = 2^20

// bucket is a ring of the latest samples.
type bucket struct {
	samples [ringSize]sample
	n, next int
}

type sample struct {
	at      time.Duration
	latency time.Duration
}

// bucketOf maps a RIF to its bucket: exact for small values, then logarithmic.
func bucketOf(rif int32) int {
	if rif < exactRIF {
		return int(max(rif, 0))
	}
	v := uint32(min(rif, MaxRIF))
	octave := bits.Len32(v) - 1 // 4 for 16..31
	return exactRIF + (octave-4)*perOctave + int(v>>(octave-2))&(perOctave-1)
}

func (m *median) add(now time.Duration, rif int32, latency time.Duration) {
	i := bucketOf(rif)
	if m.buckets[i] == nil {
		m.buckets[i] = new(bucket)
	}
	b := m.buckets[i]
	b.samples[b.next] = sample{now, latency}
	b.n = min(b.n+1, ringSize)
	b.next = (b.next + 1) % ringSize
}

// estimate returns the latency to expect, and whether anything is known.
func (m *median) estimate(now time.Duration, rif int32) (time.Duration, bool) {
	steps := [...]struct {
		window time.Duration
		reach  int
		want   int
	}{
		{recent, near, enough},
		{stale, near, 1},
		{stale, bucketCount, 1},
		{forgotten, near, 1},
		{forgotten, bucketCount, 1},
	}
	center := bucketOf(rif)
	for _, s := range steps {
		if median, ok := m.search(now-s.window, center, s.reach, s.want); ok {
			return median, true
		}
	}
	return 0, false
}

// search returns the median of the samples since the given time in the bucket at center; if there are fewer than want,
// of those in the buckets up to reach away too, the nearest first.
func (m *median) search(since time.Duration, center, reach, want int) (time.Duration, bool) {
	var found [3 * ringSize]time.Duration
	n := 0
	for d := 0; d <= reach && n < want; d++ {
		n += m.collect(found[n:], since, center-d)
		if d > 0 {
			n += m.collect(found[n:], since, center+d)
		}
	}
	if n < want {
		return 0, false
	}
	slices.Sort(found[:n])
	return found[n/2], true
}

// collect copies the latencies of bucket i since the given time, the newest first, and returns how many there were.
func (m *median) collect(dst []time.Duration, since time.Duration, i int) int {
	if i < 0 || i >= bucketCount || m.buckets[i] == nil {
		return 0
	}
	b := m.buckets[i]
	for n := range b.n {
		s := b.samples[(b.next+ringSize-1-n)%ringSize]
		if s.at < since {
			return n
		}
		dst[n] = s.latency
	}
	return b.n
}
