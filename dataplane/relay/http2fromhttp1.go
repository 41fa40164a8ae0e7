package relay

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/h1"
	"github.com/headroom-mesh/headroom/dataplane/h2"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// translated is a connection on which HTTP/1.1 is spoken to a replica that is known to speak HTTP/2: each request that is
// written to it becomes a stream, and its response can be read.
type translated struct {
	to *Upstream

	mu sync.Mutex
	// mu guards the fields below.

	changed sync.Cond
	ctx     context.Context
	close   func()
	read    limit
	write   limit

	// The request that is being written.

	in    buffer // its head
	req   h1.Request
	dec   h1.Decoder
	left  int64
	state translating
	bare  bool // it is HEAD
	s     *h2.Stream

	// The response that is to be read.

	out     queue
	chunked bool
	size    int // of the body that is in out, to be consumed
	whole   bool
	err     error // why there is no more of it
}

type translating int

const (
	atHead translating = iota
	inBody
	atEnd
)

// limit is a deadline.
type limit struct {
	at    time.Time
	timer *time.Timer
}

func (l *limit) passed() bool { return !l.at.IsZero() && !time.Now().Before(l.at) }

// dialFor connects for a protocol, or one that the other end understands.
func (u *Upstream) dialFor(ctx context.Context, p Protocol) (net.Conn, error) {
	if p == HTTP1 && u.target.Speaks == HTTP2 {
		return u.dialTranslated(ctx)
	}
	return u.target.Dial(ctx, p)
}

// dialTranslated makes such a connection, once there is one of HTTP/2.
func (u *Upstream) dialTranslated(ctx context.Context) (net.Conn, error) {
	if !u.hasRoom() {
		if err := u.dialHTTP2(ctx); err != nil {
			return nil, err
		}
	}
	t := &translated{to: u, in: buffer{b: make([]byte, minRead)}}
	t.changed.L = &t.mu
	t.ctx, t.close = context.WithCancel(context.Background())
	return t, nil
}

func (u *Upstream) hasRoom() bool {
	for _, c := range u.allHTTP2() {
		if _, free := c.conn.Streams(); free > 0 {
			return true
		}
	}
	return false
}

// Write takes in a part of a request.
func (t *translated) Write(p []byte) (n int, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for n < len(p) {
		if err := t.failedLocked(&t.write); err != nil {
			return n, err
		}
		used := 0
		switch t.state {
		case atHead:
			used, err = t.writeHeadLocked(p[n:])
		case inBody:
			used, err = t.writeBodyLocked(p[n:])
		default:
			err = errors.New("a request follows one that is not answered yet")
		}
		if n += used; err != nil {
			return n, err
		}
	}
	return n, nil
}

// failedLocked returns why nothing can be done any more.
func (t *translated) failedLocked(l *limit) error {
	switch {
	case t.ctx.Err() != nil:
		return net.ErrClosed
	case l.passed():
		return os.ErrDeadlineExceeded
	}
	return nil
}

// writeHeadLocked takes in bytes of a head, and opens a stream when there are no more.
func (t *translated) writeHeadLocked(p []byte) (used int, err error) {
	before := t.in.w
	for rest := p; len(rest) > 0; {
		n := copy(t.in.room(), rest)
		t.in.w += n
		rest = rest[n:]
	}
	n, err := t.req.Parse(t.in.bytes())
	if n == 0 || err != nil {
		return len(p), err
	}
	fields := requestFields(&t.req)
	t.bare = fields[0].Value == "HEAD"
	end := t.req.Framing == h1.None || t.req.Framing == h1.Length && t.req.Length == 0
	t.in.reset()
	if err := t.openLocked(fields, end); err != nil {
		return 0, err
	}
	t.left, t.state = t.req.Length, inBody
	t.dec.Reset()
	if end {
		t.state = atEnd
	}
	return n - before, nil
}

