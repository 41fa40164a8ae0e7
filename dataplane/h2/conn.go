package h2

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/sockets"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// Config says what a connection needs.
type Config struct {
	Handler Handler
	Buffers *Buffers
	// Begun is what was read of the connection already.
	Begun []byte
	// Trusted is whether the other end resets streams for others, so that it may do so as often as it likes.
	Trusted bool
}

// Conn is a connection.
type Conn struct {
	net     net.Conn
	server  bool
	trusted bool
	handler Handler

	// The reader's.

	input   input
	reader  *http2.Framer
	list    fieldList
	later   []*Conn // to be flushed before the next read
	greeted bool    // the settings of the other end have come
	ready   chan struct{}

	heard   atomic.Bool  // something, since the last Check
	open    atomic.Int32 // streams
	allowed atomic.Int32 // streams that may be open here, as far as this end opens them

	mu sync.Mutex
	// mu guards the fields below.

	output   output
	framer   *http2.Framer  // appends to output
	encoder  *hpack.Encoder // appends to output
	streams  map[uint32]*Stream
	waiting  []*Stream // to write, in turns
	window   int64     // that we may still send
	received int64     // that the other end may still send
	owed     int64     // received, and not yet given back
	queued   int64     // received, and not yet consumed
	initial  int64     // window of new streams
	next     uint32    // the number of the next stream that we open
	last     uint32    // the number of the last stream that the other end opened
	ours     recent    // streams that we have reset
	draining bool      // no new streams: those under way end, and then the connection
	leaving  bool      // the last GOAWAY is sent or received
	silent   time.Time // since when, as far as Check knows
	asked    bool      // a ping is on its way
	spent    allowance // by resets
	idled    int       // by frames that carry nothing
	err      error     // set at the end
}

// NewServer returns the server's end of a connection.
func NewServer(c net.Conn, cfg Config) *Conn { return newConn(c, cfg, true) }

// NewClient returns the client's end of a connection.
func NewClient(c net.Conn, cfg Config) *Conn { return newConn(c, cfg, false) }

func newConn(nc net.Conn, cfg Config, server bool) *Conn {
	c := &Conn{
		net: sockets.Wired(nc), server: server, trusted: cfg.Trusted, handler: cfg.Handler,
		streams: map[uint32]*Stream{}, window: 65535, received: connWindow, initial: 65535, next: 1,
		ready: make(chan struct{}),
	}
	c.list.init()
	c.input.init(c, cfg)
	c.output.init(c)
	c.reader = http2.NewFramer(nil, &c.input)
	c.reader.SetReuseFrames()
	c.reader.SetMaxReadFrameSize(frameSize)
	c.framer = http2.NewFramer(&c.output, nil)
	c.encoder = hpack.NewEncoder(&c.output)
	if !server {
		c.allowed.Store(100) // until the other end says (RFC 9113, 6.5.2)
	}
	c.greet()
	return c
}

// greet gathers what either end says first.
func (c *Conn) greet() {
	settings := []http2.Setting{
		{ID: http2.SettingInitialWindowSize, Val: streamWindow},
		{ID: http2.SettingMaxHeaderListSize, Val: MaxHeaderBytes},
	}
	if c.server {
		settings = append(settings, http2.Setting{ID: http2.SettingMaxConcurrentStreams, Val: MaxStreams})
	} else {
		io.WriteString(&c.output, http2.ClientPreface)
		settings = append(settings, http2.Setting{ID: http2.SettingEnablePush, Val: 0})
	}
	c.framer.WriteSettings(settings...)
	c.framer.WriteWindowUpdate(0, connWindow-65535)
}

// errDone is how a connection ends that nobody needs any more.
var errDone = errors.New("the connection is no longer needed")

