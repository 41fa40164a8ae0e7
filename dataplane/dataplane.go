// Package dataplane runs the traffic of one node: requests out, requests in, and the probes between agents.
package dataplane

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/dataplane/identity"
	"github.com/headroom-mesh/headroom/dataplane/inbound"
	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/dataplane/outbound"
	"github.com/headroom-mesh/headroom/dataplane/probe"
	"github.com/headroom-mesh/headroom/dataplane/relay"
	"github.com/headroom-mesh/headroom/dataplane/sockets"
	"github.com/headroom-mesh/headroom/dataplane/transport"
	"github.com/headroom-mesh/headroom/registry"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// Config configures a Dataplane.
type Config struct {
	Node registry.NodeName
	Zone string // where the node is. Default: nowhere in particular
	// Transport connects agents. Default transport.Plain.
	Transport transport.Transport
	// Identity is that of the transport. Default nil: nobody knows who calls.
	Identity *identity.Source
	// Mark is set on the connections to replicas, so that none is captured (sockets.Mark). Default none.
	Mark uint32
	// DrainTimeout bounds the time for requests in flight at the end. Default 30s.
	DrainTimeout time.Duration
	Log          *slog.Logger          // nil: no logs
	AccessLog    *slog.Logger          // nil: no access log
	Metrics      prometheus.Registerer // nil: not exported
}

// Dataplane is safe for concurrent use.
type Dataplane struct {
	cfg      Config
	started  time.Time
	relay    *relay.Engine
	inbound  *inbound.Inbound
	outbound *outbound.Outbound
	probes   *probe.Client
	mux      *transport.Mux
	http     net.Listener
	http2    net.Listener
	probing  net.Listener
	rpc      net.Listener
	captured captured

	resting chan struct{} // closed by rest
	rest    func()
}

// New returns a Dataplane that knows no service and serves nothing yet.
func New(cfg Config) (*Dataplane, error) {
	if cfg.Transport == nil {
		cfg.Transport = transport.Plain{}
	}
	d := &Dataplane{cfg: cfg, started: time.Now(), resting: make(chan struct{})}
	d.rest = sync.OnceFunc(func() { close(d.resting) })
	d.relay = relay.New(relay.Config{DrainTimeout: cfg.DrainTimeout, Identity: cfg.Identity, Log: cfg.Log, Metrics: cfg.Metrics})
	d.inbound = inbound.New(inbound.Config{Relay: d.relay, Mark: cfg.Mark, AccessLog: cfg.AccessLog, Metrics: cfg.Metrics})
	var err error
	d.probes, err = probe.NewClient(probe.Config{
		Dial:  d.dialer(cfg.Transport, transport.Probe),
		State: func(agent netip.AddrPort, up bool) { d.outbound.SetReachable(agent, up) },
		Log:   cfg.Log, Metrics: cfg.Metrics,
	})
	if err != nil {
		return nil, err
	}
	d.outbound = outbound.New(outbound.Config{
		Node: cfg.Node, Zone: cfg.Zone, Relay: d.relay, Inbound: d.inbound, Dial: d.dial, DialPeer: d.DialPeer, DialFront: d.dialFront, Prober: d.probes,
		Log: cfg.Log, AccessLog: cfg.AccessLog, Metrics: cfg.Metrics,
	})
	d.mux = transport.NewMux(cfg.Transport, cfg.Log, cfg.Metrics)
	d.http, d.http2 = d.mux.Listener(transport.HTTP), d.mux.Listener(transport.HTTP2)
	d.probing, d.rpc = d.mux.Listener(transport.Probe), d.mux.Listener(transport.RPC)
	return d, nil
}

func (d *Dataplane) dialer(as transport.Dialer, p transport.Protocol) func(context.Context, netip.AddrPort) (net.Conn, error) {
	return func(ctx context.Context, agent netip.AddrPort) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, dialTimeout)
		defer cancel()
		return as.Dial(ctx, agent, p)
	}
}

// dial connects to another agent for calls, of a workload or of this node. TCP goes by CONNECT.
func (d *Dataplane) dial(ctx context.Context, agent netip.AddrPort, p relay.Protocol, w identity.Workload) (net.Conn, error) {
	as, over := transport.Dialer(d.cfg.Transport), transport.HTTP
	if w != (identity.Workload{}) {
		as = d.cfg.Transport.As(w)
	}
	if p == relay.HTTP2 {
		over = transport.HTTP2
	}
	return d.dialer(as, over)(ctx, agent)
}

// dialFront connects to an address that is none of the mesh.
func (d *Dataplane) dialFront(ctx context.Context, at netip.AddrPort) (net.Conn, error) {
	dialer := net.Dialer{Timeout: dialTimeout, Control: sockets.Mark(d.cfg.Mark)}
	return dialer.DialContext(ctx, "tcp", at.String())
}

// dialTimeout bounds a connection to another agent: a packet lost on the way is sent again within it.
const dialTimeout = 1500 * time.Millisecond

// DialPeer connects to the RPC service of another agent.
func (d *Dataplane) DialPeer(ctx context.Context, agent netip.AddrPort) (net.Conn, error) {
	return d.dialer(d.cfg.Transport, transport.RPC)(ctx, agent)
}

// PeerListener is where other agents connect to this agent's RPC service.
func (d *Dataplane) PeerListener() net.Listener { return d.rpc }

// Reserve answers the method of that name of service Peer.
func (d *Dataplane) Reserve(r *meshv1.ReserveRequest, stream grpc.ServerStreamingServer[meshv1.Grant]) error {
	return d.inbound.ServeReserve(r, stream)
}

