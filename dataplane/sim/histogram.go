package sim

import "math/bits"

// histogram counts values that are not negative. Values below 512 are kept exactly, others to one part in 512 at worst:
// each octave is divided into 256 buckets, and a bucket counts for its middle.
type histogram struct {
	counts []uint64
	total  uint64
	sum    float64
	max    int64
}

const octaveBits = 8

func bucketOf(v int64) int {
	if v < 2<<octaveBits {
		return int(max(v, 0))
	}
	shift := bits.Len64(uint64(v)) - octaveBits - 1
	return shift<<octaveBits + int(v>>shift)
}

// middle returns the value that bucket i counts for.
func middle(i int) int64 {
	if i < 2<<octaveBits {
		return int64(i)
	}
	shift := i>>octaveBits - 1
	low := int64(i-shift<<octaveBits) << shift
	return low + int64(1)<<shift/2
}

func (h *histogram) add(v int64) {
	i := bucketOf(v)
	if i >= len(h.counts) {
		h.counts = append(h.counts, make([]uint64, i+1-len(h.counts))...)
	}
	h.counts[i]++
	h.total++
	h.sum += float64(v)
	h.max = max(h.max, v)
}

func (h *histogram) reset() {
	clear(h.counts)
	h.total, h.sum, h.max = 0, 0, 0
}

// quantile returns the least value that at least the part q of all values do not exceed; 0 if there are none.
func (h *histogram) quantile(q float64) int64 {
	rank := max(1, uint64(q*float64(h.total)+0.999999))
	seen := uint64(0)
	for i, n := range h.counts {
		if seen += n; seen >= rank {
			return min(middle(i), h.max)
		}
	}
	return 0
}

func (h *histogram) mean() float64 {
	if h.total == 0 {
		return 0
	}
	return h.sum / float64(h.total)
}
