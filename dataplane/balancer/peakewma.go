package balancer

import (
	"math"
	"math/rand/v2"
	"time"

	"github.com/headroom-mesh/headroom/policy"
)

// peakEWMA picks, of two replicas chosen at random without replacement, the one with the lower
//
//	cost · (requests in flight / weight + 1)
//
// by what this agent sees alone. The cost follows the time until the head of a response: up at once, down slowly. After a
// time Δt, a sample s makes it
//
//	s                               if s > cost
//	cost·w + s·(1−w), w = e^(−Δt/τ) else
//
// where τ, Decay, is 10 s. To look at the cost is a sample of 0, so that a replica that was slow once is tried again. It
// starts at DefaultLatency, 30 ms; a failure is a sample of FailurePenalty, 5 s, at least, or one that fails fast would
// draw requests. (Finagle's PeakEwma; the last two are Linkerd's.)
//
// Use it where replicas have no agents to answer probes, or where the way to them takes longer than they do: it sees the
// whole time. Not where requests differ much in cost, as an expensive one makes its replica look slow; nor where many
// agents send little each: none of them sees enough. At low rates the replica heard of longest ago wins, as its cost has
// fallen the most; replicas then take turns, and weights count for less.
type peakEWMA struct {
	_     apart
	cfg   policy.PeakEWMA
	rng   *rand.Rand
	set   *Set
	costs map[*Endpoint]*cost
	_     apart
}

// cost is a latency that rises at once and falls slowly.
type cost struct {
	nanoseconds float64
	at          time.Time
}

func (c *cost) observe(now time.Time, sample float64, decay time.Duration) {
	passed := max(now.Sub(c.at), 0)
	c.at = c.at.Add(passed)
	if sample > c.nanoseconds {
		c.nanoseconds = sample
		return
	}
	kept := math.Exp(-float64(passed) / float64(decay))
	c.nanoseconds = c.nanoseconds*kept + sample*(1-kept)
}

func (p *peakEWMA) Update(now time.Time, set *Set) {
	p.set = set
	p.costs = recall(set, p.costs, func(c *cost) { *c = cost{float64(p.cfg.DefaultLatency), now} })
}

func (p *peakEWMA) Pick(now time.Time, _ Request) (*Endpoint, Class) {
	a, b := p.set.pair(p.rng)
	if p.load(now, b) < p.load(now, a) {
		return b.Endpoint, Ruled
	}
	return a.Endpoint, Ruled
}

// forgottenPenalty is what a replica counts with, apart from its requests in flight, if nothing is left of its cost and the
// next response is awaited: as in Finagle, more than any cost.
const forgottenPenalty = math.MaxInt64 >> 16

func (p *peakEWMA) load(now time.Time, s seat) float64 {
	c := p.costs[s.Endpoint]
	c.observe(now, 0, p.cfg.Decay)
	inFlight := float64(s.RIF()) / float64(s.of)
	if c.nanoseconds < 1 && inFlight > 0 {
		return forgottenPenalty + inFlight
	}
	return c.nanoseconds * (inFlight + 1)
}

func (p *peakEWMA) Responded(now time.Time, e *Endpoint, took time.Duration) {
	if c := p.costs[e]; c != nil {
		c.observe(now, float64(took), p.cfg.Decay)
	}
}

func (p *peakEWMA) Failed(now time.Time, e *Endpoint) {
	if c := p.costs[e]; c != nil {
		c.observe(now, max(float64(p.cfg.FailurePenalty), c.nanoseconds), p.cfg.Decay)
	}
}
