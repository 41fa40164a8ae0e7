// Package prequal holds the probe pool and the hot-cold lexicographic rule of Prequal ("Load is not what you should
// balance", Wydrowski et al., NSDI '24; "§" refers to that paper).
//
// Everything here is a pure state machine: time and randomness come in as arguments, and one Pool serves one goroutine.
package prequal

import (
	"math"
	"math/rand/v2"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/policy"
)

const (
	// minOccupancy is the number of probes below which a choice among them is no choice (§4: random "whenever
	// occupancy < 2").
	minOccupancy = 2
	// maxReuse bounds the uses of one probe where Eq. 1 has no finite answer, as in small fleets.
	maxReuse = 16
)

// Class says how a replica was chosen.
type Class int

const (
	Cold Class = iota // the fastest of those not hot
	Hot               // all were hot: the one with the fewest requests in flight
)

// Pool is a bounded set of fresh probes, one a replica, from which the next replica is chosen. K identifies a replica.
type Pool[K comparable] struct {
	cfg policy.Prequal
	rng *rand.Rand

	// weight says into how many equal parts the load of a replica is divided; nil: 1.
	weight func(K) int32
	// score ranks the probes in place of the hot-cold rule; nil: it does not.
	score Score[K]

	epoch    time.Time
	entries  []entry[K] // at most capacity
	capacity int        // m, or the number of replicas in a small fleet
	whole    bool       // there is room for all
	reuse    float64    // b_reuse
	history  history

	probesDue   float64 // fractions of probes and removals carried over to the next request
	removalsDue float64
	worstNext   bool // removals alternate between the oldest and the worst
}

// entry is one probe. Latency and receipt are in nanoseconds.
type entry[K comparable] struct {
	key      K
	rif      int32
	weight   int32
	uses     int32 // left
	latency  int64
	received int64 // since the pool's epoch: receipt time, as clocks of others may be skewed (§4, footnote 9)
}

// share is the RIF that the rule goes by.
func (e *entry[K]) share() float64 { return float64(e.rif) / float64(e.weight) }

// unknown stands for a latency that the replica could not tell.
const unknown = -1

// Score says how good a choice a pooled replica is; the lowest is the best. The RIF is divided by the weight; the latency, in
// nanoseconds, is what to reckon with, whether it is known or not.
type Score[K comparable] func(key K, rif, latency float64) float64

// New returns an empty pool. Call Resize before anything else. The rule goes by the RIF divided by the weight; nil: all
// replicas can bear the same. With a score, the pool chooses by that, and removes the worst by it, instead of by the hot-cold
// rule. But for small fleets it is the pool of Prequal in all else, so that rules can be compared on the same knowledge (§5.2).
func New[K comparable](cfg policy.Prequal, now time.Time, rng *rand.Rand, weight func(K) int32, score Score[K]) *Pool[K] {
	return &Pool[K]{cfg: cfg, rng: rng, epoch: now, weight: weight, score: score}
}

// Resize adapts the pool to a fleet of n replicas and drops the probes of replicas that keep does not want.
//
// The paper says nothing of small fleets: its m = 16 assumes n well above m. Here the pool has room for all of them. If some
// of a few replicas were left out, they would be idle meanwhile. Callers that know all replicas don't herd, as each knows
// them as they were at another moment, and counts its own requests. A score that only requests bring up to date would go on
// to leave out a replica whose score is bad; there, what is in the pool must change.
func (p *Pool[K]) Resize(n int, keep func(K) bool) {
	small := n < 2*p.cfg.PoolSize
	p.whole = small && p.score == nil
	switch {
	case p.whole:
		p.capacity = max(minOccupancy, n)
	case small:
		p.capacity = max(minOccupancy, n/2)
	default:
		p.capacity = p.cfg.PoolSize
	}
	p.reuse = reuseBudget(p.cfg, p.capacity, n)
	kept := p.entries[:0]
	for _, e := range p.entries {
		if keep(e.key) {
			kept = append(kept, e)
		}
	}
	p.entries = kept
	for len(p.entries) > p.capacity {
		p.removeOldest()
	}
	if cap(p.entries) < p.capacity {
		p.entries = append(make([]entry[K], 0, p.capacity), p.entries...)
	}
}

