package sim

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/balancer"
	"github.com/headroom-mesh/headroom/registry"
)

// Run plays what c says and returns what was seen. The same c gives the same Result. The error is that of c.Validate.
func Run(c Config) (Result, error) { return RunContext(context.Background(), c) }

// RunContext is Run, but stops when ctx ends, whose cause is the error then.
func RunContext(ctx context.Context, c Config) (Result, error) {
	if err := c.Validate(); err != nil {
		return Result{}, err
	}
	s := newSimulation(c.withDefaults())
	if err := s.play(ctx); err != nil {
		return Result{}, err
	}
	return s.seen.result(s), nil
}

// simulation is a service being played. Time is in nanoseconds since the start.
type simulation struct {
	cfg     Config
	mean    float64 // of the work of a request
	now     int64
	clock   time.Time // now, as the agents see it
	agenda  agenda
	randoms randoms

	arrivals arrivals
	agents   []agent
	replicas []replica
	groups   []int               // the first replica of each group, and the end
	records  []registry.Endpoint // what the registry says
	edition  uint32              // how often it has said something new
	news     map[uint32]*news    // editions that some agents are still to hear of
	checks   bool                // some replica has taken no requests for a time

	requests pool[request]
	tries    pool[try]
	probes   pool[probe]

	inquiries pool[inquiry]
	questions pool[question]

	targets []*balancer.Endpoint // of probes, used again and again

	warm, end int64 // requests born from warm to end count
	alive     int   // requests that have not ended
	seen      measurements
}

// randoms are sources for what must not depend on the rule, each drawn in an order that does not.
type randoms struct {
	requests, antagonists *rand.Rand
	// The rest is for what comes in an order of its own under each rule.
	rest *rand.Rand
}

func newSimulation(c Config) *simulation {
	source := func(stream uint64) *rand.Rand { return rand.New(rand.NewPCG(c.Seed, stream)) }
	s := &simulation{
		cfg:     c,
		mean:    c.Load.Work.mean() + float64(c.Probes.RequestCost),
		clock:   epoch(0),
		news:    map[uint32]*news{},
		randoms: randoms{requests: source(1), antagonists: source(2), rest: source(3)},
		warm:    int64(c.Warmup),
		end:     int64(c.Warmup + c.Duration),
	}
	s.agenda.addLane(int64(c.Network.Delay))
	if c.Network.ZoneDelay != c.Network.Delay {
		s.agenda.addLane(int64(c.Network.ZoneDelay))
	}
	if c.Caller.Timeout > 0 {
		s.agenda.addLane(int64(c.Caller.Timeout))
	}
	s.addReplicas()
	s.arrivals = newArrivals(c.Load, s.capacity(), s.randoms.requests)
	s.seen = newMeasurements(s)
	s.addAgents()
	s.addAntagonists()
	return s
}

// epoch returns the time that agents see at a time of the simulation.
func epoch(at int64) time.Time { return time.Unix(1_000_000_000, at) }

// play plays to the end, and then until all requests have ended, or patience has.
func (s *simulation) play(ctx context.Context) error {
	s.begin()
	last := s.end + int64(s.cfg.Duration) + int64(patience)
	for events := 0; s.now < s.end || s.alive > 0; events++ {
		if events%lookUp == 0 && ctx.Err() != nil {
			return context.Cause(ctx)
		}
		e, ok := s.agenda.next()
		if !ok || e.at > last {
			break
		}
		s.now, s.clock = e.at, epoch(e.at)
		s.handle(e)
	}
	for _, q := range s.requests.items {
		if q.alive {
			s.seen.ended(s, q, unended)
		}
	}
	return nil
}

// lookUp is after how many events somebody is looked for who wants the simulation to stop.
const lookUp = 1 << 12

// patience is how much longer than the simulation itself requests may take that are under way at its end.
const patience = time.Minute

