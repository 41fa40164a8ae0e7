package sim

import (
	"time"

	"github.com/headroom-mesh/headroom/dataplane/balancer"
	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/policy/budget"
	"github.com/headroom-mesh/headroom/registry"
)

// agent is a client host's: it places the requests of the host.
type agent struct {
	zone    string
	fleet   *balancer.Fleet
	edition uint32 // of the news that the fleet is up to
	// Each shard is a balancer of one shard. A balancer of many would pick the shard of whichever processor it runs on.
	shards []*balancer.Balancer
	budget *budget.Budget
	seeds  uint64
}

// request is what a client asks for, from its birth until it has an answer or is given up.
type request struct {
	id     int32
	alive  bool
	user   int32 // noUser in an open loop
	agent  int32
	shard  int32
	born   int64
	work   float64
	item   int32
	key    balancer.Request
	tries  int // of the caller
	places int // by the agent, in the present try
	// deadline is when the present try has timed out, if the caller has a timeout.
	deadline int64
}

const noUser = -1

// try is one attempt to get an answer. The client may lose interest in it while the replica is at it.
type try struct {
	id         int32
	generation uint32   // counts the uses of this struct, as events may outlive them
	request    *request // nil once the client has lost interest
	picked     balancer.Picked
	sent       time.Time
	agent      *agent
	replica    *replica
	work       float64
	item       int32
	counts     bool // whether its request does
	state      tryState
	outcome    outcome
	report     load.Report
	tracker    *load.Tracker
	token      load.Token
	place      int       // in the replica's heap of jobs
	hold       *question // the slot that is held for it; nil if none is
}

// tryState is how far a try has come at the replica.
type tryState uint8

const (
	coming  tryState = iota
	waiting          // for a slot
	served           // it is being worked on
	failing          // it will fail, with no work done on it
	dropped          // it is on its way, or waits for a slot, but is no longer wanted
	ended            // it has been answered, or need not be
)

// outcome is how a try ended.
type outcome uint8

const (
	succeeded outcome = iota
	timedOut
	failed
	refused
	unconnected
	unplaced
	unended
	outcomes
)

// probe is a probe under way.
type probe struct {
	agent    *agent
	balancer *balancer.Balancer // nil if the probe is none of a rule's
	endpoint *balancer.Endpoint
	replica  *replica
	sent     int64
	report   load.Report
	declined bool
}

func (s *simulation) addAgents() {
	for _, group := range s.cfg.Agents {
		if s.joinsIdleQueues() {
			group.Shards = 1 // as in real agents, or what idle replicas say would be lost on requests of other shards
		}
		for range group.Count {
			s.agents = append(s.agents, agent{zone: group.Zone, shards: make([]*balancer.Balancer, group.Shards)})
		}
	}
	for i := range s.agents {
		s.startAgent(i)
	}
}

// startAgent gives an agent empty hands.
func (s *simulation) startAgent(i int) {
	a := &s.agents[i]
	a.fleet = balancer.NewFleet(balancer.Place{Node: nodeName("a", i), Zone: a.zone})
	a.fleet.Update(s.clock, s.records, s.cfg.Policy.Scope)
	a.edition = s.edition
	a.budget = budget.New(s.cfg.Policy.RetryBudget)
	for shard := range a.shards {
		seed := s.cfg.Seed ^ uint64(i+1)<<32 ^ uint64(shard)<<16 ^ a.seeds
		a.shards[shard] = balancer.New(s.cfg.Policy, a.fleet, 1, seed)
	}
	a.seeds++
	s.hearOfIdle(a)
}

// bear lets a request come into the world.
func (s *simulation) bear(user int32) {
	rng := s.randoms.requests
	id, q := s.requests.take()
	*q = request{id: id, alive: true, user: user, born: s.now, agent: int32(rng.IntN(len(s.agents)))}
	q.shard = int32(s.randoms.rest.IntN(len(s.agents[q.agent].shards))) // how many there are depends on the rule
	q.work = s.arrivals.work.draw(rng)
	if s.cfg.Load.Items > 0 {
		q.item = s.arrivals.items.draw(rng)
		q.key = balancer.Request{Key: spread(uint64(q.item)), Keyed: true}
	}
	s.alive++
	s.seen.born(s)
	s.agents[q.agent].budget.Deposit(s.clock)
	s.try(q)
}

