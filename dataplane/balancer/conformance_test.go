package balancer

import (
	"errors"
	"math"
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
)

func TestConformance(t *testing.T) {
	for _, rule := range policy.Balancers() {
		t.Run(string(rule), func(t *testing.T) { conform(t, rule) })
	}
}

// conform runs all that is asked of every rule.
func conform(t *testing.T, rule policy.Balancer) {
	for _, part := range []struct {
		name string
		run  func(*testing.T, policy.Balancer)
	}{
		{"few replicas", testFewReplicas},
		{"same seed, same choices", testSameSeed},
		{"no allocations", testNoAllocations},
		{"weights", testWeights},
		{"weights under load", testWeightsUnderLoad},
		{"departed replicas", testDepartedReplicas},
		{"ejected replicas come back", testEjectedComeBack},
		{"no starvation", testNoStarvation},
		{"concurrent use", testConcurrentUse},
	} {
		t.Run(part.name, func(t *testing.T) { part.run(t, rule) })
	}
}

// underRace reports whether the race detector is on, which makes all ten times slower.
func underRace() bool {
	info, _ := debug.ReadBuildInfo()
	return slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}

// agent does for a balancer what an agent does: it asks, probes, and tells of load and of idle replicas.
type agent struct {
	*Balancer
	now time.Time
	rng *rand.Rand
	// report is what a replica says when it has so many requests in flight.
	report func(e *Endpoint, rif int) load.Report
	// asked, if it is set, sees whom the rule asks or probes.
	asked func(*Endpoint)

	key     uint64
	targets []*Endpoint
	answers []Answer
}

func newAgent(p policy.Policy, fleet *Fleet, shards int) *agent {
	return &agent{
		Balancer: New(p, fleet, shards, 1),
		now:      start,
		rng:      rand.New(rand.NewPCG(1, 2)),
		report:   equal,
		targets:  make([]*Endpoint, 0, 1024),
		answers:  make([]Answer, 0, 64),
	}
}

// equal is a report by which all replicas are alike, apart from their requests in flight.
func equal(_ *Endpoint, rif int) load.Report {
	return load.Report{RIF: int32(rif), Latency: 50 * time.Millisecond, Known: true, Rate: 100, Utilization: 0.5}
}

// crowded is one by which replicas are alike whose requests in flight are as many for their weights.
func crowded(e *Endpoint, rif int) load.Report {
	r := equal(e, rif)
	r.Latency = time.Duration(rif+int(e.weight())) * time.Millisecond / time.Duration(e.weight())
	return r
}

func (a *agent) ask(e *Endpoint) load.Report {
	if a.asked != nil {
		a.asked(e)
	}
	return a.report(e, e.RIF())
}

// place places a request, which is in flight then.
func (a *agent) place(req Request) (Picked, error) {
	picked, err := a.choose(req)
	if err == nil {
		a.probe(picked.Shard(), picked.Due(a.targets[:0]))
	}
	return picked, err
}

func (a *agent) choose(req Request) (Picked, error) {
	targets, enough, asks := a.Inquire(a.now, req, a.targets[:0])
	if !asks {
		return a.Pick(a.now, req)
	}
	answers := a.answers[:0]
	a.shuffle(targets)
	for _, e := range targets {
		if len(answers) < enough && a.grants(e) {
			answers = append(answers, Answer{e, a.ask(e)})
		}
	}
	return a.Choose(a.now, req, answers)
}

// grants reports whether a replica answers at once when it is asked about a request.
func (a *agent) grants(e *Endpoint) bool {
	return a.Policy.Balancer != policy.BalancerLateBinding || a.idle(e)
}

func (a *agent) idle(e *Endpoint) bool { return e.RIF() < a.Policy.Slots*int(e.weight()) }

func (a *agent) probe(shard int, targets []*Endpoint) {
	a.shuffle(targets)
	for _, e := range targets {
		a.Probed(a.now, shard, e, a.ask(e))
	}
}

