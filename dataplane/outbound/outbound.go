// Package outbound sends the requests of this node on their way: it finds the service, picks a replica, tries, and
// retries where that is safe.
package outbound

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/balancer"
	"github.com/headroom-mesh/headroom/dataplane/identity"
	"github.com/headroom-mesh/headroom/dataplane/inbound"
	"github.com/headroom-mesh/headroom/dataplane/probe"
	"github.com/headroom-mesh/headroom/dataplane/relay"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
	"github.com/prometheus/client_golang/prometheus"
)

// Domain is the suffix of the names by which callers reach services: SERVICE.mesh.
const Domain = "mesh"

// Prober sends probes to other agents without blocking; it reports whether it took the probe.
type Prober interface {
	Probe(agent netip.AddrPort, q probe.Request, timeout time.Duration, sink probe.Sink, token uint64) bool
}

// Config configures an Outbound.
type Config struct {
	Node    registry.NodeName // replicas on this node are reached without a second hop
	Zone    string            // where the node is, for policies that keep to it; "": nowhere in particular
	Inbound *inbound.Inbound
	Relay   *relay.Engine // carries the calls
	// Dial connects to the agent at an address, for calls of a workload or of this node, and DialPeer to its RPC service.
	Dial     func(ctx context.Context, agent netip.AddrPort, p relay.Protocol, as identity.Workload) (net.Conn, error)
	DialPeer func(ctx context.Context, agent netip.AddrPort) (net.Conn, error)
	// DialFront connects to a service where it is to be had without the mesh.
	DialFront func(ctx context.Context, at netip.AddrPort) (net.Conn, error)
	Prober    Prober
	// Seed makes the balancers' choices repeatable. Default random.
	Seed      uint64
	Log       *slog.Logger          // nil: no logs
	AccessLog *slog.Logger          // nil: no access log
	Metrics   prometheus.Registerer // nil: not exported
}

// Outbound is safe for concurrent use.
type Outbound struct {
	cfg      Config
	services atomic.Pointer[map[registry.ServiceName]*service]
	fronts   atomic.Pointer[map[registry.ServiceName]front]
	updated  atomic.Bool // whether services says anything yet
	sinks    sync.Pool   // of *sink
	calls    sync.Pool   // of *call
	agents   *agents
	lines    *lines
	metrics  *metrics

	mu sync.Mutex
	// mu guards down, and serializes changes of services and fronts.
	down map[netip.AddrPort]bool
}

// New returns an Outbound that knows no service.
func New(cfg Config) *Outbound {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Seed == 0 {
		cfg.Seed = rand.Uint64()
	}
	o := &Outbound{cfg: cfg, lines: newLines(cfg.DialPeer), down: map[netip.AddrPort]bool{}, metrics: newMetrics(cfg.Metrics)}
	o.services.Store(&map[registry.ServiceName]*service{})
	o.fronts.Store(&map[registry.ServiceName]front{})
	o.sinks.New = func() any { return &sink{outbound: o} }
	o.calls.New = func() any { return new(call) }
	o.agents = newAgents(o.newAgent)
	return o
}

// newAgent returns the way to another agent, for a workload or this node.
func (o *Outbound) newAgent(agent netip.AddrPort, as identity.Workload) *relay.Upstream {
	return o.cfg.Relay.NewUpstream(relay.Target{
		Name: "agent " + agent.String(),
		Dial: func(ctx context.Context, p relay.Protocol) (net.Conn, error) {
			return o.cfg.Dial(ctx, agent, p, as)
		},
		Agent:       true,
		IdleTimeout: idleTimeout,
	})
}

// Update applies a snapshot. Requests in flight end as they began.
func (o *Outbound) Update(now time.Time, snapshot *registry.Snapshot) {
	o.mu.Lock()
	defer o.mu.Unlock()
	before := *o.services.Load()
	after := make(map[registry.ServiceName]*service, len(snapshot.Services))
	for name, record := range snapshot.Services {
		s := before[name]
		if s == nil {
			s = newService(name, balancer.Place{Node: o.cfg.Node, Zone: o.cfg.Zone}, o.cfg.Seed+uint64(len(after)), o.metrics.service(name))
			for agent := range o.down {
				s.fleet.SetReachable(now, agent, false)
			}
		}
		s.update(now, record)
		after[name] = s
	}
	o.services.Store(&after)
	o.updated.Store(true)
	for name, s := range before {
		if after[name] == nil {
			s.metrics.forget()
		}
	}
}

// SetReachable notes whether the agent at an address answers probes.
func (o *Outbound) SetReachable(agent netip.AddrPort, reachable bool) {
	now := time.Now()
	o.mu.Lock()
	defer o.mu.Unlock()
	if reachable {
		delete(o.down, agent)
		o.agents.isBack(agent)
	} else {
		o.down[agent] = true
		o.agents.fellSilent(now, agent)
		o.lines.cut(agent)
	}
	for _, s := range *o.services.Load() {
		s.fleet.SetReachable(now, agent, reachable)
	}
}

