package sim_test

import (
	"math"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/sim"
	"github.com/headroom-mesh/headroom/policy"
	"pgregory.net/rapid"
)

const (
	ms  = time.Millisecond
	sec = time.Second
)

func run(t testing.TB, c sim.Config) sim.Result {
	t.Helper()
	r, err := sim.Run(c)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func by(rule policy.Balancer) policy.Policy {
	p := policy.Default()
	p.Balancer = rule
	return p
}

func exponential(mean time.Duration) sim.Work {
	return sim.Work{Distribution: sim.Exponential, Mean: mean}
}

func near(t *testing.T, what string, got, want, within float64) {
	t.Helper()
	if math.Abs(got-want) > within*want {
		t.Errorf("%s: got %.5g, want %.5g", what, got, want)
	}
}

// queue is one queue in the textbooks' sense, n times side by side: random choice splits Poisson arrivals into such.
func queue(g sim.Group, load float64, work sim.Work) sim.Config {
	g.Count = 20
	return sim.Config{
		Policy:   by(policy.BalancerRandom),
		Load:     sim.Load{Stages: []sim.Stage{{Rate: load}}, OfCapacity: true, Work: work},
		Agents:   []sim.Agents{{}},
		Replicas: []sim.Group{g},
		Machines: sim.Machines{Cores: 1, Allocation: 1},
		Network:  sim.Network{Delay: -1},
		Warmup:   2 * sec,
		Duration: 15 * sec,
	}
}

// One server, Poisson arrivals, exponential work: time in the system is exponential with mean 1/(μ-λ).
func TestMM1(t *testing.T) {
	t.Parallel()
	r := run(t, queue(sim.Group{Serve: sim.Slots}, 0.6, exponential(10*ms)))
	mean := 0.010 / (1 - 0.6)
	near(t, "mean", r.Latency.Mean.Seconds(), mean, 0.05)
	near(t, "p50", r.Latency.P50.Seconds(), mean*math.Log(2), 0.05)
	near(t, "p99", r.Latency.P99.Seconds(), mean*math.Log(100), 0.08)
	near(t, "RIF", r.RIF.Mean, 0.6/(1-0.6), 0.05)
	near(t, "slots in use", r.Groups[0].CPU, 0.6, 0.02)
}

// Several servers, one line: Erlang's formula C says how many wait, and those wait for an exponential time.
func TestMMk(t *testing.T) {
	t.Parallel()
	const k, load = 4, 0.7
	r := run(t, queue(sim.Group{Serve: sim.Slots, Slots: k}, load, exponential(40*ms)))
	a, sum, term := k*load, 0.0, 1.0
	for i := range k {
		sum += term
		term *= a / float64(i+1)
	}
	waits := term / (1 - load) / (sum + term/(1-load))
	mean := 0.040 + waits*0.040/(k*(1-load))
	near(t, "mean", r.Latency.Mean.Seconds(), mean, 0.05)
}

// Equal sharing makes the mean depend on the mean work only, whatever its distribution: x/(1-ρ).
func TestMG1ProcessorSharing(t *testing.T) {
	t.Parallel()
	for name, work := range map[string]sim.Work{
		"fixed":       {Mean: 10 * ms},
		"exponential": exponential(10 * ms),
		"lognormal":   {Distribution: sim.LogNormal, Mean: 10 * ms, Spread: 1},
		"mixture":     {Mix: []sim.Class{{Share: 9, Work: exponential(5 * ms)}, {Share: 1, Work: exponential(55 * ms)}}},
	} {
		r := run(t, queue(sim.Group{}, 0.6, work))
		near(t, name+": mean", r.Latency.Mean.Seconds(), 0.010/(1-0.6), 0.11)
		near(t, name+": CPU", r.CPU.Mean, 0.6, 0.04)
	}
}

// First come, first served makes it depend on the variance too (Pollaczek and Khinchine).
func TestMG1InOrder(t *testing.T) {
	t.Parallel()
	const load = 0.6
	work := sim.Work{Mix: []sim.Class{{Share: 0.5, Work: sim.Work{Mean: 5 * ms}}, {Share: 0.5, Work: sim.Work{Mean: 15 * ms}}}}
	r := run(t, queue(sim.Group{Serve: sim.Slots}, load, work))
	square := (25e-6 + 225e-6) / 2
	near(t, "mean", r.Latency.Mean.Seconds(), 0.010+load/0.010*square/(2*(1-load)), 0.05)
}

// A machine with room serves each request at the speed of a core: latencies are the work, and the way there and back.
func TestBelowAllocationNothingQueues(t *testing.T) {
	t.Parallel()
	c := testbed(0.5, policy.BalancerRandom)
	c.Machines.Antagonists = sim.Antagonists{}
	r := run(t, c)
	for _, tt := range []struct {
		name string
		got  time.Duration
		want float64
	}{{"p50", r.Latency.P50, 80.5}, {"p90", r.Latency.P90, 183}, {"p99", r.Latency.P99, 266.5}, {"p99.9", r.Latency.P999, 327.5}} {
		near(t, tt.name, float64(tt.got)/1e6, tt.want, 0.02)
	}
	near(t, "CPU", r.Groups[0].CPU, 0.5, 0.02)
}

// testbed is something like the paper's, of a fifth of its size.
func testbed(load float64, rule policy.Balancer) sim.Config {
	p := by(rule)
	p.Timeout = 5 * sec
	return sim.Config{
		Policy:   p,
		Load:     sim.Load{Stages: []sim.Stage{{Rate: load}}, OfCapacity: true, Work: sim.Work{Distribution: sim.Normal, Mean: 80 * ms, Spread: 1}},
		Agents:   []sim.Agents{{Count: 20}},
		Replicas: []sim.Group{{Count: 20}},
		Machines: sim.Machines{Antagonists: sim.Antagonists{
			Levels: []sim.Level{{Share: 0.9, Demand: sim.Range{Min: 0.2, Max: 0.8}}, {Share: 0.1, Demand: sim.Range{Min: 1, Max: 1.2}}}, Lasts: 3 * sec,
		}},
		Warmup:   3 * sec,
		Duration: 12 * sec,
	}
}

// everything is a simulation in which everything happens.
func everything(seed uint64, rule policy.Balancer) sim.Config {
	c := testbed(0.2, rule)
	c.Seed = seed
	c.Policy.Timeout = 400 * ms
	c.Load.Items, c.Load.Zipf, c.Load.CacheHit = 100, 1, 4
	c.Agents = []sim.Agents{{Count: 2, Shards: 2, Zone: "a"}, {Count: 3, Zone: "b"}}
	c.Replicas = []sim.Group{
		{Name: "cpu", Count: 8, Zone: "a"}, {Name: "slots", Count: 3, Serve: sim.Slots, Slots: 6, Queue: 20, Zone: "b", Cache: 5},
		{Name: "late", Count: 2, Speed: 0.5, Weight: 2, Absent: true},
	}
	c.Machines.Interference, c.Machines.InterferenceFrom, c.Machines.Hobble = 0.2, 0.7, 0.9
	c.Network = sim.Network{Jitter: 100 * time.Microsecond, ZoneDelay: ms}
	c.Caller = sim.Caller{Retries: 2, Budgeted: true}
	c.Probes = sim.Probes{Cost: 100 * time.Microsecond, RequestCost: ms}
	c.Warmup, c.Duration = sec/2, 3*sec
	c.Faults = []sim.Fault{
		{Kind: sim.Join, At: sec, Group: "late"},
		{Kind: sim.Stall, At: sec, Lasts: sec / 2, Group: "cpu", Count: 1},
		{Kind: sim.Freeze, At: sec, Lasts: sec / 2, Group: "slots", Count: 1},
		{Kind: sim.Slow, At: sec, Lasts: sec / 2, Factor: 0.3, Group: "cpu", First: 1, Count: 2},
		{Kind: sim.Fail, At: 3 * sec / 2, Lasts: sec / 2, Share: 0.5, Latency: ms, Group: "cpu", First: 3, Count: 1},
		{Kind: sim.Crash, At: 3 * sec / 2, Lasts: sec / 2, Group: "cpu", First: 4, Count: 1},
		{Kind: sim.Crash, At: 3 * sec / 2, Lasts: sec / 2, Group: "slots", First: 1, Count: 1},
		{Kind: sim.Drain, At: 2 * sec, Lasts: sec / 2, Group: "cpu", First: 5, Count: 1},
		{Kind: sim.Unhealthy, At: 2 * sec, Lasts: sec / 2, Group: "cpu", First: 6, Count: 1},
		{Kind: sim.Leave, At: 2 * sec, Lasts: sec / 2, Group: "cpu", First: 7, Count: 1},
		{Kind: sim.Restart, At: 5 * sec / 2, First: 1, Count: 2},
	}
	return c
}

func TestSameSeedSameResult(t *testing.T) {
	t.Parallel()
	for _, rule := range policy.Balancers() {
		if a, b := run(t, everything(1, rule)), run(t, everything(1, rule)); !reflect.DeepEqual(a, b) {
			t.Errorf("%s: got\n%+v and\n%+v", rule, a, b)
		}
	}
	c := everything(1, policy.BalancerRandom)
	a := run(t, c)
	c.Seed = 2
	if reflect.DeepEqual(a, run(t, c)) {
		t.Error("another seed gives the same")
	}
}

// Every rule sees the same requests.
func TestRulesSeeTheSameRequests(t *testing.T) {
	t.Parallel()
	var arrivals [2][]int
	for i, rule := range []policy.Balancer{policy.BalancerPrequal, policy.BalancerRandom} {
		for _, b := range run(t, everything(1, rule)).Series {
			arrivals[i] = append(arrivals[i], b.Arrivals)
		}
		arrivals[i] = arrivals[i][:3]
	}
	if !reflect.DeepEqual(arrivals[0], arrivals[1]) {
		t.Errorf("requests each second: %v and %v", arrivals[0], arrivals[1])
	}
}

// Whatever happens, every request ends once.
func TestEveryRequestEndsOnce(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		c := everything(rapid.Uint64().Draw(t, "seed"), rapid.SampledFrom(policy.Balancers()).Draw(t, "rule"))
		c.Oracle = rapid.IntRange(0, 4).Draw(t, "oracle") == 0
		c.Load.Stages = []sim.Stage{{Rate: rapid.Float64Range(0.1, 2).Draw(t, "load")}}
		if rapid.IntRange(0, 3).Draw(t, "loop") == 0 {
			c.Load.Stages, c.Load.OfCapacity, c.Load.Users = nil, false, rapid.IntRange(1, 100).Draw(t, "users")
			c.Load.Think = exponential(rapid.SampledFrom([]time.Duration{0, 10 * ms}).Draw(t, "think"))
		}
		c.Caller.FinishAbandoned = rapid.Bool().Draw(t, "finish abandoned")
		c.Caller.Budgeted = rapid.Bool().Draw(t, "budgeted")
		c.Without = sim.Without{Reports: rapid.Bool().Draw(t, "reports"), ErrorAversion: rapid.Bool().Draw(t, "aversion")}
		c.Warmup, c.Duration = 0, 100*ms
		for i := range c.Faults {
			c.Faults[i].At = time.Duration(rapid.IntRange(0, 100).Draw(t, "at")) * ms
			c.Faults[i].Lasts /= 20
		}
		r, err := sim.Run(c)
		if err != nil {
			t.Fatal(err)
		}
		arrived, ended, failed := 0, 0, 0
		for _, b := range r.Series {
			arrived, ended, failed = arrived+b.Arrivals, ended+b.Requests, failed+b.Errors
		}
		if arrived != ended || r.Requests != ended || r.Errors.Total() != failed || r.Errors.Unended != 0 {
			t.Fatalf("%d arrived, %d ended, %d counted; %d failed, %+v", arrived, ended, r.Requests, failed, r.Errors)
		}
	})
}