// spread makes hashes of items: neighbours are far apart.
func spread(x uint64) uint64 {
	x = (x + 1) * 0x9e3779b97f4a7c15
	x ^= x >> 32
	x *= 0xd6e8feb86659fd93
	return x ^ x>>32
}

// try sends a request to a replica.
func (s *simulation) try(q *request) {
	q.tries++
	q.places = 0
	if s.cfg.Caller.Timeout > 0 {
		q.deadline = s.now + int64(s.cfg.Caller.Timeout)
	}
	s.place(q)
}

// place lets the agent choose a replica, and sends the request and the probes that are due.
func (s *simulation) place(q *request) {
	q.places++
	a := &s.agents[q.agent]
	if s.cfg.Oracle {
		if r := s.foresee(a); r != nil {
			s.send(q, a, balancer.Picked{}, r)
		} else {
			s.finish(q, unplaced)
		}
		return
	}
	b := a.shards[q.shard]
	var enough int
	var asks bool
	if s.targets, enough, asks = b.Inquire(s.clock, q.key, s.targets[:0]); asks {
		s.inquire(q, a, b, enough)
		return
	}
	picked, err := s.pick(b, q.key)
	s.placed(q, b, picked, err, nil)
}

// pick lets the rule choose, and now and then notes how old the probe was that it went by.
func (s *simulation) pick(b *balancer.Balancer, key balancer.Request) (balancer.Picked, error) {
	if !s.seen.looks(s) {
		return b.Pick(s.clock, key)
	}
	before := b.View(s.clock)
	picked, err := b.Pick(s.clock, key)
	if p, ok := before.FreshestProbes[picked.Endpoint]; ok && picked.Class != balancer.Fallback {
		s.seen.ages.add(int64(p.Age))
	}
	return picked, err
}

// placed sends a request that has been placed, and the probes that are due.
func (s *simulation) placed(q *request, b *balancer.Balancer, picked balancer.Picked, err error, hold *question) {
	if err != nil { // there are no replicas
		s.finish(q, unplaced)
		return
	}
	a := &s.agents[q.agent]
	s.targets = picked.Due(s.targets[:0])
	s.probe(a, b, s.targets)
	s.send(q, a, picked, s.replicaOf(picked.Endpoint)).hold = hold
}

func (s *simulation) send(q *request, a *agent, picked balancer.Picked, r *replica) *try {
	id, t := s.tries.take()
	*t = try{id: id, generation: t.generation + 1, request: q, picked: picked, sent: s.clock, agent: a, replica: r, work: q.work, item: q.item, counts: q.born >= s.warm}
	r.coming++
	s.seen.placed(s, t)
	s.message(a.zone, r.zone, arrival, id, 0)
	if s.cfg.Caller.Timeout > 0 {
		s.agenda.put(s.now, q.deadline-s.now, timeout, id, t.generation)
	}
	return t
}

// answer sends the response to a try.
func (s *simulation) answer(t *try, o outcome) {
	t.state, t.outcome = ended, o
	s.message(t.replica.zone, t.agent.zone, response, t.id, 0)
}

// respond takes in the response to a try.
func (s *simulation) respond(t *try) {
	if t.request == nil {
		s.tries.release(t.id)
		return
	}
	q := t.request
	t.replica.heard = t.replica.heard || t.outcome != unconnected
	s.learn(t)
	o := t.outcome
	s.forgetTry(t)
	switch {
	case o == succeeded:
		s.finish(q, o)
	case o == unconnected && q.places < agentTries && s.agents[q.agent].budget.Withdraw(s.clock):
		s.seen.retried(s, q)
		s.place(q)
	default:
		s.retry(q, o)
	}
}

// agentTries is how many replicas an agent tries to connect to for one request.
const agentTries = 3

// learn tells the balancer of the response.
func (s *simulation) learn(t *try) {
	if s.cfg.Oracle {
		return
	}
	if t.outcome != unconnected {
		var report *load.Report
		if !s.cfg.Without.Reports {
			report = &t.report
		}
		t.picked.Responded(s.clock, s.clock.Sub(t.sent), report)
	}
	t.picked.Done(s.clock, s.outcomeSeen(t.outcome))
}

