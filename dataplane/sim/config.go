// Package sim plays a service in virtual time: clients, the agents that place their requests, and the replicas that serve
// them. The agents run the very code of real ones: the balancing rules, pools, load estimators and retry budgets.
package sim

import (
	"time"

	"github.com/headroom-mesh/headroom/policy"
)

// Config says what is played. The zero value of every field is the default that its comment gives. Times are counted
// from the start of the simulation, the warm-up included.
type Config struct {
	// Seed decides all that is random. Runs that differ in nothing but the policy see the same requests at the same times
	// in an open loop, and the same antagonists ("common random numbers").
	Seed uint64
	// Policy decides how agents balance. Without a balancer it is policy.Default().
	Policy policy.Policy
	// Oracle replaces the policy's rule by one that no agent could have: it sees every replica's true queue, remaining work
	// and present speed, and what is on its way there, and picks the least expected time to completion.
	Oracle bool
	// Without leaves out parts of the product, to show what they are good for.
	Without Without

	Load     Load
	Agents   []Agents // at least one
	Replicas []Group  // at least one
	Machines Machines // of the replicas that use CPU
	Network  Network
	Registry Registry
	Caller   Caller
	Probes   Probes
	Faults   []Fault

	// Warmup is played first and not counted. 0: none.
	Warmup time.Duration
	// Duration is how long requests that count arrive after the warm-up. Those under way at the end are played to
	// theirs, for another Duration and a minute at most. Required.
	Duration time.Duration
	// Threshold is the latency above which a request is late; one that fails is late too. 0: none is late.
	Threshold time.Duration
	// SampleEvery is how often RIF and CPU use are sampled. 0: every 100 ms.
	SampleEvery time.Duration
	// Bucket is the width of the buckets of Result.Series. 0: 1 s.
	Bucket time.Duration
}

// Without says what is left out.
type Without struct {
	Reports       bool // responses carry no load reports
	ErrorAversion bool // agents and replicas take failures for answers
	Ejection      bool // agents take failures for answers
	Utilization   bool // replicas of kind CPU don't say how much of what is allocated to them they use
}

// Load is the requests and what they cost.
type Load struct {
	// Stages are the rates over time, one stage after another (open loop). After the last, its final rate goes on.
	Stages []Stage
	// OfCapacity makes the rates of the stages shares of the allocated capacity of all replicas that are registered at the
	// start: 1 means as many requests as they can serve within what is allocated to them.
	OfCapacity bool
	// Even spaces arrivals evenly. Else they are Poisson.
	Even bool

	// Users is the number of clients that send one request at a time (closed loop). It excludes Stages.
	Users int
	// Think is how long a user waits between an answer and the next request. 0: not at all.
	Think Work

	// Work is what a request costs: seconds of one core, or of one slot, at speed 1. Required.
	Work Work
	// Items is the number of things that requests ask for; the item is the request's affinity key. 0: requests have no keys.
	Items int
	// Zipf is the exponent of the items' popularity: the i-th is asked for in proportion to 1/i^Zipf. 0: all the same.
	Zipf float64
	// CacheHit is by how much a request is faster at a replica that has its item cached. 0: 1, no faster.
	CacheHit float64
}

// Stage is a span of time with one rate, or with one that changes linearly.
type Stage struct {
	Lasts time.Duration
	Rate  float64 // requests a second at the start
	To    float64 // at the end. 0: as at the start
}

// Distribution names the shape of a Work.
type Distribution string

const (
	Fixed       Distribution = "fixed"       // always Mean
	Exponential Distribution = "exponential" // with mean Mean
	Normal      Distribution = "normal"      // mean Mean, deviation Spread*Mean, then clipped: max(0, x)
	Uniform     Distribution = "uniform"     // from (1-Spread)*Mean to (1+Spread)*Mean
	LogNormal   Distribution = "lognormal"   // mean Mean; Spread is the deviation of the logarithm
)

// Work is a random amount of work or time.
type Work struct {
	Distribution Distribution // "": Fixed
	Mean         time.Duration
	Spread       float64
	// Mix makes it a mixture: each request is of one of these classes. It excludes the other fields.
	Mix []Class
}

// Class is one part of a mixture.
type Class struct {
	Share float64 // of requests, in proportion to the shares of all classes
	Work  Work    // no mixture itself
}

// Agents are client hosts that are alike. Each request comes from an agent chosen uniformly among all.
type Agents struct {
	Count int // 0: 1
	// Shards is the number of processors of an agent, each of which runs the rule with a state of its own. 0: 1.
	Shards int
	Zone   string
}

// Serving names how a replica serves.
type Serving string

const (
	// CPU shares a replica's cores equally among the requests in service, each of which uses one core at most.
	CPU Serving = "cpu"
	// Slots serves a number of requests at a time; others wait in line.
	Slots Serving = "slots"
	// Delay serves any number at once without any slowing down.
	Delay Serving = "delay"
)

// Group is replicas that are alike.
type Group struct {
	Name   string
	Count  int     // 0: 1
	Weight int     // 0: 1
	Zone   string  //
	Speed  float64 // work done in a second of a core or slot. 0: 1
	Serve  Serving // "": CPU
	Slots  int     // of Slots. 0: 1
	Queue  int     // requests that may wait for a slot; others are refused. 0: no limit
	Cache  int     // items that a replica caches, least recently used out first. 0: none
	// Absent replicas are registered only once a Fault of kind Join says so.
	Absent bool
}