// Once all requests have ended, nothing is left of them anywhere.
func TestNothingIsLeft(t *testing.T) {
	t.Parallel()
	for i, rule := range policy.Balancers() {
		c := everything(3, rule)
		c.Caller.FinishAbandoned = i%2 == 0
		if left := sim.Leftovers(c); left != nil {
			t.Errorf("%s, replicas finish what is abandoned: %v: left %v", rule, c.Caller.FinishAbandoned, left)
		}
	}
}

// A longer simulation takes more time, but no more memory.
func TestNothingIsAllocatedByRequests(t *testing.T) {
	allocations := func(lasts time.Duration) float64 {
		c := testbed(0.8, policy.BalancerPrequal)
		c.Duration = lasts
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		run(t, c)
		runtime.ReadMemStats(&after)
		return float64(after.Mallocs - before.Mallocs)
	}
	short, long := allocations(3*sec), allocations(18*sec) // so long that what the runtime does meanwhile is little
	requests := 15 * 0.8 * 20 * 6.4 / 0.0867
	if got := (long - short) / requests; got > 0.1 {
		t.Errorf("got %.2f allocations a request (%.0f in 3 seconds, %.0f in 18)", got, short, long)
	}
}

// In a closed loop of N users throughput is N/(time to think + latency).
func TestClosedLoop(t *testing.T) {
	t.Parallel()
	r := run(t, sim.Config{
		Load:     sim.Load{Users: 30, Think: exponential(50 * ms), Work: sim.Work{Mean: 10 * ms}},
		Agents:   []sim.Agents{{Count: 3}},
		Replicas: []sim.Group{{Count: 4, Serve: sim.Delay}},
		Network:  sim.Network{Delay: 2 * ms},
		Duration: 20 * sec,
	})
	near(t, "latency", r.Latency.Mean.Seconds(), 0.014, 0.01)
	near(t, "throughput", r.Throughput, 30/(0.050+0.014), 0.02)
}

