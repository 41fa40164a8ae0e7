package sim

import (
	"math"
	"slices"
	"strings"

	"github.com/headroom-mesh/headroom/dataplane/balancer"
	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
)

// inquiry is a request for which the agent asks replicas before it places it: for their load (prequal_sync), or for a slot
// (late_binding).
type inquiry struct {
	id         int32
	generation uint32
	request    *request
	balancer   *balancer.Balancer
	enough     int
	failed     int
	answers    []balancer.Answer
	questions  []*question
	granted    *question // late_binding: the first slot
}

// question is what one replica is asked.
type question struct {
	id       int32
	holders  int      // who may still make use of it: the inquiry, then the try, and each message under way
	inquiry  *inquiry // nil once it is over
	agent    *agent
	endpoint *balancer.Endpoint
	replica  *replica
	key      balancer.Request
	answered bool // rather than refused
	declined bool // because the replica takes no requests
	released bool // the replica knows that the slot is not needed
	report   load.Report
}

// slotted reports whether agents need to know which slots of replicas are free.
func (s *simulation) slotted() bool { return s.lateBinding() || s.joinsIdleQueues() }

func (s *simulation) lateBinding() bool { return s.cfg.Policy.Balancer == policy.BalancerLateBinding }

func (s *simulation) joinsIdleQueues() bool {
	return s.cfg.Policy.Balancer == policy.BalancerJoinIdleQueue
}

// inquire asks replicas about a request.
func (s *simulation) inquire(q *request, a *agent, b *balancer.Balancer, enough int) {
	id, i := s.inquiries.take()
	*i = inquiry{
		id: id, generation: i.generation + 1, request: q, balancer: b, enough: enough,
		answers: i.answers[:0], questions: i.questions[:0],
	}
	for _, e := range s.targets {
		i.questions = append(i.questions, s.ask(i, a, e))
	}
	if !s.lateBinding() {
		s.agenda.put(s.now, int64(s.cfg.Policy.Prequal.ProbeTimeout), inquiryTimeout, id, i.generation)
	}
	if s.cfg.Caller.Timeout > 0 {
		s.agenda.put(s.now, q.deadline-s.now, inquiryGivenUp, id, i.generation)
	}
}

func (s *simulation) ask(i *inquiry, a *agent, e *balancer.Endpoint) *question {
	id, u := s.questions.take()
	*u = question{id: id, holders: 1, inquiry: i, agent: a, endpoint: e, replica: s.replicaOf(e), key: i.request.key}
	s.seen.probeSent(s)
	s.tell(u, a.zone, u.replica.zone, asking)
	return u
}

// tell sends a message about a question.
func (s *simulation) tell(u *question, from, to string, kind eventKind) {
	u.holders++
	s.message(from, to, kind, u.id, 0)
}

// drop lets one of those who made use of a question do so no more.
func (s *simulation) drop(u *question) {
	if u.holders--; u.holders == 0 {
		s.questions.release(u.id)
	}
}

// asked is the arrival of a question at its replica.
func (s *simulation) asked(u *question) {
	r := u.replica
	switch {
	case u.released: // that word was faster
	case r.crashed > 0:
		s.answerQuestion(u, false)
	case r.frozen == 0 && r.declines():
		u.declined = true
		s.answerQuestion(u, false)
	case r.frozen > 0:
		u.holders++
		r.asked = append(r.asked, u)
	case !s.lateBinding():
		s.answerQuestion(u, true)
	case r.slotLine.Join(u.id):
		s.answerQuestion(u, true)
	}
	s.drop(u)
}

// loadFor returns what a replica says of its load to a request with a key.
func (s *simulation) loadFor(r *replica, key balancer.Request) load.Report {
	if cost := s.cfg.Probes.Cost; cost > 0 && r.serve == CPU {
		s.burden(r, float64(cost))
	}
	report := r.tracker.Report(s.clock)
	if key.Keyed && r.keys != nil && r.keys.Has(key.Key) {
		return report.Scaled(s.cfg.Policy.PrequalSync.HitScale)
	}
	return report
}

func (s *simulation) answerQuestion(u *question, answered bool) {
	u.answered = answered
	if answered {
		s.seen.probed(s, u.replica)
		u.report = s.loadFor(u.replica, u.key)
	}
	s.tell(u, u.replica.zone, u.agent.zone, answering)
}

// answered is the arrival of an answer.
func (s *simulation) answered(u *question) {
	if u.declined {
		s.declined(u.agent, u.endpoint)
	}
	if i := u.inquiry; i != nil {
		s.note(i, u)
	}
	s.drop(u)
}