// shuffle puts replicas in the order in which their answers come: any.
func (a *agent) shuffle(targets []*Endpoint) {
	for i := range targets {
		j := a.rng.IntN(i + 1)
		targets[i], targets[j] = targets[j], targets[i]
	}
}

// respond lets a response come. All seem to have taken 50 ms, so that all replicas are alike.
func (a *agent) respond(p Picked) {
	r := a.report(p.Endpoint, p.Endpoint.RIF()-1)
	p.Responded(a.now.Add(50*time.Millisecond), 50*time.Millisecond, &r)
}

// finish ends a request.
func (a *agent) finish(p Picked, outcome Outcome) {
	if outcome == Succeeded {
		a.respond(p)
	}
	p.Done(a.now, outcome)
	if a.idle(p.Endpoint) {
		a.Idled(a.now, p.Endpoint)
	}
}

// tick lets time pass.
func (a *agent) tick(d time.Duration) {
	a.now = a.now.Add(d)
	for shard := range a.Shards() {
		a.probe(shard, a.Idle(a.now, shard, a.targets[:0]))
	}
}

// begin lets the rule see the fleet, hear of it for a while, and learn who is idle.
func (a *agent) begin() {
	for range 150 {
		a.tick(100 * time.Millisecond)
		for _, e := range a.fleet.Set(a.now).Endpoints {
			e.counter.begin()
			a.inFlight[0].Add(1)
			picked := Picked{Endpoint: e, shard: a.shards[0], balancer: a.Balancer}
			a.respond(picked)
			picked.Done(a.now, Succeeded)
		}
	}
	set := a.fleet.Set(a.now)
	for range a.Policy.Slots {
		for _, s := range set.seats {
			a.Idled(a.now, s.Endpoint)
		}
	}
}

// anyKey returns a request with a key of its own. Keys are spread more evenly than chance has it.
func (a *agent) anyKey() Request {
	a.key += 0x9e3779b97f4a7c15
	return Request{Key: a.key, Keyed: true}
}

func testFewReplicas(t *testing.T, rule policy.Balancer) {
	f := NewFleet(Place{})
	a := newAgent(defaults(rule), f, 2)
	a.tick(time.Second)
	if _, err := a.place(a.anyKey()); !errors.Is(err, ErrNoEndpoints) {
		t.Errorf("no replicas: got %v; want %v", err, ErrNoEndpoints)
	}
	for _, n := range []int{1, 2, 3, 1, 0, 2} {
		f.Update(a.now, replicas(n), policy.Scope{})
		used := map[*Endpoint]bool{}
		for i := range 200 {
			req := a.anyKey()
			req.Keyed = i%4 > 0
			picked, err := a.place(req)
			if n == 0 {
				if !errors.Is(err, ErrNoEndpoints) {
					t.Fatalf("no replicas any more: got %v; want %v", err, ErrNoEndpoints)
				}
				continue
			}
			if err != nil {
				t.Fatalf("%d replicas: %v", n, err)
			}
			used[picked.Endpoint] = true
			a.tick(10 * time.Millisecond)
			a.finish(picked, Succeeded)
		}
		if len(used) != n {
			t.Errorf("%d replicas: %d got requests", n, len(used))
		}
	}
}

func testSameSeed(t *testing.T, rule policy.Balancer) {
	var choices [2][]registry.EndpointID
	for i := range choices {
		f := NewFleet(Place{})
		records := replicas(50)
		for i := range records {
			records[i].Weight = int32(i%3 + 1)
		}
		f.Update(start, records, policy.Scope{Subset: 30})
		a := newAgent(defaults(rule), f, 1)
		var inFlight []Picked
		for range 500 {
			picked, err := a.place(a.anyKey())
			if err != nil {
				t.Fatal(err)
			}
			choices[i] = append(choices[i], picked.Endpoint.ID)
			if inFlight = append(inFlight, picked); len(inFlight) > 20 {
				a.finish(inFlight[0], Succeeded)
				inFlight = inFlight[1:]
			}
			a.tick(5 * time.Millisecond)
		}
	}
	if !slices.Equal(choices[0], choices[1]) {
		t.Error("the same seed made other choices")
	}
}

