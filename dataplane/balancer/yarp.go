package balancer

import (
	"math/rand/v2"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/policy"
)

// yarp picks the less loaded of two replicas chosen at random without replacement, by the requests in flight that each
// replica had when it was last polled, divided by its weight (Prequal §5.2, "YARP-Po2C"). Every replica is polled every
// PollInterval, 500 ms, at a moment that agents choose at random, so that their polls are spread over it. One that has not
// answered counts with this agent's own requests in flight.
//
// Use it in small fleets of replicas that requests occupy for longer than the interval. Not where requests are short: all
// agents follow a number that is old by the time they do, and what polls cost grows with agents times replicas.
type yarp struct {
	_        apart
	cfg      policy.YARP
	rng      *rand.Rand
	set      *Set
	polled   map[*Endpoint]*polled
	nextPoll time.Time
	_        apart
}

// polled is a replica's last answer.
type polled struct {
	report load.Report
	at     time.Time // zero: there is none
}

func (y *yarp) Update(_ time.Time, set *Set) {
	y.set = set
	y.polled = recall(set, y.polled, func(*polled) {})
}

func (y *yarp) Pick(time.Time, Request) (*Endpoint, Class) {
	a, b := y.set.pair(y.rng)
	if y.rif(b)*int64(a.of) < y.rif(a)*int64(b.of) {
		return b.Endpoint, Ruled
	}
	return a.Endpoint, Ruled
}

func (y *yarp) rif(s seat) int64 {
	if p := y.polled[s.Endpoint]; !p.at.IsZero() {
		return int64(p.report.RIF)
	}
	return int64(s.RIF())
}

func (y *yarp) Due(dst []*Endpoint) []*Endpoint { return dst }

func (y *yarp) Idle(now time.Time, dst []*Endpoint) []*Endpoint {
	if now.Before(y.nextPoll) {
		return dst
	}
	y.nextPoll = y.after(now)
	return append(dst, y.set.Endpoints...)
}

// after returns the next time to poll: at intervals, whatever the times at which it is asked; but a random time after the
// first poll, which is made at once.
func (y *yarp) after(now time.Time) time.Time {
	if y.nextPoll.IsZero() {
		return now.Add(time.Duration(y.rng.Float64() * float64(y.cfg.PollInterval)))
	}
	return y.nextPoll.Add(now.Sub(y.nextPoll).Truncate(y.cfg.PollInterval) + y.cfg.PollInterval)
}

func (y *yarp) Probed(now time.Time, e *Endpoint, r load.Report) { *y.polled[e] = polled{r, now} }

func (y *yarp) Forget(e *Endpoint) {
	if p := y.polled[e]; p != nil {
		*p = polled{}
	}
}

func (y *yarp) View(now time.Time, v *View) {
	for e, p := range y.polled {
		if p.at.IsZero() {
			continue
		}
		age := now.Sub(p.at)
		if seen, ok := v.FreshestProbes[e]; !ok || age < seen.Age {
			v.FreshestProbes[e] = PooledProbe{Report: p.report, Age: age}
		}
	}
}
