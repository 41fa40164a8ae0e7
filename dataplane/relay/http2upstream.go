package relay

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/h2"
	"golang.org/x/net/http2/hpack"
)

const (
	// streamsEach is how many streams a connection should carry before another one is made: its frames are read by one
	// goroutine. Until then, one is better than two: more goes out with each write.
	streamsEach = 100
	// mostConns is how many connections there may be to one Upstream before they carry more than they should.
	mostConns = 64
)

// openHTTP2 opens a stream on a connection that there is; nil if there is none with room.
func (u *Upstream) openHTTP2(x responder, fields []hpack.HeaderField, more []h2.Field, end bool) *h2.Stream {
	u.mu.Lock()
	conns := u.http2 // which is never changed, but replaced
	u.mu.Unlock()
	for _, c := range conns {
		if open, free := c.conn.Streams(); free > 0 && open < streamsEach {
			if s := c.conn.Open(x, fields, more, end); s != nil {
				return s
			}
		}
	}
	for _, c := range conns {
		if s := c.conn.Open(x, fields, more, end); s != nil {
			if len(conns) < mostConns {
				u.pendingHTTP2()
			}
			return s
		}
	}
	return nil
}

// dialing is a connection being made.
type dialing struct {
	done chan struct{}
	err  error // valid once done is closed
}

// dialHTTP2 waits for a connection of HTTP/2 being made.
func (u *Upstream) dialHTTP2(ctx context.Context) error {
	pending := u.pendingHTTP2()
	select {
	case <-pending.done:
		return pending.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// pendingHTTP2 makes a connection of HTTP/2, unless one is being made.
func (u *Upstream) pendingHTTP2() *dialing {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.dialing == nil {
		pending := &dialing{done: make(chan struct{})}
		u.dialing = pending
		u.engine.readers.Go(func() { u.connectHTTP2(pending) })
	}
	return u.dialing
}

// errNotHTTP2 is what is wrong with who closes a connection before saying anything in HTTP/2.
var errNotHTTP2 = errors.New("the other end does not answer in HTTP/2")

// notHTTP2For is for how long the other end is not asked for HTTP/2 again: another program may have taken its place.
const notHTTP2For = time.Minute

// onlyHTTP1 reports whether the other end is known to speak HTTP/1.1 only: it is declared to, or has not answered in HTTP/2.
func (u *Upstream) onlyHTTP1() bool {
	if u.target.Speaks != Unknown {
		return u.target.Speaks == HTTP1
	}
	since := u.notHTTP2.Load()
	return since != 0 && u.engine.watch.now()-since < notHTTP2For.Milliseconds()
}

// failedHTTP2 notes that the other end does not answer in HTTP/2, and reports whether HTTP/1.1 may do instead.
func (u *Upstream) failedHTTP2() bool {
	u.notHTTP2.Store(time.Now().UnixMilli())
	return u.target.Speaks == Unknown && !u.target.Agent
}

// connectHTTP2 makes a connection and serves it to its end. It does not depend on the calls that wait for it.
func (u *Upstream) connectHTTP2(pending *dialing) {
	settle := func(err error) {
		u.mu.Lock()
		defer u.mu.Unlock()
		pending.err, u.dialing = err, nil
		close(pending.done)
	}
	raw, err := u.target.Dial(context.Background(), HTTP2)
	if err != nil {
		settle(err)
		return
	}
	u.engine.metrics.connected.Inc()
	c := &http2Conn{}
	c.conn = h2.NewClient(raw, h2.Config{Handler: c, Buffers: &u.engine.memory.buffers})
	u.engine.readers.Go(func() {
		<-c.conn.Ready()
		if _, free := c.conn.Streams(); free == 0 {
			settle(errNotHTTP2)
			return
		}
		u.add(c)
		settle(nil)
	})
	if err := c.conn.Run(context.Background()); err != nil {
		u.engine.cfg.Log.Debug("a connection of HTTP/2 broke", "peer", u.target.Name, "err", err)
	}
	u.lost(c)
}

func (u *Upstream) add(c *http2Conn) {
	u.mu.Lock()
	u.http2 = append(u.http2[:len(u.http2):len(u.http2)], c)
	u.mu.Unlock()
	u.engine.register(u)
	if u.engine.memory.ended.Load() {
		c.conn.Drain() // it comes too late
	}
}

func (u *Upstream) lost(c *http2Conn) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.http2 = slices.DeleteFunc(slices.Clone(u.http2), func(other *http2Conn) bool { return other == c })
}

func (u *Upstream) allHTTP2() []*http2Conn {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.http2
}

// drainIdleHTTP2 closes the connections of HTTP/2 without a stream.
func (u *Upstream) drainIdleHTTP2() {
	for _, c := range u.allHTTP2() {
		if open, _ := c.conn.Streams(); open == 0 {
			c.conn.Drain()
		}
	}
}

// checkHTTP2 gives up connections that are of no use: those without a stream for long, and those whose other end is silent.
func (u *Upstream) checkHTTP2(now time.Time) {
	for _, c := range u.allHTTP2() {
		if c.idle(now) > u.target.IdleTimeout {
			c.conn.Drain()
		} else if err := c.conn.Check(now); err != nil {
			u.engine.cfg.Log.Warn("gave up a connection", "peer", u.target.Name, "err", err)
			c.conn.Close()
		}
	}
}

// idle returns for how long no stream was opened.
func (c *http2Conn) idle(now time.Time) time.Duration {
	opened := c.conn.Opened()
	if open, _ := c.conn.Streams(); open > 0 || opened != c.opened || c.idleFor.IsZero() {
		c.opened, c.idleFor = opened, now
	}
	return now.Sub(c.idleFor)
}