// reuseBudget is b_reuse of Eq. 1 (§4): max{1, (1+δ) / ((1 − m/n)·r_probe − r_remove)}.
func reuseBudget(cfg policy.Prequal, m, n int) float64 {
	inflow := (1-float64(m)/float64(max(n, 1)))*cfg.ProbesPerRequest - cfg.RemovalsPerRequest
	if inflow <= 0 {
		return maxReuse
	}
	return min(max(1, (1+cfg.Delta)/inflow), maxReuse)
}

// Add takes in the answer to a probe. It replaces an earlier one of the same replica; a full pool gives up its oldest.
func (p *Pool[K]) Add(now time.Time, key K, r load.Report) {
	e := p.entry(now, key, r)
	p.history.add(e.share())
	if i := p.find(key); i >= 0 {
		p.entries[i] = e
		return
	}
	if len(p.entries) >= p.capacity {
		p.removeOldest()
	}
	p.entries = append(p.entries, e)
}

// Refresh takes in a load report that came with a response. Such reports come from the replicas that were chosen, not
// from random ones. So they bring a pooled probe up to date, but neither renew its uses nor add to the history of RIF,
// which must be a fair sample; and they enter the pool only where there are too few probes to choose from. In a pool of the
// whole fleet they crowd nobody out, and are as good as answers to probes.
func (p *Pool[K]) Refresh(now time.Time, key K, r load.Report) {
	p.expire(now)
	i := p.find(key)
	switch {
	case p.whole:
		p.Add(now, key, r)
	case i >= 0:
		uses := p.entries[i].uses
		p.entries[i] = p.entry(now, key, r)
		p.entries[i].uses = uses
	case len(p.entries) < minOccupancy:
		p.entries = append(p.entries, p.entry(now, key, r))
	}
}

// Forget drops the probe of a replica, if there is one.
func (p *Pool[K]) Forget(key K) {
	if i := p.find(key); i >= 0 {
		p.remove(i)
	}
}

func (p *Pool[K]) entry(now time.Time, key K, r load.Report) entry[K] {
	e := entry[K]{key: key, rif: r.RIF, weight: 1, uses: int32(roundRandomly(p.reuse, p.rng)), latency: unknown,
		received: int64(now.Sub(p.epoch))}
	if p.weight != nil {
		e.weight = p.weight(key)
	}
	if r.Known {
		e.latency = int64(r.Latency)
	}
	return e
}

// roundRandomly rounds to one of the neighbouring integers so that the expectation is kept (§4, on b_reuse).
func roundRandomly(x float64, rng *rand.Rand) int {
	whole := math.Floor(x)
	if rng.Float64() < x-whole {
		whole++
	}
	return int(whole)
}

// Select chooses a replica by the rule and accounts for the request that goes there: the probe
// counts one more request in flight, and one use less. It then removes as many probes as are due. It returns false if
// there are too few probes to choose from; the caller then chooses at random.
func (p *Pool[K]) Select(now time.Time) (key K, class Class, ok bool) {
	p.expire(now)
	if len(p.entries) < minOccupancy {
		return key, class, false
	}
	i, class := p.best()
	e := &p.entries[i]
	key = e.key
	p.charge(e)
	e.uses--
	if e.uses <= 0 {
		p.remove(i)
	}
	p.removeDue()
	return key, class, true
}

// Charge accounts for a request that goes to a replica which was not chosen from the pool: if it is pooled nevertheless,
// its probe counts one more request in flight (§4, RIF compensation).
func (p *Pool[K]) Charge(key K) {
	if i := p.find(key); i >= 0 {
		p.charge(&p.entries[i])
	}
}