func testNoAllocations(t *testing.T, rule policy.Balancer) {
	a := weighed(rule, 25, 1)
	request := func() {
		picked, err := a.place(a.anyKey())
		if err != nil {
			t.Fatal(err)
		}
		a.tick(5 * time.Millisecond)
		a.finish(picked, Succeeded)
	}
	for range 1000 {
		request() // pools fill up
	}
	if n := testing.AllocsPerRun(1000, request); n != 0 {
		t.Errorf("got %v allocations a request; want none", n)
	}
}

// weighed returns an agent over a fleet with as many replicas of each of the weights 1 to 4.
func weighed(rule policy.Balancer, each, inFlight int) *agent {
	records := replicas(4 * each)
	for i := range records {
		records[i].Weight = int32(i%4 + 1)
	}
	f := NewFleet(Place{})
	f.Update(start, records, policy.Scope{})
	p := defaults(rule)
	p.Slots = max(2*inFlight, 1)
	p.YARP.PollInterval = 10 * time.Millisecond // it goes by what was
	p.Hash.LoadFactor = 2                       // chance fills the light ones more often
	a := newAgent(p, f, 1)
	a.begin()
	return a
}

// wantByWeight checks that replicas of weight 1 to 4 got as many picks as they weigh, within 2 %: a rule that goes by the
// lowest favours those that vary most, the light ones.
func wantByWeight(t *testing.T, a *agent, before map[*Endpoint]uint64) {
	t.Helper()
	got, total := make([]float64, 5), 0.0
	for _, e := range a.fleet.Set(a.now).Endpoints {
		picks := float64(e.Picks() - before[e])
		got[e.weight()] += picks
		total += picks
	}
	for weight := 1; weight <= 4; weight++ {
		if want := total * float64(weight) / 10; math.Abs(got[weight]-want) > 0.02*want {
			t.Errorf("%d replicas: those of weight %d got %.0f of %.0f picks; want %.0f, within 2 %%",
				len(before), weight, got[weight], total, want)
		}
	}
}

func (a *agent) picks() map[*Endpoint]uint64 {
	picks := map[*Endpoint]uint64{}
	for _, e := range a.fleet.Set(a.now).Endpoints {
		picks[e] = e.Picks()
	}
	return picks
}

// fleetSizes are the numbers of replicas of each weight with which weights are tested. On a ring, the shares of a few
// replicas are as chance has them.
func fleetSizes(t *testing.T, rule policy.Balancer) []int {
	switch {
	case underRace():
		t.Skip("one goroutine that counts to a million")
	case rule == policy.BalancerRingHash:
		return []int{200}
	}
	return []int{1, 25}
}

// Idle replicas that report the same get requests in proportion to their weights.
func testWeights(t *testing.T, rule policy.Balancer) {
	for _, each := range fleetSizes(t, rule) {
		a := weighed(rule, each, 0)
		a.report = func(e *Endpoint, _ int) load.Report { return equal(e, 0) }
		before := a.picks()
		for range 100_000 {
			picked, err := a.place(a.anyKey())
			if err != nil {
				t.Fatal(err)
			}
			a.finish(picked, Succeeded)
		}
		wantByWeight(t, a, before)
	}
}

