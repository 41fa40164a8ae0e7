package prequal

import "math"

// rank orders the probes by the hot-cold lexicographic rule (§4, "Replica selection"): cold before hot, among the cold
// the lower latency, among the hot the lower RIF. The paper leaves ties open; here each signal breaks the ties of the
// other. The lower rank is the better one.
type rank struct {
	hot           bool
	first, second float64
}

func (r rank) less(o rank) bool {
	if r.hot != o.hot {
		return o.hot
	}
	if r.first != o.first {
		return r.first < o.first
	}
	return r.second < o.second
}

// judge ranks the entries of a pool as it was when the judge was made.
type judge struct {
	threshold float64 // a higher RIF is hot (§4: "exceeds")
	fastest   int64   // lowest latency known, 0 if none is
}

// The two ends of Q_RIF as thresholds (§5.3): at 0 RIF alone decides, at 1 latency alone.
const (
	allHot  = -1
	noneHot = math.MaxFloat64
)

func (p *Pool[K]) judge() judge {
	return judge{threshold: p.limit(), fastest: p.fastest()}
}

func (p *Pool[K]) limit() float64 {
	if p.cfg.QRIF <= 0 && p.score == nil {
		return allHot
	}
	if threshold, ok := p.Threshold(); ok {
		return threshold
	}
	return noneHot
}

// fastest returns the lowest latency known in the pool, 0 if none is.
func (p *Pool[K]) fastest() int64 {
	fastest := int64(unknown)
	for i := range p.entries {
		if l := p.entries[i].latency; l != unknown && (fastest == unknown || l < fastest) {
			fastest = l
		}
	}
	return max(fastest, 0)
}

// rank ranks an entry. Scores that are equal for one signal are told apart by the other, whichever it is.
func (p *Pool[K]) rank(j judge, i int) rank {
	e := &p.entries[i]
	rif := e.share()
	if p.score == nil {
		return j.rank(rif, e.latency)
	}
	latency := j.assumed(rif, e.latency)
	return rank{false, p.score(e.key, rif, latency), (rif + 1) * latency}
}

func (j judge) rank(rif float64, latency int64) rank {
	assumed := j.assumed(rif, latency)
	if rif > j.threshold {
		return rank{true, rif, assumed}
	}
	return rank{false, assumed, rif}
}

// assumed is the latency to reckon with. A replica whose latency is unknown is tried by one request at a time: while it
// has none in flight it counts as fast as the fastest, otherwise as slower than all others that are cold. So a new replica
// is neither flooded nor starved, and still takes its part where the others are hot.
func (j judge) assumed(rif float64, latency int64) float64 {
	if latency != unknown {
		return float64(latency)
	}
	if rif == 0 {
		return float64(j.fastest)
	}
	return math.MaxFloat64
}

// best returns the entry to use, at random among equals.
func (p *Pool[K]) best() (int, Class) {
	j := p.judge()
	best, equals := 0, 1
	bestRank := p.rank(j, 0)
	for i := 1; i < len(p.entries); i++ {
		r := p.rank(j, i)
		switch {
		case r.less(bestRank):
			best, bestRank, equals = i, r, 1
		case r == bestRank:
			equals++
			if p.rng.IntN(equals) == 0 {
				best = i
			}
		}
	}
	if bestRank.hot {
		return best, Hot
	}
	return best, Cold
}

// worst returns the entry to remove: if any is hot the hot one with the highest RIF, else the slowest (§4).
func (p *Pool[K]) worst() int {
	j := p.judge()
	worst := 0
	worstRank := p.rank(j, 0)
	for i := 1; i < len(p.entries); i++ {
		if r := p.rank(j, i); worstRank.less(r) {
			worst, worstRank = i, r
		}
	}
	return worst
}