// charge counts a request that this agent has sent, of which the probe can't know (§4, RIF compensation). Where latencies are
// those to expect at the present RIF, the latency rises in proportion. (The paper would like that too, and does not do it: a
// median says nothing of another RIF.)
func (p *Pool[K]) charge(e *entry[K]) {
	if e.latency != unknown && p.cfg.Latency == policy.LatencyMean {
		e.latency += int64(float64(e.latency) / (e.share() + 1))
	}
	e.rif++
}

// ProbesDue returns how many probes to send on account of one more request: r_probe on average, rounded
// deterministically (§4, footnote 7).
func (p *Pool[K]) ProbesDue() int {
	p.probesDue += p.cfg.ProbesPerRequest
	n := math.Floor(p.probesDue)
	p.probesDue -= n
	return int(n)
}

// Whole reports whether the pool has room for all replicas, as in small fleets.
func (p *Pool[K]) Whole() bool { return p.whole }

// Fresh reports whether a probe of a replica would tell little, as its pooled load is from less than half the time ago that
// a request takes there.
func (p *Pool[K]) Fresh(now time.Time, key K) bool {
	i := p.find(key)
	return i >= 0 && 2*(int64(now.Sub(p.epoch))-p.entries[i].received) < p.entries[i].latency
}

// Threshold returns θ: a replica with more requests in flight (by its weight) is hot. It returns false while nothing is
// known, for the two ends of Q_RIF, where RIF or latency alone decides, and for a pool that goes by a score.
func (p *Pool[K]) Threshold() (float64, bool) {
	if p.cfg.QRIF <= 0 || p.cfg.QRIF >= 1 || p.score != nil {
		return 0, false
	}
	return p.history.quantile(p.cfg.QRIF)
}

// Probe is a pooled probe as seen from outside.
type Probe[K comparable] struct {
	Key    K
	Report load.Report
	Age    time.Duration
	Hot    bool
}

// Probes calls yield for every probe that is still fresh.
func (p *Pool[K]) Probes(now time.Time, yield func(Probe[K])) {
	p.expire(now)
	limit := p.limit()
	for _, e := range p.entries {
		yield(Probe[K]{
			Key:    e.key,
			Report: load.Report{RIF: e.rif, Latency: time.Duration(max(e.latency, 0)), Known: e.latency != unknown},
			Age:    now.Sub(p.epoch) - time.Duration(e.received),
			Hot:    e.share() > limit,
		})
	}
}

// Capacity returns how many probes the pool can hold.
func (p *Pool[K]) Capacity() int { return p.capacity }

func (p *Pool[K]) find(key K) int {
	for i := range p.entries {
		if p.entries[i].key == key {
			return i
		}
	}
	return -1
}

// expire drops probes that are too old (§4: 1 s in the testbed).
func (p *Pool[K]) expire(now time.Time) {
	limit := int64(now.Sub(p.epoch) - p.cfg.MaxAge)
	for i := 0; i < len(p.entries); {
		if p.entries[i].received <= limit {
			p.remove(i)
			continue
		}
		i++
	}
}

// removeDue removes r_remove probes a request, rounded deterministically, the oldest and the worst in turn (§4), so that
// others take their place. It leaves as many as a choice needs, and those of a pool in which there is a place for all.
func (p *Pool[K]) removeDue() {
	if p.whole {
		return
	}
	p.removalsDue += p.cfg.RemovalsPerRequest
	for ; p.removalsDue >= 1; p.removalsDue-- {
		if len(p.entries) <= minOccupancy {
			continue
		}
		if p.worstNext {
			p.remove(p.worst())
		} else {
			p.removeOldest()
		}
		p.worstNext = !p.worstNext
	}
}

func (p *Pool[K]) removeOldest() {
	oldest := 0
	for i := range p.entries {
		if p.entries[i].received < p.entries[oldest].received {
			oldest = i
		}
	}
	p.remove(oldest)
}

func (p *Pool[K]) remove(i int) {
	last := len(p.entries) - 1
	p.entries[i] = p.entries[last]
	p.entries[last] = entry[K]{}
	p.entries = p.entries[:last]
}
