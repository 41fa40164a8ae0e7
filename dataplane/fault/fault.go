// Package fault is the closed list of reasons for which the data plane itself answers a request, and what it then says.
package fault

import (
	"fmt"
	"net/http"
)

// Header carries the reason in an answer that the data plane gave itself. An answer without it comes from a replica.
const Header = "Headroom-Reason"

// Reason is why a request got no answer from a replica. It is the value of the header and of metric labels.
type Reason string

const (
	None               Reason = ""
	BadRequest         Reason = "bad_request"         // the request can't be parsed, or could be read in two ways; 400, or what says more
	NotMesh            Reason = "not_mesh"            // the host is not SERVICE.mesh
	UnknownService     Reason = "unknown_service"     // no such service was ever registered
	NoRegistry         Reason = "no_registry"         // the agent has never known any services: it can't reach the registry
	NoEndpoints        Reason = "no_endpoints"        // the service has no replicas
	NoneReady          Reason = "none_ready"          // all replicas are unhealthy or leaving
	ConnectFailed      Reason = "connect_failed"      // no connection to the replica
	UnknownEndpoint    Reason = "unknown_endpoint"    // the replica is not on that node (any more)
	RetriesExhausted   Reason = "retries_exhausted"   // no replica could be connected to, and no retry is left
	Reset              Reason = "upstream_reset"      // the connection broke before the answer was complete
	MalformedResponse  Reason = "malformed_response"  // what came in answer can't be parsed, or could be read in two ways
	Timeout            Reason = "timeout"             // the service's timeout ran out
	UnsupportedRequest Reason = "unsupported_request" // CONNECT by HTTP/2
	Loop               Reason = "loop"                // the request has passed through the mesh again and again
	Canceled           Reason = "canceled"            // the caller went away; nobody sees the answer
)

// Status returns the HTTP status that goes with the reason.
func (r Reason) Status() int {
	switch r {
	case BadRequest:
		return http.StatusBadRequest
	case NotMesh, UnknownService:
		return http.StatusNotFound
	case UnsupportedRequest:
		return http.StatusNotImplemented
	case Reset, MalformedResponse:
		return http.StatusBadGateway
	case Loop:
		return http.StatusLoopDetected
	case Timeout:
		return http.StatusGatewayTimeout
	case Canceled:
		return 499 // nginx's "client closed request"; only logs and metrics see it
	default:
		return http.StatusServiceUnavailable
	}
}

// GRPC returns the status that callers who speak gRPC are told.
func (r Reason) GRPC() int {
	switch r {
	case BadRequest, Reset, MalformedResponse, Loop:
		return 13 // internal
	case NotMesh, UnknownService, UnsupportedRequest:
		return 12 // unimplemented
	case Timeout:
		return 4 // deadline exceeded
	case Canceled:
		return 1 // canceled
	default:
		return 14 // unavailable
	}
}

// Known reports whether the reason is on the list.
func (r Reason) Known() bool {
	switch r {
	case None, BadRequest, NotMesh, UnknownService, NoRegistry, NoEndpoints, NoneReady, ConnectFailed, UnknownEndpoint,
		RetriesExhausted, Reset, MalformedResponse, Timeout, UnsupportedRequest, Loop, Canceled:
		return true
	}
	return false
}

// Unsent reports whether a peer's answer with this reason means that no replica has seen the request.
func (r Reason) Unsent() bool { return r == ConnectFailed || r == UnknownEndpoint }

// Error is a fault with its particulars.
type Error struct {
	Reason Reason
	Detail string // one sentence for the caller
	Code   int    // the HTTP status, where it says more than that of the reason. 0: that of the reason
	// Lasting: it stays until somebody does something about it, so there is no use in waiting.
	Lasting bool
}

func (e *Error) Error() string { return string(e.Reason) + ": " + e.Detail }

// New returns an Error.
func New(r Reason, format string, args ...any) *Error {
	return &Error{Reason: r, Detail: fmt.Sprintf(format, args...)}
}

// Status returns the HTTP status of the answer.
func (e *Error) Status() int {
	if e.Code != 0 {
		return e.Code
	}
	return e.Reason.Status()
}

// Write answers a request with the fault.
func (e *Error) Write(w http.ResponseWriter) {
	w.Header().Set(Header, string(e.Reason))
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(e.Status())
	fmt.Fprintf(w, "headroom: %s\n", e.Detail)
}