func TestNetworkDelays(t *testing.T) {
	t.Parallel()
	base := sim.Config{
		Load:     sim.Load{Stages: []sim.Stage{{Rate: 100}}, Work: sim.Work{Mean: 10 * ms}},
		Agents:   []sim.Agents{{Zone: "a"}},
		Replicas: []sim.Group{{Serve: sim.Delay, Zone: "a"}},
		Duration: 20 * sec,
	}
	for _, tt := range []struct {
		name    string
		network sim.Network
		zone    string
		want    float64
	}{
		{"by default", sim.Network{}, "a", 0.0105},
		{"none", sim.Network{Delay: -1}, "a", 0.010},
		{"far", sim.Network{Delay: 3 * ms, ZoneDelay: 7 * ms}, "b", 0.024},
		{"near", sim.Network{Delay: 3 * ms, ZoneDelay: 7 * ms}, "a", 0.016},
		{"jitter", sim.Network{Jitter: 5 * ms}, "a", 0.0205},
	} {
		c := base
		c.Network = tt.network
		c.Replicas = []sim.Group{{Serve: sim.Delay, Zone: tt.zone}}
		near(t, tt.name, run(t, c).Latency.Mean.Seconds(), tt.want, 0.02)
	}
}

// Probes are counted as the policy has them sent: on account of requests, and where there are none.
func TestProbes(t *testing.T) {
	t.Parallel()
	c := testbed(0.5, policy.BalancerPrequal)
	c.Duration = 4 * sec
	c.Policy.Prequal.PoolSize = 4 // of the whole of a small fleet, many would be spared
	if r := run(t, c); math.Abs(r.ProbesPerRequest-1) > 0.05 || r.ProbesLost != 0 || r.Choices["cold"] == 0 {
		t.Errorf("got %v probes a request, %d lost, choices %v; want 1 and none", r.ProbesPerRequest, r.ProbesLost, r.Choices)
	}
	c.Policy.Prequal.ProbesPerRequest = 0.5
	near(t, "probes a request", run(t, c).ProbesPerRequest, 0.5, 0.03)
	c.Network.Delay = 51 * ms // there and back takes longer than the timeout
	c.Without.Reports = true
	if r := run(t, c); r.Choices["cold"] != 0 || r.ProbesLost == 0 {
		t.Errorf("got choices %v, %d probes lost; want all of them late", r.Choices, r.ProbesLost)
	}
}

