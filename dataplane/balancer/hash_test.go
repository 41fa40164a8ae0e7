package balancer

import (
	"cmp"
	"fmt"
	"iter"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
	"pgregory.net/rapid"
)

var hashBalancers = []policy.Balancer{policy.BalancerRingHash, policy.BalancerMaglev}

func hashing(rule policy.Balancer, records []registry.Endpoint, factor float64) (*Balancer, *Fleet) {
	p := by(rule)
	p.Hash.LoadFactor = factor
	fleet := NewFleet(Place{})
	fleet.Update(start, records, policy.Scope{})
	return New(p, fleet, 1, 1), fleet
}

func pickKey(b *Balancer, key uint64) Picked { return pickKeyAt(b, start, key) }

func pickKeyAt(b *Balancer, now time.Time, key uint64) Picked {
	picked, err := b.Pick(now, Request{Key: key, Keyed: true})
	if err != nil {
		panic(err)
	}
	return picked
}

// home returns where a key goes while nothing is in flight.
func home(b *Balancer, key uint64) registry.EndpointID {
	picked := pickKey(b, key)
	picked.Done(start, Succeeded)
	return picked.Endpoint.ID
}

// hashModel is consistent hashing with bounded loads in its plainest form. The load factor is in hundredths, as floating
// point would not tell where a bound lies.
type hashModel struct {
	factor  int
	records []registry.Endpoint
	order   func(key uint64) iter.Seq[registry.EndpointID] // the owners on the circle, from the key on
	own     map[registry.EndpointID]int
	known   map[registry.EndpointID]modelReplica
	asked   map[registry.EndpointID]bool
	fair    []modelAnswer
}

type modelReplica struct {
	others float64
	until  time.Time
}

type modelAnswer struct {
	share float64
	until time.Time
}

func (m *hashModel) weight(id registry.EndpointID) int {
	i := slices.IndexFunc(m.records, func(r registry.Endpoint) bool { return r.ID() == id })
	return max(int(m.records[i].Weight), 1)
}

func (m *hashModel) totals() (own, weight int) {
	for _, n := range m.own {
		own += n
	}
	for _, r := range m.records {
		weight += m.weight(r.ID())
	}
	return own, weight
}

// fresh returns the last answers of the fair sample that still count.
func (m *hashModel) fresh(now time.Time) (answers []modelAnswer) {
	for _, a := range m.fair[max(0, len(m.fair)-64):] {
		if now.Before(a.until) {
			answers = append(answers, a)
		}
	}
	return answers
}

// pick returns the first replica that has room, if any has.
func (m *hashModel) pick(now time.Time, key uint64) (id registry.EndpointID, class Class, found bool) {
	full := map[registry.EndpointID]bool{}
	for id := range m.order(key) {
		switch {
		case full[id]:
		case !m.fits(now, id):
			full[id] = true
			if len(full) == len(m.records) {
				return "", 0, false
			}
		case len(full) == 0:
			return id, Ruled, true
		default:
			return id, Overflow, true
		}
	}
	return "", 0, false
}

// fits reports whether a replica has room.
func (m *hashModel) fits(now time.Time, id registry.EndpointID) bool {
	own, total := m.totals()
	weight := m.weight(id)
	answers := m.fresh(now)
	if len(answers) < 8 {
		room := m.factor * (own + 1) * weight / (100 * total)
		if m.factor*(own+1)*weight%(100*total) != 0 {
			room++
		}
		return m.own[id] < room
	}
	mean := 0.0 // by seat
	for _, a := range answers {
		mean += a.share / float64(len(answers))
	}
	seats, seat := m.seats()
	others := mean * float64(weight/seat)
	if k := m.known[id]; now.Before(k.until) {
		others = k.others
	}
	inFlight := float64(own) + mean*float64(seats)
	room := float64(m.factor) / 100 * (inFlight + 1) * float64(weight) / float64(total)
	return float64(m.own[id])+others < room-1e-9 // not the bound rounded up: others are an estimate
}

// seats returns how many there are, and the weight of one.
func (m *hashModel) seats() (n, unit int) {
	for _, r := range m.records {
		unit = int(gcd(int32(m.weight(r.ID())), int32(unit)))
	}
	_, total := m.totals()
	return total / unit, unit
}

func (m *hashModel) learn(now time.Time, id registry.EndpointID, others int) {
	k, raw := m.known[id], float64(max(others, 0))
	if now.Before(k.until) {
		raw = k.others*7/8 + raw/8
	}
	m.known[id] = modelReplica{raw, now.Add(time.Second)}
}

