package dataplane

import (
	"net/netip"
	"sync"

	"github.com/headroom-mesh/headroom/dataplane/relay"
	"github.com/headroom-mesh/headroom/registry"
)

// captured says where connections lead that applications have made to an address, and that a rule of the kernel has brought
// here.
type captured struct {
	mu sync.Mutex
	// mu guards the fields below.

	snapshot *registry.Snapshot
	local    []registry.Endpoint
	fronts   map[netip.AddrPort]registry.ServiceName
	real     map[netip.AddrPort]destination
}

// destination is what a real address stands for: a service, or else one replica of this node.
type destination struct {
	service registry.ServiceName
	replica registry.EndpointID
}

func (c *captured) update(s *registry.Snapshot) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.snapshot = s
	c.renewLocked()
}

func (c *captured) updateLocal(endpoints []registry.Endpoint) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.local = endpoints
	c.renewLocked()
}

func (c *captured) updateFronts(fronts map[netip.AddrPort]registry.ServiceName) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fronts = fronts
	c.renewLocked()
}

func (c *captured) renewLocked() {
	if c.snapshot == nil {
		return
	}
	before := c.real
	c.real = make(map[netip.AddrPort]destination, len(before))
	for at, name := range c.fronts {
		// One that has had no replica yet is left to whoever serves the address without a mesh.
		to := destination{service: name}
		if s := c.snapshot.Services[name]; s != nil && (len(s.Endpoints) > 0 || before[at] == to) {
			c.real[at] = to
		}
	}
	for _, e := range c.local {
		if s := c.snapshot.Services[e.Service]; s != nil && s.Policy.CaptureInbound && isReal(e) {
			c.real[e.Address] = destination{replica: e.ID()}
		}
	}
	for name, s := range c.snapshot.Services {
		if !s.Policy.CaptureReal {
			continue
		}
		for _, e := range s.Endpoints {
			if isReal(e) {
				c.real[e.Address] = destination{service: name}
			}
		}
	}
}

// isReal reports whether the endpoint has an address that means the same on every node.
func isReal(e registry.Endpoint) bool {
	a := e.Address.Addr()
	return a.IsValid() && !a.IsLoopback() && !a.IsUnspecified()
}

// UpdateFronts replaces the addresses that stand for services elsewhere than in the mesh, such as those that Kubernetes gives
// them: connections to them go where the service's own go, and requests that the mesh can't deliver go there.
func (d *Dataplane) UpdateFronts(fronts map[netip.AddrPort]registry.ServiceName) {
	d.captured.updateFronts(fronts)
	d.outbound.UpdateFronts(fronts)
}

// CapturedAddresses returns the real addresses whose connections should be brought here.
func (d *Dataplane) CapturedAddresses() []netip.AddrPort {
	d.captured.mu.Lock()
	defer d.captured.mu.Unlock()
	all := make([]netip.AddrPort, 0, len(d.captured.real))
	for at := range d.captured.real {
		all = append(all, at)
	}
	return all
}

// leadsTo returns where a connection goes that was meant for an address.
func (d *Dataplane) leadsTo(meant netip.AddrPort) (relay.Entry, bool) {
	d.captured.mu.Lock()
	defer d.captured.mu.Unlock()
	if d.captured.snapshot == nil {
		return relay.Entry{}, false
	}
	if name, ok := d.captured.snapshot.ServiceAt(meant.Addr()); ok {
		return d.outbound.Entry(name), true
	}
	to, ok := d.captured.real[meant]
	switch {
	case !ok:
		return relay.Entry{}, false
	case to.replica != "":
		return d.inbound.Direct(to.replica), true
	}
	return d.outbound.Entry(to.service), true
}