// A cache that holds the most popular items is hit as often as these are asked for, roughly.
func TestCaches(t *testing.T) {
	t.Parallel()
	c := sim.Config{
		Load:   sim.Load{Stages: []sim.Stage{{Rate: 200}}, Work: sim.Work{Mean: 20 * ms}, Items: 3, CacheHit: 4},
		Agents: []sim.Agents{{}}, Replicas: []sim.Group{{Serve: sim.Delay, Cache: 3}},
		Network: sim.Network{Delay: -1}, Warmup: sec, Duration: 10 * sec,
	}
	r := run(t, c)
	near(t, "all hits", r.Latency.Mean.Seconds(), 0.005, 0.001)
	near(t, "hits", float64(r.Groups[0].Hits), float64(r.Requests), 0)
	c.Load.Items = 300
	r = run(t, c)
	near(t, "few hits", r.Latency.Mean.Seconds(), 0.020-0.015*3/300, 0.01)
}

// The oracle is better than any rule.
func TestOracle(t *testing.T) {
	t.Parallel()
	for _, g := range []sim.Group{{Count: 10}, {Count: 10, Serve: sim.Slots, Slots: 4}} {
		slow := g
		slow.Speed, slow.Count = 0.25, 5
		c := testbed(0.85, policy.BalancerPrequal)
		c.Duration = 6 * sec
		c.Replicas = []sim.Group{g, slow}
		rule := run(t, c)
		c.Oracle = true
		oracle := run(t, c)
		if oracle.Latency.P99 > rule.Latency.P99 || oracle.Latency.Mean > rule.Latency.Mean || oracle.ProbesPerRequest != 0 {
			t.Errorf("%s: oracle %+v, prequal %+v", g.Serve, oracle.Latency, rule.Latency)
		}
	}
}

