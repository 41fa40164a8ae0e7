// Package transport carries connections between agents: one port, several protocols, one place for identity.
package transport

import (
	"context"
	"net"
	"net/netip"

	"github.com/headroom-mesh/headroom/dataplane/identity"
)

// Protocol names what a connection between agents is used for.
type Protocol string

const (
	HTTP  Protocol = "headroom-http/1"  // requests to replicas
	HTTP2 Protocol = "headroom-h2/1"    // requests to replicas, as streams of HTTP/2
	Probe Protocol = "headroom-probe/2" // probes
	RPC   Protocol = "headroom-rpc/1"   // gRPC service Peer
)

func protocols() []Protocol { return []Protocol{HTTP, HTTP2, Probe, RPC} }

// carriesRequests reports whether back-pressure may hold a connection for as long as an application likes.
func (p Protocol) carriesRequests() bool { return p == HTTP || p == HTTP2 }

// Transport makes connections between agents. Its implementations differ in how the two ends prove who they are.
type Transport interface {
	// Dial connects to an agent for one protocol.
	Dialer
	// Accept finishes on c what the other end's Dial began, and says for which protocol. It closes c on error.
	Accept(ctx context.Context, c net.Conn) (net.Conn, Protocol, error)
	// As returns what dials on behalf of a workload, for requests only. Whoever accepts takes that for the one who calls.
	As(w identity.Workload) Dialer
}

// Dialer makes connections to agents.
type Dialer interface {
	Dial(ctx context.Context, agent netip.AddrPort, p Protocol) (net.Conn, error)
}