// Machines are what the replicas of kind CPU run on, each on one of its own, together with antagonists.
//
// A machine has Cores. Antagonists want D of them, which changes with time. That leaves S = max(Cores-D, Allocation) for
// the replica, which with RIF requests wants W = min(RIF, Most) cores and gets min(W, S). Whoever wants more than there is
// for long is taken for a hog, and hobbled: while W, averaged over HobbleAfter, exceeds S, and W did so since it was last
// satisfied, the replica gets Hobble*(Allocation + (1-HobbleLoses)*(S-Allocation)) cores at most. Work on it goes at speed
// Speed * (1 - Interference*x), where x goes from 0 to 1 as the busy part of the machine, min(1, (W+D)/Cores), goes from
// InterferenceFrom to 1.
type Machines struct {
	Cores      float64 // 0: 64
	Allocation float64 // cores guaranteed to the replica. 0: a tenth of Cores
	Most       float64 // cores that the replica can use. 0: Cores
	// Hobble is the part that a hobbled replica keeps of what there is for it. 0: 1, all
	Hobble float64
	// HobbleLoses is the part that a hobbled replica loses beforehand of the cores that are idle beyond its allocation. 0: none.
	HobbleLoses float64
	// HobbleAfter is the time over which what the replica wants is averaged (exponentially). 0: it is hobbled at once.
	HobbleAfter time.Duration
	// Interference is how much slower work is on a machine that is busy all over. 0: no slower.
	Interference     float64
	InterferenceFrom float64 // busy part of the machine at which interference begins. 0: only on a full machine
	Antagonists      Antagonists
}

// Antagonists take cores of a machine. Their demand lasts for an exponential time; then another is drawn: first its level,
// then the demand, uniformly from the level's range.
type Antagonists struct {
	Levels []Level       // at most 8. None: no antagonists
	Lasts  time.Duration // on average. 0: for ever
	// Stay keeps levels on the machines that had them first. Else they move from machine to machine.
	Stay bool
}

// Level is a kind of machine, by how busy its antagonists are.
type Level struct {
	Share  float64 // of machines, on average over time, in proportion to the shares of all levels
	Demand Range   // in parts of the machine; above 1 is more than there is
}

// Range is an interval of numbers.
type Range struct{ Min, Max float64 }

// Network is what messages between agents go through.
type Network struct {
	Delay     time.Duration // one way. 0: 250 µs; negative: none
	Jitter    time.Duration // mean of an exponential time on top. 0: none
	ZoneDelay time.Duration // one way between different zones. 0: as Delay
}

// Registry is how the registry's news of replicas reach agents. A replica's own agent knows at once that it takes no
// requests, or that it has left, and says so when it is probed. An agent that starts learns all there is to know.
type Registry struct {
	Delay  time.Duration // until an agent hears of a change. 0: none
	Spread time.Duration // each agent hears of it up to so much later. 0: all at the same time
}

// Caller is what clients do about requests that fail or take too long.
type Caller struct {
	// Timeout is how long a try may take. 0: the policy's timeout; without one, for ever.
	Timeout time.Duration
	// FinishAbandoned lets replicas finish work whose caller has given up. Else it is dropped when the news arrives.
	FinishAbandoned bool
	// Retries is how often a request that failed or timed out is sent again. 0: never. (Requests that could not be sent at
	// all are retried by the agents themselves, under the budget.)
	Retries int
	// Budgeted puts the retries under the policy's retry budget, one for each agent.
	Budgeted bool
}

// Probes is what probing costs.
type Probes struct {
	IdleEvery time.Duration // how often agents look whether probes are due. 0: 100 ms
	Cost      time.Duration // work of a probe at the replica. 0: none
	// RequestCost is work that each request costs the replica on top of its own.
	RequestCost time.Duration
}

// FaultKind names what happens.
type FaultKind string

const (
	Stall     FaultKind = "stall"     // the replica does no work; its agent goes on answering probes
	Freeze    FaultKind = "freeze"    // the whole node stands still: probes wait, and are lost at the probe timeout
	Slow      FaultKind = "slow"      // the replica's speed is multiplied by Factor
	Fail      FaultKind = "fail"      // a Share of new requests fails after Latency
	Crash     FaultKind = "crash"     // the node can't be connected to, and loses what it was at
	Unhealthy FaultKind = "unhealthy" // the registry calls the replica unhealthy
	Drain     FaultKind = "drain"     // the registry calls the replica draining
	Leave     FaultKind = "leave"     // the replica leaves the registry, and finishes what it has
	Join      FaultKind = "join"      // the replica is registered
	Restart   FaultKind = "restart"   // agents lose what they know; Count counts agents, the group is ignored
)

// Fault is something that happens to replicas or agents.
type Fault struct {
	Kind  FaultKind
	At    time.Duration
	Lasts time.Duration // 0: for good. Join and Restart never end

	Group string // "": all groups
	First int    // the first one affected, counted within the group from 0
	Count int    // 0: all from First
	// Every makes it happen to one after the other, so much later each. 0: to all at once.
	Every time.Duration

	Factor  float64       // of Slow
	Share   float64       // of Fail. 0: 1, all requests
	Latency time.Duration // of Fail
}
