package balancer

import (
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/dataplane/prequal"
	"github.com/headroom-mesh/headroom/policy"
)

// prequalPicker is asynchronous Prequal (§4 of the paper): each request is placed by the answers to the probes of
// earlier requests, and sends probes for later ones. Use it wherever requests differ in cost or replicas in speed; it
// needs agents at the replicas to answer the probes.
type prequalPicker struct {
	_    apart
	cfg  policy.Prequal
	rng  *rand.Rand
	set  *Set
	pool *prequal.Pool[*Endpoint]

	present   map[*Endpoint]bool // in set
	lastPick  time.Time
	lastProbe time.Time
	_         apart
}

func (p *prequalPicker) Update(now time.Time, set *Set) {
	p.set = set
	p.present = make(map[*Endpoint]bool, len(set.Endpoints))
	for _, e := range set.Endpoints {
		p.present[e] = true
	}
	if p.pool == nil {
		p.pool = prequal.New[*Endpoint](p.cfg, now, p.rng)
	}
	p.pool.Resize(len(set.Endpoints), p.has)
}

func (p *prequalPicker) Pick(now time.Time, _ Request) (*Endpoint, Class) {
	p.lastPick = now
	e, class, ok := p.pool.Select(now)
	switch {
	case !ok:
		e = p.set.Endpoints[p.rng.IntN(len(p.set.Endpoints))]
		p.pool.Charge(e)
		return e, Fallback
	case class == prequal.Hot:
		return e, Hot
	default:
		return e, Cold
	}
}

func (p *prequalPicker) Due(dst []*Endpoint) []*Endpoint {
	n := p.pool.ProbesDue()
	if n > 0 {
		p.lastProbe = p.lastPick
	}
	return p.sample(n, dst)
}

// Idle probes as many as a request would, and at least as many as a choice needs.
func (p *prequalPicker) Idle(now time.Time, dst []*Endpoint) []*Endpoint {
	if p.cfg.IdleProbeInterval <= 0 || now.Sub(p.lastProbe) < p.cfg.IdleProbeInterval {
		return dst
	}
	p.lastProbe = now
	return p.sample(max(2, int(math.Ceil(p.cfg.ProbesPerRequest))), dst)
}

// sample appends n replicas, chosen uniformly at random without replacement (§4).
func (p *prequalPicker) sample(n int, dst []*Endpoint) []*Endpoint {
	all := p.set.Endpoints
	if n >= len(all) {
		return append(dst, all...)
	}
	// Floyd's algorithm: for each j, a random one of the first j+1, or j itself if that one is taken already.
	chosen := len(dst)
	for j := len(all) - n; j < len(all); j++ {
		e := all[p.rng.IntN(j+1)]
		if slices.Contains(dst[chosen:], e) {
			e = all[j]
		}
		dst = append(dst, e)
	}
	return dst
}

func (p *prequalPicker) Probed(now time.Time, e *Endpoint, r load.Report) {
	if p.has(e) {
		p.pool.Add(now, e, r)
	}
}

func (p *prequalPicker) Reported(now time.Time, e *Endpoint, r load.Report) {
	if p.has(e) {
		p.pool.Refresh(now, e, r)
	}
}

func (p *prequalPicker) Forget(e *Endpoint) { p.pool.Forget(e) }

// has reports whether e is among the replicas to choose from: an answer may come after its replica has left.
func (p *prequalPicker) has(e *Endpoint) bool { return p.present[e] }

func (p *prequalPicker) View(now time.Time, v *View) {
	if t, ok := p.pool.Threshold(); ok {
		v.Threshold = max(v.Threshold, t)
		v.HasThreshold = true
	}
	v.PoolCapacity += p.pool.Capacity()
	p.pool.Probes(now, func(pr prequal.Probe[*Endpoint]) {
		v.Pooled++
		if seen, ok := v.FreshestProbes[pr.Key]; !ok || pr.Age < seen.Age {
			v.FreshestProbes[pr.Key] = PooledProbe{Report: pr.Report, Age: pr.Age, Hot: pr.Hot}
		}
	})
}