func TestValidateTellsAll(t *testing.T) {
	c := sim.Config{
		Load: sim.Load{
			Stages: []sim.Stage{{Rate: -1}, {Rate: math.NaN(), To: 5}}, OfCapacity: true, Users: 3,
			Work: sim.Work{Distribution: "cauchy", Mean: -sec}, Zipf: math.Inf(1),
		},
		Replicas: []sim.Group{{Serve: sim.Delay, Slots: 2, Speed: -1}, {Serve: "magic", Count: -4}},
		Machines: sim.Machines{Cores: 4, Allocation: 8, Hobble: 2, Antagonists: sim.Antagonists{Levels: []sim.Level{{Demand: sim.Range{Min: 2, Max: 1}}}}},
		Faults:   []sim.Fault{{Kind: "flood", Group: "x"}, {Kind: sim.Slow, Lasts: -1, Every: -1}},
		Registry: sim.Registry{Delay: -1, Spread: -1},
	}
	err := c.Validate()
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{
		"Duration: want a time above 0, got 0s", "Load: want either Stages or Users", "Load.Stages[0].Lasts: only the last",
		"Load.Stages[0].Rate: want a number that is not negative, got -1", "Load.Stages[1].Rate", "Load.Stages[1].To: want a stage that ends",
		"Load.OfCapacity: the capacity of Replicas[0] has no limit", `Load.Work.Distribution: want one of ["" "fixed"`, "Load.Work.Mean",
		"Load.Zipf", "Agents: want one group", "Replicas[0].Speed", "Replicas[0]: only replicas that serve by slots", "Replicas[1].Count",
		`Replicas[1].Serve: want one of ["" "cpu" "slots" "delay"], got "magic"`, "Machines.Allocation: want 4 cores at most, got 8", "Machines.Hobble",
		"Machines.Antagonists.Levels[0].Share: want", "Machines.Antagonists.Levels[0].Demand: want Min from 0 to Max, got 2 to 1", "Faults[0].Kind", `Faults[0].Group: no group of replicas is named "x"`,
		"Faults[1].Factor", "Faults[1].Lasts", "Faults[1].Every", "Registry.Delay", "Registry.Spread",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("want %q in\n%v", want, err)
		}
	}
	if _, err := sim.Run(c); err == nil {
		t.Error("it runs")
	}
}

// TestLate counts what takes longer than the threshold, and what fails: here a third takes 30 ms, and some of the rest fails.
func TestLate(t *testing.T) {
	t.Parallel()
	c := sim.Config{
		Policy: by(policy.BalancerRandom),
		Load: sim.Load{Stages: []sim.Stage{{Rate: 1000}}, Work: sim.Work{Mix: []sim.Class{
			{Share: 2, Work: sim.Work{Mean: 10 * ms}}, {Share: 1, Work: sim.Work{Mean: 30 * ms}},
		}}},
		Agents:    []sim.Agents{{}},
		Replicas:  []sim.Group{{Count: 10, Serve: sim.Delay}},
		Faults:    []sim.Fault{{Kind: sim.Fail, Share: 0.1}},
		Without:   sim.Without{ErrorAversion: true},
		Threshold: 20 * ms,
		Duration:  20 * sec,
	}
	near(t, "late", run(t, c).Late, 0.1+0.9/3, 0.05)
	c.Threshold = 0
	if late := run(t, c).Late; late != 0 {
		t.Errorf("without a threshold %v of the requests are late", late)
	}
}