// ListenIdle answers the method of that name of service Peer.
func (d *Dataplane) ListenIdle(r *meshv1.ListenIdleRequest, stream grpc.ServerStreamingServer[meshv1.IdleReplica]) error {
	return d.inbound.ServeListenIdle(r, stream)
}

// Update applies a snapshot of the registry.
func (d *Dataplane) Update(s *registry.Snapshot) {
	d.inbound.UpdatePolicies(s)
	d.outbound.Update(time.Now(), s)
	d.captured.update(s)
}

// UpdateLocal replaces the replicas of this node.
func (d *Dataplane) UpdateLocal(endpoints []registry.Endpoint) {
	d.inbound.Update(endpoints)
	d.captured.updateLocal(endpoints)
}

// Listener is where callers connect to that want one service, whatever they speak. It may return connections that are
// identity.WorkloadConn.
type Listener struct {
	// Service is the one that they want. Default: that at whose virtual address they meant to connect, when a rule of the kernel
	// led them here.
	Service registry.ServiceName
	net.Listener
}

// Run serves callers on proxy and services, and other agents on mesh, until ctx ends or a part of it fails. Then it takes no new
// requests, lets those in flight finish, and returns.
func (d *Dataplane) Run(ctx context.Context, proxy, mesh net.Listener, services ...Listener) error {
	// Probes and peers are served until the last request is answered.
	rest, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	ctx, fail := context.WithCancel(ctx)
	defer fail()
	var serving, background sync.WaitGroup
	errs := make(chan error, 10+len(services))
	run := func(wg *sync.WaitGroup, part func() error) {
		wg.Go(func() {
			err := part()
			if err != nil {
				fail()
			}
			errs <- err
		})
	}
	responder := probe.Responder{Lookup: d.inbound.Probe}

	run(&background, func() error { return d.mux.Run(rest, mesh) })
	run(&background, func() error { return d.relay.Run(rest) })
	run(&background, func() error { return d.probes.Run(rest) })
	run(&background, func() error { return d.outbound.Run(rest) })
	run(&background, func() error { return d.inbound.Run(rest) })
	answering, stopAnswering := context.WithCancel(rest)
	defer stopAnswering()
	run(&background, func() error { return responder.Serve(answering, d.probing) })
	run(&background, func() error {
		defer stopAnswering()
		select {
		case <-d.resting:
		case <-rest.Done():
		}
		return nil
	})
	run(&serving, func() error {
		return d.relay.Serve(ctx, proxy, relay.Entry{Router: d.outbound.Router()})
	})
	for _, l := range services {
		run(&serving, func() error { return d.relay.Serve(ctx, l, d.entry(l.Service)) })
	}
	run(&serving, func() error { return d.relay.Serve(ctx, d.http, d.fromAgents(relay.HTTP1)) })
	run(&serving, func() error { return d.relay.Serve(ctx, d.http2, d.fromAgents(relay.HTTP2)) })

	serving.Wait()
	stop()
	background.Wait()
	close(errs)
	var all error
	for err := range errs {
		all = errors.Join(all, err)
	}
	return all
}

// Rest takes no new connections, as the next agent of this node does. Callers are asked to make new ones, and other agents, for
// their probes, are made to: this agent knows of ever fewer of the requests that replicas have.
func (d *Dataplane) Rest() {
	d.mux.Rest()
	d.rest()
	d.relay.Rest()
}

// Leave asks callers to make new connections, and goes on to serve them until Run ends.
func (d *Dataplane) Leave() { d.relay.Leave() }

// entry returns what a listener for a service needs.
func (d *Dataplane) entry(service registry.ServiceName) relay.Entry {
	if service != "" {
		return d.outbound.Entry(service)
	}
	return relay.Entry{Each: func(c net.Conn) (relay.Entry, bool) {
		meant, err := sockets.OriginalDestination(c)
		if err != nil {
			return relay.Entry{}, false
		}
		return d.leadsTo(meant)
	}}
}

// Observe describes what this agent sees now of one service, or of all if service is empty.
func (d *Dataplane) Observe(service registry.ServiceName) *meshv1.Observation {
	now := time.Now()
	o := &meshv1.Observation{
		Node:     string(d.cfg.Node),
		Time:     timestamppb.New(now),
		Started:  timestamppb.New(d.started),
		Outbound: d.outbound.Observe(now, service),
	}
	d.inbound.Each(func(r *inbound.Replica) {
		if service == "" || r.Endpoint.Service == service {
			o.Inbound = append(o.Inbound, inboundView(now, r))
		}
	})
	return o
}

func inboundView(now time.Time, r *inbound.Replica) *meshv1.InboundView {
	requests, errors := r.Load.Totals()
	report := r.Load.Report(now)
	return &meshv1.InboundView{
		Id:       string(r.Endpoint.ID()),
		State:    r.Endpoint.State.Proto(),
		Rif:      report.RIF,
		Latency:  latency(report),
		Requests: requests,
		Errors:   errors,
		Slots:    r.Slots(),
	}
}

func latency(r load.Report) *durationpb.Duration {
	if !r.Known {
		return nil
	}
	return durationpb.New(r.Latency)
}

// fromAgents is where other agents send calls. They close idle connections first: a request must not meet a connection
// that is just being closed.
func (d *Dataplane) fromAgents(p relay.Protocol) relay.Entry {
	return relay.Entry{Router: d.inbound, Protocol: p, Agents: true, IdleTimeout: 5 * time.Minute}
}