// Run serves the connection to its end, and closes it. It cuts off what is under way when ctx ends.
func (c *Conn) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	stop := context.AfterFunc(ctx, c.Close)
	defer stop()
	wg.Go(c.write)
	err := c.read()
	c.finish(err)
	wg.Wait()
	if _, violated := violation(err); violated || c.server && errors.Is(err, errDone) {
		c.linger()
	}
	c.net.Close()
	c.input.release()
	c.resetAll()
	c.flushLater()
	if errors.Is(err, io.EOF) || errors.Is(err, errDone) {
		return nil
	}
	return err
}

// violation returns what the other end is told if that is to blame for an error.
func violation(err error) (code http2.ErrCode, yes bool) {
	if e, ok := errors.AsType[http2.ConnectionError](err); ok {
		return http2.ErrCode(e), true
	}
	if errors.Is(err, http2.ErrFrameTooLarge) {
		return http2.ErrCodeFrameSize, true
	}
	return 0, false
}

// finish says goodbye, and lets the writer end.
func (c *Conn) finish(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	patience := 100 * time.Millisecond
	if code, violated := violation(err); violated {
		c.framer.WriteGoAway(c.last, code, nil)
		patience = lingerTime
	} else if errors.Is(err, errDone) {
		patience = prefaceTimeout // the other end may be slow
	}
	c.net.SetWriteDeadline(time.Now().Add(patience))
	c.err = err
	c.draining = true
	if !c.greeted {
		close(c.ready)
	}
	c.allowed.Store(0)
	c.output.wake.Broadcast()
}

// linger waits for the other end to close, as closing with bytes unread might take away from it what was written last.
func (c *Conn) linger() {
	half, ok := c.net.(interface{ CloseWrite() error })
	if !ok || half.CloseWrite() != nil {
		return
	}
	c.net.SetReadDeadline(time.Now().Add(lingerTime))
	io.CopyN(io.Discard, struct{ io.Reader }{c.net}, 4*connWindow)
}

// resetAll tells the handler that what is left of the streams will not come.
func (c *Conn) resetAll() {
	c.mu.Lock()
	left := make([]*Stream, 0, len(c.streams))
	for _, s := range c.streams {
		left = append(left, s)
	}
	for _, s := range left {
		c.removeLocked(s)
	}
	c.mu.Unlock()
	slices.SortFunc(left, older)
	for _, s := range left {
		c.handler.Reset(s, http2.ErrCodeConnect, Broken)
	}
}

func older(a, b *Stream) int { return cmp.Compare(a.id, b.id) }

func (c *Conn) removeLocked(s *Stream) {
	if s.gone {
		return
	}
	s.gone = true
	c.dequeuedLocked(s.queued)
	delete(c.streams, s.id)
	c.open.Store(int32(len(c.streams)))
	if len(c.streams) == 0 && c.leaving {
		c.closeSoonLocked()
	}
}

// closeSoonLocked ends a connection that has nothing left to do: the reader notices.
func (c *Conn) closeSoonLocked() { c.net.SetReadDeadline(time.Unix(1, 0)) }

// timedOut says what becomes of a read whose time was out; nil: it goes on.
func (c *Conn) timedOut(err error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !errors.Is(err, os.ErrDeadlineExceeded) || !c.draining {
		return err
	}
	if !c.leaving {
		c.leaveLocked()
	}
	if len(c.streams) == 0 {
		return errDone
	}
	c.net.SetReadDeadline(time.Time{})
	return nil
}

// Open opens a stream and sends the head of its request. It returns nil if the connection takes no more streams now.
func (c *Conn) Open(state any, fields []hpack.HeaderField, more []Field, end bool) *Stream {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.draining || len(c.streams) >= int(c.allowed.Load()) {
		return nil
	}
	if len(c.streams) == 0 {
		c.silent, c.asked = time.Time{}, false // silence was right until now
	}
	s := c.newStreamLocked(c.next)
	s.State = state
	s.bodiless = asksForHead(fields)
	if c.next += 2; c.next > math.MaxInt32 {
		c.draining, c.leaving = true, true // there are no more numbers
		c.allowed.Store(0)
	}
	c.writeHeadersLocked(s.id, fields, more, end)
	s.closed = end
	return s
}

