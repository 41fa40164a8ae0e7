package prequal

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/policy"
	"pgregory.net/rapid"
)

// Of the answers to one request none is better than the one chosen, by the RIF of the answers to those before.
func TestSyncAgreesWithModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := policy.Prequal{QRIF: rapid.SampledFrom([]float64{0, 0.5, 0.84, 1}).Draw(t, "q")}
		s := NewSync[string](cfg, rand.New(rand.NewPCG(1, 2)), nil)
		m := &model{cfg: cfg}
		for range 20 {
			m.entries = m.entries[:0]
			for i := range rapid.IntRange(1, 5).Draw(t, "answers") {
				r := load.Report{RIF: rapid.Int32Range(0, 6).Draw(t, "rif"), Known: rapid.Bool().Draw(t, "known")}
				latency := math.NaN()
				if r.Known {
					r.Latency = time.Duration(rapid.IntRange(0, 3).Draw(t, "latency"))
					latency = float64(r.Latency)
				}
				key := fmt.Sprint(i)
				s.Consider(key, r)
				m.entries = append(m.entries, modelEntry{key: key, rif: r.RIF, latency: latency})
			}
			key, class := s.Choose()
			chosen := m.entries[m.index(key)]
			for _, e := range m.entries {
				if m.better(e, chosen) {
					t.Fatalf("chose %s of %v; %s is better", key, m.entries, e.key)
				}
			}
			if (class == Hot) != m.hot(chosen) {
				t.Fatalf("chose %s of %v as class %v", key, m.entries, class)
			}
			for _, e := range m.entries {
				m.rifs = append(m.rifs, e.rif)
			}
		}
	})
}

func TestSyncBreaksTiesAtRandom(t *testing.T) {
	s := NewSync[int](published(), rand.New(rand.NewPCG(1, 2)), nil)
	counts := [4]int{}
	for range 4000 {
		for key := range counts {
			s.Consider(key, load.Report{RIF: 3, Latency: time.Millisecond, Known: true})
		}
		key, _ := s.Choose()
		counts[key]++
	}
	for key, count := range counts {
		if count < 850 || count > 1150 {
			t.Errorf("of four equals %d was chosen %d times of 4000", key, count)
		}
	}
}
