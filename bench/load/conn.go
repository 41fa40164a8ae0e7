//go:build linux

package load

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// conn is a connection. What is sent goes out when its handler returns.
type conn struct {
	loop    *Loop
	fd      int
	handler handler
	out     []byte // to be sent
	sent    int    // of out
	filler  int    // bytes of any kind to be sent after out
	full    bool   // the socket takes no more for now
	watched bool   // for being no longer full
	gone    bool
}

func newConn(l *Loop, fd int) *conn {
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1) // it is only slower without
	return &conn{loop: l, fd: fd}
}

// dial connects, which the system does at once on this machine, unless nobody accepts for long.
func (l *Loop) dial(to netip.AddrPort, serve func(*conn) handler) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	if err := connect(fd, to); err != nil {
		unix.Close(fd)
		return fmt.Errorf("connect to %s: %w", to, err)
	}
	c := newConn(l, fd)
	c.handler = serve(c)
	if err := l.add(fd, c); err != nil {
		c.fail(err)
		return err
	}
	return nil
}

func connect(fd int, to netip.AddrPort) error {
	err := unix.Connect(fd, address(to))
	if err != unix.EINPROGRESS && err != unix.EINTR {
		return err
	}
	deadline := time.Now().Add(2 * time.Second)
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, int(max(time.Until(deadline), 0).Milliseconds()))
		switch {
		case err == unix.EINTR:
		case err != nil:
			return os.NewSyscallError("poll", err)
		case n == 0:
			return os.ErrDeadlineExceeded
		default:
			return connected(fd)
		}
	}
}

func connected(fd int) error {
	code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err == nil && code != 0 {
		err = unix.Errno(code)
	}
	return err
}

func (c *conn) ready(events uint32) {
	if events&unix.EPOLLOUT != 0 {
		c.full = false
	}
	if events&(unix.EPOLLIN|unix.EPOLLHUP|unix.EPOLLERR) != 0 {
		c.receive()
	}
	c.flush()
}

// receive reads once: the loop comes back if there is more.
func (c *conn) receive() {
	n, err := unix.Read(c.fd, c.loop.buffer)
	switch {
	case err == unix.EAGAIN || err == unix.EINTR:
		return
	case err != nil:
		c.fail(os.NewSyscallError("read", err))
		return
	case n == 0:
		c.fail(io.EOF)
		return
	}
	if err := c.handler.received(c.loop.buffer[:n]); err != nil {
		c.fail(err)
	}
}

// flush sends as much as the socket takes.
func (c *conn) flush() {
	for !c.gone && !c.full && (c.sent < len(c.out) || c.filler > 0) {
		n, err := c.send()
		switch {
		case err == unix.EINTR:
		case err == unix.EAGAIN:
			c.full = true
		case err != nil:
			c.receive() // the other end may have said why
			c.fail(os.NewSyscallError("write", err))
		default:
			c.count(n)
		}
	}
	if c.sent == len(c.out) {
		c.out, c.sent = c.out[:0], 0
	}
	c.watch()
}

func (c *conn) send() (int, error) {
	head, body := c.out[c.sent:], c.loop.filler[:min(c.filler, len(c.loop.filler))]
	switch {
	case len(body) == 0:
		return unix.Write(c.fd, head)
	case len(head) == 0:
		return unix.Write(c.fd, body)
	}
	return unix.Writev(c.fd, [][]byte{head, body})
}

func (c *conn) count(n int) {
	head := min(n, len(c.out)-c.sent)
	c.sent += head
	c.filler -= n - head
}

// watch asks the loop to tell when the socket takes more, if it is full.
func (c *conn) watch() {
	if c.gone || c.full == c.watched {
		return
	}
	events := uint32(unix.EPOLLIN)
	if c.full {
		events |= unix.EPOLLOUT
	}
	if err := unix.EpollCtl(c.loop.epoll, unix.EPOLL_CTL_MOD, c.fd, &unix.EpollEvent{Events: events, Fd: int32(c.fd)}); err != nil {
		c.fail(os.NewSyscallError("epoll_ctl", err))
		return
	}
	c.watched = c.full
}

var errClosed = errors.New("closed by this end")

func (c *conn) close() { c.fail(errClosed) }

func (c *conn) fail(err error) {
	if c.gone {
		return
	}
	c.gone = true
	c.loop.sources[c.fd] = nil
	unix.Close(c.fd)
	c.handler.closed(err)
}
