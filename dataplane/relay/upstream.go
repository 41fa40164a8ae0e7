package relay

import (
	"context"
	"math"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Target says what an Upstream is.
type Target struct {
	// Name is what messages call it.
	Name string
	// Dial connects for a protocol, which is never Unknown. It need not be quick.
	Dial func(ctx context.Context, p Protocol) (net.Conn, error)
	// Speaks is the only protocol that the other end is known to understand. Default: whichever the caller speaks, or HTTP/1.1
	// if the caller speaks HTTP/2 and the other end turns out not to.
	Speaks Protocol
	// Agent is whether the other end is an agent: then fields between agents are kept, and TCP goes by CONNECT.
	Agent bool
	// ProxyHeader is whether connections for TCP begin with a PROXY header (version 2).
	ProxyHeader bool
	// Once is whether no connection is kept for the next call of HTTP/1.1. Default: they are.
	Once bool
	// IdleTimeout is how long a connection is kept for the next call. It must be shorter than the other end's.
	IdleTimeout time.Duration
}

// maxIdle bounds the connections that an Upstream keeps for later.
const maxIdle = 1024

// Upstream is where calls are sent: a replica, or an agent. It keeps connections open from one call to the next.
type Upstream struct {
	target   Target
	engine   *Engine
	notHTTP2 atomic.Int64 // when the other end last did not answer in HTTP/2, in milliseconds since 1970

	mu sync.Mutex
	// mu guards the fields below.

	idle []*upstreamConn // the one used last is at the end
	open map[*upstreamConn]bool
	cuts int

	http2   []*http2Conn
	dialing *dialing // a connection of HTTP/2 being made
}

// upstreamConn is a connection for one call at a time.
type upstreamConn struct {
	*socket
	upstream *Upstream
	kept     bool  // a call has ended well on it
	used     int64 // in milliseconds since 1970; last
	since    int   // how often the upstream had been cut before
}

// idleConn returns a connection that can be used again, nil if there is none.
func (u *Upstream) idleConn() *upstreamConn {
	for {
		c := u.lastUsed()
		if c == nil || c.quiet() {
			return c
		}
		c.drop()
	}
}

// lastUsed returns the connection that was used last, which may be dead by now; nil if there is none.
func (u *Upstream) lastUsed() *upstreamConn {
	u.mu.Lock()
	defer u.mu.Unlock()
	last := len(u.idle) - 1
	if last < 0 {
		return nil
	}
	c := u.idle[last]
	u.idle[last] = nil
	u.idle = u.idle[:last]
	return c
}

// dial makes a new connection.
func (u *Upstream) dial(ctx context.Context, p Protocol) (*upstreamConn, error) {
	raw, err := u.dialFor(ctx, p)
	if err != nil {
		return nil, err
	}
	u.engine.metrics.connected.Inc()
	c := &upstreamConn{socket: newSocket(raw), upstream: u}
	u.mu.Lock()
	first := len(u.open) == 0
	if u.open == nil {
		u.open = map[*upstreamConn]bool{}
	}
	u.open[c], c.since = true, u.cuts
	u.mu.Unlock()
	if first {
		u.engine.register(u)
	}
	return c, nil
}

// doubtful reports whether the connection should be looked at before a request is sent on it that can't be sent again, or
// at all: those to agents, which say nothing unasked, may be used at once for what can be sent again.
func (c *upstreamConn) doubtful(again bool) bool {
	return c.kept && !(again && c.upstream.target.Agent && c.used == c.upstream.engine.watch.now())
}

// keep puts the connection by for the next call.
func (c *upstreamConn) keep() {
	u := c.upstream
	c.kept, c.used = true, u.engine.watch.now()
	u.mu.Lock()
	fits := len(u.idle) < maxIdle && c.since == u.cuts && !u.target.Once
	if fits {
		u.idle = append(u.idle, c)
	}
	u.mu.Unlock()
	if !fits {
		c.drop()
	}
}

// drop closes the connection for good, without the word that TLS has for it: who does not read may not take it.
func (c *upstreamConn) drop() {
	u := c.upstream
	u.mu.Lock()
	delete(u.open, c)
	u.mu.Unlock()
	c.cut()
}

// CloseIdle closes the connections that no call uses.
func (u *Upstream) CloseIdle() {
	u.closeIdleSince(math.MaxInt64)
	u.drainIdleHTTP2()
}

// closeIdleSince closes the connections that no call has used since a moment.
func (u *Upstream) closeIdleSince(ms int64) {
	u.mu.Lock()
	n := 0
	for n < len(u.idle) && u.idle[n].used < ms { // they are in the order of their last use
		n++
	}
	old := slices.Clone(u.idle[:n])
	u.idle = slices.Delete(u.idle, 0, n) // which lets go of them
	u.mu.Unlock()
	for _, c := range old {
		c.drop()
	}
}

// Cut closes all connections: the calls on them fail.
func (u *Upstream) Cut() {
	u.mu.Lock()
	all := u.open
	u.open, u.idle = nil, nil
	u.cuts++
	streams := u.http2 // which is never changed, but replaced
	u.mu.Unlock()
	for _, c := range streams {
		c.conn.Close()
	}
	for c := range all {
		c.cut()
	}
}

// Connections counts those that are open.
func (u *Upstream) Connections() int {
	u.mu.Lock()
	defer u.mu.Unlock()
	return len(u.open) + len(u.http2)
}
