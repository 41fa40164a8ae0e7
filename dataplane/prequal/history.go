package prequal

import (
	"math"
	"slices"
)

// historySize is the number of recent probe answers from which the distribution of RIF across replicas is estimated.
// The paper gives no window.
const historySize = 128

// history estimates that distribution. It is kept apart from the pool: a quantile of the pool's own entries would always
// leave one of them cold, and the rule for an all-hot pool could never apply.
type history struct {
	ring   [historySize]float64
	sorted [historySize]float64
	n      int
	next   int
}

// add takes in one value, in place of the oldest once the history is full.
func (h *history) add(rif float64) {
	s := h.sorted[:h.n]
	if h.n == historySize {
		i, _ := slices.BinarySearch(s, h.ring[h.next])
		s = slices.Delete(s, i, i+1)
		h.n--
	}
	i, _ := slices.BinarySearch(s, rif)
	copy(h.sorted[i+1:h.n+1], h.sorted[i:h.n])
	h.sorted[i] = rif
	h.n++
	h.ring[h.next] = rif
	h.next = (h.next + 1) % historySize
}

// quantile returns the smallest value that at least a share of q of the history does not exceed.
func (h *history) quantile(q float64) (float64, bool) {
	if h.n == 0 {
		return 0, false
	}
	i := int(math.Ceil(q*float64(h.n))) - 1
	return h.sorted[max(i, 0)], true
}
