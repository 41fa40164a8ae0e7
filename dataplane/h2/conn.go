package h2

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"sync"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// Conn is a connection.
type Conn struct {
	net     net.Conn
	server  bool
	handler Handler
	input   *bufio.Reader
	reader  *http2.Framer

	mu sync.Mutex
	// mu guards the fields below.

	out      []byte
	framer   *http2.Framer // writes to out
	encoder  *hpack.Encoder
	block    bytes.Buffer // what encoder writes
	wake     *sync.Cond   // there is something to write, or the end has come
	streams  map[uint32]*Stream
	window   int64  // that we may still send
	received int64  // that the other end may still send
	owed     int64  // received, and not yet given back
	queued   int64  // received, and not yet consumed
	initial  int64  // window of new streams
	most     uint32 // streams that the other end allows
	next     uint32 // the number of the next stream that we open
	last     uint32 // the number of the last stream that the other end opened
	heard    time.Time
	asked    bool // a ping is on its way
	draining bool // no new streams: those under way end, and then the connection
	leaving  bool // the last GOAWAY is sent
	resets   int
	empty    int
	err      error // set at the end
}

// NewServer returns the server's end of a connection; begun is what was read of it already.
func NewServer(c net.Conn, begun []byte, h Handler) *Conn {
	return newConn(c, begun, true, h)
}

// NewClient returns the client's end of a connection.
func NewClient(c net.Conn, h Handler) *Conn { return newConn(c, nil, false, h) }

func newConn(nc net.Conn, begun []byte, server bool, h Handler) *Conn {
	c := &Conn{
		net: nc, server: server, handler: h,
		streams: map[uint32]*Stream{}, window: 65535, received: connWindow, initial: 65535,
		most: math.MaxUint32, next: 1, heard: time.Now(),
	}
	if !server {
		c.most = 100 // until it says more (RFC 9113, 6.5.2)
	}
	c.wake = sync.NewCond(&c.mu)
	c.encoder = hpack.NewEncoder(&c.block)
	c.framer = http2.NewFramer((*gathered)(c), nil)
	c.input = bufio.NewReaderSize(io.MultiReader(bytes.NewReader(begun), nc), 32<<10)
	c.reader = http2.NewFramer(nil, c.input)
	c.reader.SetReuseFrames()
	c.reader.SetMaxReadFrameSize(frameSize)
	c.reader.ReadMetaHeaders = hpack.NewDecoder(tableSize, nil)
	c.reader.MaxHeaderListSize = MaxHeaderBytes
	c.begin()
	return c
}

// gathered lets a framer append to what is to be written.
type gathered Conn

func (g *gathered) Write(p []byte) (int, error) {
	g.out = append(g.out, p...)
	return len(p), nil
}