func (m *hashModel) probed(now time.Time, id registry.EndpointID, rif int) {
	others := max(rif-m.own[id], 0)
	m.learn(now, id, others)
	if m.asked[id] {
		m.asked[id] = false
		_, unit := m.seats()
		m.fair = append(m.fair, modelAnswer{float64(others) / float64(m.weight(id)/unit), now.Add(10 * time.Second)})
	}
}

// ringOrder walks the points of the ring clockwise.
func ringOrder(records []registry.Endpoint) func(key uint64) iter.Seq[registry.EndpointID] {
	owners := map[uint64]registry.EndpointID{}
	for _, r := range records {
		for _, p := range pointsOf(string(r.ID()), 128*max(int(r.Weight), 1)) {
			owners[p] = r.ID()
		}
	}
	points := slices.Collect(maps.Keys(owners))
	return func(key uint64) iter.Seq[registry.EndpointID] {
		slices.SortFunc(points, func(a, b uint64) int { return cmp.Compare(a-key, b-key) }) // by distance from the key
		return func(yield func(registry.EndpointID) bool) {
			for _, p := range points {
				if !yield(owners[p]) {
					return
				}
			}
		}
	}
}

// hashCase is some replicas, and who owns the points of their circle from a key on.
type hashCase struct {
	records []registry.Endpoint
	order   func(key uint64) iter.Seq[registry.EndpointID]
	circle  *circle
}

// Whatever agents and replicas do, each request goes where the plain rule says.
func TestHashBalancersAgreeWithModel(t *testing.T) {
	for _, rule := range hashBalancers {
		t.Run(string(rule), func(t *testing.T) {
			var cases []hashCase // circles take long to make
			rng := rand.New(rand.NewPCG(1, 2))
			for n := range 8 {
				records := replicas(n + 1)
				for i := range records {
					records[i].Weight = []int32{0, 1, 2, 3}[rng.IntN(4)]
				}
				c := hashCase{records: records, order: ringOrder(records), circle: newRing(setOf(records))}
				if rule == policy.BalancerMaglev {
					c = hashCase{records: records, order: tableOrder(records), circle: newMaglev(setOf(records))}
				}
				cases = append(cases, c)
			}
			rapid.Check(t, func(t *rapid.T) { checkHashModel(t, rule, rapid.SampledFrom(cases).Draw(t, "replicas")) })
		})
	}
}

func checkHashModel(t *rapid.T, rule policy.Balancer, c hashCase) {
	m := &hashModel{
		factor: rapid.IntRange(101, 300).Draw(t, "factor"), own: map[registry.EndpointID]int{},
		known: map[registry.EndpointID]modelReplica{}, asked: map[registry.EndpointID]bool{},
	}
	m.records, m.order = c.records, c.order
	b, fleet := hashing(rule, c.records, float64(m.factor)/100)
	set := fleet.Set(start)
	made := newCircle(set, c.circle.owners, c.circle.find)
	set.ring, set.maglev = func() *circle { return made }, func() *circle { return made }
	now := start
	b.Idle(now, 0, nil) // sees the fleet
	var inFlight []Picked
	some := func(t *rapid.T) *Endpoint {
		return rapid.SampledFrom(fleet.Set(now).Endpoints).Draw(t, "replica")
	}
	rif := func(t *rapid.T) int32 { return rapid.Int32Range(0, 12).Draw(t, "rif") }
	keys := rapid.OneOf(rapid.Uint64(), rapid.Uint64Range(0, 2), rapid.Just(uint64(math.MaxUint64)),
		rapid.SampledFrom(pointsOf(string(c.records[0].ID()), 128)))
	t.Repeat(map[string]func(*rapid.T){
		"pick": func(t *rapid.T) {
			key := keys.Draw(t, "key")
			want, class, found := m.pick(now, key)
			picked := pickKeyAt(b, now, key)
			got := picked.Endpoint.ID
			if found && (got != want || picked.Class != class) {
				t.Fatalf("key %x: got %s, %v; want %s, %v\nown %v\nknown %v", key, got, picked.Class, want, class, m.own, m.known)
			}
			m.own[got]++
			inFlight = append(inFlight, picked)
		},
		"done": func(t *rapid.T) {
			if len(inFlight) > 0 {
				i := rapid.IntRange(0, len(inFlight)-1).Draw(t, "which")
				picked := inFlight[i]
				inFlight = slices.Delete(inFlight, i, i+1)
				if id := picked.Endpoint.ID; rapid.Bool().Draw(t, "reports") {
					r := load.Report{RIF: rif(t)}
					picked.Responded(now, 0, &r)
					if fleet.Set(now).has(picked.Endpoint) {
						m.learn(now, id, int(r.RIF)-(picked.Endpoint.RIF()-1))
					}
				}
				picked.Done(now, Succeeded)
				if m.own[picked.Endpoint.ID]--; m.own[picked.Endpoint.ID] == 0 {
					delete(m.own, picked.Endpoint.ID)
				}
			}
		},
		"idle": func(t *rapid.T) {
			for range rapid.IntRange(1, 12).Draw(t, "times") {
				now = now.Add(time.Second / 2)
				for _, e := range b.Idle(now, 0, nil) {
					m.asked[e.ID] = true
					r := rif(t)
					b.Probed(now, 0, e, load.Report{RIF: r})
					m.probed(now, e.ID, int(r))
				}
			}
		},
		"probed": func(t *rapid.T) {
			e, r := some(t), rif(t)
			b.Probed(now, 0, e, load.Report{RIF: r})
			m.probed(now, e.ID, int(r))
		},
		"forget": func(t *rapid.T) {
			e := some(t)
			b.Forget(e)
			delete(m.known, e.ID)
		},
		"wait": func(t *rapid.T) {
			now = now.Add(time.Duration(rapid.IntRange(0, 700).Draw(t, "ms")) * time.Millisecond)
		},
	})
}

