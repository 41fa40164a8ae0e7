package relay

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/headroom-mesh/headroom/dataplane/h1"
	"github.com/headroom-mesh/headroom/dataplane/h2"
	"github.com/headroom-mesh/headroom/dataplane/identity"
	"github.com/headroom-mesh/headroom/dataplane/sockets"
)

// session is a caller's connection. It has one goroutine, and while it waits for a call no memory but that.
type session struct {
	server *server
	engine *Engine
	entry  *Entry
	conn   *socket
	source netip.AddrPort
	caller Caller
	place  *place
	*work  // nil while there is no call

	attend    func() bool // attendNow
	attentive bool        // it serves, too
	first     [1]byte
	firstErr  error
	lingers   bool // after the last call

	ending atomic.Bool // after the call under way
	last   atomic.Bool // the next answer is to say that it is the last

	mu sync.Mutex
	// mu guards the fields below.

	upstream *upstreamConn // on which an answer is awaited
	cancel   func()        // ends what waits for something else
	hungUp   bool          // the caller is gone, or the connection is to be cut off
	http2    *h2.Conn      // if that is what it speaks
	opened   int           // streams, when last looked at
}

func newSession(s *server, c net.Conn, entry *Entry, w identity.Workload) *session {
	x := &session{server: s, engine: s.engine, entry: entry, conn: newSocket(c)}
	x.source, x.caller = addrPort(c.RemoteAddr()), x.engine.callerOn(c, w, entry)
	x.attend = x.attendNow
	x.place = x.engine.watch.enter(x)
	return x
}

func addrPort(a net.Addr) netip.AddrPort {
	if tcp, ok := a.(*net.TCPAddr); ok {
		ap := tcp.AddrPort()
		return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
	}
	ap, _ := netip.ParseAddrPort(a.String())
	return ap
}

// run serves the connection to its end.
func (s *session) run() {
	defer s.engine.watch.leave(s.place)
	defer s.conn.Close()
	defer s.release()
	switch s.protocol() {
	case HTTP1:
		s.serveHTTP1()
	case HTTP2:
		begun := s.taken()
		s.release()
		s.serveHTTP2(begun)
	case TCP:
		s.serveTCP()
	}
}

// serveHTTP1 serves one request after the other.
func (s *session) serveHTTP1() {
	s.attentive = true
	for s.next() {
		if s.in.r == s.in.w {
			s.release()
		}
	}
	if s.lingers {
		s.release()
		s.linger()
	}
}

func (s *session) release() {
	if s.work != nil {
		s.work.reset()
		s.engine.works.Put(s.work)
		s.work = nil
	}
}

func (s *session) acquire() {
	if s.work == nil {
		s.work = s.engine.works.Get().(*work)
	}
}

// announce has the caller know with the next answer that the connection ends then.
func (s *session) announce() {
	s.last.Store(true)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.http2 != nil {
		s.http2.Drain()
	}
}

// isLast reports whether the call under way is the last.
func (s *session) isLast() bool { return s.last.Load() || s.ending.Load() }

// drain lets the connection end after the call under way.
func (s *session) drain() {
	s.ending.Store(true)
	s.mu.Lock()
	if s.http2 != nil {
		s.http2.Drain()
	}
	s.mu.Unlock()
	word := s.place.word.Load()
	if word%states == head || word%states == idle && s.conn.quiet() { // else a request has come, in the last moment
		if s.place.end(word) {
			s.conn.Close()
		}
	}
}

// cutOff ends the connection, whatever is under way.
func (s *session) cutOff() {
	s.hangUp()     // first: closing waits for who serves a call where it reads
	s.conn.reset() // wakes all who wait for the caller
}

// hangUp ends the call under way: nobody waits for it.
func (s *session) hangUp() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hungUp = true
	if s.upstream != nil {
		s.upstream.SetDeadline(past())
	}
	if s.cancel != nil {
		s.cancel()
	}
}

// waitsOn lets hangUp end what waits for c. It returns false if the caller is gone already.
func (s *session) waitsOn(c *upstreamConn) bool {
	s.mu.Lock()
	s.upstream = c
	here := !s.hungUp
	s.mu.Unlock()
	return here
}

// cancelable returns a context that ends when the caller is gone.
func (s *session) cancelable() (context.Context, func()) {
	ctx, cancel := context.WithCancel(context.Background())
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cancel = cancel
	if s.hungUp {
		cancel()
	}
	return ctx, func() {
		s.mu.Lock()
		s.cancel = nil
		s.mu.Unlock()
		cancel()
	}
}

func (s *session) isGone() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.hungUp
}

