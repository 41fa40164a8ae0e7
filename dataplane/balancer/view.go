package balancer

import "time"

// View shows the weights as parts of the mean, where replicas have shown some.
func (w *weightedRoundRobin) View(now time.Time, v *View) {
	mean := w.mean(now)
	for e, s := range w.shown {
		if _, ok := v.Weights[e]; !ok && mean > 0 && w.counts(now, s) {
			v.Weights[e] = min(max(s.weight/mean, lightest), heaviest)
		}
	}
}

// View shows what one more request to each replica would cost.
func (p *peakEWMA) View(now time.Time, v *View) {
	for e := range p.costs {
		cost := time.Duration(min(p.load(now, seat{e, 0, 1}), float64(forgottenPenalty)))
		if seen, ok := v.Costs[e]; !ok || cost < seen {
			v.Costs[e] = cost
		}
	}
}

// View shows how many idle slots the queue has.
func (q *idleQueue) View(_ time.Time, v *View) {
	v.IdleSlots += q.n
	v.HasIdleSlots = true
}
