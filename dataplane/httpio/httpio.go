// Package httpio is what the data plane shares of its HTTP engine, which stands on net/http.
package httpio

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httputil"
	"strings"

	"github.com/headroom-mesh/headroom/dataplane/fault"
)

// Headers between agents. Neither callers nor replicas ever see or set them.
const (
	headerPrefix   = "Headroom-"
	HeaderEndpoint = headerPrefix + "Endpoint" // request: the replica that was picked
	HeaderLoad     = headerPrefix + "Load"     // response: a load.Report
)

// StripHeaders removes the headers that only agents may set.
func StripHeaders(h http.Header) {
	for name := range h {
		if strings.HasPrefix(name, headerPrefix) {
			delete(h, name)
		}
	}
}

// RoundTripper is a function as an http.RoundTripper.
type RoundTripper func(*http.Request) (*http.Response, error)

// RoundTrip calls f.
func (f RoundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// NewProxy returns a handler that answers each request by what rt makes of it. It streams both ways, passes trailers,
// informational responses and upgrades, and turns errors into faults.
func NewProxy(rt RoundTripper, log *slog.Logger) *httputil.ReverseProxy {
	return &httputil.ReverseProxy{
		Rewrite:       passThrough,
		Transport:     rt,
		FlushInterval: -1,
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			FaultOf(r.Context(), err).Write(w)
		},
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
}

// passThrough restores what ReverseProxy takes away on the assumption that it faces the open internet. Here callers and
// replicas must see each other as if no proxy were between them.
func passThrough(pr *httputil.ProxyRequest) {
	pr.Out.URL.RawQuery = pr.In.URL.RawQuery
	for _, name := range []string{"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"} {
		if v, ok := pr.In.Header[name]; ok {
			pr.Out.Header[name] = v
		}
	}
}

// FaultOf returns the fault that an error of a round trip amounts to.
func FaultOf(ctx context.Context, err error) *fault.Error {
	if f, ok := errors.AsType[*fault.Error](err); ok {
		return f
	}
	switch {
	case errors.Is(ctx.Err(), context.Canceled):
		return fault.New(fault.Canceled, "the caller went away")
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return fault.New(fault.Timeout, "no complete answer in time")
	default:
		return fault.New(fault.Reset, "the connection to the replica broke: %v", err)
	}
}

// Unconnected is a failure to connect: the other end has not seen the request.
type Unconnected struct{ Err error }

func (u *Unconnected) Error() string { return u.Err.Error() }
func (u *Unconnected) Unwrap() error { return u.Err }