// What was in flight to replicas that have left still counts for m, and those that stay are as known as before.
func TestHashBalancersKeepWhatTheyKnowAsTheFleetChanges(t *testing.T) {
	for _, rule := range hashBalancers {
		records := replicas(4)
		b, fleet := hashing(rule, records, 1.25)
		b.Idle(start, 0, nil)
		learnFairly(b, fleet, start, 4) // 16 in flight: five may be at one replica
		key := uint64(42)
		at := pickKey(b, key).Endpoint
		b.Probed(start, 0, at, load.Report{RIF: 100})
		for i, r := range records {
			if r.ID() != at.ID {
				fleet.Update(start, slices.Delete(slices.Clone(records), i, i+1), policy.Scope{})
				break
			}
		}
		if picked := pickKey(b, key); picked.Class != Overflow {
			t.Errorf("%s: %v at a full replica after another has left", rule, picked.Class)
		}
	}
}

// learnFairly lets a balancer know that every replica has the same RIF.
func learnFairly(b *Balancer, fleet *Fleet, now time.Time, rif int32) {
	for i := range 16 {
		at := now.Add(time.Duration(i-16) * time.Second / 2)
		for _, e := range b.Idle(at, 0, nil) {
			b.Probed(at, 0, e, load.Report{RIF: rif})
		}
	}
	for _, e := range fleet.Set(now).Endpoints {
		b.Probed(now, 0, e, load.Report{RIF: rif})
	}
}

// Requests of other agents fill a replica as this agent's own do.
func TestHashBoundCountsRequestsOfOthers(t *testing.T) {
	const n, rif = 10, 8 // ⌈1.25·81/10⌉ = 11 may be at one replica
	for _, rule := range hashBalancers {
		for _, tt := range []struct {
			name string
			at   int32 // RIF of the home
			tell bool
			wait time.Duration
			want Class
		}{
			{"room for another", 10, true, 0, Ruled},
			{"full", 11, true, 0, Overflow},
			{"full, but that is long ago", 11, true, time.Second, Ruled},
			{"full, but not known", 11, false, 0, Ruled},
		} {
			b, fleet := hashing(rule, replicas(n), 1.25)
			b.Idle(after(-time.Minute), 0, nil)
			learnFairly(b, fleet, start, rif)
			home := fleetEndpoint(fleet, home(b, 42))
			if tt.tell {
				b.Forget(home)
				b.Probed(start, 0, home, load.Report{RIF: tt.at})
			}
			if got := pickKeyAt(b, after(tt.wait), 42).Class; got != tt.want {
				t.Errorf("%s, %s: got class %v; want %v", rule, tt.name, got, tt.want)
			}
		}
	}
}

func fleetEndpoint(f *Fleet, id registry.EndpointID) *Endpoint {
	es := f.Set(start).Endpoints
	return es[slices.IndexFunc(es, func(e *Endpoint) bool { return e.ID == id })]
}

// With one hot key, no replica ever holds more than ⌈c·m/n⌉ of m requests.
func TestHashBoundsLoad(t *testing.T) {
	for _, rule := range hashBalancers {
		for _, tt := range []struct{ n, percent int }{{10, 125}, {9, 108}, {1, 101}, {3, 300}} {
			b, fleet := hashing(rule, replicas(tt.n), float64(tt.percent)/100)
			for m := 1; m <= 300; m++ {
				pickKey(b, 42)
				bound := (tt.percent*m + 100*tt.n - 1) / (100 * tt.n)
				for _, e := range fleet.Set(start).Endpoints {
					if e.RIF() > bound {
						t.Fatalf("%s, %d replicas, c %d %%: %d of %d in flight on one; bound %d", rule, tt.n, tt.percent, e.RIF(), m, bound)
					}
				}
			}
		}
	}
}