// So do busy ones. With dozens in flight to a weight of 1, rounding does not show.
func testWeightsUnderLoad(t *testing.T, rule policy.Balancer) {
	for _, each := range fleetSizes(t, rule) {
		const busy = 100 // to a weight of 1
		a := weighed(rule, each, busy)
		a.report = crowded
		inFlight := make([]Picked, 0, 10*busy*each)
		step := 50 * time.Millisecond / time.Duration(cap(inFlight)) // every request takes 50 ms on average
		var before map[*Endpoint]uint64
		ticked := a.now
		const picks = 100_000
		for i := range cap(inFlight) + 2*picks {
			if i == cap(inFlight)+picks {
				before = a.picks()
			}
			if len(inFlight) == cap(inFlight) {
				at, last := a.rng.IntN(len(inFlight)), len(inFlight)-1
				a.finish(inFlight[at], Succeeded)
				inFlight[at] = inFlight[last]
				inFlight = inFlight[:last]
			}
			picked, err := a.place(a.anyKey())
			if err != nil {
				t.Fatal(err)
			}
			inFlight = append(inFlight, picked)
			if a.now = a.now.Add(step); a.now.Sub(ticked) >= 20*time.Millisecond {
				ticked = a.now
				a.tick(0)
			}
		}
		wantByWeight(t, a, before)
	}
}

// However late an agent hears of a replica that has left, is draining, ejected or out of scope, the replica gets nothing.
func testDepartedReplicas(t *testing.T, rule policy.Balancer) {
	steps := 500
	if underRace() {
		steps = 50
	}
	for _, scope := range []policy.Scope{
		{}, {Subset: 4}, {Zone: policy.ZonePrefer}, {Subset: 3, Zone: policy.ZonePrefer},
	} {
		all := replicas(16)
		for i := range all {
			all[i].Zone, all[i].Weight = string(rune('a'+i%3)), int32(i%2+1)
		}
		f := NewFleet(Place{Node: "agent", Zone: "a"})
		a := newAgent(defaults(rule), f, 1)
		tempting := load.Report{RIF: 0, Latency: 1, Known: true, Rate: 1e6, Utilization: 0.01}
		seen := map[*Endpoint]bool{}
		var once []*Endpoint // all that was ever in use
		var inFlight []Picked
		records := slices.Clone(all)
		for step := range steps {
			switch a.rng.IntN(8) {
			case 0: // one comes, goes or changes its state
				i := a.rng.IntN(len(all))
				at := slices.IndexFunc(records, func(r registry.Endpoint) bool { return r.ID() == all[i].ID() })
				records = slices.Clone(records)
				switch {
				case at < 0:
					records = append(records, all[i])
				case a.rng.IntN(2) == 0:
					records = slices.Delete(records, at, at+1)
				default:
					records[at].State = registry.State(a.rng.IntN(3))
				}
				f.Update(a.now, records, scope)
			case 1:
				if es := f.Set(a.now).Endpoints; len(es) > 0 {
					f.failed(a.now, es[a.rng.IntN(len(es))], true)
				}
			case 2:
				if es := f.Set(a.now).Endpoints; len(es) > 0 {
					f.Decline(a.now, es[a.rng.IntN(len(es))])
				}
			case 3:
				f.SetReachable(a.now, all[a.rng.IntN(len(all))].Agent, a.rng.IntN(3) > 0)
			case 4:
				a.tick(200 * time.Millisecond)
			}
			// What was asked before arrives now.
			targets, _, asks := a.Inquire(a.now, a.anyKey(), a.targets[:0])
			if asks && a.rng.IntN(2) == 0 {
				records = without1(records, a.rng)
				f.Update(a.now, records, scope)
			}
			for range min(len(once), 5) {
				e := once[a.rng.IntN(len(once))]
				a.Probed(a.now, 0, e, tempting)
				a.Idled(a.now, e)
				if len(inFlight) > 0 {
					inFlight[a.rng.IntN(len(inFlight))].Responded(a.now, time.Millisecond, &tempting)
				}
				if asks {
					targets = append(targets, e)
				}
			}
			var picked Picked
			var err error
			if asks {
				var answers []Answer
				for _, e := range targets {
					answers = append(answers, Answer{e, tempting})
				}
				picked, err = a.Choose(a.now, a.anyKey(), answers)
			} else {
				picked, err = a.Pick(a.now, a.anyKey())
			}
			set := f.Set(a.now)
			if err != nil {
				if len(set.Endpoints) > 0 {
					t.Fatalf("step %d: %v, though %d replicas take requests", step, err, len(set.Endpoints))
				}
				continue
			}
			if !slices.Contains(set.Endpoints, picked.Endpoint) || picked.Endpoint.Record().State != registry.Ready {
				t.Fatalf("step %d, scope %+v: picked %s, which is not in use", step, scope, picked.Endpoint.ID)
			}
			for _, e := range append(picked.Due(a.targets[:0]), a.Idle(a.now, 0, nil)...) {
				if !slices.Contains(set.Endpoints, e) {
					t.Fatalf("step %d: probes %s, which is not in use", step, e.ID)
				}
			}
			if !seen[picked.Endpoint] {
				seen[picked.Endpoint] = true
				once = append(once, picked.Endpoint)
			}
			if inFlight = append(inFlight, picked); len(inFlight) > 10 {
				inFlight[0].Done(a.now, Outcome(a.rng.IntN(4)))
				inFlight = inFlight[1:]
			}
		}
		for _, p := range inFlight {
			p.Done(a.now, Abandoned)
		}
		if rif := (flights{all: a.inFlight}).total(); rif != 0 {
			t.Errorf("got %d in flight at the end; want 0", rif)
		}
	}
}