// openLocked opens a stream for the request.
func (t *translated) openLocked(fields []hpack.HeaderField, end bool) error {
	t.s, t.chunked, t.whole, t.err, t.size = nil, false, false, nil, 0
	for {
		s := t.to.openHTTP2(t, fields, nil, end)
		if s != nil {
			t.s = s
			t.flushLocked()
			return nil
		}
		t.mu.Unlock()
		err := t.to.dialHTTP2(t.ctx)
		t.mu.Lock()
		if err != nil {
			return err
		}
	}
}

func (t *translated) flushLocked() { t.s.Conn().Flush() }

// requestFields returns the head of a request as HTTP/2 has it.
func requestFields(r *h1.Request) []hpack.HeaderField {
	fields := []hpack.HeaderField{
		{Name: ":method", Value: string(r.Method)}, {Name: ":scheme", Value: "http"},
		{Name: ":authority", Value: string(r.Authority)}, {Name: ":path", Value: string(r.Path)},
	}
	for name, value := range r.Passed {
		if !h1.Is(name, "host") { // that is :authority
			fields = append(fields, lowered(name, value))
		}
	}
	if r.Framing == h1.Length {
		fields = append(fields, hpack.HeaderField{Name: "content-length", Value: strconv.FormatInt(r.Length, 10)})
	}
	if r.TakesTrailers {
		fields = append(fields, hpack.HeaderField{Name: "te", Value: "trailers"})
	}
	return fields
}

// writeBodyLocked takes in a part of a body.
func (t *translated) writeBodyLocked(p []byte) (used int, err error) {
	data, used, done := p, 0, false
	if t.req.Framing == h1.Length {
		data = p[:min(int64(len(p)), t.left)]
		used = len(data)
		t.left -= int64(used)
		done = t.left == 0
	} else if data, used, done, err = t.decodeLocked(p); err != nil {
		return used, err
	}
	trailers := trailerFields(&t.dec)
	if err := t.sendLocked(data, done && len(trailers) == 0); err != nil {
		return used, err
	}
	if done {
		if len(trailers) > 0 {
			t.s.WriteHeaders(trailers, nil, true)
		}
		t.state = atEnd
	}
	t.flushLocked()
	return used, nil
}

// decodeLocked decodes a part of a chunked body. What needs more bytes to be understood is kept.
func (t *translated) decodeLocked(p []byte) (data []byte, used int, done bool, err error) {
	if t.in.r == t.in.w {
		if data, used, done, err = t.dec.Next(p); used > 0 || err != nil {
			return data, used, done, err
		}
	}
	before := t.in.w - t.in.r
	used = copy(t.in.room(), p[:min(len(p), minRead)])
	t.in.w += used
	data, n, done, err := t.dec.Next(t.in.bytes())
	data = bytes.Clone(data)
	if n > 0 {
		used = n - before
		t.in.reset()
	}
	return data, used, done, err
}

// sendLocked sends a part of the body. It waits for the other end to take it.
func (t *translated) sendLocked(data []byte, end bool) error {
	for len(data) > 0 || end {
		n := t.s.Write(data, end)
		if data = data[n:]; len(data) == 0 {
			return nil
		}
		t.flushLocked()
		if err := t.failedLocked(&t.write); err != nil {
			return err
		}
		t.changed.Wait()
	}
	return nil
}

// Read returns a part of the response.
func (t *translated) Read(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for {
		if err := t.failedLocked(&t.read); err != nil {
			return 0, err
		}
		if t.out.len() > 0 {
			break
		}
		if t.err != nil {
			return 0, t.err
		}
		t.changed.Wait()
	}
	n := copy(p, t.out.bytes())
	t.out.use(n)
	if t.out.len() == 0 {
		t.consumedLocked()
	}
	return n, nil
}

// consumedLocked lets more of the response come; after the last of it, another request may be written.
func (t *translated) consumedLocked() {
	t.s.Consumed(t.size)
	t.size = 0
	t.flushLocked()
	if t.whole {
		if t.state != atEnd {
			t.err = io.ErrUnexpectedEOF // the rest of the request is not wanted
			t.s.Reset(http2.ErrCodeCancel)
			t.flushLocked()
			return
		}
		t.state = atHead
	}
}