// next serves the next request, or more than one. It returns false if it was the last on this connection.
func (s *session) next() bool {
	s.lingers = false
	if !s.awaitFirst() {
		return false
	}
	n, err := s.readHead()
	if err != nil {
		s.refuseMalformed(err)
		return false
	}
	return s.serve(n)
}

// awaitFirst waits for the first bytes of a request. Until they come it holds no buffer. Requests that come whole it
// serves: then those that it waits for are the first that don't.
func (s *session) awaitFirst() bool {
	if s.work != nil && s.in.w > s.in.r {
		return s.place.waitsSince(head, s.engine.watch.now())
	}
	if !s.enterIdle() {
		return false
	}
	var err error
	if s.conn.wire != nil {
		s.firstErr = nil
		if err = s.conn.wire.Attend(s.attend); err == nil {
			err = s.firstErr
		}
	} else {
		err = s.readFirst()
	}
	return err == nil && s.place.waitsSince(head, s.engine.watch.now())
}

// readFirst reads a byte. The rest of what came with it, TLS keeps until it is asked.
func (s *session) readFirst() error {
	if _, err := s.conn.Read(s.first[:]); err != nil {
		return err
	}
	s.acquire()
	s.in.w += copy(s.in.room(), s.first[:])
	return nil
}

// enterIdle notes that the connection waits for a call. It returns false if it need not.
func (s *session) enterIdle() bool {
	return !s.ending.Load() && s.place.waitsSince(idle, s.engine.watch.now()) && !s.ending.Load()
}

// attendNow is called when there may be something to read. It serves what it can without reading on, and returns false to
// be called again when there is more.
func (s *session) attendNow() bool {
	for {
		s.acquire()
		n, err := s.conn.readNow(s.in.room())
		if err == sockets.ErrNothing {
			s.release()
			return false
		}
		s.in.w, s.firstErr = s.in.w+n, err
		if err != nil || !s.serveWhole() {
			return true
		}
		if !s.enterIdle() {
			s.firstErr = errOver
			return true
		}
	}
}

// errOver means that a connection has carried its last call.
var errOver = errors.New("the connection is over")

// serveWhole serves the requests in the buffer that are there to their end, and need nothing but to be answered. It
// returns false if that leaves anything.
func (s *session) serveWhole() bool {
	if !s.attentive {
		return false
	}
	for s.in.r < s.in.w {
		n, err := s.head.Parse(s.in.bytes())
		if n == 0 || err != nil || !s.isWhole(n) {
			return false
		}
		s.conn.wire.Direct(true)
		more := s.serve(n)
		s.conn.wire.Direct(false)
		if !more {
			s.firstErr = errOver
			return false
		}
	}
	return true
}

// isWhole reports whether the request whose head has n bytes can be served without reading more from the caller.
func (s *session) isWhole(n int) bool {
	r := &s.head.Request
	switch {
	case r.Upgrade != nil || s.head.Protocol() == TCP:
		return false
	case r.Framing == h1.Length:
		return r.Length <= int64(len(s.in.bytes())-n)
	}
	return r.Framing == h1.None
}

// readHead reads a head, and returns its length.
func (s *session) readHead() (int, error) {
	if len(s.in.bytes()) == len(s.first) { // there is more than that, most likely
		if err := s.in.fill(s.conn); err != nil {
			return 0, err
		}
	}
	for {
		n, err := s.head.Parse(s.in.bytes())
		if n > 0 || err != nil {
			return n, err
		}
		if err := s.in.fillLine(s.conn); err != nil {
			return 0, err
		}
	}
}

// refuseMalformed answers what is no request.
func (s *session) refuseMalformed(err error) {
	malformed, ok := errors.AsType[*h1.Error](err)
	if !ok {
		if s.place.word.Load()%states == over && errors.Is(err, os.ErrDeadlineExceeded) {
			s.conn.Write([]byte("HTTP/1.1 408 Request Timeout\r\n" + fault.Header + ": " + string(fault.BadRequest) + "\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"))
		}
		return // the caller is gone
	}
	s.place.waits(nothing, time.Now())
	s.answerFault(&fault.Error{Reason: fault.BadRequest, Detail: "the request is malformed: " + malformed.Detail, Code: malformed.Status}, false, false)
	s.lingers = true
}

const (
	lingerTime  = 500 * time.Millisecond
	lingerBytes = 1 << 20
)

// linger reads on for a little, as closing a connection with bytes unread might take the answer away from the caller.
func (s *session) linger() {
	s.place.waits(nothing, time.Now())
	if s.conn.closeWrite() != nil {
		return
	}
	s.conn.SetReadDeadline(time.Now().Add(lingerTime))
	io.CopyN(io.Discard, struct{ io.Reader }{s.conn}, lingerBytes)
}
