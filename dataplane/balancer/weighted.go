package balancer

import (
	"math/rand/v2"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/policy"
)

// weightedRoundRobin gives each replica requests in proportion to what it has shown to be able to bear:
//
//	w = rate / (utilization + errorRate/rate · ErrorPenalty)
//
// by the load reports on its responses. What the replicas say is smoothed already. There are two uses:
//
//   - As in gRPC (proposal A58), with the defaults: a replica's weight counts after a blackout of 10 s, until its last
//     report is 3 min old, and weights are computed every second. Utilization is what replicas say themselves; where they
//     say nothing it is the mean number of requests in flight, which makes w 1/latency.
//   - As in the Prequal paper (§2), with blackout and penalty 0: w = q/u.
//
// A replica whose weight is not known gets the mean of the others'; so, with fewer than two that are known, all get the
// same. A weight that is registered multiplies: where replicas tell their own utilization, w has it in it already, and 1 is
// right for all.
//
// Use it where replicas differ and what they differ in changes slowly, such as kinds of machines, and where neither
// probes nor a look at single requests is wanted. Not where they slow down for seconds at a time: rates need longer than
// that to tell.
type weightedRoundRobin struct {
	_       apart
	cfg     policy.WeightedRoundRobin
	rng     *rand.Rand
	set     *Set
	shown   map[*Endpoint]*shown
	updated time.Time // when the weights were computed

	turns []turn // of the seats
	next  int
	_     apart
}

// shown is what a replica has shown to be able to bear.
type shown struct {
	weight      float64
	first, last time.Time // the first and the last of the reports that count; zero: there is none
}

// turn is a seat's part in the round: it has credit for part of a request, gets more each round, and is picked when that
// makes a whole one. So picks of a seat are spread as evenly as those of a plain round robin, at any weight, and go on so
// when weights change.
type turn struct {
	seat   seat
	shown  *shown
	credit float64
	step   float64 // 1 for the greatest weight
}

const (
	// Weights are held within these bounds, as parts of the mean: the light must be heard of again, and the heavy are not
	// to be trusted with all.
	lightest = 0.01
	heaviest = 10
	// greatestWeight is beyond all that replicas can do, and small enough for sums.
	greatestWeight = 1e15
)

func (w *weightedRoundRobin) Update(now time.Time, set *Set) {
	w.set = set
	w.shown = recall(set, w.shown, func(*shown) {})
	w.turns = make([]turn, len(set.seats))
	for i, s := range set.seats {
		w.turns[i] = turn{seat: s, shown: w.shown[s.Endpoint], credit: w.rng.Float64()}
	}
	w.next = w.rng.IntN(len(w.turns))
	w.weigh(now)
}

func (w *weightedRoundRobin) Pick(now time.Time, _ Request) (*Endpoint, Class) {
	if now.Sub(w.updated) >= w.cfg.UpdateInterval {
		w.weigh(now)
	}
	for {
		t := &w.turns[w.next]
		w.next++
		if w.next == len(w.turns) {
			w.next = 0
		}
		t.credit += t.step
		if t.credit >= 1 {
			t.credit--
			return t.seat.Endpoint, Ruled
		}
	}
}

func (w *weightedRoundRobin) Reported(now time.Time, e *Endpoint, r load.Report) {
	s := w.shown[e]
	if s == nil || r.Utilization <= 0 || r.Rate <= 0 && r.ErrorRate <= 0 {
		return
	}
	if s.first.IsZero() || w.expired(now, s) {
		s.first = now
	}
	s.last = now
	s.weight = weightOf(r, w.cfg.ErrorPenalty)
}

// weightOf is 0 for a replica that only fails.
func weightOf(r load.Report, errorPenalty float64) float64 {
	if r.Rate <= 0 {
		return 0
	}
	return min(r.Rate/(r.Utilization+r.ErrorRate*errorPenalty/r.Rate), greatestWeight)
}

func (w *weightedRoundRobin) expired(now time.Time, s *shown) bool {
	return now.Sub(s.last) >= w.cfg.Expiry
}

// counts reports whether the weight of a replica is to be used.
func (w *weightedRoundRobin) counts(now time.Time, s *shown) bool {
	return !s.first.IsZero() && !w.expired(now, s) && now.Sub(s.first) >= w.cfg.Blackout
}

// weigh computes the part of each seat.
func (w *weightedRoundRobin) weigh(now time.Time) {
	w.updated = now
	mean := w.mean(now)
	greatest := 0.0
	for i := range w.turns {
		t := &w.turns[i]
		t.step = 1
		if mean > 0 && w.counts(now, t.shown) {
			t.step = min(max(t.shown.weight/mean, lightest), heaviest)
		}
		greatest = max(greatest, t.step)
	}
	for i := range w.turns {
		w.turns[i].step /= greatest
	}
}

// mean returns the mean of the weights that are known, 0 if there are none.
func (w *weightedRoundRobin) mean(now time.Time) float64 {
	sum, n := 0.0, 0.0
	for _, e := range w.set.Endpoints {
		if s := w.shown[e]; w.counts(now, s) {
			sum += s.weight
			n++
		}
	}
	if n == 0 {
		return 0
	}
	return sum / n
}
