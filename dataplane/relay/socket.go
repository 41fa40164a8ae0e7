package relay

import (
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"time"
)

// socket is a connection, and what the kernel says of it.
type socket struct {
	net.Conn
	plain *net.TCPConn    // nil if it is something else, or encrypted
	raw   syscall.RawConn // nil if there is no file descriptor

	peek  func(fd uintptr) bool // made once, it needs no memory each time
	empty bool                  // what it found
}

func newSocket(c net.Conn) *socket {
	s := &socket{Conn: c}
	s.plain, _ = c.(*net.TCPConn)
	if sc, ok := below(c).(syscall.Conn); ok {
		s.raw, _ = sc.SyscallConn()
	}
	return s
}

// below returns the connection that others, such as that of TLS, stand on.
func below(c net.Conn) net.Conn {
	for {
		over, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			return c
		}
		c = over.NetConn()
	}
}

// past is a deadline that makes what waits fail.
func past() time.Time { return time.Unix(1, 0) }

// closeWrite ends the direction to the other end.
func (s *socket) closeWrite() error {
	if c, ok := s.Conn.(interface{ CloseWrite() error }); ok {
		return c.CloseWrite()
	}
	return errors.ErrUnsupported
}

// abort closes the connection in a way that the other end can't take for an ordinary end.
func (s *socket) abort() {
	c := below(s.Conn)
	if l, ok := c.(interface{ SetLinger(sec int) error }); ok {
		l.SetLinger(0)
	}
	c.Close()
}

// readNow reads what there is, without waiting. It returns false if there is nothing yet.
func readNow(fd uintptr, into []byte) (n int, err error, done bool) {
	for {
		n, err := syscall.Read(int(fd), into)
		switch {
		case err == syscall.EINTR:
		case err == syscall.EAGAIN:
			return 0, nil, false
		case err != nil:
			return 0, os.NewSyscallError("read", err), true
		case n == 0:
			return 0, io.EOF, true
		default:
			return n, nil, true
		}
	}
}

// quiet reports whether the connection is open and nothing has come that nobody read: whether it can be used again.
func (s *socket) quiet() bool {
	if s.raw == nil {
		q, ok := s.Conn.(interface{ Quiet() bool })
		return !ok || q.Quiet()
	}
	if s.peek == nil {
		s.peek = func(fd uintptr) bool {
			var one [1]byte
			_, _, err := syscall.Recvfrom(int(fd), one[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
			s.empty = err == syscall.EAGAIN || err == syscall.EINTR
			return true
		}
	}
	s.empty = false
	return s.raw.Read(s.peek) == nil && s.empty
}

// hungUp reports whether the other end has closed the connection, though there may be bytes left to read.
func (s *socket) hungUp() bool {
	if s.raw == nil {
		h, ok := s.Conn.(interface{ HungUp() bool })
		return ok && h.HungUp()
	}
	gone := false
	err := s.raw.Control(func(fd uintptr) { gone = closedByPeer(int(fd)) })
	return err == nil && gone
}
