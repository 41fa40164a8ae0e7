package balancer

import (
	"math/rand/v2"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/policy"
)

// c3 picks, of Prequal's pool of probes, the one with the lowest
//
//	Ψ = (R − 1/μ) + q̂³·1/μ,  q̂ = 1 + os·n + q̄
//
// (Prequal §5.2, "C3"; the score is that of C3, Suresh et al., NSDI '15, without its rate control). Of each replica, R is
// the time until the head of a response as this agent sees it, 1/μ the service time, q̄ the requests in flight as the
// replica reports them: moving averages, in which what was known before weighs Smoothing, 0.9, once there are enough
// samples. os is this agent's own requests in flight to the replica. n is the number of agents, Clients: each of them is
// taken to have as many there, unknown to the others. Unless it is given it is estimated: all requests in flight, by the
// reports, divided by this agent's own. os and q̄ are divided by the replica's weight.
//
// 1/μ is the latency that the replica reports. There is nothing better: an agent sees when requests begin and end at the
// replica, not how long they wait in there. Where replicas work on all requests at once, as in the paper's testbed, that
// is the service time, slowed down by what goes on beside. Where they let requests wait in line it is too long by the
// wait, and the score counts the line twice. R − 1/μ then is the way there and back, and never less than nothing: the two
// are means over different requests. A failure counts as a response that took load.FailurePenalty at least; where queues
// are long, their cubes outweigh that, and only ejection keeps requests from a replica that fails.
//
// Use it where replicas differ in speed, and where the number of requests in flight is a good measure of the wait; the
// paper found it within 3 to 8 % of Prequal. Not with agents of which few send most of the requests: n is wrong for all.
type c3 struct {
	prequalPicker
	cfg     policy.C3
	flights flights

	inFlight, own average // requests in flight: at one seat, as replicas report them; this agent's own at all
	clients       float64 // n
}

// estimates is what the c3 rule knows of a replica. Times are in nanoseconds.
type estimates struct {
	response, service, queue average // R, 1/μ and q̄
}

// fleetSmoothing is the smoothing of what n is estimated from. It changes slowly.
const fleetSmoothing = 0.99

func newC3(p policy.Policy, rng *rand.Rand, flights flights) *c3 {
	c := &c3{cfg: p.C3, flights: flights, clients: max(float64(p.C3.Clients), 1)}
	c.prequalPicker = prequalPicker{cfg: p.Prequal, rng: rng, score: c.psi}
	return c
}

func (c *c3) Update(now time.Time, set *Set) {
	c.estimates = recall(set, c.estimates, func(*estimates) {})
	c.prequalPicker.Update(now, set)
}

func (c *c3) psi(key pooled, _, latency float64) float64 {
	e := key.estimates
	service := latency // to reckon with, if the replica has not told any
	if e.service.samples > 0 {
		service = e.service.value
	}
	queue := 1 + (float64(key.RIF())*c.clients+e.queue.value)/float64(key.of)
	return max(e.response.value-service, 0) + queue*queue*queue*service
}

func (c *c3) Probed(now time.Time, e *Endpoint, r load.Report) {
	c.learn(e, r)
	c.inFlight.add(float64(r.RIF)/float64(c.set.seatsOf[e]), fleetSmoothing)
	c.prequalPicker.Probed(now, e, r)
}

func (c *c3) Reported(now time.Time, e *Endpoint, r load.Report) {
	c.learn(e, r)
	c.prequalPicker.Reported(now, e, r)
}

func (c *c3) learn(e *Endpoint, r load.Report) {
	known := c.estimates[e]
	if known == nil {
		return
	}
	known.queue.add(float64(r.RIF), c.cfg.Smoothing)
	if r.Known {
		known.service.add(float64(r.Latency), c.cfg.Smoothing)
	}
}

func (c *c3) Responded(_ time.Time, e *Endpoint, took time.Duration) {
	if known := c.estimates[e]; known != nil {
		known.response.add(float64(took), c.cfg.Smoothing)
	}
}

func (c *c3) Failed(_ time.Time, e *Endpoint) {
	if known := c.estimates[e]; known != nil {
		known.response.add(max(known.response.value, float64(load.FailurePenalty)), c.cfg.Smoothing)
	}
}

func (c *c3) Idle(now time.Time, dst []*Endpoint) []*Endpoint {
	c.count()
	return c.prequalPicker.Idle(now, dst)
}

// count estimates n. It is called at regular times: at those of requests there is always one in flight.
func (c *c3) count() {
	if c.cfg.Clients > 0 {
		return
	}
	c.own.add(float64(c.flights.total()), fleetSmoothing)
	if c.own.value > 0 {
		c.clients = min(max(c.inFlight.value*float64(len(c.set.seats))/c.own.value, 1), load.MaxRIF)
	}
}

// average is an exponentially weighted moving average, of which the first samples weigh all the same.
type average struct{ value, samples float64 }

func (a *average) add(v, smoothing float64) {
	a.samples++
	a.value += (v - a.value) * max(1/a.samples, 1-smoothing)
}
