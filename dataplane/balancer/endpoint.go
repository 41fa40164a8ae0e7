package balancer

import (
	"sync/atomic"
	"time"

	"github.com/headroom-mesh/headroom/registry"
)

// Endpoint is a replica as this agent sees it. It lives as long as the replica is registered and in scope, over changes of
// policy and of the rest of the fleet, so that its counters stay true.
type Endpoint struct {
	ID registry.EndpointID

	record    atomic.Pointer[registry.Endpoint]
	counter   *counter
	errors    atomic.Uint64
	failures  atomic.Int32 // in a row
	ejections atomic.Int32 // in a row, each longer than the one before

	// The Fleet's mutex guards the fields below.

	avoided   Avoidance // why it is left out, until avoidEnds
	avoidEnds time.Time
	updated   uint64 // the last update of the fleet that had it
	inScope   uint64 // the last Set's version that had it in scope
}

// updateLocked takes in what the registry says of the endpoint by the fleet's nth update.
func (e *Endpoint) updateLocked(now time.Time, record *registry.Endpoint, nth uint64) {
	old := e.record.Swap(record)
	e.updated = nth
	if old != nil && old.State != record.State && e.avoided == Declined {
		e.avoidEnds = now // the registry has caught up with what the agent said
	}
}

// Record returns what the registry says of the endpoint.
func (e *Endpoint) Record() registry.Endpoint { return *e.record.Load() }

// weight returns how much the replica can bear, compared with others.
func (e *Endpoint) weight() int32 { return max(e.record.Load().Weight, 1) }

// RIF returns this agent's own requests in flight to the endpoint.
func (e *Endpoint) RIF() int { return e.counter.rif() }

// Picks returns how many requests were sent to the endpoint.
func (e *Endpoint) Picks() uint64 { return e.counter.picks() }

// Errors returns how many of those failed.
func (e *Endpoint) Errors() uint64 { return e.errors.Load() }

// counter holds an endpoint's own RIF (low half) and picks (high half) in one word, so that a pick costs one atomic
// operation. Picks wrap around after 2^40.
type counter struct{ word atomic.Uint64 }

const (
	onePick = 1 << 24
	rifMask = onePick - 1
)

func (c *counter) begin()        { c.word.Add(onePick + 1) }
func (c *counter) end()          { c.word.Add(^uint64(0)) }
func (c *counter) rif() int      { return int(c.word.Load() & rifMask) }
func (c *counter) picks() uint64 { return c.word.Load() >> 24 }

// counters hands out counters that lie side by side in memory, as a rule that looks at every endpoint (least loaded) reads
// them in sequence. A counter is never moved nor used again: requests may be in flight when its endpoint leaves.
type counters struct{ chunk []counter }

const counterChunk = 256

func (c *counters) take() *counter {
	if len(c.chunk) == 0 {
		c.chunk = make([]counter, counterChunk)
	}
	taken := &c.chunk[0]
	c.chunk = c.chunk[1:]
	return taken
}
