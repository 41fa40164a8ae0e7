package sim

import (
	"fmt"
	"math"
	"net/netip"

	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
)

// replica serves requests. Whichever way it serves, those in service share equally in what it does. So each of them has
// had the same service since it began as any other that was there: attained is what a request would have had that was in
// service from the start, and a request that begins with work w ends when attained has grown by w ("virtual time").
type replica struct {
	index     int
	id        registry.EndpointID
	group     int
	zone      string
	weight    int32
	serve     Serving
	slots     int
	queue     int
	speed     float64 // as configured
	allocated float64 // cores or slots
	machine   machine
	tracker   *load.Tracker
	cache     lru

	registered bool
	stopped    int64 // when it last stopped to take requests
	heard      bool  // an agent has had an answer of it
	// Faults that are in force.
	stalled, frozen, crashed int
	unhealthy, draining      int
	slow                     float64
	failShare                float64
	failAfter                int64

	jobs     []job // a heap by mark
	line     line  // of those that wait for a slot
	failing  int
	coming   int // on the way here
	updated  int64
	attained float64
	rate     float64 // of attained
	cores    float64 // in use
	used     float64 // core-nanoseconds up to updated
	told     int64   // when the replica last said how much it uses
	usedTold float64 // used then
	wake     int64   // when the next job may end; never if none is expected to
	held     []int32 // probes that came while the node stood still
	asked    []*question

	// What the agent of the node keeps, if the rule makes use of it.
	keys     *load.Keys
	known    int // slots that the agent believes the replica to have
	slotLine *load.Line[int32]
}

// job is work in service. It has no try if it is the cost of a probe.
type job struct {
	mark float64 // attained when it ends
	try  *try
}

// digits is how many a node's name has.
const digits = 6

func nodeName(prefix string, i int) registry.NodeName {
	return registry.NodeName(fmt.Sprintf("%s%0*d", prefix, digits, i))
}

func (s *simulation) addReplicas() {
	for g, group := range s.cfg.Replicas {
		s.groups = append(s.groups, len(s.replicas))
		for range group.Count {
			s.replicas = append(s.replicas, newReplica(s.cfg, group, g, len(s.replicas)))
		}
	}
	s.groups = append(s.groups, len(s.replicas))
	s.records = s.registered()
}

func newReplica(c Config, g Group, group, index int) replica {
	r := replica{
		index: index, group: group, zone: g.Zone, weight: int32(g.Weight), serve: g.Serve, slots: g.Slots, queue: g.Queue,
		speed: g.Speed, slow: 1, tracker: newTracker(c.Policy), cache: newLRU(g.Cache), registered: !g.Absent, wake: never,
	}
	switch g.Serve {
	case CPU:
		r.machine = machine{Machines: c.Machines}
		r.allocated = c.Machines.Allocation
	case Slots:
		r.allocated = float64(g.Slots)
	}
	record := r.record()
	r.id = record.ID()
	r.known = max(c.Policy.Slots, 1) * g.Weight
	r.slotLine = load.NewLine[int32](r.known)
	if c.Policy.Balancer == policy.BalancerPrequalSync && c.Load.Items > 0 {
		r.keys = load.NewKeys(c.Policy.PrequalSync.Keys)
	}
	return r
}

func newTracker(p policy.Policy) *load.Tracker {
	t := new(load.Tracker)
	t.ByMedian(p.Prequal.Latency == policy.LatencyMedian)
	return t
}

func (r *replica) record() registry.Endpoint {
	ip := netip.AddrFrom4([4]byte{10, byte(r.index >> 16), byte(r.index >> 8), byte(r.index)})
	return registry.Endpoint{
		Service: "sim", Node: nodeName("r", r.index), Zone: r.zone, State: r.state(), Weight: r.weight,
		Address: netip.AddrPortFrom(ip, 80), Agent: netip.AddrPortFrom(ip, 81),
	}
}

func (r *replica) state() registry.State {
	switch {
	case r.draining > 0:
		return registry.Draining
	case r.unhealthy > 0:
		return registry.Unhealthy
	}
	return registry.Ready
}

