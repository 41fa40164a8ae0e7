package balancer

import (
	"math/rand/v2"
	"time"

	"github.com/headroom-mesh/headroom/policy"
)

// idleQueue is join-idle-queue (Lu et al., "Join-Idle-Queue: A Novel Load Balancing Algorithm for Dynamically Scalable
// Web Services", Performance Evaluation 68, 2011): a replica that has a slot free tells one agent, which keeps a token for
// it in a queue. Each request takes the oldest token and goes to that replica; without any, to a random one.
//
// A replica has Slots of them, 1 by default. It tells of each slot once when that gets free. If it gets a request from elsewhere
// in the meantime, the token is one too many, and so is that request. Tokens are used in the order in which they came, so
// that replicas take turns.
//
// Use it where there are few agents to a replica (a tier of gateways) and replicas serve a known number of requests at
// once: nothing is asked while a request waits. Not with many agents: tokens at those that have no requests are lost to
// the others. Nor at loads near 1, when nobody is idle and all is random.
type idleQueue struct {
	_      apart
	slots  int
	rng    *rand.Rand
	set    *Set
	tokens map[*Endpoint]int // in the queue, by replica
	queue  []*Endpoint       // a ring of n tokens from first on
	first  int
	n      int
	_      apart
}

// mostAtOnce bounds the tokens that a replica gets unasked.
const mostAtOnce = 64

func newIdleQueue(p policy.Policy, rng *rand.Rand) *idleQueue {
	return &idleQueue{slots: max(p.Slots, 1), rng: rng}
}

// Update keeps the tokens of the replicas that stay. One that comes, or that was left out for a while, may have told of its
// slots when nobody here knew it: it gets tokens for them, or it would have to wait until nobody else is idle.
func (q *idleQueue) Update(now time.Time, set *Set) {
	old := *q
	q.set = set
	q.tokens = make(map[*Endpoint]int, len(set.Endpoints))
	q.queue, q.first, q.n = nil, 0, 0
	for old.n > 0 {
		if e := old.pop(); set.has(e) {
			q.Idled(now, e)
		}
	}
	for _, e := range set.Endpoints {
		if old.set != nil && !old.set.has(e) {
			for range min(q.slots*int(set.seatsOf[e])-e.RIF(), mostAtOnce) {
				q.Idled(now, e)
			}
		}
	}
}

func (q *idleQueue) Pick(time.Time, Request) (*Endpoint, Class) {
	if q.n == 0 {
		return q.set.anyone(q.rng), Fallback
	}
	return q.pop(), Ruled
}

// Idled keeps no more tokens of a replica than it has slots, whatever it says.
func (q *idleQueue) Idled(_ time.Time, e *Endpoint) {
	if q.tokens[e] < q.slots*int(q.set.seatsOf[e]) {
		q.push(e)
	}
}

func (q *idleQueue) Forget(e *Endpoint) {
	for range q.n {
		if kept := q.pop(); kept != e {
			q.push(kept)
		}
	}
}

func (q *idleQueue) push(e *Endpoint) {
	if q.n == len(q.queue) {
		q.grow()
	}
	q.queue[(q.first+q.n)%len(q.queue)] = e
	q.n++
	q.tokens[e]++
}

// grow makes room for more tokens. There are never more than slots, so that it comes to an end.
func (q *idleQueue) grow() {
	room := make([]*Endpoint, max(2*len(q.queue), len(q.set.seats)))
	n := copy(room, q.queue[q.first:])
	copy(room[n:], q.queue[:q.first])
	q.queue, q.first = room, 0
}

func (q *idleQueue) pop() *Endpoint {
	e := q.queue[q.first]
	q.first = (q.first + 1) % len(q.queue)
	q.n--
	q.tokens[e]--
	return e
}
