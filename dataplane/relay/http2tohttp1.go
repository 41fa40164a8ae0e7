package relay

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/headroom-mesh/headroom/dataplane/h1"
	"github.com/headroom-mesh/headroom/dataplane/h2"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// outgoing is a stream to where a call went. Its methods are those of an h2.Stream.
type outgoing interface {
	Write(p []byte, end bool) (n int)
	WriteHeaders(fields []hpack.HeaderField, more []h2.Field, end bool)
	Consumed(n int)
	Reset(code http2.ErrCode)
}

// http1Stream stands for a stream of HTTP/2 where the replica is known to speak HTTP/1.1. It has goroutines of its own.
type http1Stream struct {
	x       *stream
	to      *Upstream
	ctx     context.Context
	cancel  func()
	head    []byte // of the request
	chunked bool
	method  []byte

	mu sync.Mutex
	// mu guards the fields below.

	changed   sync.Cond
	body      queue // of the request, to be sent
	ended     bool  // there will be no more of it
	trailers  []byte
	wants     bool // Write took less than all
	unread    int  // bytes of the response that nobody has consumed yet
	over      bool
	conn      *upstreamConn
	sent      bool // the whole request was taken to be written
	delivered bool // and written
}

var _ outgoing = (*http1Stream)(nil)

// mostBuffered bounds what waits on either way.
const mostBuffered = 64 << 10

// sendHTTP1Locked sends the call to a replica of HTTP/1.1. The head of the request is in x.fields and x.more.
func (x *stream) sendHTTP1Locked(hop *Hop, bare bool) {
	s := &http1Stream{x: x, to: hop.To, method: x.head.Method(nil), ended: bare}
	s.changed.L = &s.mu
	s.ctx, s.cancel = context.WithCancel(x.ctx)
	s.writeHead(x.fields, x.more, bare)
	x.hop, x.up, x.upConn, x.sent, x.sought = *hop, s, nil, 0, true
	x.limitLocked(hop.Deadline)
	if !bare {
		x.pushUpLocked()
	}
	x.waiting.Go(s.run)
}

// writeHead makes the head of the request.
func (s *http1Stream) writeHead(fields fieldList, more []h2.Field, bare bool) {
	b := append(append(s.head, s.method...), ' ')
	b = append(append(b, fields.get(":path")...), " HTTP/1.1\r\n"...)
	b = h1.AppendField(b, "host", s.x.head.Authority(nil))
	for i := range fields {
		switch f := &fields[i]; {
		case f.IsPseudo() || f.Name == "host" || f.Name == "cookie":
		case f.Name == "te":
			b = append(b, "connection: te\r\nte: trailers\r\n"...)
		default:
			b = h1.AppendField(b, f.Name, []byte(f.Value))
		}
	}
	if cookies, ok := s.x.head.Field(nil, "cookie"); ok { // in one field (RFC 9113, 8.2.3)
		b = h1.AppendField(b, "cookie", cookies)
	}
	for _, f := range more {
		b = h1.AppendField(b, f.Name, f.Value)
	}
	_, declared := fields.Field(nil, "content-length")
	switch s.chunked = !bare && !declared; {
	case s.chunked:
		b = append(b, "transfer-encoding: chunked\r\n"...)
	case !declared && !withoutBody(string(s.method)):
		b = append(b, "content-length: 0\r\n"...)
	}
	s.head = append(b, "\r\n"...)
}

// withoutBody reports whether requests with a method have no body unless they say so (RFC 9110, 8.6).
func withoutBody(method string) bool {
	switch method {
	case http.MethodGet, http.MethodHead, http.MethodDelete, http.MethodOptions, http.MethodTrace:
		return true
	}
	return false
}

// Write takes in a part of the request's body.
func (s *http1Stream) Write(p []byte, end bool) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n = min(len(p), mostBuffered-s.body.len())
	s.body.add(p[:n])
	s.wants, s.ended = n < len(p), end && n == len(p)
	s.changed.Broadcast()
	return n
}

