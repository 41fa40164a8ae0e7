package relay

import (
	"context"
	"net"
	"time"
)

// Target says what an Upstream is.
type Target struct {
	// Dial connects for a protocol, which is never Unknown. It need not be quick.
	Dial func(ctx context.Context, p Protocol) (net.Conn, error)
	// Speaks is the only protocol that the other end is known to understand. Default: whichever the caller speaks.
	Speaks Protocol
	// Agent is whether the other end is an agent: then fields between agents are kept, and TCP goes by CONNECT.
	Agent bool
	// ProxyHeader is whether connections for TCP begin with a PROXY header (version 2).
	ProxyHeader bool
	// IdleTimeout is how long a connection is kept for the next call. It must be shorter than the other end's.
	IdleTimeout time.Duration
}

// Upstream is where calls are sent: a replica, or an agent. It keeps connections open from one call to the next.
type Upstream struct {
	target Target
}

// NewUpstream returns an Upstream without connections.
func NewUpstream(t Target) *Upstream { return &Upstream{target: t} }

// CloseIdle closes the connections that no call uses.
func (u *Upstream) CloseIdle() {}

// Cut closes all connections: the calls on them fail.
func (u *Upstream) Cut() {}
