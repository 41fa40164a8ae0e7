package balancer

import (
	"math/rand/v2"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/prequal"
	"github.com/headroom-mesh/headroom/policy"
)

// syncPicker is Prequal in its synchronous mode (§4, "Synchronous mode"): it asks d replicas chosen at random about each
// request, d = 3 by default, waits for d−1 answers, and places the request by the hot-cold lexicographic rule among those
// that came. A replica is hot by the quantile Q_RIF (0.99) of the RIF in earlier answers. The questions carry the request's
// key: a replica that has served it lately says a tenth of its load.
//
// Use it where what a replica holds decides what a request costs there (caches, LLM prefixes), or where requests are so
// few or so long that earlier answers say nothing. Otherwise use prequal, which makes no request wait for answers.
type syncPicker struct {
	_      apart
	probes int // d
	rng    *rand.Rand
	set    *Set
	sync   *prequal.Sync[seat]
	_      apart
}

func newSyncPicker(p policy.Policy, rng *rand.Rand) *syncPicker {
	weight := func(s seat) int32 { return s.of }
	return &syncPicker{probes: p.PrequalSync.Probes, rng: rng, sync: prequal.NewSync(p.Prequal, rng, weight)}
}

func (p *syncPicker) Update(_ time.Time, set *Set) { p.set = set }

func (p *syncPicker) Pick(time.Time, Request) (*Endpoint, Class) {
	return p.set.anyone(p.rng), Fallback
}

// Ask draws seats. A replica that has several may be drawn more than once, and its answers count so often: among equals the
// chance of each is then just its weight. There is nothing to ask about a choice of one.
func (p *syncPicker) Ask(_ time.Time, _ Request, dst []*Endpoint) ([]*Endpoint, int) {
	if len(p.set.seats) == 1 {
		return dst, 0
	}
	targets := p.set.sample(p.rng, p.probes, dst)
	return targets, max(len(targets)-len(dst)-1, 1)
}

func (p *syncPicker) Choose(_ time.Time, _ Request, answers []Answer) (*Endpoint, Class) {
	for _, a := range answers {
		p.sync.Consider(p.set.seatOf(p.rng, a.Endpoint), a.Report)
	}
	s, class := p.sync.Choose()
	if class == prequal.Hot {
		return s.Endpoint, Hot
	}
	return s.Endpoint, Cold
}

func (p *syncPicker) View(_ time.Time, v *View) {
	if t, ok := p.sync.Threshold(); ok {
		v.Threshold = max(v.Threshold, t)
		v.HasThreshold = true
	}
}
