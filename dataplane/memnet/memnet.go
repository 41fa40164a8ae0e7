// Package memnet is a network in memory for tests: hosts, buffered connections, and faults. All of it works inside a
// testing/synctest bubble. Only tests import it.
package memnet

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"
)

// Network joins hosts. Make it with New, inside the bubble that uses it.
type Network struct {
	mu sync.Mutex
	// mu guards the fields below, those of the hosts, and all connections.
	changed *sync.Cond // anything at all

	hosts     map[netip.Addr]*Host
	listeners map[netip.AddrPort]*listener
	conns     map[*conn]bool
	port      uint16 // the last one given to a dialer or to a listener that asked for port 0
}

// Host is a machine on a Network. Faults of a host befall all its connections, in both directions.
type Host struct {
	net        *Network
	addr       netip.Addr
	blackholed bool
	delay      time.Duration
}

// New returns an empty network.
func New() *Network {
	n := &Network{
		hosts:     make(map[netip.Addr]*Host),
		listeners: make(map[netip.AddrPort]*listener),
		conns:     make(map[*conn]bool),
		port:      32768,
	}
	n.changed = sync.NewCond(&n.mu)
	return n
}

// Host returns the host with an address, such as "10.0.0.1", which comes into being when it is first named.
func (n *Network) Host(addr string) *Host {
	a := netip.MustParseAddr(addr)
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.hostLocked(a)
}

func (n *Network) hostLocked(a netip.Addr) *Host {
	h := n.hosts[a]
	if h == nil {
		h = &Host{net: n, addr: a}
		n.hosts[a] = h
	}
	return h
}

// Cut resets all connections of the host.
func (h *Host) Cut() {
	h.update(func() {
		for c := range h.net.conns {
			if c.local == h || c.peer.local == h {
				c.reset = true
			}
		}
	})
}

// Blackhole makes all that is sent to or from the host vanish, silently, until it is called with false: then it is
// delivered after all, as TCP would.
func (h *Host) Blackhole(on bool) { h.update(func() { h.blackholed = on }) }

// Delay lets whatever is sent to or from the host from now on arrive later.
func (h *Host) Delay(d time.Duration) { h.update(func() { h.delay = d }) }

func (h *Host) update(change func()) {
	h.net.mu.Lock()
	defer h.net.mu.Unlock()
	change()
	h.net.changed.Broadcast()
}

// Listen takes connections at a port of the host; port 0 is replaced with a free one.
func (h *Host) Listen(port uint16) (net.Listener, error) {
	n := h.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if port == 0 {
		n.port++
		port = n.port
	}
	at := netip.AddrPortFrom(h.addr, port)
	if n.listeners[at] != nil {
		return nil, fmt.Errorf("listen %v: %w", at, syscall.EADDRINUSE)
	}
	l := &listener{net: n, at: at}
	n.listeners[at] = l
	return l, nil
}

// Dial connects from the host. Where nobody listens the connection is refused; where data vanishes it waits for ctx.
func (h *Host) Dial(ctx context.Context, to netip.AddrPort) (net.Conn, error) {
	n := h.net
	defer context.AfterFunc(ctx, n.wake)()
	n.mu.Lock()
	defer n.mu.Unlock()
	remote := n.hostLocked(to.Addr())
	arrival := time.Now().Add(2 * (h.delay + remote.delay))
	defer time.AfterFunc(time.Until(arrival), n.wake).Stop()
	for h.blackholed || remote.blackholed || time.Now().Before(arrival) {
		if ctx.Err() != nil {
			return nil, fmt.Errorf("dial %v: %w", to, ctx.Err())
		}
		n.changed.Wait()
	}
	l := n.listeners[to]
	if l == nil {
		return nil, fmt.Errorf("dial %v: %w", to, syscall.ECONNREFUSED)
	}
	n.port++
	here, there := n.pairLocked(h, netip.AddrPortFrom(h.addr, n.port), remote, to)
	l.backlog = append(l.backlog, there)
	n.changed.Broadcast()
	return here, nil
}

func (n *Network) wake() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.changed.Broadcast()
}

func (n *Network) pairLocked(a *Host, aAddr netip.AddrPort, b *Host, bAddr netip.AddrPort) (*conn, *conn) {
	ca := &conn{net: n, local: a, addr: net.TCPAddrFromAddrPort(aAddr)}
	cb := &conn{net: n, local: b, addr: net.TCPAddrFromAddrPort(bAddr)}
	ca.peer, cb.peer = cb, ca
	n.conns[ca], n.conns[cb] = true, true
	return ca, cb
}

type listener struct {
	net *Network
	at  netip.AddrPort

	// guarded by net.mu

	backlog []*conn
	closed  bool
}

func (l *listener) Accept() (net.Conn, error) {
	l.net.mu.Lock()
	defer l.net.mu.Unlock()
	for {
		if l.closed {
			return nil, fmt.Errorf("accept %v: %w", l.at, net.ErrClosed)
		}
		if len(l.backlog) > 0 {
			c := l.backlog[0]
			l.backlog = l.backlog[1:]
			return c, nil
		}
		l.net.changed.Wait()
	}
}

func (l *listener) Close() error {
	l.net.mu.Lock()
	defer l.net.mu.Unlock()
	if l.closed {
		return net.ErrClosed
	}
	l.closed = true
	delete(l.net.listeners, l.at)
	for _, c := range l.backlog {
		c.reset, c.peer.reset = true, true
	}
	l.net.changed.Broadcast()
	return nil
}

func (l *listener) Addr() net.Addr { return net.TCPAddrFromAddrPort(l.at) }

// maxBuffered is how much a connection holds in one direction before its writer waits.
const maxBuffered = 256 << 10

