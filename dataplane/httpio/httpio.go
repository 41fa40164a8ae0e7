// Package httpio is what the data plane shares of its HTTP engine, which stands on net/http.
package httpio

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"

	"github.com/headroom-mesh/headroom/dataplane/fault"
)

// Headers between agents. Neither callers nor replicas ever see or set them.
const (
	headerPrefix      = "Headroom-"
	HeaderEndpoint    = headerPrefix + "Endpoint"    // request: the replica that was picked
	HeaderKey         = headerPrefix + "Key"         // request: the hash of its key, where the rule wants the replica to know
	HeaderReservation = headerPrefix + "Reservation" // request: the slot that was reserved for it
	HeaderLoad        = headerPrefix + "Load"        // response: a load.Report
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

// callerFault returns the fault that an error of reading the caller's body amounts to. It keeps the caller's failures
// from being laid at the replica's door.
func callerFault(err error) error {
	_, network := errors.AsType[net.Error](err)
	if network || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, http.ErrBodyReadAfterClose) {
		return fault.New(fault.Canceled, "the caller broke off its request: %v", err)
	}
	return fault.New(fault.BadRequest, "the body of the request is malformed: %v", err)
}

// Unconnected is a failure to connect: the other end has not seen the request.
type Unconnected struct{ Err error }

func (u *Unconnected) Error() string { return u.Err.Error() }
func (u *Unconnected) Unwrap() error { return u.Err }
