package httpio

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"time"
)

// BodyEnd says how the body of a response ended.
type BodyEnd int

const (
	BodyComplete BodyEnd = iota
	BodyBroken           // the other end failed
	BodyLate             // its time ran out
	BodyAborted          // the reader lost interest, or went away
)

// TrackBody lets ended be called exactly once, when the body of resp has been read to its end or is closed. An upgraded
// connection (101) only ends when it is closed.
func TrackBody(ctx context.Context, resp *http.Response, ended func(BodyEnd)) {
	t := trackedBody{ReadCloser: resp.Body, ctx: ctx, ended: ended}
	if rw, ok := resp.Body.(io.ReadWriteCloser); ok {
		resp.Body = &trackedUpgrade{ReadWriteCloser: rw, track: &t}
	} else {
		resp.Body = &t
	}
}

type trackedBody struct {
	io.ReadCloser
	ctx   context.Context
	once  sync.Once
	ended func(BodyEnd)
}

func (t *trackedBody) Read(p []byte) (int, error) {
	n, err := t.ReadCloser.Read(p)
	switch {
	case err == nil:
	case errors.Is(err, io.EOF):
		t.end(BodyComplete)
	case errors.Is(t.ctx.Err(), context.Canceled) || callerFailed(t.ctx):
		t.end(BodyAborted)
	case t.ctx.Err() != nil:
		t.end(BodyLate)
	default:
		t.end(BodyBroken)
	}
	return n, err
}

func (t *trackedBody) Close() error {
	err := t.ReadCloser.Close()
	if errors.Is(t.ctx.Err(), context.DeadlineExceeded) {
		t.end(BodyLate)
	} else {
		t.end(BodyAborted)
	}
	return err
}

// end returns once ended has been called, be it by somebody else.
func (t *trackedBody) end(how BodyEnd) { t.once.Do(func() { t.ended(how) }) }

// trackedUpgrade is an upgraded connection. Either side may be done with sending long before the other is.
type trackedUpgrade struct {
	io.ReadWriteCloser
	track *trackedBody
}

func (t *trackedUpgrade) CloseWrite() error { return closeWrite(t.ReadWriteCloser) }

func (t *trackedUpgrade) Close() error {
	err := t.ReadWriteCloser.Close()
	t.track.end(BodyComplete)
	return err
}

// closeWrite ends the direction to the other end of a connection, where that is possible without ending the other one.
func closeWrite(c any) error {
	if c, ok := c.(interface{ CloseWrite() error }); ok {
		return c.CloseWrite()
	}
	return errors.ErrUnsupported
}

// upgradedConn is a caller's connection after an upgrade.
type upgradedConn struct {
	net.Conn
	early *bufio.Reader // what the caller sent before it knew of the upgrade
}

func (c *upgradedConn) Read(p []byte) (int, error) {
	if n := c.early.Buffered(); n > 0 {
		return c.early.Read(p[:min(n, len(p))])
	}
	return c.Conn.Read(p)
}

func (c *upgradedConn) CloseWrite() error { return closeWrite(c.Conn) }

// requestBody is the body of a caller's request. Reads, which may wait for the caller for ever, can be interrupted.
type requestBody struct {
	io.ReadCloser
	trailer http.Header // of the request
	control *http.ResponseController

	reads sync.Mutex // held during a read

	mu sync.Mutex
	// mu guards the fields below.

	reading, ended, failed, interrupted bool
}

var errInterrupted = errors.New("the rest of the request is not wanted any more")

func (b *requestBody) Read(p []byte) (int, error) {
	b.reads.Lock()
	defer b.reads.Unlock()
	if err := b.begin(); err != nil {
		return 0, err
	}
	n, err := b.ReadCloser.Read(p)
	return n, b.done(err)
}

func (b *requestBody) begin() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.ended:
		return io.EOF // net/http may have closed the body by now, and would call this a read too many
	case b.interrupted:
		return errInterrupted
	}
	b.reading = true
	return nil
}

func (b *requestBody) done(err error) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.reading = false
	switch {
	case b.interrupted:
		return errInterrupted
	case err == nil:
		return nil
	case err != io.EOF:
		b.failed = true
		return callerFault(err)
	}
	b.ended = true
	StripHeaders(b.trailer)
	return io.EOF
}

// unfinished reports whether there is a body that has not been read to its end.
func (b *requestBody) unfinished() bool {
	if b == nil {
		return false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return !b.ended
}

// callerFailed reports whether the caller of the request that has this context could not send its body. Then the
// connection to the replica had to be broken.
func callerFailed(ctx context.Context) bool {
	g, ok := ctx.Value(passageKey{}).(*passage)
	if !ok || g.request == nil {
		return false
	}
	g.request.mu.Lock()
	defer g.request.mu.Unlock()
	return g.request.failed
}

// interrupt makes reads fail, the pending one too.
func (b *requestBody) interrupt() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.interrupted = true
	if b.reading {
		b.control.SetReadDeadline(time.Unix(1, 0))
	}
}

// wait waits until no read is pending.
func (b *requestBody) wait() {
	b.reads.Lock()
	defer b.reads.Unlock()
}
