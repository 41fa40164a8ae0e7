package relay

import (
	"context"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/h2"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// memory is what connections of HTTP/2 borrow while they need it.
type memory struct {
	buffers h2.Buffers
	streams sync.Pool   // of *stream
	ended   atomic.Bool // nothing more is needed
}

// serveHTTP2 serves a caller's connection of HTTP/2 to its end; begun is what was read of it already.
func (s *session) serveHTTP2(begun []byte) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	c := &callers{session: s, ctx: ctx}
	c.conn = h2.NewServer(s.conn.Conn, h2.Config{Handler: c, Buffers: &s.engine.memory.buffers, Begun: begun, Trusted: s.entry.Agents})
	s.mu.Lock()
	s.http2 = c.conn
	cutOff := s.hungUp
	s.mu.Unlock()
	if cutOff || !s.place.waits(streams, time.Now()) {
		return
	}
	if s.isLast() {
		c.conn.Drain()
	}
	if err := c.conn.Run(ctx); err != nil {
		s.engine.cfg.Log.Debug("a connection of HTTP/2 broke", "peer", s.source, "err", err)
	}
	cancel()
	c.waiting.Wait()
}

// lookAtStreams ends a connection of HTTP/2 on which no stream was open since it was last called.
func (s *session) lookAtStreams(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	opened := s.http2.Opened()
	if open, _ := s.http2.Streams(); open == 0 && opened == s.opened {
		s.http2.Drain()
	}
	s.opened = opened
	s.place.waits(streams, now)
}

// callers is a caller's connection of HTTP/2: each stream is a call.
type callers struct {
	*session
	ctx     context.Context // ends with the connection
	conn    *h2.Conn
	waiting sync.WaitGroup // for calls to be placed
}

var _ h2.Handler = (*callers)(nil)

// Headers takes in a call.
func (c *callers) Headers(s *h2.Stream, fields []hpack.HeaderField, end bool) {
	x := c.engine.memory.stream()
	x.mu.Lock()
	x.callers, x.down, x.upEnd = c, s, end
	x.head.fields = append(x.head.fields[:0], fields...)
	x.head.source, x.head.caller = c.source, &c.caller
	s.State = x
	x.beginLocked()
	x.leaveLocked(c.conn)
}

// Data takes in a part of a request's body.
func (c *callers) Data(s *h2.Stream, p []byte, end bool) {
	if x := enterDown(s); x != nil {
		x.fromCallerLocked(p, end)
		x.leaveLocked(c.conn)
	}
}

// Trailers takes in the fields after a request's body.
func (c *callers) Trailers(s *h2.Stream, fields []hpack.HeaderField) {
	if x := enterDown(s); x != nil {
		x.trailersFromCallerLocked(fields)
		x.leaveLocked(c.conn)
	}
}

// Writable lets the response go on.
func (c *callers) Writable(s *h2.Stream) {
	if x := enterDown(s); x != nil {
		x.pushDownLocked()
		x.leaveLocked(nil)
	}
}

// Reset ends a call that the caller does not want any more.
func (c *callers) Reset(s *h2.Stream, _ http2.ErrCode, why h2.Cause) {
	if x := enterDown(s); x != nil {
		x.failLocked(leftFault(why))
		x.leaveLocked(c.conn)
	}
}

// enterDown returns the call of a caller's stream, locked; nil if it is over.
func enterDown(s *h2.Stream) *stream {
	x, _ := s.State.(*stream)
	if x == nil {
		return nil
	}
	x.mu.Lock()
	if x.down != s || x.over {
		x.mu.Unlock()
		return nil
	}
	return x
}

// enterUp locks the call of a stream to upstream. It returns false if it is over, or on another stream.
func (x *stream) enterUp(s *h2.Stream) bool {
	x.mu.Lock()
	if x.up != outgoing(s) || x.over {
		x.mu.Unlock()
		return false
	}
	return true
}

// headers takes in the head of a response.
func (x *stream) headers(s *h2.Stream, fields []hpack.HeaderField, end bool, reading *h2.Conn) {
	if x.enterUp(s) {
		x.answerLocked(fields, end)
		x.leaveLocked(reading)
	}
}

// data takes in a part of its body.
func (x *stream) data(s *h2.Stream, p []byte, end bool, reading *h2.Conn) {
	if !x.enterUp(s) {
		s.Consumed(len(p))
		return
	}
	x.bodyLocked(p, end)
	x.leaveLocked(reading)
}

// trailers takes in the fields after it.
func (x *stream) trailers(s *h2.Stream, fields []hpack.HeaderField, reading *h2.Conn) {
	if x.enterUp(s) {
		x.trailersLocked(fields)
		x.leaveLocked(reading)
	}
}

// writable lets the request go on.
func (x *stream) writable(s *h2.Stream) {
	if x.enterUp(s) {
		x.pushUpLocked()
		x.leaveLocked(nil)
	}
}

