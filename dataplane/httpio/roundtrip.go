package httpio

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptrace"
	"sync"
	"sync/atomic"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/fault"
)

// NewTransport returns a transport that connects by dial, and says Unconnected where that fails. Bytes pass it as they are.
func NewTransport(dial func(ctx context.Context, address string) (net.Conn, error), idle time.Duration) *http.Transport {
	return &http.Transport{
		DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
			c, err := dial(ctx, address)
			if err != nil {
				return nil, &Unconnected{Err: err}
			}
			return &upstreamConn{Conn: c}, nil
		},
		MaxIdleConnsPerHost:   1024,
		IdleConnTimeout:       idle,
		ExpectContinueTimeout: time.Second, // for a replica that has never heard of 100 Continue
		DisableCompression:    true,
	}
}

// RoundTrip sends a request that a Proxy has passed on by a transport of NewTransport. A transport that gives up a
// connection waits until its last read of the request's body returns. RoundTrip sees to it that this is not for ever: the
// caller may have no reason to send more.
func RoundTrip(t *http.Transport, r *http.Request) (*http.Response, error) {
	g, _ := r.Context().Value(passageKey{}).(*passage)
	if g == nil || g.request == nil {
		return t.RoundTrip(r)
	}
	var used *upstreamConn
	var broke atomic.Bool
	closed := func() {
		broke.Store(r.Context().Err() == nil) // else it was given up as the caller went away, or its time ran out
		g.request.interrupt()
	}
	trace := &httptrace.ClientTrace{GotConn: func(got httptrace.GotConnInfo) {
		if c, ok := got.Conn.(*upstreamConn); ok {
			used = c
			c.whenClosed(closed)
		}
	}}
	resp, err := t.RoundTrip(r.WithContext(httptrace.WithClientTrace(r.Context(), trace)))
	if used != nil {
		used.whenClosed(nil)
	}
	if _, ours := errors.AsType[*fault.Error](err); err != nil && !ours && broke.Load() {
		// An interrupted read ends the request's context, so that the error may say that.
		return nil, fault.New(fault.Reset, "the connection to the replica broke before it had all of the request")
	}
	return resp, err
}

// upstreamConn is a connection to a replica or another agent. It serves one request at a time.
type upstreamConn struct {
	net.Conn

	mu sync.Mutex
	// mu guards the fields below.

	closed bool
	tell   func() // nil if nobody wants to know
}

func (c *upstreamConn) whenClosed(tell func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tell = tell
	if c.closed && tell != nil {
		tell()
	}
}

func (c *upstreamConn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	if c.tell != nil {
		c.tell()
	}
	return c.Conn.Close()
}

func (c *upstreamConn) CloseWrite() error { return closeWrite(c.Conn) }
