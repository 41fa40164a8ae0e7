// Package inbound delivers requests to the replicas of this node and measures the load that they bear.
package inbound

import (
	"sync/atomic"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/dataplane/probe"
	"github.com/headroom-mesh/headroom/registry"
)

// Inbound knows the replicas of this node. It is safe for concurrent use.
type Inbound struct {
	replicas atomic.Pointer[map[registry.EndpointID]*Replica]
	engine   *engine
	metrics  *metrics
}

// Replica is a replica on this node.
type Replica struct {
	Endpoint registry.Endpoint // as last registered
	Load     *load.Tracker

	metrics *serviceMetrics
}

// Update replaces the replicas of this node. One that was there before keeps its load. It must not be called
// concurrently.
func (in *Inbound) Update(endpoints []registry.Endpoint) {
	before := *in.replicas.Load()
	after := make(map[registry.EndpointID]*Replica, len(endpoints))
	services := map[registry.ServiceName]bool{}
	for _, e := range endpoints {
		r := &Replica{Endpoint: e, metrics: in.metrics.service(e.Service)}
		if old := before[e.ID()]; old != nil {
			r.Load = old.Load
		} else {
			r.Load = new(load.Tracker)
		}
		after[e.ID()] = r
		services[e.Service] = true
	}
	in.replicas.Store(&after)
	in.metrics.keep(services)
}

// Replica returns a replica of this node, nil if there is none of that name.
func (in *Inbound) Replica(id registry.EndpointID) *Replica {
	return (*in.replicas.Load())[id]
}

// Each calls yield for every replica of this node, in no order.
func (in *Inbound) Each(yield func(*Replica)) {
	for _, r := range *in.replicas.Load() {
		yield(r)
	}
}

// Probe answers a probe.
func (in *Inbound) Probe(now time.Time, q probe.Request) probe.Answer {
	r := in.Replica(q.Endpoint)
	if r == nil {
		return probe.Answer{Status: probe.Unknown}
	}
	answer := probe.Answer{Report: r.Load.Report(now)}
	switch r.Endpoint.State {
	case registry.Unhealthy:
		answer.Status = probe.Unhealthy
	case registry.Draining:
		answer.Status = probe.Draining
	}
	return answer
}
