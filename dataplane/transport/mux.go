package transport

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/sockets"
	"github.com/prometheus/client_golang/prometheus"
)

const (
	handshakeTime = 5 * time.Second
	maxHandshakes = 1024 // at once; further connections wait in the kernel's backlog
	maxWaiting    = 128  // connections of one protocol that nobody has accepted yet
)

// Mux shares one listener among protocols.
type Mux struct {
	transport Transport
	log       *slog.Logger
	metrics   *metrics
	listeners map[Protocol]*listener // fixed once Run begins
	atOnce    int                    // handshakes
	told      told
	resting   chan struct{} // closed by Rest
	rest      func()
}

// NewMux returns a Mux whose connections t accepts. A nil log discards, nil metrics are kept from no one.
func NewMux(t Transport, log *slog.Logger, metrics prometheus.Registerer) *Mux {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	m := &Mux{transport: t, log: log, metrics: newMetrics(metrics),
		listeners: make(map[Protocol]*listener), atOnce: maxHandshakes, resting: make(chan struct{})}
	m.rest = sync.OnceFunc(func() { close(m.resting) })
	return m
}

// Rest closes the shared listener. What it has accepted is still served.
func (m *Mux) Rest() { m.rest() }

// Listener returns where connections for p arrive. Call it before Run, and once for each protocol: connections for
// others are refused. Its Addr is that of the shared listener once Run has begun. Closing it refuses p from then on.
func (m *Mux) Listener(p Protocol) net.Listener {
	l := &listener{protocol: p, conns: make(chan net.Conn, maxWaiting), closed: make(chan struct{})}
	m.listeners[p] = l
	return l
}

// Run accepts connections on l until ctx ends or l is closed by somebody else, which is an error. It closes l and all
// protocol listeners and returns when all handshakes have ended. Connections that were accepted from a protocol
// listener are left to those who did.
func (m *Mux) Run(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer m.close()
	defer cancel()
	wg.Go(func() {
		select {
		case <-ctx.Done():
		case <-m.resting:
		}
		l.Close()
	})
	for _, pl := range m.listeners {
		pl.setAddr(l.Addr())
	}
	busy := make(chan struct{}, m.atOnce)
	for {
		busy <- struct{}{} // every handshake ends in time, so this does too
		c, err := sockets.Accept(ctx, l, m.log)
		if ctx.Err() != nil {
			if c != nil {
				c.Close()
			}
			return nil
		}
		if err != nil {
			return m.rested(ctx, err)
		}
		wg.Go(func() {
			defer func() { <-busy }()
			m.handshake(ctx, c)
		})
	}
}

// rested returns nil when ctx ends, if that nothing more can be accepted is what was wanted.
func (m *Mux) rested(ctx context.Context, err error) error {
	select {
	case <-m.resting:
		<-ctx.Done()
		return nil
	default:
		return fmt.Errorf("accept connections from other agents: %w", err)
	}
}

func (m *Mux) handshake(ctx context.Context, raw net.Conn) {
	ctx, cancel := context.WithTimeout(ctx, handshakeTime)
	defer cancel()
	c, p, err := m.transport.Accept(ctx, raw)
	if err != nil {
		m.metrics.failed()
		m.tell(raw.RemoteAddr(), err)
		return
	}
	if l := m.listeners[p]; l == nil || !l.offer(c) {
		c.Close()
		m.metrics.refused(p)
		m.log.Debug("refused a connection", "peer", raw.RemoteAddr(), "reason", "nobody accepts "+string(p))
		return
	}
	m.metrics.accepted(p)
}

// tell logs why a connection was refused: aloud if somebody has to do something, but not each time.
func (m *Mux) tell(peer net.Addr, err error) {
	level := slog.LevelDebug
	if r, ok := errors.AsType[*refusal](err); ok && m.told.isNews(host(peer)+r.reason, time.Now()) {
		level = slog.LevelWarn
	}
	m.log.Log(context.Background(), level, "refused a connection", "peer", peer, "err", err)
}

func host(a net.Addr) string {
	if h, _, err := net.SplitHostPort(a.String()); err == nil {
		return h
	}
	return a.String()
}

// told is what was said lately.
type told struct {
	mu sync.Mutex
	// mu guards the field below.
	at map[string]time.Time
}

const (
	sayAgain = time.Minute
	maxTold  = 1000
)

// isNews reports whether something was not said within the last minute, and notes that it is now.
func (t *told) isNews(what string, now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if last, ok := t.at[what]; ok && now.Sub(last) < sayAgain {
		return false
	}
	if t.at == nil || len(t.at) >= maxTold {
		t.at = map[string]time.Time{}
	}
	t.at[what] = now
	return true
}

func (m *Mux) close() {
	for _, l := range m.listeners {
		l.Close()
	}
}

// listener is the part of a Mux that one protocol sees.
type listener struct {
	protocol Protocol
	conns    chan net.Conn
	closed   chan struct{}

	mu sync.Mutex
	// mu guards the fields below, and that nothing enters conns once closed is closed.

	addr net.Addr // nil before Run
}

// offer hands c over, unless too many wait already.
func (l *listener) offer(c net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-l.closed:
		return false
	default:
	}
	select {
	case l.conns <- c:
		return true
	default:
		return false
	}
}

// Accept returns the next connection, or net.ErrClosed.
func (l *listener) Accept() (net.Conn, error) {
	select {
	case <-l.closed:
	case c := <-l.conns:
		return c, nil
	}
	return nil, fmt.Errorf("accept %s: %w", l.protocol, net.ErrClosed)
}

// Close closes the connections that nobody has accepted too.
func (l *listener) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-l.closed:
		return nil
	default:
	}
	close(l.closed)
	for {
		select {
		case c := <-l.conns:
			c.Close()
		default:
			return nil
		}
	}
}

func (l *listener) Addr() net.Addr {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.addr == nil {
		return unbound{l.protocol}
	}
	return l.addr
}

func (l *listener) setAddr(a net.Addr) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.addr = a
}

// unbound is the address of a listener before its Mux runs.
type unbound struct{ p Protocol }

func (unbound) Network() string  { return "tcp" }
func (u unbound) String() string { return string(u.p) }
