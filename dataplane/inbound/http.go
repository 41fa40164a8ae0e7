package inbound

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/headroom-mesh/headroom/dataplane/httpio"
	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/registry"
	"github.com/prometheus/client_golang/prometheus"
)

const (
	// connectTimeout bounds the connection to a replica. It is on this node: one that does not accept at once is stuck.
	connectTimeout = time.Second
	// idleTimeout is how long a connection to a replica stays open without a request. It is shorter than what servers
	// allow, some only two seconds: a request must not meet a connection that the replica is just closing.
	idleTimeout = 1500 * time.Millisecond
)

// engine is the part of Inbound that stands on net/http.
type engine struct {
	transport *http.Transport
	proxy     *httpio.Proxy
}

// Config configures an Inbound.
type Config struct {
	Log     *slog.Logger          // nil: no logs
	Metrics prometheus.Registerer // nil: not exported
}

// New returns an Inbound without replicas.
func New(cfg Config) *Inbound {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	in := &Inbound{metrics: newMetrics(cfg.Metrics), ended: make(chan struct{}), snapshot: &registry.Snapshot{}}
	in.replicas.Store(&map[registry.EndpointID]*Replica{})
	in.engine = &engine{transport: httpio.NewTransport(dial, idleTimeout)}
	in.engine.proxy = httpio.NewProxy(in.serveRemote, cfg.Log)
	return in
}

func dial(ctx context.Context, address string) (net.Conn, error) {
	d := net.Dialer{Timeout: connectTimeout}
	return d.DialContext(ctx, "tcp", address)
}

// Run keeps connections to replicas open for further requests, until ctx ends. It is called once.
func (in *Inbound) Run(ctx context.Context) error {
	<-ctx.Done()
	close(in.ended)
	in.engine.transport.CloseIdleConnections()
	return nil
}

// ServeHTTP takes a request from another agent and delivers it to the replica that the agent picked.
func (in *Inbound) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodConnect {
		fault.New(fault.UnsupportedRequest, "CONNECT is not supported").Write(w)
		return
	}
	in.engine.proxy.ServeHTTP(w, r)
}

// serveRemote delivers a request that came from another agent.
func (in *Inbound) serveRemote(r *http.Request) (*http.Response, error) {
	id := registry.EndpointID(r.Header.Get(httpio.HeaderEndpoint))
	resp, report, err := in.Deliver(r, id)
	if err != nil {
		return nil, err
	}
	resp.Header.Set(httpio.HeaderLoad, report.String())
	return resp, nil
}

// Deliver sends a request, which it may change, to a replica of this node and counts it for as long as it is in flight,
// which is until the response's body has been read or closed. The report is the replica's load without this request. The
// error is a *fault.Error.
func (in *Inbound) Deliver(r *http.Request, id registry.EndpointID) (*http.Response, load.Report, error) {
	replica := in.Replica(id)
	if replica == nil {
		return nil, load.Report{}, fault.New(fault.UnknownEndpoint, "there is no replica %q on this node", id)
	}
	key := r.Header.Get(httpio.HeaderKey)
	flight := in.begin(replica, r.Header.Get(httpio.HeaderReservation))
	resp, err := in.send(r, replica)
	if err != nil {
		f := deliveryFault(r.Context(), id, err)
		flight.end(outcomeOf(f.Reason))
		return nil, load.Report{}, f
	}
	now := time.Now()
	replica.utilized(now, resp.Header)
	report := replica.Load.ReportLeaving(now)
	flight.failed = resp.StatusCode >= http.StatusInternalServerError
	if !flight.failed {
		replica.served(key)
	}
	httpio.TrackBody(r.Context(), resp, func(end httpio.BodyEnd) {
		httpio.StripHeaders(resp.Trailer)
		replica.utilized(time.Now(), resp.Trailer)
		flight.finished(end)
	})
	return resp, report, nil
}

// send turns the caller's request into the one that the replica sees, and returns what the replica says.
func (in *Inbound) send(r *http.Request, replica *Replica) (*http.Response, error) {
	httpio.StripHeaders(r.Header)
	r.URL.Scheme, r.URL.Host = "http", replica.Endpoint.Address.String()
	r.RequestURI = ""
	resp, err := httpio.RoundTrip(in.engine.transport, r)
	if err != nil {
		return nil, err
	}
	if f := httpio.CheckResponse(r, resp); f != nil {
		resp.Body.Close()
		return nil, f
	}
	httpio.StripHeaders(resp.Header)
	httpio.StripHeaders(resp.Trailer) // the announcement
	takeUtilization(resp.Trailer)
	return resp, nil
}

// utilized notes what the replica says of itself in a header or in trailers.
func (r *Replica) utilized(now time.Time, h http.Header) {
	if u := takeUtilization(h); u > 0 {
		r.Load.Utilize(now, u)
	}
}

func deliveryFault(ctx context.Context, id registry.EndpointID, err error) *fault.Error {
	if no, ok := errors.AsType[*httpio.Unconnected](err); ok && ctx.Err() == nil {
		return fault.New(fault.ConnectFailed, "no connection to %s: %v", id, no.Err)
	}
	return httpio.FaultOf(ctx, err)
}

// outcomeOf says what a fault means for the replica: that a caller gave up, for want of time or otherwise, or can't form
// a request, is not held against it.
func outcomeOf(r fault.Reason) load.Outcome {
	switch r {
	case fault.Canceled, fault.Timeout, fault.BadRequest:
		return load.Canceled
	}
	return load.Failed
}

// served notes that the replica has what requests with a key need.
func (r *Replica) served(key string) {
	if r.keys == nil || key == "" {
		return
	}
	if k, err := strconv.ParseUint(key, 16, 64); err == nil {
		r.keys.Served(k)
	}
}

// flight is one request in flight at a replica.
type flight struct {
	inbound *Inbound
	replica *Replica
	slot    *Reservation
	token   load.Token
	start   time.Time
	failed  bool // by its status
}

func (in *Inbound) begin(r *Replica, reservation string) *flight {
	now := time.Now()
	return &flight{inbound: in, replica: r, slot: in.slot(r.line, reservation), token: r.Load.Begin(now), start: now}
}

// finished is called when the body has ended, in whichever way.
func (f *flight) finished(end httpio.BodyEnd) {
	switch {
	case end == httpio.BodyAborted || end == httpio.BodyLate:
		f.end(load.Canceled)
	case end == httpio.BodyBroken || f.failed:
		f.end(load.Failed)
	default:
		f.end(load.OK)
	}
}

func (f *flight) end(outcome load.Outcome) {
	now := time.Now()
	f.replica.Load.End(now, f.token, outcome)
	f.replica.metrics.finished(outcome, now.Sub(f.start))
	if !f.replica.line.leave(f.slot) {
		return
	}
	if r := f.inbound.Replica(f.replica.Endpoint.ID()); r != nil {
		f.inbound.idle(r)
	}
}
