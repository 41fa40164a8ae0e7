package agent

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/sockets"
)

// later is a listener at an address that another agent may still have. Accept waits for the agent's turn, and then until the
// other one shares the address or gives it up.
type later struct {
	at    netip.AddrPort
	turn  <-chan struct{}
	log   *slog.Logger
	bound chan struct{} // closed when it listens
	over  chan struct{} // closed by Close

	mu sync.Mutex
	// mu guards the fields below.

	listener net.Listener // nil: not yet
	closed   bool
}

func newLater(at netip.AddrPort, turn <-chan struct{}, log *slog.Logger) *later {
	return &later{at: at, turn: turn, log: log, bound: make(chan struct{}), over: make(chan struct{})}
}

// Accept waits for the next connection.
func (l *later) Accept() (net.Conn, error) {
	listener, err := l.listen()
	if err != nil {
		return nil, err
	}
	return listener.Accept()
}

func (l *later) listen() (net.Listener, error) {
	if l.isBound() {
		return l.listener, nil // which changes no more
	}
	select {
	case <-l.turn:
	case <-l.over:
		return nil, net.ErrClosed
	}
	complain := time.Now().Add(takeOverTimeout)
	for {
		listener, err := sockets.ListenShared(l.at)
		if err == nil {
			return l.bind(listener)
		}
		if !errors.Is(err, syscall.EADDRINUSE) {
			return nil, err
		}
		if !complain.IsZero() && time.Now().After(complain) {
			l.log.Warn("an address of this agent is in use; waiting for it", "err", err)
			complain = time.Time{}
		}
		select {
		case <-l.over:
			return nil, net.ErrClosed
		case <-time.After(lookAgain):
		}
	}
}

func (l *later) bind(listener net.Listener) (net.Listener, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		_ = listener.Close()
		return nil, net.ErrClosed
	}
	l.listener = listener
	close(l.bound)
	return listener, nil
}

// Close gives the address up.
func (l *later) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return net.ErrClosed
	}
	l.closed = true
	close(l.over)
	if l.listener == nil {
		return nil
	}
	return l.listener.Close()
}

// Addr returns the address that it is for.
func (l *later) Addr() net.Addr { return net.TCPAddrFromAddrPort(l.at) }

func (l *later) isBound() bool {
	select {
	case <-l.bound:
		return true
	default:
		return false
	}
}

// awaitBound waits until it listens, for a while.
func (l *later) awaitBound(ctx context.Context, d time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	select {
	case <-l.bound:
	case <-ctx.Done():
	}
}
