package inbound

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/headroom-mesh/headroom/dataplane/httpio"
	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/registry"
	"github.com/prometheus/client_golang/prometheus"
)

// connectTimeout bounds the connection to a replica. It is on this node: one that does not accept at once is stuck.
const connectTimeout = time.Second

// engine is the part of Inbound that stands on net/http.
type engine struct {
	transport *http.Transport
	proxy     *httputil.ReverseProxy
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
	in := &Inbound{metrics: newMetrics(cfg.Metrics)}
	in.replicas.Store(&map[registry.EndpointID]*Replica{})
	in.engine = &engine{transport: newTransport()}
	in.engine.proxy = httpio.NewProxy(httpio.RoundTripper(in.serveRemote), cfg.Log)
	return in
}

func newTransport() *http.Transport {
	dialer := &net.Dialer{Timeout: connectTimeout}
	return &http.Transport{
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			c, err := dialer.DialContext(ctx, network, address)
			if err != nil {
				return nil, &httpio.Unconnected{Err: err}
			}
			return c, nil
		},
		MaxIdleConnsPerHost: 1024,
		IdleConnTimeout:     30 * time.Second,
		DisableCompression:  true, // bytes pass as they are
	}
}

// ServeHTTP takes a request from another agent and delivers it to the replica that the agent picked.
func (in *Inbound) ServeHTTP(w http.ResponseWriter, r *http.Request) {
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

// Deliver sends a request to a replica of this node and counts it for as long as it is in flight, which is until the
// response's body has been read or closed. The report is the replica's load without this request. The error is a
// *fault.Error.
func (in *Inbound) Deliver(r *http.Request, id registry.EndpointID) (*http.Response, load.Report, error) {
	replica := in.Replica(id)
	if replica == nil {
		return nil, load.Report{}, fault.New(fault.UnknownEndpoint, "there is no replica %q on this node", id)
	}
	flight := in.begin(replica)
	resp, err := in.engine.transport.RoundTrip(in.localRequest(r, replica))
	if err != nil {
		if errors.Is(r.Context().Err(), context.Canceled) {
			flight.end(load.Canceled)
		} else {
			flight.end(load.Failed)
		}
		return nil, load.Report{}, deliveryFault(r.Context(), id, err)
	}
	httpio.StripHeaders(resp.Header)
	report := replica.Load.ReportLeaving(time.Now())
	flight.failed = resp.StatusCode >= http.StatusInternalServerError
	resp.Body = httpio.TrackBody(r.Context(), resp.Body, flight.finished)
	return resp, report, nil
}

// localRequest turns the caller's request into the one that the replica sees.
func (in *Inbound) localRequest(r *http.Request, replica *Replica) *http.Request {
	out := r.Clone(r.Context())
	out.URL.Scheme = "http"
	out.URL.Host = replica.Endpoint.Address.String()
	out.RequestURI = ""
	httpio.StripHeaders(out.Header)
	return out
}

func deliveryFault(ctx context.Context, id registry.EndpointID, err error) *fault.Error {
	if no, ok := errors.AsType[*httpio.Unconnected](err); ok {
		return fault.New(fault.ConnectFailed, "no connection to %s: %v", id, no.Err)
	}
	return httpio.FaultOf(ctx, err)
}

// flight is one request in flight at a replica.
type flight struct {
	in      *Inbound
	replica *Replica
	token   load.Token
	start   time.Time
	failed  bool // by its status
}

func (in *Inbound) begin(r *Replica) *flight {
	now := time.Now()
	return &flight{in: in, replica: r, token: r.Load.Begin(now), start: now}
}

// finished is called when the body has ended, in whichever way.
func (f *flight) finished(end httpio.BodyEnd) {
	switch {
	case end == httpio.BodyAborted:
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
	f.in.metrics.finished(f.replica.Endpoint.Service, outcome, now.Sub(f.start))
}
