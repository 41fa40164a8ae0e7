package balancer

import (
	"slices"
	"testing"

	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
	"pgregory.net/rapid"
)

// owners returns the homes of keys spread over the circle.
func owners(c *circle, set *Set, keys int) []registry.EndpointID {
	var ids []registry.EndpointID
	for i := range uint64(keys) {
		ids = append(ids, set.Endpoints[c.owners[c.find(mix(i))]].ID)
	}
	return ids
}

func setOf(records []registry.Endpoint) *Set {
	f := NewFleet(Place{})
	f.Update(start, records, policy.Scope{})
	return f.Set(start)
}

func ringOwners(records []registry.Endpoint, keys int) []registry.EndpointID {
	set := setOf(records)
	return owners(newRing(set), set, keys)
}

// When a replica leaves, joins or has its weight changed, keys move only to it or only away from it.
func TestRingMovesOnlyWhatItMust(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		before := replicas(rapid.IntRange(2, 20).Draw(t, "replicas"))
		for i := range before {
			before[i].Weight = rapid.Int32Range(0, 6).Draw(t, "weight")
		}
		more, less := slices.Clone(before), slices.Clone(before)
		i := rapid.IntRange(0, len(before)-1).Draw(t, "changes")
		changed := before[i].ID()
		more[i].Weight = max(before[i].Weight, 1) + rapid.Int32Range(1, 6).Draw(t, "more")
		less = slices.Delete(less, i, i+1)
		was, grown, left := ringOwners(before, 500), ringOwners(more, 500), ringOwners(less, 500)
		for key := range was {
			if grown[key] != was[key] && grown[key] != changed {
				t.Fatalf("key %d moved from %s to %s as the weight of %s grew", key, was[key], grown[key], changed)
			}
			if left[key] == changed || left[key] != was[key] && was[key] != changed {
				t.Fatalf("key %d moved from %s to %s as %s left", key, was[key], left[key], changed)
			}
		}
	})
}

func TestRingMovesAShare(t *testing.T) {
	records := replicas(20)
	was, now := ringOwners(records, 10_000), ringOwners(records[1:], 10_000)
	moved := 0
	for key := range was {
		if was[key] != now[key] {
			moved++
		}
	}
	if moved < 350 || moved > 650 {
		t.Errorf("%d of 10000 keys moved; want about a twentieth", moved)
	}
}

func TestRingSharesAreEven(t *testing.T) {
	const keys = 50_000
	for _, n := range []int{2, 10, 100} {
		counts := map[registry.EndpointID]int{}
		for _, id := range ringOwners(replicas(n), keys) {
			counts[id]++
		}
		for id, count := range counts {
			if share := float64(count) / keys * float64(n); len(counts) != n || share < 0.7 || share > 1.4 {
				t.Errorf("%d replicas: %s has %.2f times its share", n, id, share)
			}
		}
	}
}

// Whatever the weights, a ring is of bounded size, every replica is on it, and shares are as the weights say.
func TestRingHeedsWeights(t *testing.T) {
	for _, heavy := range []int32{2, 10, 1000, 10_000} {
		records := replicas(20)
		for i := range records {
			records[i].Weight = 1 + int32(i%2)*(heavy-1)
		}
		set := setOf(records)
		c := newRing(set)
		weight := map[int32]int{}
		for i := range uint64(100_000) {
			weight[set.Endpoints[c.owners[c.find(mix(i))]].weight()]++
		}
		want := 100_000 * float64(heavy) / float64(heavy+1)
		if got := float64(weight[heavy]); got < 0.85*want || got > 1.15*want {
			t.Errorf("weight %d: got %v of 100000 keys; want about %.0f", heavy, got, want)
		}
		on := map[int32]bool{}
		for _, o := range c.owners {
			on[o] = true
		}
		if len(on) != 20 || len(c.owners) > mostPoints+20 {
			t.Errorf("weight %d: %d replicas are on a ring of %d points; want 20 and at most %d", heavy, len(on), len(c.owners), mostPoints)
		}
	}
}