func asksForHead(fields []hpack.HeaderField) bool {
	for i := range fields {
		if fields[i].Name == ":method" {
			return fields[i].Value == "HEAD"
		}
	}
	return false
}

func (c *Conn) newStreamLocked(id uint32) *Stream {
	s := &Stream{conn: c, id: id, window: c.initial, received: streamWindow, declared: -1}
	c.streams[id] = s
	c.open.Store(int32(len(c.streams)))
	return s
}

// Streams returns how many streams are open, and how many more this end may open.
func (c *Conn) Streams() (open, free int) {
	open = int(c.open.Load())
	return open, max(0, int(c.allowed.Load())-open)
}

// Opened counts the streams that were opened here, or there, so far.
func (c *Conn) Opened() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.server {
		return int(c.last+1) / 2
	}
	return int(c.next-1) / 2
}

// Ready is closed once the other end has said what it allows, or the connection has failed before that.
func (c *Conn) Ready() <-chan struct{} { return c.ready }

// Drain lets the streams under way end, and then the connection. The other end is told to open no more.
func (c *Conn) Drain() {
	c.mu.Lock()
	c.drainLocked()
	c.mu.Unlock()
	c.Flush()
}

func (c *Conn) drainLocked() {
	if c.draining {
		return
	}
	c.draining = true
	c.allowed.Store(0)
	if !c.server {
		c.leaveLocked()
		return
	}
	// What the other end opens before it hears of it is still served: it answers the ping once it has (RFC 9113, 6.8).
	c.framer.WriteGoAway(math.MaxInt32, http2.ErrCodeNo, nil)
	c.framer.WritePing(false, drainPing())
	c.net.SetReadDeadline(time.Now().Add(goAwayTimeout))
}

func drainPing() [8]byte { return [8]byte{'d', 'r', 'a', 'i', 'n'} }

// leaveLocked says which stream was the last.
func (c *Conn) leaveLocked() {
	c.leaving = true
	c.framer.WriteGoAway(c.last, http2.ErrCodeNo, nil)
	if len(c.streams) == 0 {
		c.closeSoonLocked()
	}
}

// Check asks the other end of a connection with open streams for a sign of life if there was none for long. It returns an
// error if there is none: the connection is of no use.
func (c *Conn) Check(now time.Time) error {
	c.mu.Lock()
	defer c.Flush()
	defer c.mu.Unlock()
	if c.heard.Swap(false) || len(c.streams) == 0 || c.silent.IsZero() {
		c.silent, c.asked = now, false
		return nil
	}
	switch silent := now.Sub(c.silent); {
	case silent >= pingAfter+pingTimeout:
		return fmt.Errorf("no sign of life from %v for %v", c.net.RemoteAddr(), silent.Round(time.Second))
	case silent >= pingAfter && !c.asked:
		c.asked = true
		c.framer.WritePing(false, [8]byte{'a', 'l', 'i', 'v', 'e'})
	}
	return nil
}

// Close cuts the connection off.
func (c *Conn) Close() { c.net.Close() }

// recent remembers the last streams that were reset: the other end may not know yet.
type recent struct {
	ids  []uint32
	next int
}

const remembered = 2 * MaxStreams

func (r *recent) add(id uint32) {
	if len(r.ids) < remembered {
		r.ids = append(r.ids, id)
		return
	}
	r.ids[r.next] = id
	r.next = (r.next + 1) % remembered
}

func (r *recent) has(id uint32) bool { return slices.Contains(r.ids, id) }

// allowance is how often something may happen.
type allowance struct {
	used float64
	last time.Time
}

// spend uses up one of most, of which perSecond come back. It returns false if none is left.
func (a *allowance) spend(now time.Time, most, perSecond float64) bool {
	a.used = max(0, a.used-perSecond*now.Sub(a.last).Seconds()) + 1
	a.last = now
	return a.used <= most
}

func (a *allowance) giveBack() { a.used = max(0, a.used-1) }