// WriteHeaders takes in the trailers of the request.
func (s *http1Stream) WriteHeaders(fields []hpack.HeaderField, _ []h2.Field, _ bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, f := range fields {
		switch f.Name {
		case "content-length", "host", "te", "trailer", "expect": // are for heads
		default:
			s.trailers = h1.AppendField(s.trailers, f.Name, []byte(f.Value))
		}
	}
	s.ended = true
	s.changed.Broadcast()
}

// Consumed lets more of the response come.
func (s *http1Stream) Consumed(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.unread -= n
	s.changed.Broadcast()
}

// Reset ends the exchange before its time.
func (s *http1Stream) Reset(http2.ErrCode) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.over = true
	s.cancel()
	if s.conn != nil {
		s.conn.SetDeadline(past())
	}
	s.changed.Broadcast()
}

// run carries the request to the replica and its response back.
func (s *http1Stream) run() {
	defer s.cancel()
	c := s.to.idleConn()
	if c == nil {
		var err error
		if c, err = s.to.dial(s.ctx, HTTP1); err != nil {
			s.fails(unconnected(&s.to.target, err))
			return
		}
	}
	if !s.begin(c) {
		c.drop()
		return
	}
	w := s.to.engine.works.Get().(*work)
	var uploading sync.WaitGroup
	uploading.Go(func() { s.upload(c, w.out[:0]) })
	keep, err := s.download(c, w)
	s.finish(c)
	uploading.Wait()
	if keep && s.delivered {
		c.SetDeadline(time.Time{})
		c.keep()
	} else {
		c.drop()
	}
	w.reset()
	s.to.engine.works.Put(w)
	s.report(err)
}

// begin lets Reset interrupt what waits for the connection.
func (s *http1Stream) begin(c *upstreamConn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conn = c
	return !s.over
}

// finish ends the upload, if it does not end by itself.
func (s *http1Stream) finish(c *upstreamConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conn = nil
	if s.over = true; !s.delivered {
		c.SetWriteDeadline(time.Now().Add(scanEvery))
	}
	s.changed.Broadcast()
}

// upload sends the request.
func (s *http1Stream) upload(c *upstreamConn, out []byte) {
	out = append(out, s.head...)
	for done := false; ; {
		if out, done = s.take(out); len(out) > 0 {
			if _, err := c.Write(out); err != nil {
				return // the answer tells, or that there is none
			}
		}
		if done {
			s.mu.Lock()
			s.delivered = s.sent
			s.mu.Unlock()
			return
		}
		out = out[:0]
	}
}

// take appends what has come of the body. If that is nothing, and out is empty, it waits. It returns true at the end.
func (s *http1Stream) take(out []byte) ([]byte, bool) {
	s.mu.Lock()
	for len(out) == 0 && s.body.len() == 0 && !s.ended && !s.over {
		s.changed.Wait()
	}
	if s.over {
		s.mu.Unlock()
		return nil, true
	}
	data := s.body.bytes()
	if s.chunked {
		out = h1.AppendChunk(out, data)
	} else {
		out = append(out, data...)
	}
	s.body.use(len(data))
	if s.sent = s.ended; s.ended && s.chunked {
		out = append(append(append(out, "0\r\n"...), s.trailers...), "\r\n"...)
	}
	wants, sent := s.wants, s.sent
	s.wants = false
	s.mu.Unlock()
	if wants {
		s.event((*stream).pushUpLocked)
	}
	return out, sent
}

// event tells the call what has happened, if it still is where this stream is.
func (s *http1Stream) event(happens func(*stream)) bool {
	x := s.x
	x.mu.Lock()
	if x.up != outgoing(s) || x.over {
		x.mu.Unlock()
		return false
	}
	happens(x)
	x.leaveLocked(nil)
	return true
}

// errNobody means that nobody waits for the response any more.
var errNobody = errors.New("the call is over")

