// Package inbound delivers requests to the replicas of this node and measures the load that they bear.
package inbound

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/dataplane/probe"
	"github.com/headroom-mesh/headroom/dataplane/relay"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
	"github.com/prometheus/client_golang/prometheus"
)

// Inbound knows the replicas of this node. It is safe for concurrent use.
type Inbound struct {
	replicas atomic.Pointer[map[registry.EndpointID]*Replica]
	relay    *relay.Engine
	mark     uint32
	metrics  *metrics

	accessLog *slog.Logger

	deliveries   sync.Pool // of *delivery
	reservations sync.Map  // of *Reservation, by their IDs
	listeners    listeners
	ended        chan struct{} // closed when Run ends: those who wait in other agents know then

	mu sync.Mutex
	// mu guards the fields below, and serializes changes of replicas.

	snapshot *registry.Snapshot // of the policies
}

// Replica is a replica on this node.
type Replica struct {
	Endpoint registry.Endpoint // as last registered
	Load     *load.Tracker

	policy   policy.Policy
	upstream *relay.Upstream
	line     *line
	keys     *load.Keys // those served lately; nil unless the policy makes use of them
	metrics  *serviceMetrics
}

// Config configures an Inbound.
type Config struct {
	Relay *relay.Engine // carries the calls
	// Mark is set on connections to replicas (sockets.Mark). Default none.
	Mark uint32
	// AccessLog tells of the calls that others make here. Nil: none does.
	AccessLog *slog.Logger
	Metrics   prometheus.Registerer // nil: not exported
}

// New returns an Inbound without replicas.
func New(cfg Config) *Inbound {
	in := &Inbound{relay: cfg.Relay, mark: cfg.Mark, accessLog: cfg.AccessLog, metrics: newMetrics(cfg.Metrics), ended: make(chan struct{}), snapshot: &registry.Snapshot{}}
	in.replicas.Store(&map[registry.EndpointID]*Replica{})
	in.deliveries.New = func() any { return new(delivery) }
	return in
}

// Run lets other agents wait for replicas of this node, until ctx ends. It is called once.
func (in *Inbound) Run(ctx context.Context) error {
	<-ctx.Done()
	close(in.ended)
	return nil
}

// Update replaces the replicas of this node. One that was there before keeps its load.
func (in *Inbound) Update(endpoints []registry.Endpoint) {
	in.mu.Lock()
	defer in.mu.Unlock()
	before := *in.replicas.Load()
	after := make(map[registry.EndpointID]*Replica, len(endpoints))
	services := map[registry.ServiceName]bool{}
	for _, e := range endpoints {
		after[e.ID()] = in.replicaLocked(e, before[e.ID()])
		services[e.Service] = true
	}
	in.replaceLocked(before, after)
	in.metrics.keep(services)
}

// UpdatePolicies takes in the policies in a snapshot.
func (in *Inbound) UpdatePolicies(snapshot *registry.Snapshot) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.snapshot = snapshot
	before := *in.replicas.Load()
	after := make(map[registry.EndpointID]*Replica, len(before))
	for id, old := range before {
		after[id] = in.replicaLocked(old.Endpoint, old)
	}
	in.replaceLocked(before, after)
}

// replicaLocked returns the replica as it is from now on. What it has in flight, and all that it knows, stays.
func (in *Inbound) replicaLocked(e registry.Endpoint, old *Replica) *Replica {
	r := &Replica{Endpoint: e, policy: policy.Default(), metrics: in.metrics.service(e.Service)}
	if s := in.snapshot.Services[e.Service]; s != nil {
		r.policy = s.Policy
	}
	slots := max(r.policy.Slots, 1) * int(max(e.Weight, 1))
	if old == nil {
		r.Load, r.line = new(load.Tracker), newLine(slots)
	} else {
		r.Load, r.line = old.Load, old.line
		r.line.resize(slots)
		switch {
		case e.State != registry.Ready && old.Endpoint.State == registry.Ready:
			r.line.dismiss(ended)
		case old.policy.Balancer == policy.BalancerLateBinding && r.policy.Balancer != policy.BalancerLateBinding:
			r.line.dismiss(granted)
		}
	}
	r.upstream = in.upstream(r, old)
	r.Load.ByMedian(r.policy.Prequal.Latency == policy.LatencyMedian)
	if r.policy.Balancer == policy.BalancerPrequalSync {
		if old != nil && old.keys != nil && old.policy.PrequalSync.Keys == r.policy.PrequalSync.Keys {
			r.keys = old.keys
		} else {
			r.keys = load.NewKeys(r.policy.PrequalSync.Keys)
		}
	}
	return r
}

// upstream returns where the replica is reached: as before, unless that is done in another way now. One that drains is about
// to close the connections that it has: a request must not meet one that it is just closing.
func (in *Inbound) upstream(r, old *Replica) *relay.Upstream {
	if old != nil && old.policy.ProxyProtocol == r.policy.ProxyProtocol && old.Endpoint.Protocol == r.Endpoint.Protocol && drains(old) == drains(r) {
		return old.upstream
	}
	if old != nil {
		old.upstream.CloseIdle()
	}
	return in.relay.NewUpstream(target(r.Endpoint, r.policy.ProxyProtocol, in.mark))
}

func drains(r *Replica) bool { return r.Endpoint.State == registry.Draining }

// replaceLocked puts replicas in the place of others, and tells those whom that concerns.
func (in *Inbound) replaceLocked(before, after map[registry.EndpointID]*Replica) {
	in.replicas.Store(&after)
	for id, old := range before {
		if after[id] == nil {
			old.line.close()
			old.upstream.CloseIdle()
		}
	}
	for id, r := range after {
		if old := before[id]; old == nil || old.Endpoint.State != registry.Ready {
			for range min(r.line.free(), mostFree) {
				in.idle(r)
			}
		}
	}
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
	if q.Key != 0 && r.keys != nil && r.keys.Has(q.Key) {
		answer.Report = answer.Report.Scaled(r.policy.PrequalSync.HitScale)
	}
	switch r.Endpoint.State {
	case registry.Unhealthy:
		answer.Status = probe.Unhealthy
	case registry.Draining:
		answer.Status = probe.Draining
	}
	return answer
}
