package balancer

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
	"pgregory.net/rapid"
)

func ringOf(records []registry.Endpoint, factor float64) (*Balancer, *Fleet) {
	p := policy.Default()
	p.Balancer = policy.BalancerRingHash
	p.Hash.LoadFactor = factor
	fleet := NewFleet(Place{})
	fleet.Update(start, records, policy.Scope{})
	return New(p, fleet, 1, 1), fleet
}

func pickKey(b *Balancer, key uint64) Picked {
	picked, err := b.Pick(start, Request{Key: key, Keyed: true})
	if err != nil {
		panic(err)
	}
	return picked
}

// home returns where a key goes while nothing is in flight.
func home(b *Balancer, key uint64) registry.EndpointID {
	picked := pickKey(b, key)
	picked.Done(start, Succeeded)
	return picked.Endpoint.ID
}

// boundedRing is consistent hashing with bounded loads in its plainest form. The load factor is in hundredths, as
// floating point would not tell where a bound lies.
type boundedRing struct {
	factor   int
	ids      []registry.EndpointID
	inFlight map[registry.EndpointID]int
}

func (r *boundedRing) pick(key uint64) registry.EndpointID {
	type stop struct {
		distance uint64 // from the key to the point, clockwise
		id       registry.EndpointID
	}
	var walk []stop
	total := 1
	for _, id := range r.ids {
		for _, p := range pointsOf(string(id), pointsPerWeight) {
			walk = append(walk, stop{p - key, id})
		}
		total += r.inFlight[id]
	}
	slices.SortFunc(walk, func(a, b stop) int {
		if a.distance < b.distance {
			return -1
		}
		return 1
	})
	room := r.factor * total / (100 * len(r.ids))
	if r.factor*total%(100*len(r.ids)) != 0 {
		room++
	}
	for _, s := range walk {
		if r.inFlight[s.id] < room {
			return s.id
		}
	}
	panic("no room, though the factor is above 1")
}

func TestRingHashAgreesWithModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := &boundedRing{factor: rapid.IntRange(101, 300).Draw(t, "factor"), inFlight: map[registry.EndpointID]int{}}
		records := replicas(rapid.IntRange(1, 12).Draw(t, "replicas"))
		for _, r := range records {
			m.ids = append(m.ids, r.ID())
		}
		b, _ := ringOf(records, float64(m.factor)/100)
		var inFlight []Picked
		keys := rapid.OneOf(rapid.Uint64(), rapid.Uint64Range(0, 2), rapid.Just(uint64(math.MaxUint64)),
			rapid.SampledFrom(pointsOf(string(m.ids[0]), pointsPerWeight)))
		t.Repeat(map[string]func(*rapid.T){
			"pick": func(t *rapid.T) {
				key := keys.Draw(t, "key")
				want := m.pick(key)
				picked := pickKey(b, key)
				if got := picked.Endpoint.ID; got != want {
					t.Fatalf("key %x: got %s; want %s\n%v", key, got, want, m.inFlight)
				}
				m.inFlight[want]++
				inFlight = append(inFlight, picked)
			},
			"done": func(t *rapid.T) {
				if len(inFlight) > 0 {
					i := rapid.IntRange(0, len(inFlight)-1).Draw(t, "which")
					inFlight[i].Done(start, Succeeded)
					m.inFlight[inFlight[i].Endpoint.ID]--
					inFlight = append(inFlight[:i], inFlight[i+1:]...)
				}
			},
		})
	})
}

// With one hot key, no replica ever holds more than ⌈c·m/n⌉ of m requests.
func TestRingHashBoundsLoad(t *testing.T) {
	for _, tt := range []struct{ n, percent int }{{10, 125}, {9, 108}, {1, 101}, {3, 300}} {
		b, fleet := ringOf(replicas(tt.n), float64(tt.percent)/100)
		for m := 1; m <= 300; m++ {
			pickKey(b, 42)
			bound := (tt.percent*m + 100*tt.n - 1) / (100 * tt.n)
			for _, e := range fleet.Set(start).Endpoints {
				if e.RIF() > bound {
					t.Fatalf("%d replicas, c %d %%: %d of %d in flight on one; bound %d", tt.n, tt.percent, e.RIF(), m, bound)
				}
			}
		}
	}
}

