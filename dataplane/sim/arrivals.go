package sim

import (
	"math"
	"math/rand/v2"
)

// arrivals says when the requests of an open loop are born, and what each request is. All rules see the same ones: what
// is random here is drawn in the order of births, from a source of its own.
type arrivals struct {
	rng   *rand.Rand
	even  bool
	spans []span
	work  Work
	items zipf
}

// span is a stage with times in seconds since the start and rates in requests a second.
type span struct{ start, end, rate, slope float64 }

func newArrivals(l Load, capacity float64, rng *rand.Rand) arrivals {
	a := arrivals{rng: rng, even: l.Even, work: l.Work}
	if l.Items > 0 {
		a.items = newZipf(l.Items, l.Zipf)
	}
	unit, start, last := 1.0, 0.0, 0.0
	if l.OfCapacity {
		unit = capacity
	}
	for _, st := range l.Stages {
		to := st.To
		if to == 0 {
			to = st.Rate
		}
		if lasts := st.Lasts.Seconds(); lasts > 0 {
			a.spans = append(a.spans, span{start, start + lasts, unit * st.Rate, unit * (to - st.Rate) / lasts})
			start += lasts
		}
		last = unit * to
	}
	a.spans = append(a.spans, span{start: start, end: math.Inf(1), rate: last})
	return a
}

// after returns the time of the next birth after now, in nanoseconds; never if there is none. It is where the integral
// of the rate from now on reaches 1, or an exponential amount.
func (a *arrivals) after(now int64) int64 {
	due := 1.0
	if !a.even {
		due = a.rng.ExpFloat64()
	}
	t := float64(now) / 1e9
	for _, s := range a.spans {
		if t >= s.end {
			continue
		}
		from := s.rate + s.slope*(t-s.start)
		if wait := s.wait(from, due); t+wait <= s.end && !math.IsInf(wait, 1) {
			return max(now, int64((t+wait)*1e9))
		}
		if math.IsInf(s.end, 1) {
			break
		}
		due -= (s.end - t) * (from + s.slope*(s.end-t)/2)
		t = s.end
	}
	return never
}

// wait returns the time in which a rate that starts at from adds up to an amount.
func (s span) wait(from, amount float64) float64 {
	if s.slope == 0 {
		return amount / from // +Inf at rate 0
	}
	root := from*from + 2*s.slope*amount
	if root < 0 {
		return math.Inf(1) // the rate falls to 0 before
	}
	return 2 * amount / (from + math.Sqrt(root))
}