// takesRequests reports whether the agent of the node says so.
func (r *replica) takesRequests() bool {
	return r.registered && r.state() == registry.Ready && r.crashed == 0
}

// rif returns the requests at the replica.
func (r *replica) rif() int { return r.busy() + r.line.waiting + r.failing }

func (r *replica) busy() int { return len(r.jobs) }

// arrive takes in a try.
func (s *simulation) arrive(t *try) {
	r := t.replica
	r.coming--
	if t.state == dropped { // that word was faster
		s.quitLine(t)
		s.forgetTry(t)
		return
	}
	if r.crashed > 0 {
		s.quitLine(t)
		s.answer(t, unconnected)
		return
	}
	s.enterLine(t)
	t.tracker = r.tracker
	t.token = t.tracker.Begin(s.clock)
	switch {
	case r.failShare > 0 && s.randoms.rest.Float64() < r.failShare:
		t.state = failing
		r.failing++
		s.agenda.put(s.now, r.failAfter, failure, t.id, t.generation)
	case r.full():
		s.leave(t, refused)
	default:
		t.work = s.cost(t)
		s.admit(t)
	}
}

// cost returns the work that a try is at this replica.
func (s *simulation) cost(t *try) float64 {
	work := t.work
	if s.cfg.Load.Items > 0 && t.replica.cache.use(t.item) {
		work /= s.cfg.Load.CacheHit
		s.seen.hit(t)
	}
	return work + float64(s.cfg.Probes.RequestCost)
}

func (r *replica) full() bool {
	return r.serve == Slots && r.busy() >= r.slots && r.queue > 0 && r.line.waiting >= r.queue
}

// admit begins the service of a try, or lets it wait.
func (s *simulation) admit(t *try) {
	r := t.replica
	if r.serve == Slots && r.busy() >= r.slots {
		t.state = waiting
		r.line.push(t)
		return
	}
	r.advance(s.now)
	r.start(t)
	s.settle(r)
}

func (r *replica) start(t *try) {
	t.state = served
	r.push(job{mark: r.attained + t.work, try: t})
}

// burden adds work that nobody waits for.
func (s *simulation) burden(r *replica, work float64) {
	r.advance(s.now)
	r.push(job{mark: r.attained + work})
	s.settle(r)
}

// advance brings a replica up to date. It must come before any change.
func (r *replica) advance(now int64) {
	if passed := float64(now - r.updated); passed > 0 {
		r.attained += r.rate * passed
		r.used += r.cores * passed
		r.machine.pass(passed)
	}
	r.updated = now
}

// settle finds out how fast the replica works from now on, and when the first of its jobs may end. It must come after
// any change.
func (s *simulation) settle(r *replica) {
	n := float64(r.busy())
	if n == 0 || r.stalled+r.frozen+r.crashed > 0 {
		r.cores, r.rate = 0, 0
		if n == 0 {
			r.attained = 0
		}
		return
	}
	each := 1.0
	r.cores = n
	if r.serve == CPU {
		var quick float64
		r.cores, quick = r.machine.grant(n)
		each = r.cores / n * quick
	}
	r.rate = each * r.speed * r.slow
	if r.rate <= 0 {
		return
	}
	left := math.Ceil((r.jobs[0].mark - r.attained) / r.rate)
	if at := s.now + int64(min(max(left, 0), never/4)); at < r.wake {
		// An event that is put down for later is left to find that it comes too soon or too late.
		r.wake = at
		s.put(at-s.now, wake, int32(r.index))
	}
}

// slack is work that is not worth another event: half a nanosecond.
const slack = 0.5

// wake ends the jobs that are done.
func (s *simulation) wake(r *replica) {
	if r.wake != s.now {
		return
	}
	r.wake = never
	r.advance(s.now)
	for len(r.jobs) > 0 && r.rate > 0 && r.jobs[0].mark <= r.attained+slack {
		if t := r.remove(0).try; t != nil {
			s.leave(t, succeeded)
		}
		s.next(r)
	}
	s.settle(r)
}

// next begins the service of the try that has waited longest.
func (s *simulation) next(r *replica) {
	for r.line.length() > 0 && r.busy() < r.slots {
		if t := s.first(&r.line); t != nil {
			r.start(t)
		}
	}
}

