//go:build linux

// Package load puts load on proxies and is the origin behind them, at as little cost as can be: callers and origin are
// nonblocking sockets of one loop, in one thread.
package load

import (
	"fmt"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
)

// Loop waits for its sockets and serves them. It belongs to one goroutine.
type Loop struct {
	epoll   int
	sources []source // by file descriptor
	events  []unix.EpollEvent
	buffer  []byte // for what is being received
	filler  []byte // for bodies that are being sent
}

// source is a socket.
type source interface {
	ready(events uint32)
	close()
}

// NewLoop returns a Loop without sockets.
func NewLoop() (*Loop, error) {
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make an epoll: %w", err)
	}
	filler := make([]byte, 256<<10)
	for i := range filler {
		filler[i] = 'x'
	}
	return &Loop{epoll: epoll, events: make([]unix.EpollEvent, 256), buffer: make([]byte, 256<<10), filler: filler}, nil
}

// Close closes all sockets.
func (l *Loop) Close() error {
	for _, s := range l.sources {
		if s != nil {
			s.close()
		}
	}
	return unix.Close(l.epoll)
}

// turn serves the sockets that are ready. It waits for the first of them, but not longer than given; -1: for ever.
func (l *Loop) turn(milliseconds int) error {
	n, err := unix.EpollWait(l.epoll, l.events, milliseconds)
	if err != nil && err != unix.EINTR {
		return fmt.Errorf("wait for sockets: %w", err)
	}
	for _, e := range l.events[:max(n, 0)] {
		if s := l.sources[e.Fd]; s != nil { // not closed by one before it
			s.ready(e.Events)
		}
	}
	return nil
}

func (l *Loop) add(fd int, s source) error {
	for len(l.sources) <= fd {
		l.sources = append(l.sources, nil)
	}
	l.sources[fd] = s
	if err := unix.EpollCtl(l.epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)}); err != nil {
		return fmt.Errorf("watch a socket: %w", err)
	}
	return nil
}

// handler is the end of a connection.
type handler interface {
	// received takes in bytes, which are valid until it returns. After an error the connection is closed.
	received(p []byte) error
	// closed is called when the connection is closed, be it by the other end (io.EOF) or by this one.
	closed(err error)
}

// listener takes connections in.
type listener struct {
	loop  *Loop
	fd    int
	serve func(*conn) handler
}

// listen takes in connections that handlers of the given make serve.
func (l *Loop) listen(at netip.AddrPort, serve func(*conn) handler) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return os.NewSyscallError("setsockopt", err)
	}
	if err := unix.Bind(fd, address(at)); err != nil {
		return fmt.Errorf("listen on %s: %w", at, err)
	}
	if err := unix.Listen(fd, 4096); err != nil {
		return fmt.Errorf("listen on %s: %w", at, err)
	}
	return l.add(fd, &listener{l, fd, serve})
}

func (s *listener) ready(uint32) {
	for {
		fd, _, err := unix.Accept4(s.fd, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
		if err != nil {
			return // there are no more, or the caller has gone
		}
		c := newConn(s.loop, fd)
		c.handler = s.serve(c)
		if err := s.loop.add(fd, c); err != nil {
			c.fail(err)
		}
	}
}

func (s *listener) close() { unix.Close(s.fd) }

func address(at netip.AddrPort) *unix.SockaddrInet4 {
	return &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}
}
