package load

import (
	"math"
	"math/bits"
	"sync"
	"time"
)

// Scaled returns the report of a replica to which a request costs factor times what it costs elsewhere, as it has what the
// request needs at hand (Prequal §4, "Synchronous mode"). A busy replica never looks idle.
func (r Report) Scaled(factor float64) Report {
	r.RIF = int32(math.Ceil(float64(r.RIF)*factor - 1e-9)) // less what floating point may add to a whole number
	r.Latency = time.Duration(float64(r.Latency) * factor)
	return r
}

// Keys remembers the last n different keys that a replica has served. It is safe for concurrent use, takes constant time,
// and allocates nothing once made.
type Keys struct {
	mu sync.Mutex
	// mu guards the fields below.

	entries []keyEntry // entries[0] stands before the newest and after the oldest
	used    int32
	buckets []int32 // by hash, the first entry of a chain; 0: none
	shift   int
}

// keyEntry is part of a ring by age and of the chain of its bucket.
type keyEntry struct {
	key          uint64
	newer, older int32
	next         int32
}

// NewKeys returns an empty memory for n keys.
func NewKeys(n int) *Keys {
	hashBits := bits.Len(uint(max(n, 1)))
	return &Keys{entries: make([]keyEntry, max(n, 0)+1), buckets: make([]int32, 1<<hashBits), shift: 64 - hashBits}
}

// Has reports whether key is among the last n. Asking does not make it any younger.
func (k *Keys) Has(key uint64) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return *k.find(key) != 0
}

// Served notes that a request with a key was served.
func (k *Keys) Served(key uint64) {
	if len(k.entries) == 1 {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	at := *k.find(key)
	if at == 0 {
		at = k.free()
		k.entries[at].key = key
		*k.find(key) = at
	} else {
		k.unlink(at)
	}
	k.link(at)
}

// find returns the link to the entry of a key; 0 is at the chain's end, where the key belongs if it has none.
func (k *Keys) find(key uint64) *int32 {
	const spread = 0x9e3779b97f4a7c15 // 2^64 by the golden ratio: whatever pattern keys have
	link := &k.buckets[key*spread>>k.shift]
	for *link != 0 && k.entries[*link].key != key {
		link = &k.entries[*link].next
	}
	return link
}

// free returns an entry to use: an unused one, or the oldest, which is forgotten.
func (k *Keys) free() int32 {
	if int(k.used) < len(k.entries)-1 {
		k.used++
		return k.used
	}
	oldest := k.entries[0].newer
	*k.find(k.entries[oldest].key) = k.entries[oldest].next
	k.entries[oldest].next = 0
	k.unlink(oldest)
	return oldest
}

func (k *Keys) unlink(at int32) {
	e := &k.entries[at]
	k.entries[e.newer].older = e.older
	k.entries[e.older].newer = e.newer
}

// link makes an entry the newest.
func (k *Keys) link(at int32) {
	newest := k.entries[0].older
	k.entries[at].older, k.entries[at].newer = newest, 0
	k.entries[newest].newer = at
	k.entries[0].older = at
}
