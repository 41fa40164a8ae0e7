package balancer

import (
	"iter"
	"math/big"
	"slices"
	"testing"

	"github.com/headroom-mesh/headroom/registry"
)

// tableOrder fills a table as the paper says, replica by replica from whole permutations, and reads it from the key on.
func tableOrder(records []registry.Endpoint) func(key uint64) iter.Seq[registry.EndpointID] {
	const size = 65_537
	set := setOf(records)
	table := make([]registry.EndpointID, size)
	permutation := map[registry.EndpointID][]int{}
	for _, e := range set.Endpoints {
		w := newMaglevWalk(string(e.ID), 0, size)
		points := make([]int, size)
		for j := range points {
			points[j] = (w.at + j*w.skip) % size
		}
		permutation[e.ID] = points
	}
	for filled := range size {
		id := set.seats[filled%len(set.seats)].ID
		for table[permutation[id][0]] != "" {
			permutation[id] = permutation[id][1:]
		}
		table[permutation[id][0]] = id
	}
	return func(key uint64) iter.Seq[registry.EndpointID] {
		return func(yield func(registry.EndpointID) bool) {
			for i := range size {
				if !yield(table[(int(key%size)+i)%size]) {
					return
				}
			}
		}
	}
}

func TestMaglevSizes(t *testing.T) {
	for n := range 41_943 {
		if size := maglevSize(n); size < 100*n || n%1000 == 0 && !big.NewInt(int64(size)).ProbablyPrime(20) {
			t.Fatalf("%d replicas: got a table of %d; want a prime of at least a hundred times as many", n, size)
		}
	}
	if maglevSize(655) != maglevSize(1) || maglevSize(1<<30) < 1<<22 {
		t.Error("small fleets want one size, and the largest the largest")
	}
}

func maglevOwners(records []registry.Endpoint) []registry.EndpointID {
	set := setOf(records)
	var ids []registry.EndpointID
	for _, o := range newMaglev(set).owners {
		ids = append(ids, set.Endpoints[o].ID)
	}
	return ids
}

func TestMaglevSharesAreEven(t *testing.T) {
	for _, n := range []int{1, 2, 10, 100, 1000} {
		records := replicas(n)
		for i := range records {
			records[i].Weight = int32(1 + i%3)
		}
		total := 0
		for _, r := range records {
			total += int(r.Weight)
		}
		counts := map[registry.EndpointID]int{}
		table := maglevOwners(records)
		for _, id := range table {
			counts[id]++
		}
		for _, r := range records {
			fair := float64(len(table)) * float64(r.Weight) / float64(total)
			if off := float64(counts[r.ID()]) - fair; off > float64(r.Weight) || off < -float64(r.Weight) {
				t.Errorf("%d replicas: %s of weight %d has %d points; want %.0f", n, r.ID(), r.Weight, counts[r.ID()], fair)
			}
		}
	}
}

// When a replica leaves, its keys move, and few others.
func TestMaglevMovesFewKeys(t *testing.T) {
	for _, n := range []int{2, 10, 50, 200} {
		records := replicas(n)
		was := maglevOwners(records)
		worst := 0.0
		for _, i := range []int{0, n / 2, n - 1} {
			gone := records[i].ID()
			now := maglevOwners(slices.Delete(slices.Clone(records), i, i+1))
			moved, kept := 0, 0
			for slot := range was {
				switch {
				case was[slot] == gone:
				case was[slot] == now[slot]:
					kept++
				default:
					moved++
				}
			}
			worst = max(worst, float64(moved)/float64(moved+kept))
		}
		t.Logf("%d replicas: %.2f %% of the keys of others moved", n, 100*worst)
		if worst > 0.02 {
			t.Errorf("%d replicas: %.2f %% of the keys of others moved; want at most 2 %%", n, 100*worst)
		}
	}
}

// The keys of a full replica go to all others.
func TestMaglevOverflowSpreads(t *testing.T) {
	const n = 20
	b, fleet := hashing("maglev", replicas(n), 1.25)
	full := fleet.Set(start).Endpoints[7]
	hold(full, 1000)
	counts := map[registry.EndpointID]int{}
	keys := 0
	for i := range uint64(100_000) {
		picked := pickKey(b, mix(i))
		picked.Done(start, Succeeded)
		if picked.Class == Overflow {
			counts[picked.Endpoint.ID]++
			keys++
		}
	}
	for id, count := range counts {
		if share := float64(count) / float64(keys) * (n - 1); share < 0.7 || share > 1.3 {
			t.Errorf("%s gets %.2f times its share of the overflow", id, share)
		}
	}
	if len(counts) != n-1 {
		t.Errorf("%d replicas take the overflow; want all %d others", len(counts), n-1)
	}
}
