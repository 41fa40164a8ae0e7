package prequal

import (
	"testing"

	"pgregory.net/rapid"
)

// The history is the last values, and its quantile the smallest of them that at least a share of q does not exceed.
func TestHistoryQuantile(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(0, 3*historySize).Draw(t, "values")
		values := rapid.SliceOfN(rapid.OneOf(rapid.Int32Range(0, 5), rapid.Int32Range(0, 1<<20)), n, n).Draw(t, "values")
		q := rapid.Float64Range(0, 1).Draw(t, "q")
		var h history
		for _, v := range values {
			h.add(float64(v))
		}
		got, ok := h.quantile(q)
		last := values[max(0, len(values)-historySize):]
		want, wantOK := plainQuantile(last, q)
		if got != float64(want) || ok != wantOK {
			t.Fatalf("quantile %v of %v: got %v, %v; want %v, %v", q, last, got, ok, want, wantOK)
		}
	})
}

func plainQuantile(values []int32, q float64) (smallest int32, ok bool) {
	for _, v := range values {
		atMost := 0
		for _, o := range values {
			if o <= v {
				atMost++
			}
		}
		if float64(atMost) >= q*float64(len(values)) && (!ok || v < smallest) {
			smallest, ok = v, true
		}
	}
	return smallest, ok
}

func TestHistoryForgetsTheOldest(t *testing.T) {
	var h history
	for i := range int32(3 * historySize) {
		h.add(float64(1000 - i))
		if got, _ := h.quantile(1); got != float64(1000-max(0, i+1-historySize)) {
			t.Fatalf("highest of the last %d values after %d: got %v", historySize, i+1, got)
		}
	}
}

func TestHistoryQuantileOfKnownValues(t *testing.T) {
	var h history
	if _, ok := h.quantile(0.5); ok {
		t.Error("an empty history has a quantile")
	}
	for rif := range int32(100) {
		h.add(float64(rif + 1))
	}
	for q, want := range map[float64]float64{0: 1, 0.001: 1, 0.5: 50, 0.84: 84, 0.841: 85, 0.999: 100, 1: 100} {
		if got, _ := h.quantile(q); got != want {
			t.Errorf("quantile %v of 1 to 100: got %v; want %v", q, got, want)
		}
	}
}