// A replica may hold as much more as its weight says.
func TestHashBoundHeedsWeights(t *testing.T) {
	for _, rule := range hashBalancers {
		records := replicas(4)
		records[0].Weight = 30
		for i := range 3 {
			records[i+1].Weight = 10
		}
		b, fleet := hashing(rule, records, 1.2)
		for m := 1; m <= 300; m++ {
			pickKey(b, 42)
			for _, e := range fleet.Set(start).Endpoints {
				w := int(e.weight())
				if bound := (12*m*w + 599) / 600; e.RIF() > bound {
					t.Fatalf("%s: %d of %d in flight on one of weight %d; bound %d", rule, e.RIF(), m, w, bound)
				}
			}
		}
	}
}

func TestHashTellsOverflow(t *testing.T) {
	for _, rule := range hashBalancers {
		b, _ := hashing(rule, replicas(10), 1.25)
		classes := map[Class]int{}
		for range 200 {
			classes[pickKey(b, 42).Class]++
		}
		if classes[Ruled] != 25 || classes[Overflow] != 175 {
			t.Errorf("%s: got classes %v; want 25 at the key's own replica and 175 overflowed", rule, classes)
		}
	}
}

// A load factor of 0 is plain consistent hashing: the home, always, and nobody is probed.
func TestHashWithoutBound(t *testing.T) {
	for _, rule := range hashBalancers {
		b, _ := hashing(rule, replicas(10), 0)
		at := home(b, 42)
		for range 100 {
			picked := pickKey(b, 42)
			if picked.Endpoint.ID != at || picked.Class != Ruled || len(picked.Due(nil)) > 0 {
				t.Fatalf("%s: got %s, class %v; want the home %s, and no probes", rule, picked.Endpoint.ID, picked.Class, at)
			}
		}
		if got := b.Idle(after(time.Hour), 0, nil); len(got) > 0 {
			t.Errorf("%s: probes %v", rule, got)
		}
	}
}

// If all are full, the request goes where there is the least too much.
func TestHashWhenAllAreFull(t *testing.T) {
	for _, rule := range hashBalancers {
		b, fleet := hashing(rule, replicas(5), 1.25)
		b.Idle(after(-time.Minute), 0, nil)
		learnFairly(b, fleet, start, 1)
		for i, e := range fleet.Set(start).Endpoints {
			b.Forget(e)
			b.Probed(start, 0, e, load.Report{RIF: int32(50 - i)})
		}
		least := fleet.Set(start).Endpoints[4]
		for key := range uint64(10) {
			picked := pickKey(b, mix(key))
			if picked.Endpoint != least || picked.Class != Overflow {
				t.Errorf("%s: got %s, class %v; want %s, overflow", rule, picked.Endpoint.ID, picked.Class, least.ID)
			}
			picked.Done(start, Succeeded)
		}
	}
}

// Probes go in turn to the key's home and to a random replica, at the policy's rate but no more than one a request.
func TestHashProbes(t *testing.T) {
	for _, tt := range []struct {
		rate     float64
		requests int
		want     int
	}{{3, 1000, 1000}, {0.25, 1000, 250}, {0, 1000, 0}} {
		p := by(policy.BalancerRingHash)
		p.Prequal.ProbesPerRequest = tt.rate
		fleet, es := fleetOf(replicas(20))
		b := New(p, fleet, 1, 1)
		sent, home := 0, 0
		for range tt.requests {
			picked := pickKey(b, 42)
			for _, e := range picked.Due(nil) {
				sent++
				if e == picked.Endpoint {
					home++
				}
			}
			picked.Done(start, Succeeded)
		}
		if want := float64(tt.want) * (0.5 + 0.5/float64(len(es))); sent != tt.want || math.Abs(float64(home)-want) > 0.05*want {
			t.Errorf("rate %v: got %d probes, %d to the home; want %d and about %.0f", tt.rate, sent, home, tt.want, want)
		}
	}
}