// conn is one end of a connection.
type conn struct {
	net   *Network
	local *Host
	addr  net.Addr
	peer  *conn

	// guarded by net.mu

	inbox         []segment
	buffered      int // bytes in inbox
	closed        bool
	closedWrite   bool
	reset         bool
	abortive      bool
	readDeadline  deadline
	writeDeadline deadline
}

// segment is what one Write sent, and when it arrives.
type segment struct {
	data []byte
	at   time.Time
}

// Read returns what has arrived, first of all why nothing can.
func (c *conn) Read(b []byte) (int, error) {
	c.net.mu.Lock()
	defer c.net.mu.Unlock()
	for {
		if err := c.failedLocked(c.readDeadline); err != nil {
			return 0, c.opError("read", err)
		}
		if len(b) == 0 {
			return 0, nil
		}
		if !c.silentLocked() {
			if len(c.inbox) > 0 && !time.Now().Before(c.inbox[0].at) {
				return c.takeLocked(b), nil
			}
			if len(c.inbox) == 0 && c.peer.closedWrite {
				return 0, io.EOF
			}
		}
		c.net.changed.Wait()
	}
}

func (c *conn) takeLocked(b []byte) int {
	s := &c.inbox[0]
	n := copy(b, s.data)
	s.data = s.data[n:]
	c.buffered -= n
	if len(s.data) == 0 {
		c.inbox = c.inbox[1:]
	}
	c.net.changed.Broadcast()
	return n
}

// Write waits while the other end has too much to read.
func (c *conn) Write(b []byte) (int, error) {
	c.net.mu.Lock()
	defer c.net.mu.Unlock()
	written := 0
	for {
		if err := c.failedLocked(c.writeDeadline); err != nil {
			return written, c.opError("write", err)
		}
		if c.closedWrite || c.peer.closed {
			return written, c.opError("write", syscall.EPIPE)
		}
		n := min(len(b)-written, maxBuffered-c.peer.buffered)
		c.sendLocked(b[written : written+n])
		written += n
		if written == len(b) {
			return written, nil
		}
		c.net.changed.Wait()
	}
}

func (c *conn) sendLocked(b []byte) {
	if len(b) == 0 {
		return
	}
	delay := c.local.delay + c.peer.local.delay
	c.peer.inbox = append(c.peer.inbox, segment{append([]byte(nil), b...), time.Now().Add(delay)})
	c.peer.buffered += len(b)
	if delay > 0 {
		time.AfterFunc(delay, c.net.wake)
	}
	c.net.changed.Broadcast()
}

func (c *conn) failedLocked(d deadline) error {
	switch {
	case c.closed:
		return net.ErrClosed
	case c.reset:
		return syscall.ECONNRESET
	case !d.at.IsZero() && !time.Now().Before(d.at):
		return os.ErrDeadlineExceeded
	}
	return nil
}

func (c *conn) silentLocked() bool { return c.local.blackholed || c.peer.local.blackholed }

func (c *conn) opError(op string, err error) error {
	return &net.OpError{Op: op, Net: "tcp", Source: c.addr, Addr: c.peer.addr, Err: err}
}

// Close ends both directions. The other end reads what is still under way, and then io.EOF.
func (c *conn) Close() error {
	return c.update(func() {
		c.closed, c.closedWrite = true, true
		c.peer.reset = c.peer.reset || c.abortive
		c.readDeadline.stop()
		c.writeDeadline.stop()
		delete(c.net.conns, c)
	})
}

// SetLinger lets Close reset the connection if sec is 0, as on a net.TCPConn.
func (c *conn) SetLinger(sec int) error { return c.update(func() { c.abortive = sec == 0 }) }

// CloseWrite ends the direction to the other end.
func (c *conn) CloseWrite() error { return c.update(func() { c.closedWrite = true }) }

func (c *conn) update(change func()) error {
	c.net.mu.Lock()
	defer c.net.mu.Unlock()
	if c.closed {
		return c.opError("set", net.ErrClosed)
	}
	change()
	c.net.changed.Broadcast()
	return nil
}

// HungUp reports whether the other end has ended its direction, or all, and that can be known here. It is what a relay
// asks the kernel of real connections.
func (c *conn) HungUp() bool {
	c.net.mu.Lock()
	defer c.net.mu.Unlock()
	return c.reset || !c.silentLocked() && c.peer.closedWrite
}

// Quiet reports whether a read would wait.
func (c *conn) Quiet() bool {
	c.net.mu.Lock()
	defer c.net.mu.Unlock()
	return !c.closed && !c.reset && (c.silentLocked() || len(c.inbox) == 0 && !c.peer.closedWrite)
}

func (c *conn) LocalAddr() net.Addr  { return c.addr }
func (c *conn) RemoteAddr() net.Addr { return c.peer.addr }

func (c *conn) SetDeadline(t time.Time) error {
	return c.update(func() {
		c.readDeadline.set(t, c.net.wake)
		c.writeDeadline.set(t, c.net.wake)
	})
}

func (c *conn) SetReadDeadline(t time.Time) error {
	return c.update(func() { c.readDeadline.set(t, c.net.wake) })
}

func (c *conn) SetWriteDeadline(t time.Time) error {
	return c.update(func() { c.writeDeadline.set(t, c.net.wake) })
}

// deadline wakes those who wait once it has passed.
type deadline struct {
	at    time.Time
	timer *time.Timer
}

func (d *deadline) set(t time.Time, wake func()) {
	d.stop()
	d.at = t
	if !t.IsZero() {
		d.timer = time.AfterFunc(time.Until(t), wake)
	}
}

func (d *deadline) stop() {
	if d.timer != nil {
		d.timer.Stop()
	}
}
