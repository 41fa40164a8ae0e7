package load

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// Those known are the last n different keys served.
func TestKeysAgreeWithModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(0, 8).Draw(t, "n")
		k := NewKeys(n)
		key := rapid.OneOf(rapid.Uint64Range(0, 12), rapid.Map(rapid.Uint64Range(0, 3), func(i uint64) uint64 { return i << 62 }))
		var last []uint64
		t.Repeat(map[string]func(*rapid.T){
			"served": func(t *rapid.T) {
				served := key.Draw(t, "key")
				k.Served(served)
				last = append(slices.DeleteFunc(last, func(o uint64) bool { return o == served }), served)
				last = last[max(0, len(last)-n):]
			},
			"has": func(t *rapid.T) {
				asked := key.Draw(t, "key")
				if got, want := k.Has(asked), slices.Contains(last, asked); got != want {
					t.Fatalf("key %d: got %v; want %v, as the last are %v", asked, got, want, last)
				}
			},
		})
	})
}

func TestKeysAllocateNothing(t *testing.T) {
	k := NewKeys(1024)
	rng := rand.New(rand.NewPCG(1, 2))
	if n := testing.AllocsPerRun(10_000, func() { k.Served(rng.Uint64N(5000)); k.Has(rng.Uint64()) }); n != 0 {
		t.Errorf("got %v allocations a key; want none", n)
	}
}

func TestReportScaled(t *testing.T) {
	for _, tt := range []struct {
		rif     int32
		latency time.Duration
		factor  float64
		wantRIF int32
		want    time.Duration
	}{
		{0, 0, 0.1, 0, 0},
		{1, 50 * time.Millisecond, 0.1, 1, 5 * time.Millisecond}, // busy still
		{20, 50 * time.Millisecond, 0.1, 2, 5 * time.Millisecond},
		{30, time.Second, 0.1, 3, 100 * time.Millisecond},
		{21, time.Second, 0.1, 3, 100 * time.Millisecond},
		{7, time.Second, 1, 7, time.Second},
		{7, time.Second, 0, 0, 0},
	} {
		got := Report{RIF: tt.rif, Latency: tt.latency, Known: true, Rate: 5}.Scaled(tt.factor)
		if want := (Report{RIF: tt.wantRIF, Latency: tt.want, Known: true, Rate: 5}); got != want {
			t.Errorf("%d, %v by %v: got %+v; want %+v", tt.rif, tt.latency, tt.factor, got, want)
		}
	}
}
