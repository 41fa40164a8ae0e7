package relay

import (
	"errors"
	"net"
	"sync/atomic"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/sockets"
)

// socket is a connection, and what the kernel says of it.
type socket struct {
	net.Conn
	wire  *sockets.Wire // the connection, or what it stands on; nil if there is no file descriptor
	plain *net.TCPConn  // nil if it is something else, or encrypted
	mute  atomic.Bool   // Close says nothing

	// Made once, these need no memory each time.

	peek  func(fd uintptr)
	empty bool // what it found
	talk  func() bool
	asking
	drain func() bool
	draining
}

func newSocket(c net.Conn) *socket {
	s := &socket{Conn: sockets.Wired(c)}
	if s.wire = sockets.WireOf(s.Conn); s.wire != nil && s.Conn == s.wire {
		s.plain, _ = s.wire.NetConn().(*net.TCPConn)
	}
	return s
}

// readNow reads what has come, or returns sockets.ErrNothing. Only what the wire's Attend runs may call it.
func (s *socket) readNow(b []byte) (int, error) { return s.wire.ReadThrough(s.Conn, b) }

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

// cut closes the connection without a word that TLS may have to say.
func (s *socket) cut() { below(s.Conn).Close() }

// discredit keeps the other end from taking it for an ordinary end when the connection is closed.
func (s *socket) discredit() {
	if l, ok := below(s.Conn).(interface{ SetLinger(sec int) error }); ok {
		l.SetLinger(0)
	}
	s.mute.Store(true)
}

// Close closes the connection, with the word that TLS has for it unless the end is to look like none.
func (s *socket) Close() error {
	if s.mute.Load() {
		s.cut()
		return nil
	}
	return s.Conn.Close()
}

// asking is a request that is sent, and the wait for the answer.
type asking struct {
	out, in   []byte
	check     bool
	asked     bool
	sent, got int
	err       error
}

// draining is a wait for much at once.
type draining struct {
	into []byte
	got  int
	err  error
}

// errDead is what is wrong with a connection on which something came that nobody asked for, such as its end.
var errDead = errors.New("it was closed, or something came unasked")

// ask writes a request, and waits for the answer, of which it reads what is there. It is as little work for the kernel as
// can be: as the wait begins before the request is written, nothing has to be read in vain. If check is set the connection
// has to be quiet before.
func (s *socket) ask(out []byte, into *buffer, check bool) (sent int, err error) {
	if s.talk == nil {
		s.talk = s.askNow
	}
	s.asking = asking{out: out, in: into.room(), check: check}
	err = s.wire.Attend(s.talk)
	a := s.asking
	s.asking = asking{}
	into.w += a.got
	if err == nil {
		err = a.err
	}
	return a.sent, err
}

// askNow is called at first, and each time that there may be something to read.
func (s *socket) askNow() bool {
	a := &s.asking
	if a.asked {
		a.got, a.err = s.readNow(a.in)
		return a.err != sockets.ErrNothing
	}
	a.asked = true
	if a.check && !nothingToRead(s.wire.FD()) {
		a.err = errDead
		return true
	}
	s.wire.Direct(true)
	a.sent, a.err = s.Write(a.out)
	s.wire.Direct(false)
	return a.err != nil
}

// quiet reports whether the connection is open and nothing has come that nobody read: whether it can be used again. Only
// one goroutine at a time may ask.
func (s *socket) quiet() bool {
	if s.wire == nil {
		q, ok := s.Conn.(interface{ Quiet() bool })
		return !ok || q.Quiet()
	}
	if s.peek == nil {
		s.peek = func(fd uintptr) { s.empty = nothingToRead(fd) }
	}
	return s.wire.Control(s.peek) == nil && s.empty
}

// hungUp reports whether the other end has closed the connection, though there may be bytes left to read.
func (s *socket) hungUp() bool {
	if s.wire == nil {
		h, ok := s.Conn.(interface{ HungUp() bool })
		return ok && h.HungUp()
	}
	gone := false
	err := s.wire.Control(func(fd uintptr) { gone = closedByPeer(fd) })
	return err == nil && gone
}