func (o *Outbound) service(name registry.ServiceName) *service {
	return (*o.services.Load())[name]
}

const (
	// idleTick is how often the services in use are looked over for probes that are due.
	idleTick = 100 * time.Millisecond
	// inUse is how long a service counts as in use after its last request.
	inUse = time.Minute
)

// Run sends the probes that no request triggers, and keeps connections to other agents open, until ctx ends.
func (o *Outbound) Run(ctx context.Context) error {
	defer o.agents.closeIdle()
	defer o.lines.close()
	listening := listening{outbound: o, to: map[source]context.CancelFunc{}}
	defer listening.end()
	tick, forget := time.NewTicker(idleTick), time.NewTicker(forgetEvery)
	defer tick.Stop()
	defer forget.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-forget.C:
			o.agents.forget()
		case <-tick.C:
			now := time.Now()
			o.agents.cutSilent(now)
			listening.review(ctx, now)
			for _, s := range *o.services.Load() {
				if s.usedSince(now.Add(-inUse)) {
					o.probeIdle(now, s)
				}
			}
		}
	}
}

// probeIdle keeps the pools of a service in use from running dry (§4 of the Prequal paper, idle probing). Whatever the
// rule, it also probes the agents to which requests are in flight, or wait for a slot, so that one that has fallen
// silent is noticed, and those whose replicas are left out, so that one that is back is noticed.
func (o *Outbound) probeIdle(now time.Time, s *service) {
	b := s.balancer.Load()
	var targets []*balancer.Endpoint
	for shard := range b.Shards() {
		targets = b.Idle(now, shard, targets[:0])
		for _, e := range targets {
			o.probe(now, s, b, shard, e)
		}
	}
	asked := map[netip.AddrPort]bool{}
	s.fleet.Each(now, func(e *balancer.Endpoint, why balancer.Avoidance) {
		record := e.Record()
		inQuestion := e.RIF() > 0 || o.lines.waits(record.Agent) || why != balancer.NotAvoided
		if inQuestion && record.Node != o.cfg.Node && !asked[record.Agent] {
			asked[record.Agent] = true
			o.probe(now, s, b, noShard, e)
		}
	})
}

// noShard marks a probe that only tells whether an agent is there.
const noShard = -1

// probe asks for the load of a replica on account of a shard. It never blocks.
func (o *Outbound) probe(now time.Time, s *service, b *balancer.Balancer, shard int, e *balancer.Endpoint) {
	k := o.sinks.Get().(*sink)
	*k = sink{outbound: o, service: s, balancer: b, shard: shard, endpoint: e}
	o.ask(now, s, e, probe.Request{Endpoint: e.ID}, b.Policy.Prequal.ProbeTimeout, k, 0)
}

// ask sends a probe, and tells sink what became of it, which may be now. It never blocks.
func (o *Outbound) ask(now time.Time, s *service, e *balancer.Endpoint, q probe.Request, timeout time.Duration, sink probe.Sink, token uint64) {
	record := e.Record()
	if record.Node == o.cfg.Node {
		s.probes.Add(1)
		sink.Answered(token, o.cfg.Inbound.Probe(now, q), now)
		return
	}
	if !o.cfg.Prober.Probe(record.Agent, q, timeout, sink, token) {
		sink.Lost(token, now) // an agent that is silent is not asked
		return
	}
	s.probes.Add(1)
}

// sink takes the answer to one probe to where it belongs. Sinks are used again.
type sink struct {
	outbound *Outbound
	service  *service
	balancer *balancer.Balancer
	shard    int
	endpoint *balancer.Endpoint
}

// Answered takes in an answer.
func (k *sink) Answered(_ uint64, a probe.Answer, now time.Time) {
	k.service.answers.Add(1)
	switch {
	case a.Status != probe.OK:
		k.service.declined(now, k.balancer, k.endpoint)
	case k.shard != noShard:
		k.balancer.Probed(now, k.shard, k.endpoint, a.Report)
	}
	k.release()
}

// Lost notes that no answer came. An older answer of the replica stays until its age or the silence of its agent takes
// it out: one lost probe says little.
func (k *sink) Lost(uint64, time.Time) { k.release() }

func (k *sink) release() {
	o := k.outbound
	*k = sink{}
	o.sinks.Put(k)
}

// shards is the number of independent parts of a balancer: one a processor. What an idle replica says is for one queue; it
// would be lost on requests that come to another part, so that rule has but one.
func shards(p policy.Policy) int {
	if p.Balancer == policy.BalancerJoinIdleQueue {
		return 1
	}
	return runtime.GOMAXPROCS(0)
}
