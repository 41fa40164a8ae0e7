package sim

import (
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

func TestQuantilesAreClose(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		values := rapid.SliceOfN(rapid.OneOf(rapid.Int64Range(0, 600), rapid.Int64Range(0, 1<<50)), 1, 200).Draw(t, "values")
		var h histogram
		sum := 0.0
		for _, v := range values {
			h.add(v)
			sum += float64(v)
		}
		slices.Sort(values)
		q := rapid.Float64Range(0, 1).Draw(t, "quantile")
		want := values[max(0, int(math.Ceil(q*float64(len(values))-1e-6))-1)]
		if got := h.quantile(q); math.Abs(float64(got-want)) > float64(want)/500 {
			t.Fatalf("quantile %v: got %d, want %d", q, got, want)
		}
		if h.max != values[len(values)-1] || math.Abs(h.mean()-sum/float64(len(values))) > 1 {
			t.Fatalf("got maximum %d and mean %v of %v", h.max, h.mean(), values)
		}
	})
}

func TestSmallValuesAreExact(t *testing.T) {
	for v := range int64(512) {
		var h histogram
		h.add(v)
		h.add(1 << 40)
		if got := h.quantile(0.5); got != v {
			t.Errorf("got %d, want %d", got, v)
		}
	}
}

func TestNothingHasNoQuantiles(t *testing.T) {
	var h histogram
	h.add(5)
	h.reset()
	if h.quantile(0.99) != 0 || h.mean() != 0 || h.max != 0 {
		t.Errorf("got p99 %d, mean %v, maximum %d; want 0", h.quantile(0.99), h.mean(), h.max)
	}
}
