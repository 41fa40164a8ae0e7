package balancer

import (
	"math/rand/v2"

	"github.com/headroom-mesh/headroom/policy"
)

// newLinear returns the linear rule: of Prequal's pool of probes it picks the one with the lowest
//
//	(1−λ)·latency + λ·α·RIF
//
// where λ, RIFWeight, is 0.5, and α, Alpha, 75 ms: what latency one request in flight is worth; the median latency of
// replicas with one request in flight is a good value (Prequal §5.2, "Linear", and App. A).
//
// Use it to compare. The paper found that the more of RIF there is in the mix the better, RIF alone better than any mix,
// and the hot-cold rule better than that.
func newLinear(p policy.Policy, rng *rand.Rand) *prequalPicker {
	perRIF := p.Linear.RIFWeight * float64(p.Linear.Alpha)
	perLatency := 1 - p.Linear.RIFWeight
	score := func(_ pooled, rif, latency float64) float64 { return perLatency*latency + perRIF*rif }
	return &prequalPicker{cfg: p.Prequal, rng: rng, score: score}
}
