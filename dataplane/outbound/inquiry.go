package outbound

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/balancer"
	"github.com/headroom-mesh/headroom/dataplane/probe"
)

// inquiry asks replicas for their load before one request is placed. Each probe's token is the place of its target.
// Answers may come long after the request has been placed, so an inquiry is never used again.
type inquiry struct {
	service  *service
	balancer *balancer.Balancer
	targets  []*balancer.Endpoint
	enough   int
	over     chan struct{} // closed when no further answer is waited for

	mu sync.Mutex
	// mu guards the fields below.

	answers []balancer.Answer
	failed  int
	ended   bool
}

// inquire returns the answers of targets, as soon as they are enough. A target that can't answer counts as if it had: what
// there is to choose from is fewer then, and may be nothing. It fails only if ctx ends.
func (o *Outbound) inquire(ctx context.Context, s *service, b *balancer.Balancer, req balancer.Request, targets []*balancer.Endpoint, enough int) ([]balancer.Answer, error) {
	q := &inquiry{
		service: s, balancer: b, targets: append([]*balancer.Endpoint(nil), targets...), enough: enough,
		over: make(chan struct{}), answers: make([]balancer.Answer, 0, len(targets)),
	}
	// Without order: answers that come at the same time come in that of the questions.
	rand.Shuffle(len(q.targets), func(i, j int) { q.targets[i], q.targets[j] = q.targets[j], q.targets[i] })
	key := uint64(0)
	if req.Keyed {
		key = req.Key
	}
	now := time.Now()
	for i, e := range q.targets {
		o.ask(now, s, e, probe.Request{Endpoint: e.ID, Key: key, Urgent: true}, b.Policy.Prequal.ProbeTimeout, q, uint64(i))
	}
	select {
	case <-q.over:
	case <-ctx.Done():
		q.end()
		return nil, ctx.Err()
	}
	return q.end(), nil
}

// end returns the answers; later ones don't count.
func (q *inquiry) end() []balancer.Answer {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.endLocked()
	return q.answers
}

func (q *inquiry) endLocked() {
	if !q.ended {
		q.ended = true
		close(q.over)
	}
}

// Answered takes in an answer.
func (q *inquiry) Answered(token uint64, a probe.Answer, now time.Time) {
	e := q.targets[token]
	q.service.answers.Add(1)
	if a.Status != probe.OK {
		q.service.declined(now, q.balancer, e)
		q.note(nil)
		return
	}
	q.note(&balancer.Answer{Endpoint: e, Report: a.Report})
}

// Lost notes that a target gave no answer in time.
func (q *inquiry) Lost(uint64, time.Time) { q.note(nil) }

// note takes in an answer, or that there will be none.
func (q *inquiry) note(a *balancer.Answer) {
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case q.ended:
		return
	case a != nil:
		q.answers = append(q.answers, *a)
	default:
		q.failed++
	}
	if len(q.answers)+q.failed >= q.enough {
		q.endLocked()
	}
}
