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

// serveHTTP2 serves a caller's connection of HTTP/2 to its end; begun is what was read of it already.
func (s *session) serveHTTP2(begun []byte) {
	c := &callers{session: s}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	c.ctx = ctx
	c.conn = h2.NewServer(s.conn.Conn, begun, c)
	s.mu.Lock()
	s.http2 = c.conn
	cutOff := s.hungUp
	s.mu.Unlock()
	if cutOff {
		return
	}
	if s.ending.Load() {
		c.conn.Drain()
	}
	s.place.waits(nothing, time.Now())
	if err := c.conn.Run(ctx); err != nil {
		s.engine.cfg.Log.Debug("a connection of HTTP/2 broke", "peer", s.source, "err", err)
	}
	cancel()
	c.waiting.Wait()
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
	x := &stream{callers: c, down: s, head: streamHead{fields: fields, source: c.source}, upEnd: end}
	s.State = x
	x.begin()
}

// Data takes in a part of a request's body.
func (c *callers) Data(s *h2.Stream, p []byte, end bool) { s.State.(*stream).fromCaller(p, end) }

// Trailers takes in the fields after a request's body.
func (c *callers) Trailers(s *h2.Stream, fields []hpack.HeaderField) {
	s.State.(*stream).trailersFromCaller(fields)
}

// Writable lets the response go on.
func (c *callers) Writable(s *h2.Stream) { s.State.(*stream).callerTakesMore() }

// Reset ends a call that the caller does not want any more.
func (c *callers) Reset(s *h2.Stream, code http2.ErrCode, _ bool) {
	s.State.(*stream).callerLeft(code)
}

// http2Conn is a connection of HTTP/2 to an Upstream.
type http2Conn struct {
	conn     *h2.Conn
	upstream *Upstream
	raw      *socket
	used     atomic.Int64 // Unix nanoseconds of the last use
}

var _ h2.Handler = (*http2Conn)(nil)

// Headers takes in the head of a response.
func (c *http2Conn) Headers(s *h2.Stream, fields []hpack.HeaderField, end bool) {
	s.State.(*stream).fromUpstream(s, fields, end)
}

// Data takes in a part of its body.
func (c *http2Conn) Data(s *h2.Stream, p []byte, end bool) { s.State.(*stream).body(s, p, end) }

// Trailers takes in the fields after it.
func (c *http2Conn) Trailers(s *h2.Stream, fields []hpack.HeaderField) {
	s.State.(*stream).trailers(s, fields)
}

// Writable lets the request go on.
func (c *http2Conn) Writable(s *h2.Stream) { s.State.(*stream).upstreamTakesMore(s) }

// Reset ends a try.
func (c *http2Conn) Reset(s *h2.Stream, code http2.ErrCode, unsent bool) {
	s.State.(*stream).upstreamReset(s, code, unsent)
}

// streamsEach is how many streams a connection should carry before another one is made: its frames are read by one
// goroutine.
const streamsEach = 100

// openHTTP2 opens a stream on a connection that there is, nil if there is none with room.
func (u *Upstream) openHTTP2(x *stream, fields []hpack.HeaderField, end bool) *h2.Stream {
	u.mu.Lock()
	defer u.mu.Unlock()
	var best *http2Conn
	most := 0
	for _, c := range u.http2 {
		open, free := c.conn.Streams()
		if room := min(free, streamsEach-open); room > most {
			best, most = c, room
		}
	}
	if best == nil && len(u.http2) >= mostConns { // share what there is
		for _, c := range u.http2 {
			if _, free := c.conn.Streams(); free > most {
				best, most = c, free
			}
		}
	}
	if best == nil {
		return nil
	}
	best.used.Store(time.Now().UnixNano())
	return best.conn.Open(x, fields, end)
}

// mostConns is how many connections of HTTP/2 there may be to one Upstream before they carry more than they should.
const mostConns = 64

// dialHTTP2 makes a connection of HTTP/2, unless one is being made: then it waits for that.
func (u *Upstream) dialHTTP2(ctx context.Context) error {
	u.mu.Lock()
	if pending := u.dialing; pending != nil {
		u.mu.Unlock()
		select {
		case <-pending.done:
			return pending.err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	pending := &dialing{done: make(chan struct{})}
	u.dialing = pending
	u.mu.Unlock()
	defer close(pending.done)

	// Others wait for it, too: it does not end with this call.
	raw, err := u.target.Dial(context.WithoutCancel(ctx), HTTP2)
	u.mu.Lock()
	defer u.mu.Unlock()
	u.dialing = nil
	if pending.err = err; err != nil {
		return err
	}
	u.engine.metrics.connected.Inc()
	c := &http2Conn{upstream: u, raw: newSocket(raw)}
	c.used.Store(time.Now().UnixNano())
	c.conn = h2.NewClient(raw, c)
	u.http2 = append(u.http2, c)
	u.engine.register(u)
	u.engine.readers.Go(func() {
		c.conn.Run(context.Background())
		u.lost(c)
	})
	return nil
}

// dialing is a connection being made.
type dialing struct {
	done chan struct{}
	err  error // valid once done is closed
}

func (u *Upstream) lost(c *http2Conn) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for i, other := range u.http2 {
		if other == c {
			u.http2 = append(u.http2[:i:i], u.http2[i+1:]...)
			return
		}
	}
}

// checkHTTP2 gives up connections that are of no use: those without a stream since a moment, and those whose other end is
// silent.
func (u *Upstream) checkHTTP2(now, since time.Time) {
	u.mu.Lock()
	all := append([]*http2Conn(nil), u.http2...)
	u.mu.Unlock()
	for _, c := range all {
		if open, _ := c.conn.Streams(); open == 0 && time.Unix(0, c.used.Load()).Before(since) {
			c.conn.Drain()
		} else if err := c.conn.Check(now); err != nil {
			u.engine.cfg.Log.Warn("gave up a connection", "peer", u.target.Name, "err", err)
			c.conn.Close()
		}
	}
}

// streamHead is a head of HTTP/2 for a Router.
type streamHead struct {
	fields fieldList
	source netip.AddrPort
}

var _ Head = (*streamHead)(nil)

func (h *streamHead) Protocol() Protocol       { return HTTP2 }
func (h *streamHead) Method(dst []byte) []byte { return append(dst, h.fields.get(":method")...) }
func (h *streamHead) Path(dst []byte) []byte   { return append(dst, h.fields.get(":path")...) }
func (h *streamHead) Source() netip.AddrPort   { return h.source }
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
	for _, f := range h.fields {
		if f.Name == name {
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