func without1(records []registry.Endpoint, rng *rand.Rand) []registry.Endpoint {
	if len(records) == 0 {
		return records
	}
	at := rng.IntN(len(records))
	return slices.Delete(slices.Clone(records), at, at+1)
}

// A replica whose ejection is over gets requests again.
func testEjectedComeBack(t *testing.T, rule policy.Balancer) {
	f := NewFleet(Place{})
	f.Update(start, replicas(4), policy.Scope{})
	a := newAgent(defaults(rule), f, 1)
	a.begin()
	out := f.Set(a.now).Endpoints[0]
	f.failed(a.now, out, true)
	for range 50 {
		picked, err := a.place(a.anyKey())
		if err != nil || picked.Endpoint == out {
			t.Fatalf("picked an ejected replica, or none: %v", err)
		}
		a.finish(picked, Succeeded)
	}
	a.tick(firstEjection)
	before := out.Picks()
	for range 200 {
		picked, err := a.place(a.anyKey())
		if err != nil {
			t.Fatal(err)
		}
		a.tick(10 * time.Millisecond)
		a.finish(picked, Succeeded)
	}
	if out.Picks() == before {
		t.Error("got nothing after its ejection")
	}
}

// However bad a replica was once, it gets requests again after it has recovered; and so do all others.
func testNoStarvation(t *testing.T, rule policy.Balancer) {
	f := NewFleet(Place{})
	f.Update(start, replicas(10), policy.Scope{})
	a := newAgent(defaults(rule), f, 1)
	a.begin()
	bad := f.Set(a.now).Endpoints[3]
	a.report = func(e *Endpoint, rif int) load.Report {
		if e == bad {
			return load.Report{RIF: 1000, Latency: 10 * time.Second, Known: true, Rate: 0.1, ErrorRate: 100, Utilization: 5}
		}
		return equal(e, rif)
	}
	request := func() {
		picked, err := a.place(a.anyKey())
		if err != nil {
			t.Fatal(err)
		}
		a.tick(10 * time.Millisecond)
		if outcome := Outcome(a.rng.IntN(2)); picked.Endpoint == bad && a.report(bad, 0).ErrorRate > 0 {
			r := a.report(bad, 0)
			picked.Responded(a.now.Add(10*time.Second), 10*time.Second, &r)
			picked.Done(a.now, outcome)
			a.Idled(a.now, bad)
			return
		}
		a.finish(picked, Succeeded)
	}
	for range 1000 {
		request()
	}
	a.report = equal
	before := a.picks()
	for range 12_000 { // two minutes
		request()
	}
	for e, n := range before {
		if e.Picks() == n {
			t.Errorf("%s got nothing for two minutes (the bad one: %v)", e.ID, e == bad)
		}
	}
}

