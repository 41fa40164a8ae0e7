package load

import (
	"sync"
	"time"
)

// FailurePenalty is the least latency that a failed request counts for. A replica that fails fast would otherwise look
// fast and draw traffic ("sinkholing", Prequal §4).
const FailurePenalty = time.Second

// Outcome says how a request ended at the replica.
type Outcome int

const (
	OK       Outcome = iota
	Failed           // the replica could not be reached, broke off, or answered 5xx
	Canceled         // the caller gave up
)

// Tracker counts the requests in flight of one replica and estimates its latency. It is safe for concurrent use.
//
// A request counts from the moment it is handed to the replica until the response has been taken over in full
// (Prequal §4, "Load signals").
type Tracker struct {
	mu sync.Mutex
	// mu guards the fields below.

	epoch    time.Time     // of the first that is known
	last     time.Duration // since then
	rif      int32
	byMedian bool
	median   median
	mean     mean
	rates    rates
	requests uint64
	errors   uint64
}

// Token stands for one request in flight.
type Token struct {
	start  time.Time
	rif    int32 // seen on arrival, this request not counted
	second int32 // in which it began, see mean
}

// ByMedian says whether the latency that is reported is the median of recent requests at the present RIF (Prequal §4), or
// the mean by Little's law. The latter is the default.
func (t *Tracker) ByMedian(is bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.byMedian = is
}

// Begin counts a request in.
func (t *Tracker) Begin(now time.Time) Token {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.advanceLocked(now)
	t.rates.advance(now, t.rif)
	token := Token{start: now, rif: t.rif, second: t.mean.begin()}
	t.rif++
	t.requests++
	return token
}

// End counts a request out. It must be called exactly once for each Begin, whichever way the request ended: a request
// that is never counted out makes the replica look busy for ever.
func (t *Tracker) End(now time.Time, token Token, outcome Outcome) {
	took := max(now.Sub(token.start), 0)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.advanceLocked(now)
	t.rates.advance(now, t.rif)
	t.rif--
	young := t.mean.leave(token.second)
	switch outcome {
	case OK:
		t.rates.answered++
	case Failed:
		t.errors++
		t.rates.failed++
		took = max(took, FailurePenalty)
	case Canceled:
		// The request would have taken at least this long. That is news only if more was not expected anyway.
		if expected, known := t.median.estimate(t.last, token.rif); known && took <= expected {
			return
		}
		young = false
	}
	t.median.add(t.last, token.rif, took)
	if young {
		t.mean.end(took - max(now.Sub(token.start), 0))
	}
}

// advanceLocked lets time pass. A clock that goes back stands still.
func (t *Tracker) advanceLocked(now time.Time) {
	if t.epoch.IsZero() {
		t.epoch = now
	}
	t.last = max(t.last, now.Sub(t.epoch))
	t.mean.advance(t.last)
}

// Utilize takes in the share of its capacity that the replica itself says it has in use (as ORCA reports do), since it
// last said so. Without such word, or when the last is older than 30 seconds, the mean number of requests in flight
// stands for it: rate/utilization then is 1/latency, by Little's law, and the replica counts as capable as it is fast.
func (t *Tracker) Utilize(now time.Time, u float64) {
	if !within(u, MaxUtilization) {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.rates.utilize(now, u)
}

// Report returns the load at this moment, for a probe: without rates.
func (t *Tracker) Report(now time.Time) Report {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.reportLocked(now, 0)
}

// ReportLeaving returns the load without the one request that is just being answered, for its response.
func (t *Tracker) ReportLeaving(now time.Time) Report {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.reportLocked(now, 1)
	t.rates.fill(now, t.rif, &r)
	return r
}

func (t *Tracker) reportLocked(now time.Time, leaving int32) Report {
	t.advanceLocked(now)
	rif := max(t.rif-leaving, 0)
	latency, known := t.latencyLocked(rif, leaving)
	return Report{RIF: rif, Latency: min(latency, MaxLatency), Known: known}
}

func (t *Tracker) latencyLocked(rif, leaving int32) (latency time.Duration, known bool) {
	if !t.byMedian && t.mean.plenty() {
		return t.mean.estimate(leaving, 0), true
	}
	latency, known = t.median.estimate(t.last, rif)
	if known && !t.byMedian {
		latency = t.mean.estimate(leaving, latency)
	}
	return latency, known
}

// Totals returns how many requests were begun and how many of them failed.
func (t *Tracker) Totals() (requests, errors uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.requests, t.errors
}