// headers takes in the head of a response.
func (t *translated) headers(s *h2.Stream, fields []hpack.HeaderField, end bool, _ *h2.Conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.s != s {
		return
	}
	status := statusOf(fields)
	b := append(strconv.AppendInt([]byte("HTTP/1.1 "), int64(status), 10), " \r\n"...)
	bodiless := status < 200 || status == 204 || status == 304 || t.bare
	length := fieldList(fields).get("content-length")
	if !bodiless && (length == "" || fieldList(fields).get("trailer") != "") { // no trailers follow a body of a length
		t.chunked = !end
		length = "0"
	}
	for _, f := range fields[1:] {
		if f.Name != "content-length" {
			b = h1.AppendField(b, f.Name, []byte(f.Value))
		}
	}
	switch {
	case t.chunked:
		b = append(b, "transfer-encoding: chunked\r\n"...)
	case length != "":
		b = h1.AppendField(b, "content-length", []byte(length))
	}
	t.out.add(append(b, "\r\n"...))
	t.endLocked(end, nil)
}

// data takes in a part of its body.
func (t *translated) data(s *h2.Stream, p []byte, end bool, _ *h2.Conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.s != s {
		s.Consumed(len(p))
		return
	}
	t.size += len(p)
	if t.chunked {
		t.out.add(h1.AppendChunk(nil, p))
	} else {
		t.out.add(p)
	}
	t.endLocked(end, nil)
}

func (t *translated) trailers(s *h2.Stream, fields []hpack.HeaderField, _ *h2.Conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.s == s {
		t.endLocked(true, fields)
	}
}

// endLocked notes that more can be read, and that it is all.
func (t *translated) endLocked(end bool, trailers []hpack.HeaderField) {
	if end && t.chunked {
		b := []byte("0\r\n")
		for _, f := range trailers {
			b = h1.AppendField(b, f.Name, []byte(f.Value))
		}
		t.out.add(append(b, "\r\n"...))
	}
	t.whole = end
	t.changed.Broadcast()
	if end && t.out.len() == 0 {
		t.consumedLocked()
	}
}

func (t *translated) writable(s *h2.Stream) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.changed.Broadcast()
}

func (t *translated) reset(s *h2.Stream, code http2.ErrCode, _ h2.Cause, _ *h2.Conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.s == s && !t.whole {
		t.err = fmt.Errorf("the stream was reset: %v", code)
		t.changed.Broadcast()
	}
}

// Quiet reports whether the connection can be used for another request.
func (t *translated) Quiet() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.err == nil && t.state == atHead && t.ctx.Err() == nil
}

// Close ends what is under way.
func (t *translated) Close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.close()
	if t.s != nil {
		t.s.Reset(http2.ErrCodeCancel)
		t.flushLocked()
	}
	for _, l := range []*limit{&t.read, &t.write} {
		if l.timer != nil {
			l.timer.Stop()
		}
	}
	t.changed.Broadcast()
	return nil
}

func (t *translated) LocalAddr() net.Addr  { return &net.UnixAddr{} }
func (t *translated) RemoteAddr() net.Addr { return &net.UnixAddr{} }

func (t *translated) SetDeadline(at time.Time) error {
	t.SetReadDeadline(at)
	return t.SetWriteDeadline(at)
}

func (t *translated) SetReadDeadline(at time.Time) error  { return t.setLimit(&t.read, at) }
func (t *translated) SetWriteDeadline(at time.Time) error { return t.setLimit(&t.write, at) }

func (t *translated) setLimit(l *limit, at time.Time) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	l.at = at
	if l.timer != nil {
		l.timer.Stop()
	}
	if !at.IsZero() {
		l.timer = time.AfterFunc(time.Until(at), t.changed.Broadcast)
	}
	t.changed.Broadcast()
	return nil
}