// note takes in an answer. Then there may be enough to go by, or no hope of that.
func (s *simulation) note(i *inquiry, u *question) {
	if !u.answered {
		i.failed++
	} else {
		i.answers = append(i.answers, balancer.Answer{Endpoint: u.endpoint, Report: u.report})
		if s.lateBinding() {
			i.granted = u
		}
	}
	hopeless := i.failed >= i.enough && !s.lateBinding()
	if len(i.answers) >= i.enough || hopeless || len(i.answers)+i.failed == len(i.questions) {
		s.choose(i)
	}
}

// choose ends an inquiry and places its request by the answers.
func (s *simulation) choose(i *inquiry) {
	q, b, hold := i.request, i.balancer, i.granted
	picked, err := b.Choose(s.clock, q.key, i.answers)
	if hold != nil && (err != nil || picked.Endpoint != hold.endpoint) {
		hold = nil // its replica has left
	}
	s.endInquiry(i, hold)
	s.placed(q, b, picked, err, hold)
}

// endInquiry leaves the lines for all slots but the one that is held.
func (s *simulation) endInquiry(i *inquiry, hold *question) {
	for _, u := range i.questions {
		u.inquiry = nil
		if u == hold {
			continue // from now on the try's
		}
		if s.lateBinding() {
			s.tell(u, u.agent.zone, u.replica.zone, releasing)
		}
		s.drop(u)
	}
	i.generation++
	s.inquiries.release(i.id)
}

// giveUp ends an inquiry whose caller has lost patience.
func (s *simulation) giveUp(i *inquiry) {
	q := i.request
	s.endInquiry(i, nil)
	s.retry(q, timedOut)
}

// release is the arrival of the word that a place in the line is not needed.
func (s *simulation) release(u *question) {
	u.released = true
	s.leaveLine(u.replica, u.id)
	s.drop(u)
}

// A slot is known by the number of the question that it was granted to, or by that of the try that came without.
func (t *try) slot() int32 {
	if t.hold != nil {
		return t.hold.id
	}
	return ^t.id
}

// enterLine lets a try have the slot that it holds, or one that it doesn't.
func (s *simulation) enterLine(t *try) {
	if s.slotted() {
		t.replica.slotLine.Enter(t.slot())
	}
}

// quitLine gives up the slot of a try.
func (s *simulation) quitLine(t *try) {
	if !s.slotted() {
		return
	}
	if s.leaveLine(t.replica, t.slot()) {
		s.idle(t.replica)
	}
	if t.hold != nil {
		s.drop(t.hold)
		t.hold = nil
	}
}

// leaveLine takes somebody out of the line. It reports whether that leaves a slot to nobody.
func (s *simulation) leaveLine(r *replica, id int32) (idle bool) {
	holding, waiting := r.slotLine.Len()
	before := holding + waiting
	if next, granted := r.slotLine.Leave(id); granted {
		s.answerQuestion(s.questions.items[next], true)
	}
	holding, waiting = r.slotLine.Len()
	return holding+waiting < before && waiting == 0 && holding < r.known
}

// closeLine lets nobody wait for the slots of a node that has crashed.
func (s *simulation) closeLine(r *replica) {
	if !s.slotted() {
		return
	}
	for _, id := range r.slotLine.Resize(math.MaxInt, nil) {
		s.answerQuestion(s.questions.items[id], false)
	}
	r.slotLine = load.NewLine[int32](r.known)
}

// idle tells one agent that a replica has a slot free.
func (s *simulation) idle(r *replica) {
	if s.joinsIdleQueues() && r.takesRequests() {
		to := s.randoms.rest.IntN(len(s.agents))
		s.agenda.put(s.now, s.delay(r.zone, s.agents[to].zone), idling, int32(r.index), uint32(to))
	}
}

// announce tells agents one by one of all slots of a replica that are free.
func (s *simulation) announce(r *replica) {
	if s.joinsIdleQueues() {
		holding, _ := r.slotLine.Len()
		for range r.known - holding {
			s.idle(r)
		}
	}
}

// hearOfIdle tells an agent that has just started of all slots that are free.
func (s *simulation) hearOfIdle(a *agent) {
	if !s.joinsIdleQueues() {
		return
	}
	for i := range s.replicas {
		r := &s.replicas[i]
		holding, _ := r.slotLine.Len()
		for range r.known - holding {
			s.idled(r, a)
		}
	}
}

// idled takes in the word of an idle replica.
func (s *simulation) idled(r *replica, a *agent) {
	endpoints := a.fleet.Set(s.clock).Endpoints
	at, found := slices.BinarySearchFunc(endpoints, r.id, func(e *balancer.Endpoint, id registry.EndpointID) int {
		return strings.Compare(string(e.ID), string(id))
	})
	if found {
		a.shards[0].Idled(s.clock, endpoints[at])
	}
}