// download passes the response on. It returns true if the connection is good for another call.
func (s *http1Stream) download(c *upstreamConn, w *work) (keep bool, err error) {
	for {
		if err := readResponse(c, w, s.method); err != nil {
			return false, err
		}
		if w.resp.Code == http.StatusSwitchingProtocols {
			return false, &h1.Error{Detail: "it switches protocols"}
		}
		end := w.resp.Framing == h1.None || w.resp.Framing == h1.Length && w.resp.Length == 0
		fields := responseFields(&w.resp)
		final := w.resp.Code >= 200
		if !s.event(func(x *stream) { x.answerLocked(fields, end && final) }) {
			return false, errNobody
		}
		if final {
			if !end {
				err = s.passBody(c, w)
			}
			return err == nil && w.resp.KeepAlive && w.up.r == w.up.w, err
		}
	}
}

func readResponse(c *upstreamConn, w *work, method []byte) error {
	for {
		n, err := w.resp.Parse(w.up.bytes(), method)
		if n > 0 || err != nil {
			w.up.use(n)
			return err
		}
		if err := w.up.fill(c.socket); err != nil {
			return err
		}
	}
}

// responseFields returns the head of a response as HTTP/2 has it.
func responseFields(r *h1.Response) []hpack.HeaderField {
	fields := append(make([]hpack.HeaderField, 0, len(r.Fields)+1), hpack.HeaderField{Name: ":status", Value: strconv.Itoa(r.Code)})
	for name, value := range r.Passed {
		fields = append(fields, lowered(name, value))
	}
	if length, ok := r.Field(nil, "content-length"); ok && r.Code >= 200 && r.Code != http.StatusNoContent {
		fields = append(fields, hpack.HeaderField{Name: "content-length", Value: string(length)})
	}
	return fields
}

// lowered returns a field of HTTP/1 as HTTP/2 has it.
func lowered(name, value []byte) hpack.HeaderField {
	return hpack.HeaderField{Name: strings.ToLower(string(name)), Value: string(value)}
}

// passBody passes on the body of the response, and its trailers.
func (s *http1Stream) passBody(c *upstreamConn, w *work) error {
	left := w.resp.Length
	w.reply.Reset()
	for {
		data, n, done := w.up.bytes(), 0, false
		var err error
		switch w.resp.Framing {
		case h1.Length:
			data = data[:min(int64(len(data)), left)]
			n, left = len(data), left-int64(len(data))
			done = left == 0
		case h1.Chunked:
			data, n, done, err = w.reply.Next(data)
		default:
			n = len(data)
		}
		if err != nil {
			return err
		}
		if trailers := trailerFields(&w.reply); done && len(trailers) > 0 {
			err = s.pass(data, false, trailers)
		} else if len(data) > 0 || done {
			err = s.pass(data, done, nil)
		}
		if w.up.use(n); done || err != nil {
			return err
		}
		if n == 0 {
			err = w.up.fill(c.socket)
		}
		if errors.Is(err, io.EOF) && w.resp.Framing == h1.UntilClose {
			return s.pass(nil, true, nil)
		}
		if err != nil {
			return err
		}
	}
}

func trailerFields(d *h1.Decoder) (fields []hpack.HeaderField) {
	for _, f := range d.Trailers() {
		fields = append(fields, lowered(f.Name, f.Value))
	}
	return fields
}

// pass passes on a part of the body once there is room for it.
func (s *http1Stream) pass(data []byte, end bool, trailers []hpack.HeaderField) error {
	s.mu.Lock()
	for s.unread > mostBuffered && !s.over {
		s.changed.Wait()
	}
	s.unread += len(data)
	s.mu.Unlock()
	ok := s.event(func(x *stream) {
		if len(data) > 0 || end {
			x.bodyLocked(data, end)
		}
		if len(trailers) > 0 && !x.over {
			x.trailersLocked(trailers)
		}
	})
	if !ok {
		return errNobody
	}
	return nil
}

// report tells the call how the exchange has failed, if it has.
func (s *http1Stream) report(err error) {
	why := h2.Broken
	if _, malformed := errors.AsType[*h1.Error](err); malformed {
		why = h2.Malformed
	}
	if err != nil && !errors.Is(err, errNobody) {
		s.event(func(x *stream) { x.upstreamResetLocked(http2.ErrCodeInternal, why) })
	}
}

// fails tells the call that it could not be sent.
func (s *http1Stream) fails(f *fault.Error) {
	s.event(func(x *stream) { x.againLocked(f) })
}
