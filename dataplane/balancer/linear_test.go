package balancer

import (
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/policy"
	"pgregory.net/rapid"
)

func TestLinearScores(t *testing.T) {
	type probe struct {
		rif     int32
		latency time.Duration
	}
	for _, tt := range []struct {
		name   string
		lambda float64
		a, b   probe
		want   int // 0: a
	}{
		{"half and half: 20+150 against 90+0", 0.5, probe{2, 20 * time.Millisecond}, probe{0, 90 * time.Millisecond}, 1},
		{"half and half: 20+75 against 100+0", 0.5, probe{1, 20 * time.Millisecond}, probe{0, 100 * time.Millisecond}, 0},
		{"more of RIF: 4+60 against 24+0", 0.8, probe{1, 20 * time.Millisecond}, probe{0, 120 * time.Millisecond}, 1},
		{"latency alone", 0, probe{900, 20 * time.Millisecond}, probe{0, 21 * time.Millisecond}, 0},
		{"latency alone, a tie", 0, probe{9, 20 * time.Millisecond}, probe{8, 20 * time.Millisecond}, 1},
		{"RIF alone", 1, probe{3, time.Millisecond}, probe{2, time.Second}, 1},
		{"RIF alone, a tie", 1, probe{3, time.Millisecond}, probe{3, time.Second}, 0},
	} {
		p := defaults(policy.BalancerLinear)
		p.Linear.RIFWeight = tt.lambda
		b, es := ruled(p, replicas(100))
		b.Probed(start, 0, es[0], known(tt.a.rif, tt.a.latency))
		b.Probed(start, 0, es[1], known(tt.b.rif, tt.b.latency))
		if got := pick(t, b, start); got.Endpoint != es[tt.want] || got.Class != Ruled {
			t.Errorf("%s: picked %s, class %v; want %s", tt.name, got.Endpoint.ID, got.Class, es[tt.want].ID)
		}
	}
}

// Whatever is in the pool, the pick is the one with the least score.
func TestLinearPicksTheLeast(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := defaults(policy.BalancerLinear)
		p.Linear.RIFWeight = rapid.Float64Range(0, 1).Draw(t, "λ")
		p.Linear.Alpha = time.Duration(rapid.IntRange(1, 1000).Draw(t, "α")) * time.Millisecond
		b, es := ruled(p, replicas(100))
		score, least := map[*Endpoint]float64{}, 1e300
		for i := range rapid.IntRange(2, 16).Draw(t, "probes") {
			rif, latency := rapid.Int32Range(0, 20).Draw(t, "rif"), time.Duration(rapid.IntRange(0, 500).Draw(t, "latency"))*time.Millisecond
			b.Probed(start, 0, es[i], known(rif, latency))
			score[es[i]] = (1-p.Linear.RIFWeight)*float64(latency) + p.Linear.RIFWeight*float64(p.Linear.Alpha)*float64(rif)
			least = min(least, score[es[i]])
		}
		picked := b.mustPick(start)
		if got, pooled := score[picked]; !pooled || got > least*(1+1e-9) {
			t.Fatalf("picked a score of %v; the least is %v", got, least)
		}
	})
}

// The pool is Prequal's: probes, removals, reuse, compensation and the choice at random are the same.
func TestLinearSharesThePool(t *testing.T) {
	b, es := balancerOf(policy.BalancerLinear, 100)
	if got := pick(t, b, start); got.Class != Fallback || len(got.Due(nil)) != 1 {
		t.Errorf("no probes: got class %v; want fallback, and a probe", got.Class)
	}
	b.Probed(start, 0, es[0], known(0, 10*time.Millisecond))
	b.Probed(start, 0, es[1], known(0, 50*time.Millisecond))
	b.Probed(start, 0, es[2], known(0, 60*time.Millisecond))
	if got := b.mustPick(start); got != es[0] {
		t.Errorf("picked %s; want the fastest", got.ID)
	}
	v := b.View(start)
	if v.HasThreshold || v.PoolCapacity != 16 || v.FreshestProbes[es[1]].Hot {
		t.Errorf("shown: %+v; want a pool of 16, and nothing hot", v)
	}
	if got := len(b.Idle(after(time.Second), 0, nil)); got != 2 {
		t.Errorf("idle: got %d probes; want 2", got)
	}
}
