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
	pool *prequal.Pool[pooled]

	score     prequal.Score[pooled]    // instead of the hot-cold rule; nil: that
	estimates map[*Endpoint]*estimates // of the c3 rule

	heard     map[*Endpoint]*hearsay // of the replicas; nil if probes go to random ones
	heardSeat []*hearsay             // the same for each seat of the set, as looking up is what a draw would cost most
	asked     seatMemory             // seats whose replicas were probed
	placed    seatMemory             // seats that got requests

	now       time.Time // as last told
	lastProbe time.Time
	_         apart
}

// pooled is a seat in the pool, with what the rule must have at hand when it looks at all of them.
type pooled struct {
	seat
	*estimates
}

func (p *prequalPicker) pooled(s seat) pooled { return pooled{s, p.estimates[s.Endpoint]} }

// hearsay is the latency that a replica last told. One that has none to tell counts as the fastest: it is to be found out.
type hearsay struct {
	latency time.Duration
	at      time.Time
}

// unheard stands for the latency of a replica from the moment that it is asked after having told nothing for long.
const unheard = math.MaxInt64

// hearsayLasts is how long it counts for.
const hearsayLasts = 5 * time.Second

func (p *prequalPicker) Update(now time.Time, set *Set) {
	p.set = set
	if p.cfg.ProbeTargets == policy.ProbeBetterOfTwo {
		p.heard = recall(set, p.heard, func(*hearsay) {})
		p.heardSeat = make([]*hearsay, len(set.seats))
		for i, s := range set.seats {
			p.heardSeat[i] = p.heard[s.Endpoint]
		}
	}
	if p.pool == nil {
		p.pool = prequal.New(p.cfg, now, p.rng, func(k pooled) int32 { return k.of }, p.score)
	}
	present := make(map[seat]bool, len(set.seats))
	for _, s := range set.seats {
		present[s] = true
	}
	p.pool.Resize(len(set.seats), func(k pooled) bool { return present[k.seat] })
}

func (p *prequalPicker) Pick(now time.Time, _ Request) (*Endpoint, Class) {
	p.now = now
	k, class, ok := p.pool.Select(now)
	if ok {
		p.placed.note(k.seat)
	}
	switch {
	case !ok:
		s := p.set.seats[p.rng.IntN(len(p.set.seats))]
		p.pool.Charge(p.pooled(s))
		p.placed.note(s)
		return s.Endpoint, Fallback
	case p.score != nil:
		return k.Endpoint, Ruled
	case class == prequal.Hot:
		return k.Endpoint, Hot
	default:
		return k.Endpoint, Cold
	}
}

func (p *prequalPicker) Due(dst []*Endpoint) []*Endpoint {
	n := p.pool.ProbesDue()
	if n > 0 {
		p.lastProbe = p.now
	}
	return p.sample(n, dst)
}

// Idle probes as many as a request would, and at least as many as a choice needs.
func (p *prequalPicker) Idle(now time.Time, dst []*Endpoint) []*Endpoint {
	if p.cfg.IdleProbeInterval <= 0 || now.Sub(p.lastProbe) < p.cfg.IdleProbeInterval {
		return dst
	}
	p.now, p.lastProbe = now, now
	return p.sample(max(2, int(math.Ceil(p.cfg.ProbesPerRequest))), dst)
}

// sample appends the replicas of n seats to probe, all of them different; fewer, where there is less to find out.
func (p *prequalPicker) sample(n int, dst []*Endpoint) []*Endpoint {
	var room [mostSampled]seat
	seats := room[:0]
	switch {
	case p.heard == nil:
		seats = p.set.draw(p.rng, n, seats) // uniformly at random without replacement (§4)
	case p.pool.Whole():
		seats = p.drawUncertain(n, seats)
	default:
		seats = p.drawBetter(min(n, mostSampled), seats)
	}
	for _, s := range seats {
		dst = append(dst, s.Endpoint)
		p.asked.note(s)
	}
	return dst
}

// drawUncertain adds those of n random seats of a small fleet whose load is not known. There reports tell of nearly all
// replicas, and a probe that tells nothing new would cost the replica as much as any other.
func (p *prequalPicker) drawUncertain(n int, seats []seat) []seat {
	drawn := p.set.draw(p.rng, n, seats)
	uncertain := drawn[:len(seats)]
	for _, s := range drawn[len(seats):] {
		if !p.pool.Fresh(p.now, p.pooled(s)) {
			uncertain = append(uncertain, s)
		}
	}
	return uncertain
}