func TestHashIdleProbes(t *testing.T) {
	b, _ := hashing(policy.BalancerMaglev, replicas(10), 1.25)
	idle := 0
	for i := range 100 { // ten seconds
		idle += len(b.Idle(after(time.Duration(i)*100*time.Millisecond), 0, nil))
	}
	if idle != 19 {
		t.Errorf("got %d idle probes in ten seconds; want one every half second", idle)
	}
	b, _ = hashing(policy.BalancerMaglev, replicas(1), 1.25)
	if got := b.Idle(after(time.Hour), 0, nil); len(got) > 0 || len(pickKey(b, 42).Due(nil)) > 0 {
		t.Error("the only replica is probed")
	}
}

// Many agents, half of the requests for one key: what the replicas tell keeps the load about as even as one agent that sees all
// would, and about as many requests at their home.
func TestHashBoundHoldsOverManyAgents(t *testing.T) {
	t.Parallel()
	const n = 20
	run := func(agents int, tells bool) (over float64, atHome float64) {
		p := by(policy.BalancerRingHash)
		if !tells {
			p.Prequal.ProbesPerRequest, p.Prequal.IdleProbeInterval = 0, 0
		}
		s := newSim(p, agents, n, func(s *sim, _ int) *simReplica { return &simReplica{serve: s.about(100 * time.Millisecond)} })
		s.next = func() Request {
			if s.rng.IntN(2) == 0 {
				return Request{Key: mix(77), Keyed: true}
			}
			return Request{Key: mix(s.rng.Uint64N(1000)), Keyed: true}
		}
		var most []float64
		var look func()
		look = func() {
			total, highest := 0, 0
			for i := range n {
				rif := int(s.replica(i).load.Report(s.now).RIF)
				total, highest = total+rif, max(highest, rif)
			}
			most = append(most, float64(highest)/math.Ceil(1.25*float64(total)/n))
			if s.now.Before(after(6 * time.Second)) {
				s.after(10*time.Millisecond, look)
			}
		}
		s.after(2*time.Second, look)
		s.run(1000, 4*time.Second)
		slices.Sort(most)
		return most[len(most)/2], float64(s.classes[Ruled]) / float64(len(s.took))
	}
	_, ideal := run(1, true)
	for _, agents := range []int{4, 20, 100} {
		over, atHome := run(agents, true)
		blind, _ := run(agents, false)
		t.Logf("%d agents: the fullest replica %.2f × the bound, %.2f if they know only their own; %.2f at home, ideal %.2f", agents, over, blind, atHome, ideal)
		if limit := min(1+0.02*float64(agents), 2); over > limit+0.3 || atHome < 0.9*ideal {
			t.Errorf("%d agents: %.2f × the bound, %.2f at home", agents, over, atHome)
		}
		if agents == 100 && blind < 2*over {
			t.Errorf("100 agents: %.2f × the bound with what the replicas tell, %.2f without; want half of it", over, blind)
		}
	}
}

func TestHashPlacesRequestsWithoutKeyAtRandom(t *testing.T) {
	const picks = 20_000
	for _, rule := range hashBalancers {
		b, fleet := hashing(rule, replicas(20), 1.25)
		for range picks {
			if picked := pick(t, b, start); picked.Class != Fallback {
				t.Fatalf("%s: got class %v; want fallback", rule, picked.Class)
			}
		}
		wantUniform(t, fleet.Set(start).Endpoints, picks)
	}
}

// The bound knows of requests that a balancer of an earlier policy has placed.
func TestHashCountsRequestsOfEarlierPolicies(t *testing.T) {
	b, es := balancerOf(policy.BalancerRoundRobin, 4)
	var old []Picked
	for range 40 {
		old = append(old, pick(t, b, start))
	}
	b = New(by(policy.BalancerRingHash), b.fleet, 1, 1)
	for key := range uint64(4) {
		if picked := pickKey(b, mix(key)); picked.Class != Ruled {
			t.Errorf("key %d: got class %v at %d in flight everywhere; want the key's own replica", key, picked.Class, 10)
		}
	}
	for _, picked := range old {
		picked.Done(start, Succeeded)
	}
	if total := (flights{all: b.inFlight}).total(); total != 4 || es[0].RIF()+es[1].RIF()+es[2].RIF()+es[3].RIF() != 4 {
		t.Errorf("in flight at the end: got %d; want 4", total)
	}
}

func TestHashKeySpreads(t *testing.T) {
	var halves [64]int
	for i := range 10_000 {
		h := HashKey(fmt.Sprintf("user-%d", i))
		for bit := range halves {
			halves[bit] += int(h >> bit & 1)
		}
	}
	for bit, ones := range halves {
		if ones < 4800 || ones > 5200 {
			t.Errorf("bit %d is set in %d of 10000 hashes", bit, ones)
		}
	}
	if got := HashKey("a"); got != HashKey(string([]byte{'a'})) {
		t.Errorf("one key, two hashes")
	}
}
