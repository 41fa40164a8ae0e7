package sim

import "time"

// Result is what was seen of the requests that arrived after the warm-up.
type Result struct {
	Requests   int     // that ended, whichever way
	Errors     Errors  // those of them that failed in the end
	ErrorRate  float64 // failed part of requests
	Throughput float64 // requests a second
	Goodput    float64 // of them, those that succeeded
	Late       float64 // part of requests that failed or took longer than the threshold
	Retries    int     // tries beyond the first
	Latency    Latency // as the client saw it, from the first try to the end of the last
	RIF        Levels  // requests at a replica, over replicas and time
	CPU        Levels  // used part of what is allocated to a replica of kind CPU, over replicas and time

	ProbesPerRequest float64
	ProbesLost       int // unanswered within the probe timeout
	// ProbeAge is how old the probes were that choices went by, where the rule goes by probes.
	ProbeAge Latency
	// ProbeLoad is the probes that come to a replica in a second, over replicas.
	ProbeLoad Levels
	// Unwanted counts tries that were sent to a replica that took no requests, and Overdue tells how long, at most, after
	// it had stopped to.
	Unwanted int
	Overdue  time.Duration
	// PeakP99 and PeakRIF are the highest p99 of latency and of RIF in a bucket of the series.
	PeakP99 time.Duration
	PeakRIF int
	// Choices counts tries by how the rule chose, under the names of balancer.Class.
	Choices map[string]int

	Groups []GroupResult
	Series []Bucket // from the start of the simulation, the warm-up included
}

// Errors counts failed requests by how their last try failed.
type Errors struct {
	Timeout     int // no answer in time
	Failed      int // the replica answered with a failure
	Refused     int // the replica's queue was full
	Unconnected int // the replica's node could not be connected to
	Unplaced    int // there was no replica to choose
	Unended     int // no answer by the time the simulation gave up waiting
}

// Total returns the number of errors.
func (e Errors) Total() int {
	return e.Timeout + e.Failed + e.Refused + e.Unconnected + e.Unplaced + e.Unended
}

// Latency is quantiles and the mean of latencies. A request that timed out counts with the time it took to do so.
type Latency struct{ P50, P90, P99, P999, Max, Mean time.Duration }

// Levels is quantiles and the mean of a quantity.
type Levels struct{ P50, P90, P99, Mean float64 }

// GroupResult is the part of one group of replicas.
type GroupResult struct {
	Name  string
	Picks int     // tries placed there
	Share float64 // of all tries
	CPU   float64 // used cores, or slots, in parts of those allocated; on average
	RIF   float64 // a replica, on average
	Hits  int     // of the caches
	Blind int     // tries that were sent to a replica before anyone had had an answer from it
	Peak  float64 // part of the tries of a bucket, at most
}

// Bucket is what happened in one span of time.
type Bucket struct {
	Start    time.Duration
	Arrivals int // of new requests
	Requests int // that ended
	Errors   int // of those that ended
	P50, P99 time.Duration
	RIFP99   int // requests at a replica
	Retries  int
	Picks    []int // tries placed, by group
}
