package balancer

import (
	"cmp"
	"math/bits"
	"slices"
)

// ring_hash is hashPicker on a ring: every replica stands at many points of the circle of hashes, and owns the keys from
// the point before each of them. If a replica leaves, only its own keys move; if one joins, only those that it takes over.
// Choose it over maglev where moved keys cost more than uneven shares.

const (
	// pointsPerWeight is how often a replica of weight 1 stands on the ring. It doesn't depend on the rest of the fleet, so
	// that a change of the fleet moves only what it must. With 128 points most shares are within 10 % of what the
	// weights say, all within 40 %.
	pointsPerWeight = 128
	// A ring that would have more points than this, and more than pointsPerWeight a replica, has half of them, a quarter and
	// so on. That only happens with large weights.
	mostPoints = 1 << 18
)

type ring struct {
	hashes []uint64 // of the points, sorted
	starts []int32  // for every value of a hash's top bits, the first point at or after it
	shift  int
}

func newRing(set *Set) *circle {
	points := ringPoints(set.Endpoints)
	// As hashes are evenly spread, about as many slots as points leave a point or two in each: sorting and finding them
	// takes no more than a look at those.
	slotBits := bits.Len(uint(len(points)))
	r := &ring{starts: make([]int32, 1<<slotBits+1), shift: 64 - slotBits}
	points = r.sorted(points)
	owners := make([]int32, len(points))
	r.hashes = make([]uint64, len(points))
	for i, p := range points {
		r.hashes[i], owners[i] = p.hash, p.owner
	}
	return newCircle(set, owners, r.find)
}

type point struct {
	hash  uint64
	owner int32
}

func ringPoints(endpoints []*Endpoint) []point {
	total := int64(0)
	for _, e := range endpoints {
		total += pointsPerWeight * int64(e.weight())
	}
	halvings := 0
	for total>>halvings > max(mostPoints, int64(pointsPerWeight*len(endpoints))) {
		halvings++
	}
	points := make([]point, 0, total>>halvings+int64(len(endpoints)))
	for i, e := range endpoints {
		n := pointsPerWeight * int64(e.weight()) >> halvings
		for _, h := range pointsOf(string(e.ID), max(int(n), 1)) {
			points = append(points, point{h, int32(i)})
		}
	}
	return points
}

// pointsOf returns the hashes of an endpoint's first n points.
func pointsOf(id string, n int) []uint64 {
	seed := hashOf(id)
	points := make([]uint64, n)
	for i := range points {
		points[i] = mix(seed + uint64(i)*0x9e3779b97f4a7c15)
	}
	return points
}

// sorted sorts points into slots, and those of each slot.
func (r *ring) sorted(points []point) []point {
	for _, p := range points {
		r.starts[p.hash>>r.shift+1]++
	}
	for slot := range len(r.starts) - 1 {
		r.starts[slot+1] += r.starts[slot]
	}
	next := slices.Clone(r.starts)
	sorted := make([]point, len(points))
	for _, p := range points {
		slot := p.hash >> r.shift
		sorted[next[slot]] = p
		next[slot]++
	}
	for slot := range len(r.starts) - 1 {
		slices.SortFunc(sorted[r.starts[slot]:r.starts[slot+1]], func(a, b point) int {
			return cmp.Or(cmp.Compare(a.hash, b.hash), cmp.Compare(a.owner, b.owner))
		})
	}
	return sorted
}

// find returns the index of the point that owns a key.
func (r *ring) find(key uint64) int {
	i := int(r.starts[key>>r.shift])
	for i < len(r.hashes) && r.hashes[i] < key {
		i++
	}
	if i == len(r.hashes) {
		return 0
	}
	return i
}