// begin puts down what happens by itself.
func (s *simulation) begin() {
	if s.cfg.Load.Users > 0 {
		for user := range s.cfg.Load.Users {
			s.put(int64(s.cfg.Load.Think.draw(s.randoms.requests)), wish, int32(user))
		}
	} else {
		s.expect()
	}
	for i := range s.agents {
		if s.cfg.Oracle {
			break // it needs no probes
		}
		s.put(s.randoms.rest.Int64N(int64(s.cfg.Probes.IdleEvery)), tick, int32(i))
	}
	for i, f := range s.cfg.Faults {
		s.put(int64(f.At), faultStarts, int32(i))
	}
	s.put(int64(s.cfg.SampleEvery), sample, 0)
	s.put(int64(s.cfg.Bucket), bucketEnds, 0)
}

func (s *simulation) put(delay int64, kind eventKind, id int32) {
	s.agenda.put(s.now, delay, kind, id, 0)
}

// message puts down what happens when a message from one zone has reached another.
func (s *simulation) message(from, to string, kind eventKind, id int32, generation uint32) {
	s.agenda.put(s.now, s.delay(from, to), kind, id, generation)
}

func (s *simulation) delay(from, to string) int64 {
	delay := int64(s.cfg.Network.Delay)
	if from != to {
		delay = int64(s.cfg.Network.ZoneDelay)
	}
	if s.cfg.Network.Jitter > 0 {
		delay += int64(s.randoms.rest.ExpFloat64() * float64(s.cfg.Network.Jitter))
	}
	return delay
}

func (s *simulation) handle(e event) {
	switch e.kind() {
	case birth:
		s.bear(noUser)
		s.expect()
	case wish:
		s.wish(e.id)
	case arrival:
		s.arrive(s.tries.items[e.id])
	case wake:
		s.wake(&s.replicas[e.id])
	case failure:
		if t := s.tries.items[e.id]; t.generation == e.generation {
			s.fail(t)
		}
	case response:
		s.respond(s.tries.items[e.id])
	case timeout:
		if t := s.tries.items[e.id]; t.generation == e.generation {
			s.timeOut(t)
		}
	case cancelation:
		if t := s.tries.items[e.id]; t.generation == e.generation {
			s.cancel(t)
		}
	case probing:
		s.probing(e.id)
	case probed:
		s.probed(e.id)
	case asking:
		s.asked(s.questions.items[e.id])
	case answering:
		s.answered(s.questions.items[e.id])
	case releasing:
		s.release(s.questions.items[e.id])
	case inquiryTimeout:
		if i := s.inquiries.items[e.id]; i.generation == e.generation {
			s.choose(i)
		}
	case inquiryGivenUp:
		if i := s.inquiries.items[e.id]; i.generation == e.generation {
			s.giveUp(i)
		}
	case idling:
		s.idled(&s.replicas[e.id], &s.agents[e.generation])
	case tick:
		s.tick(e.id)
	case hearing:
		s.hear(e.id, e.generation)
	case level:
		s.changeLevel(&s.replicas[e.id])
	case faultStarts:
		s.startFault(e.id, int(e.generation))
	case faultEnds:
		s.endFault(e.id, int(e.generation))
	case sample:
		s.seen.sample(s)
		s.put(int64(s.cfg.SampleEvery), sample, 0)
	case bucketEnds:
		s.seen.endBucket(s)
		s.put(int64(s.cfg.Bucket), bucketEnds, 0)
	}
}

// expect puts down the next birth of the open loop.
func (s *simulation) expect() {
	if at := s.arrivals.after(s.now); at < s.end {
		s.put(at-s.now, birth, 0)
	}
}

// wish lets a user send a request.
func (s *simulation) wish(user int32) {
	if s.now < s.end {
		s.bear(user)
	}
}

// capacity returns the requests a second that the replicas registered at the start serve within what is allocated to
// them.
func (s *simulation) capacity() float64 {
	cores := 0.0
	for i := range s.replicas {
		if r := &s.replicas[i]; r.registered {
			cores += r.allocated * r.speed
		}
	}
	return cores * 1e9 / s.mean
}