// drawBetter adds n seats, each the one of two random seats whose replica is faster by hearsay. So probes find fast replicas,
// and none is left out for longer than hearsay lasts.
func (p *prequalPicker) drawBetter(n int, seats []seat) []seat {
	for tries := 0; len(seats) < n && tries < 4*n; tries++ { // n may be all there are
		a, b := p.set.pairAt(p.rng)
		if p.expected(b) < p.expected(a) {
			a, b = b, a
		}
		if slices.Contains(seats, p.set.seats[a]) {
			a = b
		}
		if !slices.Contains(seats, p.set.seats[a]) {
			seats = append(seats, p.set.seats[a])
			p.ask(a)
		}
	}
	return seats
}

// expected returns the latency of a seat's replica by hearsay, 0 if it is to be found out.
func (p *prequalPicker) expected(seat int) time.Duration {
	h := p.heardSeat[seat]
	if p.now.Sub(h.at) > hearsayLasts {
		return 0
	}
	return h.latency
}

// ask notes that a seat's replica is asked. Until it answers, or for as long as hearsay lasts, it need not be asked again.
func (p *prequalPicker) ask(seat int) {
	if p.expected(seat) == 0 {
		*p.heardSeat[seat] = hearsay{unheard, p.now}
	}
}

// hear notes what a replica tells.
func (p *prequalPicker) hear(now time.Time, e *Endpoint, r load.Report) {
	h := p.heard[e]
	switch {
	case h == nil:
	case r.Known:
		*h = hearsay{r.Latency, now}
	default:
		*h = hearsay{0, now}
	}
}

func (p *prequalPicker) Probed(now time.Time, e *Endpoint, r load.Report) {
	p.hear(now, e, r)
	p.pool.Add(now, p.pooled(p.seatOf(&p.asked, e)), p.withOwn(r, e.RIF()))
}

func (p *prequalPicker) Reported(now time.Time, e *Endpoint, r load.Report) {
	if p.set.has(e) {
		p.hear(now, e, r)
		p.pool.Refresh(now, p.pooled(p.seatOf(&p.placed, e)), p.withOwn(r, e.RIF()-1))
	}
}

// withOwn counts in the requests of this agent that were still on their way to a replica when it told its load: there can't
// be fewer in flight than this agent has there. In a small fleet those matter. The latency rises with them, where it is the
// one to expect.
func (p *prequalPicker) withOwn(r load.Report, own int) load.Report {
	if p.pool.Whole() && p.cfg.Latency == policy.LatencyMean && own > int(r.RIF) {
		r.Latency = time.Duration(float64(r.Latency) * float64(own+1) / float64(r.RIF+1))
		r.RIF = int32(own)
	}
	return r
}

// seatOf returns the seat on account of which a replica tells its load, or any of its seats if that is not known any more.
// Were it always any, the probes of one request would meet in one seat, and a request would go on to count against its seat
// when it is done: in a small fleet, the shares would not be those of the weights.
func (p *prequalPicker) seatOf(memory *seatMemory, e *Endpoint) seat {
	if s, ok := memory.recall(e, p.set.seatsOf[e]); ok {
		return s
	}
	return p.set.seatOf(p.rng, e)
}

func (p *prequalPicker) Forget(e *Endpoint) {
	of := p.set.seatsOf[e]
	for nth := range of {
		p.pool.Forget(p.pooled(seat{e, nth, of}))
	}
}

func (p *prequalPicker) View(now time.Time, v *View) {
	if t, ok := p.pool.Threshold(); ok {
		v.Threshold = max(v.Threshold, t)
		v.HasThreshold = true
	}
	v.PoolCapacity += p.pool.Capacity()
	p.pool.Probes(now, func(pr prequal.Probe[pooled]) {
		v.Pooled++
		if seen, ok := v.FreshestProbes[pr.Key.Endpoint]; !ok || pr.Age < seen.Age {
			v.FreshestProbes[pr.Key.Endpoint] = PooledProbe{Report: pr.Report, Age: pr.Age, Hot: pr.Hot}
		}
	})
}
