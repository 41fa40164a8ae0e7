//go:build linux

package load

import (
	"math/rand/v2"
	"slices"
	"time"
)

// Pace makes calls at random moments (Poisson), rate a second on average, whatever comes back, and returns how long each
// took from the moment when it was due: a call that had to wait until another had ended took that long, too. The same
// seed gives the same moments.
func (s *Session) Pace(rate float64, lasts time.Duration, seed uint64) (Latencies, error) {
	if err := s.repair(); err != nil {
		return nil, err
	}
	p := &pace{session: s, took: make(Latencies, 0, int(rate*lasts.Seconds()*1.2)+100)}
	s.ended = p.end
	if err := p.run(moments{rand.New(rand.NewPCG(seed, 7)), rate, time.Now()}, lasts); err != nil {
		return nil, err
	}
	if err := s.settle(); err != nil {
		return nil, err
	}
	slices.Sort(p.took)
	return p.took, nil
}

type moments struct {
	random *rand.Rand
	rate   float64
	last   time.Time
}

func (m *moments) next() time.Time {
	m.last = m.last.Add(time.Duration(m.random.ExpFloat64() / m.rate * float64(time.Second)))
	return m.last
}

type pace struct {
	session *Session
	waiting []time.Time // moments at which calls were due that no connection was free for
	took    Latencies
}

// run never waits for sockets, but looks at them all the time: to be woken takes longer than many a call.
func (p *pace) run(m moments, lasts time.Duration) error {
	progress, last := m.last, 0
	end := m.last.Add(lasts)
	for due := m.next(); due.Before(end); {
		now := time.Now()
		for ; !due.After(now) && due.Before(end); due = m.next() {
			p.begin(due)
		}
		if err := p.session.loop.turn(0); err != nil {
			return err
		}
		if len(p.took) != last || p.session.active == 0 {
			last, progress = len(p.took), now
		}
		if err := p.session.trouble(now.Sub(progress)); err != nil {
			return err
		}
	}
	return nil
}

func (p *pace) begin(due time.Time) {
	s := p.session
	if len(s.idle) == 0 {
		p.waiting = append(p.waiting, due)
		return
	}
	// The one that has been idle for longest: all are in use.
	c := s.idle[0]
	s.idle = append(s.idle[:0], s.idle[1:]...)
	c.due = due
	s.begin(c)
}

func (p *pace) end(c *call, err error) {
	if err == nil {
		p.took = append(p.took, time.Since(c.due))
	}
	switch {
	case c.broken:
	case len(p.waiting) > 0:
		c.due = p.waiting[0]
		p.waiting = p.waiting[1:]
		p.session.start(c)
	default:
		p.session.idle = append(p.session.idle, c)
	}
}

// Latencies are sorted.
type Latencies []time.Duration

// Quantile returns the least one that at least the share q does not exceed; 0 if there are none.
func (l Latencies) Quantile(q float64) time.Duration {
	if len(l) == 0 {
		return 0
	}
	return l[min(int(q*float64(len(l))), len(l)-1)]
}

// Merge returns all of them.
func Merge(all ...Latencies) Latencies {
	merged := slices.Concat(all...)
	slices.Sort(merged)
	return merged
}
