package outbound

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/httpio"
)

const (
	// idleTimeout is how long a connection to another agent is kept for the next request.
	idleTimeout = 90 * time.Second
	// patience is how long requests in flight to an agent that has fallen silent may go on waiting: it may be back in a
	// moment. After that they fail, long before TCP would give up.
	patience = 5 * time.Second
)

// peers are the connections to other agents.
type peers struct {
	dial func(ctx context.Context, agent netip.AddrPort) (net.Conn, error)

	mu sync.Mutex
	// mu guards the fields below.

	all    map[netip.AddrPort]*peer
	silent map[netip.AddrPort]time.Time // since when; those whose connections are yet to be cut
}

func newPeers(dial func(ctx context.Context, agent netip.AddrPort) (net.Conn, error)) *peers {
	return &peers{dial: dial, all: map[netip.AddrPort]*peer{}, silent: map[netip.AddrPort]time.Time{}}
}

// transport returns the connections to an agent.
func (ps *peers) transport(agent netip.AddrPort) *http.Transport {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	p := ps.all[agent]
	if p == nil {
		p = &peer{open: map[*peerConn]bool{}}
		p.transport = httpio.NewTransport(func(ctx context.Context, _ string) (net.Conn, error) {
			c, err := ps.dial(ctx, agent)
			if err != nil {
				return nil, err
			}
			return p.add(c), nil
		}, idleTimeout)
		ps.all[agent] = p
	}
	return p.transport
}

// fellSilent gives up the idle connections to an agent: a request on one of them would wait for an answer, where a new
// connection fails soon.
func (ps *peers) fellSilent(now time.Time, agent netip.AddrPort) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if p := ps.all[agent]; p != nil {
		p.transport.CloseIdleConnections()
		ps.silent[agent] = now
	}
}

func (ps *peers) isBack(agent netip.AddrPort) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	delete(ps.silent, agent)
}

// cutSilent closes the connections to agents that have been silent for too long.
func (ps *peers) cutSilent(now time.Time) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	for agent, since := range ps.silent {
		if now.Sub(since) >= patience {
			ps.all[agent].cut()
			delete(ps.all, agent)
			delete(ps.silent, agent)
		}
	}
}

// closeIdle closes the connections that no request uses.
func (ps *peers) closeIdle() {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	for _, p := range ps.all {
		p.transport.CloseIdleConnections()
	}
}

// peer is the connections to one agent.
type peer struct {
	transport *http.Transport

	mu   sync.Mutex
	open map[*peerConn]bool // guarded by mu
}

func (p *peer) add(c net.Conn) net.Conn {
	pc := &peerConn{Conn: c, peer: p}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.open[pc] = true
	return pc
}

func (p *peer) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.open {
		c.Conn.Close()
	}
}

// peerConn is a connection to an agent.
type peerConn struct {
	net.Conn
	peer *peer
}

func (c *peerConn) Close() error {
	c.peer.mu.Lock()
	delete(c.peer.open, c)
	c.peer.mu.Unlock()
	return c.Conn.Close()
}

// CloseWrite ends the direction to the agent: an upgraded connection may be half closed.
func (c *peerConn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return errors.ErrUnsupported
}
