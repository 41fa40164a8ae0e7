package balancer

import "slices"

// maglev is hashPicker on a table (Eisenbud et al., "Maglev: A Fast and Reliable Software Network Load Balancer", NSDI
// '16, §3.4): a key hashes to one of the table's points, which the replicas have filled in turn, each by a permutation of
// its own, once a seat and round. So shares are as even as they can be. When a replica leaves or joins, about a hundredth
// of the keys of others move too: where that costs more than uneven shares, choose ring_hash.
//
// When the home is full, the request goes on along the table. The points that follow one belong to random replicas, so a full
// replica's keys spread over all others; and they change as little as all others do when the fleet changes.

// newMaglev fills the table.
func newMaglev(set *Set) *circle {
	size := maglevSize(set.Registered)
	owners := slices.Repeat([]int32{-1}, size)
	walks := make(map[*Endpoint]*maglevWalk, len(set.Endpoints))
	for i, e := range set.Endpoints {
		walks[e] = newMaglevWalk(string(e.ID), int32(i), size)
	}
	turns := make([]*maglevWalk, len(set.seats))
	for i, s := range set.seats {
		turns[i] = walks[s.Endpoint]
	}
	for filled := range size {
		turns[filled%len(turns)].take(owners)
	}
	return newCircle(set, owners, func(key uint64) int { return int(key % uint64(size)) })
}

// maglevSize returns the size of the table for n replicas: a prime of at least 100·n, so that shares are even. As another
// size moves most keys, there are few sizes, and n is that of the replicas registered, not of those that are ready.
func maglevSize(n int) int {
	sizes := [...]int{65_537, 131_101, 262_147, 524_309, 1_048_583, 2_097_169, 4_194_319} // the first primes after powers of two
	for _, size := range sizes {
		if size >= 100*n {
			return size
		}
	}
	return sizes[len(sizes)-1]
}

// maglevWalk is a replica's permutation of the table: from at on in steps of skip.
type maglevWalk struct {
	owner    int32
	at, skip int
}

func newMaglevWalk(id string, owner int32, size int) *maglevWalk {
	offset := hashOf(id)
	skip := mix(offset + 0x9e3779b97f4a7c15)
	return &maglevWalk{owner: owner, at: int(offset % uint64(size)), skip: int(skip%uint64(size-1)) + 1}
}

// take takes the next point that nobody has.
func (w *maglevWalk) take(owners []int32) {
	for owners[w.at] >= 0 {
		w.step(len(owners))
	}
	owners[w.at] = w.owner
	w.step(len(owners))
}

func (w *maglevWalk) step(size int) {
	if w.at += w.skip; w.at >= size {
		w.at -= size
	}
}