// begin gathers what either end says first.
func (c *Conn) begin() {
	settings := []http2.Setting{
		{ID: http2.SettingInitialWindowSize, Val: streamWindow},
		{ID: http2.SettingMaxHeaderListSize, Val: MaxHeaderBytes},
	}
	if c.server {
		settings = append(settings, http2.Setting{ID: http2.SettingMaxConcurrentStreams, Val: MaxStreams})
	} else {
		c.out = append(c.out, http2.ClientPreface...)
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
	stop := context.AfterFunc(ctx, func() { c.net.Close() })
	defer stop()
	wg.Go(c.write)
	err := c.read()
	c.finish(err)
	wg.Wait()
	c.net.Close()
	c.resetAll()
	if errors.Is(err, io.EOF) || errors.Is(err, errDone) {
		return nil
	}
	return err
}

// finish says goodbye, and lets the writer end.
func (c *Conn) finish(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	code, violation := http2.ErrCodeNo, false
	if ce, ok := errors.AsType[http2.ConnectionError](err); ok {
		code, violation = http2.ErrCode(ce), true
	} else if errors.Is(err, http2.ErrFrameTooLarge) {
		code, violation = http2.ErrCodeFrameSize, true
	}
	if violation {
		c.framer.WriteGoAway(c.last, code, nil)
		c.net.SetWriteDeadline(time.Now().Add(time.Second))
	} else {
		c.net.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
	}
	if err == nil {
		err = io.EOF
	}
	c.err = err
	c.draining = true
	c.wake.Broadcast()
}

// resetAll tells the handler that what is left of the streams will not come.
func (c *Conn) resetAll() {
	c.mu.Lock()
	var left []*Stream
	for _, s := range c.streams {
		left = append(left, s)
	}
	for _, s := range left {
		c.removeLocked(s)
	}
	c.mu.Unlock()
	for _, s := range left {
		c.handler.Reset(s, http2.ErrCodeConnect, false)
	}
}

// write writes what was gathered until the end.
func (c *Conn) write() {
	var spare []byte
	for {
		c.mu.Lock()
		for len(c.out) == 0 && c.err == nil {
			c.wake.Wait()
		}
		if len(c.out) == 0 {
			c.mu.Unlock()
			return
		}
		batch := c.out
		c.out = spare[:0]
		c.mu.Unlock()
		_, err := c.net.Write(batch)
		if spare = batch; cap(spare) > 2*mostPending {
			spare = nil
		}
		if err != nil {
			c.net.Close() // the reader tells
			c.mu.Lock()
			for c.err == nil {
				c.out = c.out[:0]
				c.wake.Wait()
			}
			c.mu.Unlock()
			return
		}
		c.unblock()
	}
}

// unblock tells the streams that waited for room or windows that there may be some.
func (c *Conn) unblock() {
	c.mu.Lock()
	var ready []*Stream
	if c.window > 0 && len(c.out) < mostPending {
		for _, s := range c.streams {
			if s.blocked && s.window > 0 {
				s.blocked = false
				ready = append(ready, s)
			}
		}
	}
	c.mu.Unlock()
	for _, s := range ready {
		c.handler.Writable(s)
	}
}

func (c *Conn) wakeLocked() { c.wake.Signal() }

func (c *Conn) removeLocked(s *Stream) {
	if s.gone {
		return
	}
	s.gone = true
	c.dequeuedLocked(s.queued)
	delete(c.streams, s.id)
	if c.draining && len(c.streams) == 0 && c.leaving {
		c.closeSoonLocked()
	}
}

// closeSoonLocked ends a connection that has nothing left to do: the reader notices.
func (c *Conn) closeSoonLocked() {
	c.net.SetReadDeadline(time.Unix(1, 0))
}

// writeHeadersLocked gathers a list of fields.
func (c *Conn) writeHeadersLocked(id uint32, fields []hpack.HeaderField, end bool) {
	c.block.Reset()
	for _, f := range fields {
		c.encoder.WriteField(f)
	}
	block := c.block.Bytes()
	first := block[:min(len(block), frameSize)]
	block = block[len(first):]
	c.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: first, EndStream: end, EndHeaders: len(block) == 0})
	for len(block) > 0 {
		part := block[:min(len(block), frameSize)]
		block = block[len(part):]
		c.framer.WriteContinuation(id, len(block) == 0, part)
	}
	c.wakeLocked()
}

// Open opens a stream and sends the head of its request. It returns nil if the connection takes no more streams now.
func (c *Conn) Open(state any, fields []hpack.HeaderField, end bool) *Stream {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.draining || c.err != nil || uint32(len(c.streams)) >= c.most || c.next > math.MaxInt32 {
		return nil
	}
	if len(c.streams) == 0 {
		c.heard = time.Now() // silence was right until now
	}
	s := c.newStreamLocked(c.next)
	s.State = state
	c.next += 2
	c.writeHeadersLocked(s.id, fields, end)
	s.closed = end
	return s
}

func (c *Conn) newStreamLocked(id uint32) *Stream {
	s := &Stream{conn: c, id: id, window: c.initial, received: streamWindow, declared: -1}
	c.streams[id] = s
	return s
}

// Streams returns how many streams are open, and how many more may be opened.
func (c *Conn) Streams() (open int, free int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	open = len(c.streams)
	if c.draining || c.err != nil || c.next > math.MaxInt32 {
		return open, 0
	}
	return open, max(0, int(min(c.most, math.MaxInt32))-open)
}

// Drain lets the streams under way end, and then the connection. The other end is told to open no more.
func (c *Conn) Drain() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.draining {
		return
	}
	if !c.server {
		c.draining, c.leaving = true, true
		if len(c.streams) == 0 {
			c.closeSoonLocked()
		}
		return
	}
	// What the other end opens before it hears of it is still served: it answers the ping once it has (RFC 9113, 6.8).
	c.draining = true
	c.framer.WriteGoAway(math.MaxInt32, http2.ErrCodeNo, nil)
	c.framer.WritePing(false, drainPing())
	c.wakeLocked()
}

func drainPing() [8]byte { return [8]byte{'d', 'r', 'a', 'i', 'n'} }

// Check asks the other end of a client's connection for a sign of life if there was none for long. It returns an error
// if there is none: the connection is of no use.
func (c *Conn) Check(now time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	silent := now.Sub(c.heard)
	switch {
	case len(c.streams) == 0 || silent < pingAfter:
		c.asked = false
	case !c.asked:
		c.asked = true
		c.framer.WritePing(false, [8]byte{'a', 'l', 'i', 'v', 'e'})
		c.wakeLocked()
	case silent >= pingAfter+pingTimeout:
		return fmt.Errorf("no sign of life from %v for %v", c.net.RemoteAddr(), silent.Round(time.Second))
	}
	return nil
}

// Close cuts the connection off.
func (c *Conn) Close() { c.net.Close() }
