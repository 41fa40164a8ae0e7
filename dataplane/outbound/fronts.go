package outbound

import (
	"context"
	"maps"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/headroom-mesh/headroom/dataplane/relay"
	"github.com/headroom-mesh/headroom/registry"
)

// frontIdleTimeout is how long a connection to a front is kept for the next request. Who is at its other end can't be known,
// so it is as short as that of connections to replicas.
const frontIdleTimeout = 1500 * time.Millisecond

// front is an address at which a service is to be had without the mesh.
type front struct {
	at netip.AddrPort
	to *relay.Upstream
}

// UpdateFronts replaces the addresses at which services are to be had without the mesh. Calls that the mesh has no replica
// for go there: others may know one, such as one whose agent has just ended.
func (o *Outbound) UpdateFronts(services map[netip.AddrPort]registry.ServiceName) {
	o.mu.Lock()
	defer o.mu.Unlock()
	before := *o.fronts.Load()
	after := make(map[registry.ServiceName]front)
	for _, at := range slices.SortedFunc(maps.Keys(services), netip.AddrPort.Compare) {
		name := services[at]
		if _, known := after[name]; known {
			continue // one is enough, of IPv4 if there is
		}
		f := before[name]
		if f.at != at {
			f = front{at, o.newFront(at)}
		}
		after[name] = f
	}
	o.fronts.Store(&after)
	for name, f := range before {
		if after[name] != f {
			f.to.CloseIdle()
		}
	}
}

func (o *Outbound) newFront(at netip.AddrPort) *relay.Upstream {
	return o.cfg.Relay.NewUpstream(relay.Target{
		Name:        "address " + at.String(),
		Dial:        func(ctx context.Context, _ relay.Protocol) (net.Conn, error) { return o.cfg.DialFront(ctx, at) },
		IdleTimeout: frontIdleTimeout,
	})
}

// outside returns the way without the mesh, if there is one, for a call that the mesh can't deliver and that no replica has seen.
func (c *call) outside(why *fault.Error) (relay.Hop, bool) {
	switch why.Reason {
	case fault.NoEndpoints, fault.NoneReady, fault.RetriesExhausted:
	default:
		return relay.Hop{}, false
	}
	f, ok := (*c.outbound.fronts.Load())[c.service.name]
	if !ok {
		return relay.Hop{}, false
	}
	c.service.leaves(time.Now(), c.outbound.cfg.Log)
	c.left = why
	c.service.metrics.outside.Inc()
	return relay.Hop{To: f.to, Deadline: c.deadline(), Forwarded: c.service.policy.Load().Forwarded}, true
}