// testConcurrentUse lets everything happen at once, on a fleet that changes like a window that slides over the replicas:
// the lowest one leaves, a new one joins.
func testConcurrentUse(t *testing.T, rule policy.Balancer) {
	const steps, window = 150, 8
	records := replicas(steps + window)
	slices.SortFunc(records, func(a, b registry.Endpoint) int { return a.Address.Compare(b.Address) })
	rank := map[registry.EndpointID]int64{}
	for i, r := range records {
		rank[r.ID()] = int64(i)
	}
	fleet := NewFleet(Place{})
	fleet.Update(time.Now(), records[:window], policy.Scope{})
	b := New(defaults(rule), fleet, 4, 1)

	var lowest atomic.Int64 // replicas below have left
	var picks atomic.Uint64
	var seen sync.Map // *Endpoint
	done := make(chan struct{})
	running := func() bool {
		select {
		case <-done:
			return false
		default:
			return true
		}
	}
	var wg sync.WaitGroup
	for g := range uint64(4) {
		a := &agent{Balancer: b, rng: rand.New(rand.NewPCG(7, g))}
		a.report = func(*Endpoint, int) load.Report {
			return known(a.rng.Int32N(5), time.Duration(a.rng.IntN(50)))
		}
		wg.Go(func() {
			var inFlight []Picked
			for n := 0; running() || n < 100; n++ {
				before := lowest.Load()
				a.now = time.Now()
				picked, err := a.place(Request{Key: a.rng.Uint64N(100), Keyed: a.rng.IntN(4) > 0})
				if err != nil {
					t.Errorf("pick: %v", err)
					break
				}
				if rank[picked.Endpoint.ID] < before {
					t.Errorf("picked replica %d after those below %d had left", rank[picked.Endpoint.ID], before)
				}
				picks.Add(1)
				seen.Store(picked.Endpoint, true)
				if inFlight = append(inFlight, picked); len(inFlight) > 10 {
					i := a.rng.IntN(len(inFlight))
					a.finish(inFlight[i], Outcome(a.rng.IntN(4)))
					inFlight = slices.Delete(inFlight, i, i+1)
				}
			}
			for _, picked := range inFlight {
				picked.Done(time.Now(), Succeeded)
			}
		})
	}
	wg.Go(func() {
		rng := rand.New(rand.NewPCG(7, 99))
		for running() {
			for shard := range b.Shards() {
				b.Idle(time.Now(), shard, nil)
			}
			b.View(time.Now())
			fleet.Each(time.Now(), func(e *Endpoint, _ Avoidance) {
				if rng.IntN(50) == 0 {
					fleet.Decline(time.Now(), e)
				}
				fleet.SetReachable(time.Now(), e.Record().Agent, rng.IntN(2) == 0)
				b.Forget(e)
			})
			runtime.Gosched()
		}
	})
	for i := range steps {
		fleet.Update(time.Now(), records[i+1:i+1+window], policy.Scope{})
		lowest.Store(int64(i + 1))
		runtime.Gosched()
	}
	close(done)
	wg.Wait()

	total := uint64(0)
	seen.Range(func(e, _ any) bool {
		total += e.(*Endpoint).Picks()
		if rif := e.(*Endpoint).RIF(); rif != 0 {
			t.Errorf("%s: got %d in flight at the end; want 0", e.(*Endpoint).ID, rif)
		}
		return true
	})
	if total != picks.Load() || (flights{all: b.inFlight}).total() != 0 {
		t.Errorf("got %d picks, %d in flight; want %d, 0", total, flights{all: b.inFlight}.total(), picks.Load())
	}
}
