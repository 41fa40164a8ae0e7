// Package transport carries connections between agents: one port, several protocols, one place for identity.
package transport

import (
	"context"
	"net"
	"net/netip"
)

// Protocol names what a connection between agents is used for.
type Protocol string

const (
	HTTP  Protocol = "headroom-http/1"  // requests to replicas
	Probe Protocol = "headroom-probe/2" // probes
	RPC   Protocol = "headroom-rpc/1"   // gRPC service Peer
)

// Transport makes connections between agents. Its implementations differ in how the two ends prove who they are.
type Transport interface {
	// Dial connects to an agent for one protocol.
	Dial(ctx context.Context, agent netip.AddrPort, p Protocol) (net.Conn, error)
	// Accept finishes on c what the other end's Dial began, and says for which protocol. It closes c on error.
	Accept(ctx context.Context, c net.Conn) (net.Conn, Protocol, error)
}