func TestRingHashTellsOverflow(t *testing.T) {
	b, _ := ringOf(replicas(10), 1.25)
	classes := map[Class]int{}
	for range 200 {
		classes[pickKey(b, 42).Class]++
	}
	if classes[Ruled] != 25 || classes[Overflow] != 175 {
		t.Errorf("got classes %v; want 25 at the key's own replica and 175 overflowed", classes)
	}
}

// The bound knows of requests that a balancer of an earlier policy has placed.
func TestRingHashCountsRequestsOfEarlierPolicies(t *testing.T) {
	b, es := balancerOf(policy.BalancerRoundRobin, 4)
	var old []Picked
	for range 40 {
		old = append(old, pick(t, b, start))
	}
	p := policy.Default()
	p.Balancer = policy.BalancerRingHash
	b = New(p, b.fleet, 1, 1)
	for key := range uint64(4) {
		if picked := pickKey(b, mix(key)); picked.Class != Ruled {
			t.Errorf("key %d: got class %v at %d in flight everywhere; want the key's own replica", key, picked.Class, 10)
		}
	}
	for _, picked := range old {
		picked.Done(start, Succeeded)
	}
	if total := (flights{all: b.inFlight}).total(); total != 4 || es[0].RIF()+es[1].RIF()+es[2].RIF()+es[3].RIF() != 4 {
		t.Errorf("in flight at the end: got %d; want 4", total)
	}
}

func TestRingHashIsStable(t *testing.T) {
	records := replicas(20)
	b, _ := ringOf(records, 1.25)
	fewer, _ := ringOf(records[1:], 1.25)
	gone := records[0].ID()
	moved := 0
	for i := range uint64(10_000) {
		key := mix(i)
		was := home(b, key)
		if again := home(b, key); again != was {
			t.Fatalf("key %x moved from %s to %s", key, was, again)
		}
		// With one replica less only its keys move; with it back, they and no others come back.
		if now := home(fewer, key); now == gone || now != was && was != gone {
			t.Fatalf("key %x moved from %s to %s as %s left", key, was, now, gone)
		}
		if was == gone {
			moved++
		}
	}
	if moved < 350 || moved > 650 {
		t.Errorf("%d of 10000 keys moved; want about a twentieth", moved)
	}
}

func TestRingHashSharesAreEven(t *testing.T) {
	const keys = 50_000
	for _, n := range []int{2, 10, 100} {
		b, fleet := ringOf(replicas(n), 1.25)
		for i := range uint64(keys) {
			home(b, mix(i))
		}
		for _, e := range fleet.Set(start).Endpoints {
			if share := float64(e.Picks()) / keys * float64(n); share < 0.7 || share > 1.4 {
				t.Errorf("%d replicas: %s has %.2f times its share", n, e.ID, share)
			}
		}
	}
}

func TestRingHashPlacesRequestsWithoutKeyAtRandom(t *testing.T) {
	const picks = 20_000
	b, fleet := ringOf(replicas(20), 1.25)
	for range picks {
		if picked := pick(t, b, start); picked.Class != Fallback {
			t.Fatalf("got class %v; want fallback", picked.Class)
		}
	}
	wantUniform(t, fleet.Set(start).Endpoints, picks)
}

func TestHashKeySpreads(t *testing.T) {
	var halves [64]int
	for i := range 10_000 {
		h := HashKey(fmt.Sprintf("user-%d", i))
		for bit := range halves {
			halves[bit] += int(h >> bit & 1)
		}
	}
	for bit, ones := range halves {
		if ones < 4800 || ones > 5200 {
			t.Errorf("bit %d is set in %d of 10000 hashes", bit, ones)
		}
	}
	if got := HashKey("a"); got != HashKey(string([]byte{'a'})) {
		t.Errorf("one key, two hashes")
	}
}