func (s *simulation) outcomeSeen(o outcome) balancer.Outcome {
	switch {
	case o == unconnected:
		return balancer.Unconnected
	case o == succeeded || s.cfg.Without.ErrorAversion || s.cfg.Without.Ejection:
		return balancer.Succeeded
	default:
		return balancer.Failed
	}
}

// forgetTry releases a try that neither side needs.
func (s *simulation) forgetTry(t *try) {
	t.request = nil
	t.generation++
	s.tries.release(t.id)
}

// timeOut makes the client lose interest in a try.
func (s *simulation) timeOut(t *try) {
	q := t.request
	if q == nil {
		return
	}
	t.request = nil
	if !s.cfg.Oracle {
		if s.cfg.Without.ErrorAversion {
			t.picked.Responded(s.clock, s.clock.Sub(t.sent), nil) // this passes for an answer too
		}
		t.picked.Done(s.clock, s.outcomeSeen(timedOut))
	}
	s.message(t.agent.zone, t.replica.zone, cancelation, t.id, t.generation)
	s.retry(q, timedOut)
}

// retry sends a request again that failed, if the caller does.
func (s *simulation) retry(q *request, o outcome) {
	if q.tries > s.cfg.Caller.Retries || s.cfg.Caller.Budgeted && !s.agents[q.agent].budget.Withdraw(s.clock) {
		s.finish(q, o)
		return
	}
	s.seen.retried(s, q)
	s.try(q)
}

// finish ends a request.
func (s *simulation) finish(q *request, o outcome) {
	s.alive--
	q.alive = false
	s.seen.ended(s, q, o)
	if q.user != noUser {
		s.put(int64(s.cfg.Load.Think.draw(s.randoms.requests)), wish, q.user)
	}
	s.requests.release(q.id)
}

// probe sends probes.
func (s *simulation) probe(a *agent, b *balancer.Balancer, targets []*balancer.Endpoint) {
	for _, e := range targets {
		id, p := s.probes.take()
		*p = probe{agent: a, balancer: b, endpoint: e, replica: s.replicaOf(e), sent: s.now}
		if b != nil {
			s.seen.probeSent(s)
		}
		s.message(a.zone, p.replica.zone, probing, id, 0)
	}
}

// probing is the arrival of a probe at its replica.
func (s *simulation) probing(id int32) {
	p := s.probes.items[id]
	r := p.replica
	switch {
	case r.crashed > 0:
		s.loseProbe(id)
	case r.frozen > 0:
		r.held = append(r.held, id)
	default:
		s.seen.probed(s, r)
		p.report, p.declined = s.loadFor(r, balancer.Request{}), r.declines()
		s.message(r.zone, p.agent.zone, probed, id, 0)
	}
}

// probed is the arrival of the answer to a probe.
func (s *simulation) probed(id int32) {
	p := s.probes.items[id]
	if s.now-p.sent > int64(s.cfg.Policy.Prequal.ProbeTimeout) {
		s.loseProbe(id)
		return
	}
	switch {
	case p.declined:
		s.declined(p.agent, p.endpoint)
	case p.balancer != nil:
		p.balancer.Probed(s.clock, 0, p.endpoint, p.report)
	}
	s.probes.release(id)
}

func (s *simulation) loseProbe(id int32) {
	if s.probes.items[id].balancer != nil {
		s.seen.probeLost(s)
	}
	s.probes.release(id)
}

// tick lets an agent look whether probes are due.
func (s *simulation) tick(id int32) {
	a := &s.agents[id]
	for _, b := range a.shards {
		s.targets = b.Idle(s.clock, 0, s.targets[:0])
		s.probe(a, b, s.targets)
	}
	s.check(a)
	if s.now < s.end || s.alive > 0 {
		s.put(int64(s.cfg.Probes.IdleEvery), tick, id)
	}
}

// replicaOf returns the replica behind an endpoint, whose ID tells its number.
func (s *simulation) replicaOf(e *balancer.Endpoint) *replica {
	i := 0
	for _, digit := range e.ID[len("sim/r") : len("sim/r")+digits] {
		i = 10*i + int(digit-'0')
	}
	return &s.replicas[i]
}

func (s *simulation) registered() []registry.Endpoint {
	var records []registry.Endpoint
	for i := range s.replicas {
		if r := &s.replicas[i]; r.registered {
			records = append(records, r.record())
		}
	}
	return records
}