// reset ends a try.
func (x *stream) reset(s *h2.Stream, code http2.ErrCode, why h2.Cause, reading *h2.Conn) {
	if x.enterUp(s) {
		x.upstreamResetLocked(code, why)
		x.leaveLocked(reading)
	}
}

// responder is who waits for the response on a stream to upstream; reading is the connection that is being read.
type responder interface {
	headers(s *h2.Stream, fields []hpack.HeaderField, end bool, reading *h2.Conn)
	data(s *h2.Stream, p []byte, end bool, reading *h2.Conn)
	trailers(s *h2.Stream, fields []hpack.HeaderField, reading *h2.Conn)
	writable(s *h2.Stream)
	reset(s *h2.Stream, code http2.ErrCode, why h2.Cause, reading *h2.Conn)
}

// http2Conn is a connection of HTTP/2 to an Upstream.
type http2Conn struct {
	conn *h2.Conn

	// Owned by checkHTTP2.

	opened  int       // streams, when last looked at
	idleFor time.Time // since when
}

var _ h2.Handler = (*http2Conn)(nil)

// Headers hands over the head of a response.
func (c *http2Conn) Headers(s *h2.Stream, fields []hpack.HeaderField, end bool) {
	s.State.(responder).headers(s, fields, end, c.conn)
}

// Data hands over a part of its body.
func (c *http2Conn) Data(s *h2.Stream, p []byte, end bool) {
	s.State.(responder).data(s, p, end, c.conn)
}

// Trailers hands over the fields after it.
func (c *http2Conn) Trailers(s *h2.Stream, fields []hpack.HeaderField) {
	s.State.(responder).trailers(s, fields, c.conn)
}

// Writable lets a request go on.
func (c *http2Conn) Writable(s *h2.Stream) { s.State.(responder).writable(s) }

// Reset ends a try.
func (c *http2Conn) Reset(s *h2.Stream, code http2.ErrCode, why h2.Cause) {
	s.State.(responder).reset(s, code, why, c.conn)
}

// streamHead is a head of HTTP/2 for a Router.
type streamHead struct {
	fields fieldList
	source netip.AddrPort
	caller *Caller
}

var _ Head = (*streamHead)(nil)

func (h *streamHead) Protocol() Protocol       { return HTTP2 }
func (h *streamHead) Method(dst []byte) []byte { return append(dst, h.fields.get(":method")...) }
func (h *streamHead) Path(dst []byte) []byte   { return append(dst, h.fields.get(":path")...) }
func (h *streamHead) Source() netip.AddrPort   { return h.source }
func (h *streamHead) Caller() *Caller          { return h.caller }
func (h *streamHead) Authority(dst []byte) []byte {
	if a := h.fields.get(":authority"); a != "" {
		return append(dst, a...)
	}
	return append(dst, h.fields.get("host")...)
}

// Field appends a field; those that may be spread, as cookies are, are joined.
func (h *streamHead) Field(dst []byte, name string) ([]byte, bool) {
	if name != "cookie" {
		return h.fields.Field(dst, name)
	}
	found := false
	for i := range h.fields {
		if f := &h.fields[i]; f.Name == name {
			if found {
				dst = append(dst, "; "...)
			}
			dst, found = append(dst, f.Value...), true
		}
	}
	return dst, found
}

// fieldList is a list of fields as Fields.
type fieldList []hpack.HeaderField

// Field appends the value of the first field with a name, given in lower case.
func (l fieldList) Field(dst []byte, name string) ([]byte, bool) {
	for i := range l {
		if l[i].Name == name {
			return append(dst, l[i].Value...), true
		}
	}
	return dst, false
}

func (l fieldList) get(name string) string {
	for i := range l {
		if l[i].Name == name {
			return l[i].Value
		}
	}
	return ""
}

// streamAnswer is the head of a response by HTTP/2.
type streamAnswer struct {
	fieldList
	status int
}

var _ Answer = (*streamAnswer)(nil)

func (a *streamAnswer) Status() int { return a.status }

// queue holds what can't be sent yet.
type queue struct {
	b    []byte
	used int
}

func (q *queue) bytes() []byte { return q.b[q.used:] }
func (q *queue) len() int      { return len(q.b) - q.used }

func (q *queue) add(p []byte) {
	if len(p) == 0 {
		return
	}
	if q.used > 0 && len(q.b)+len(p) > cap(q.b) {
		q.b, q.used = q.b[:copy(q.b, q.b[q.used:])], 0
	}
	q.b = append(q.b, p...)
}

// use takes n bytes away. Memory that much was in is given up with the last.
func (q *queue) use(n int) {
	if q.used += n; q.used < len(q.b) {
		return
	}
	q.b, q.used = q.b[:0], 0
	if cap(q.b) > 2*bufferSize {
		q.b = nil
	}
}