// first takes a try out of a line; nil if it was dropped.
func (s *simulation) first(l *line) *try {
	t := l.pop()
	if t.state == dropped {
		s.forgetTry(t)
		return nil
	}
	l.waiting--
	return t
}

// leave answers a try that the replica is done with.
func (s *simulation) leave(t *try, o outcome) {
	seen := load.OK
	if o != succeeded && !s.cfg.Without.ErrorAversion {
		seen = load.Failed
	}
	s.tellUtilization(t.replica)
	t.report = t.tracker.ReportLeaving(s.clock)
	t.tracker.End(s.clock, t.token, seen)
	if r := t.replica; r.keys != nil && o == succeeded {
		r.keys.Served(spread(uint64(t.item)))
	}
	s.quitLine(t)
	s.answer(t, o)
}

// tellUtilization lets a replica say how much CPU it has used since it last did.
func (s *simulation) tellUtilization(r *replica) {
	passed := float64(s.now - r.told)
	if r.serve != CPU || s.cfg.Without.Utilization || passed == 0 {
		return
	}
	r.advance(s.now)
	r.tracker.Utilize(s.clock, (r.used-r.usedTold)/(passed*r.allocated))
	r.told, r.usedTold = s.now, r.used
}

// fail fails a try that is meant to.
func (s *simulation) fail(t *try) {
	if t.state == failing {
		t.replica.failing--
		s.leave(t, failed)
	}
}

// cancel takes a try back whose client has lost interest, unless the replica finishes what it has begun.
func (s *simulation) cancel(t *try) {
	r := t.replica
	if t.state == ended || s.cfg.Caller.FinishAbandoned {
		return
	}
	if t.state == coming {
		t.state = dropped
		return
	}
	s.quitLine(t)
	switch t.state {
	case waiting:
		t.state = dropped
		r.line.waiting--
		t.tracker.End(s.clock, t.token, load.Canceled)
		return
	case failing:
		r.failing--
	case served:
		r.advance(s.now)
		r.remove(t.place)
		s.next(r)
		s.settle(r)
	}
	t.tracker.End(s.clock, t.token, load.Canceled)
	s.forgetTry(t)
}

// push and remove keep the heap of jobs, in which each try knows its place.

func (r *replica) push(j job) {
	r.jobs = append(r.jobs, j)
	r.rise(len(r.jobs)-1, j)
}

func (r *replica) rise(i int, j job) {
	for i > 0 {
		parent := (i - 1) / 2
		if r.jobs[parent].mark <= j.mark {
			break
		}
		r.put(i, r.jobs[parent])
		i = parent
	}
	r.put(i, j)
}

func (r *replica) put(i int, j job) {
	r.jobs[i] = j
	if j.try != nil {
		j.try.place = i
	}
}

func (r *replica) remove(i int) job {
	removed := r.jobs[i]
	n := len(r.jobs) - 1
	last := r.jobs[n]
	r.jobs[n] = job{}
	r.jobs = r.jobs[:n]
	if i == n {
		return removed
	}
	if i > 0 && last.mark < r.jobs[(i-1)/2].mark {
		r.rise(i, last)
		return removed
	}
	for {
		child := 2*i + 1
		if child >= n {
			break
		}
		if child+1 < n && r.jobs[child+1].mark < r.jobs[child].mark {
			child++
		}
		if last.mark <= r.jobs[child].mark {
			break
		}
		r.put(i, r.jobs[child])
		i = child
	}
	r.put(i, last)
	return removed
}

// line is a queue of tries, some of which are dropped.
type line struct {
	tries   []*try
	first   int
	waiting int // not dropped
}

func (l *line) length() int { return len(l.tries) - l.first }

func (l *line) push(t *try) {
	if l.first > 64 && 2*l.first > len(l.tries) {
		n := copy(l.tries, l.tries[l.first:])
		l.tries, l.first = l.tries[:n], 0
	}
	l.tries = append(l.tries, t)
	l.waiting++
}

func (l *line) pop() *try {
	t := l.tries[l.first]
	l.first++
	return t
}
