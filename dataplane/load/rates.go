package load

import (
	"math"
	"time"
)

const (
	// halfLife is the age at which what happened counts half in a smoothed rate. The sources of weighted round robin give
	// none; with this one, the last seven seconds or so decide.
	halfLife = 5 * time.Second
	// A rate over less than this would be one over nothing.
	leastSpan = time.Second
	// utilizationLasts is how long the word of a replica counts: three times the interval at which ORCA has replicas that
	// report apart from responses do so.
	utilizationLasts = 30 * time.Second
)

// rates keeps exponentially smoothed rates. The same weights go into all of them, so that a ratio of two is true from the
// first request on.
type rates struct {
	since, at time.Time // the first request; the time of the sums
	// Sums in which what happened counts by its age: 1 now, 1/2 a half-life ago.
	answered, failed float64
	flown            float64 // seconds that requests were in flight

	utilization float64 // as the replica says, smoothed
	told        time.Time
}

// advance lets time pass in which rif requests were in flight.
func (r *rates) advance(now time.Time, rif int32) {
	if r.since.IsZero() {
		r.since, r.at = now, now
	}
	passed := now.Sub(r.at)
	if passed <= 0 {
		return
	}
	kept := decay(passed)
	r.answered *= kept
	r.failed *= kept
	r.flown = r.flown*kept + float64(rif)*window(kept)
	r.at = now
}

// utilize takes in what the replica says of the time since it last did.
func (r *rates) utilize(now time.Time, u float64) {
	if r.knowsUtilization(now) {
		kept := decay(max(now.Sub(r.told), 0))
		u = r.utilization*kept + u*(1-kept)
	}
	r.utilization, r.told = u, now
}

func (r *rates) knowsUtilization(now time.Time) bool {
	return !r.told.IsZero() && now.Sub(r.told) <= utilizationLasts
}

// fill writes the rates into a report.
func (r *rates) fill(now time.Time, rif int32, report *Report) {
	r.advance(now, rif)
	span := window(decay(max(now.Sub(r.since), leastSpan)))
	report.Rate = min(r.answered/span, MaxRate)
	report.ErrorRate = min(r.failed/span, MaxRate)
	report.Utilization = min(r.flown/span, MaxUtilization)
	if r.knowsUtilization(now) {
		report.Utilization = r.utilization
	}
}

// decay returns what is left of the weight of something after some time.
func decay(passed time.Duration) float64 { return math.Exp2(-float64(passed) / float64(halfLife)) }

// window returns the sum of weights, in seconds, over a time at whose start the weight is kept and at whose end it is 1.
func window(kept float64) float64 { return (1 - kept) * halfLife.Seconds() / math.Ln2 }
