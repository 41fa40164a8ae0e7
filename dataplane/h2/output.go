package h2

import (
	"encoding/binary"
	"slices"
	"sync"

	"github.com/headroom-mesh/headroom/dataplane/sockets"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// output is what is to be written. It is guarded by the connection's mu.
type output struct {
	b     []byte
	rest  []byte // to be written before b
	spare []byte
	busy  bool       // somebody is writing
	wake  *sync.Cond // the writer

	wire *sockets.Wire // nil if the connection is not plain
}

func (o *output) init(c *Conn) {
	o.wake = sync.NewCond(&c.mu)
	o.wire, _ = c.net.(*sockets.Wire)
}

// Write gathers.
func (o *output) Write(p []byte) (int, error) {
	o.b = append(o.b, p...)
	return len(p), nil
}

// keptSize is how much memory a connection keeps for what it will write next.
const keptSize = 16 << 10

// takeLocked takes what was gathered, to write it.
func (o *output) takeLocked() []byte {
	o.busy = true
	if o.rest != nil {
		batch := o.rest
		o.rest = nil
		return batch
	}
	batch := o.b
	o.b, o.spare = o.spare[:0], nil
	return batch
}

// wroteLocked is told what was written of what was taken.
func (o *output) wroteLocked(batch []byte, n int) {
	o.busy = false
	if n < len(batch) {
		o.rest = batch[n:]
		return
	}
	if cap(batch) <= 2*mostPending {
		o.spare = batch[:0]
	}
}

// shrinkLocked gives up memory that was needed for much.
func (o *output) shrinkLocked() {
	if cap(o.b) > keptSize && len(o.b) == 0 {
		o.b = nil
	}
	if cap(o.spare) > keptSize {
		o.spare = nil
	}
}

// FlushAfter flushes another connection once all was handed over that c has read by now. Only a Handler of c may call it,
// and not from Writable.
func (c *Conn) FlushAfter(other *Conn) {
	if other != c && !slices.Contains(c.later, other) {
		c.later = append(c.later, other)
	}
}

func (c *Conn) flushLater() {
	c.Flush()
	for i, other := range c.later {
		other.Flush()
		c.later[i] = nil
	}
	c.later = c.later[:0]
}

// Flush writes what was gathered, as far as that takes no waiting. The rest is for the writer.
func (c *Conn) Flush() {
	c.mu.Lock()
	defer c.mu.Unlock()
	o := &c.output
	for !o.busy && o.rest == nil && len(o.b) > 0 {
		if o.wire == nil {
			break
		}
		batch := o.takeLocked()
		c.mu.Unlock()
		n, err := o.wire.WriteNow(batch)
		if err != nil {
			c.net.Close() // the reader tells
			n = len(batch)
		}
		c.mu.Lock()
		o.wroteLocked(batch, n)
	}
	if c.forWriterLocked() {
		o.wake.Signal()
	}
}

// forWriterLocked reports whether there is something to do for the writer.
func (c *Conn) forWriterLocked() bool {
	return !c.output.busy && (len(c.output.b) > 0 || c.output.rest != nil || c.err != nil || c.turnLocked())
}

// write writes what can't be written at once, until the end.
func (c *Conn) write() {
	c.mu.Lock()
	defer c.mu.Unlock()
	o := &c.output
	for {
		for !c.forWriterLocked() {
			if len(c.streams) == 0 {
				o.shrinkLocked()
			}
			o.wake.Wait()
		}
		if len(o.b) > 0 || o.rest != nil {
			batch := o.takeLocked()
			c.mu.Unlock()
			_, err := c.net.Write(batch)
			if err != nil {
				c.net.Close() // the reader tells
			}
			c.mu.Lock()
			o.wroteLocked(batch, len(batch))
		} else if c.err != nil {
			return
		}
		c.mu.Unlock()
		c.unblock()
		c.mu.Lock()
	}
}

// turnLocked reports whether a stream that waits may write.
func (c *Conn) turnLocked() bool {
	return len(c.waiting) > 0 && c.window > 0 && c.pendingLocked() < mostPending
}

func (c *Conn) pendingLocked() int { return len(c.output.b) + len(c.output.rest) }

// unblock lets the streams write that wait for it, one after the other.
func (c *Conn) unblock() {
	for {
		c.mu.Lock()
		if !c.turnLocked() {
			c.mu.Unlock()
			return
		}
		s := c.waiting[0]
		c.waiting = append(c.waiting[:0], c.waiting[1:]...)
		s.waits = false
		c.mu.Unlock()
		c.handler.Writable(s)
	}
}

// room returns how much of a stream may be sent now.
func (c *Conn) roomLocked(s *Stream) int {
	room := mostPending - c.pendingLocked()
	if len(c.waiting) > 0 {
		room = min(room, turn)
	}
	return int(max(0, min(s.window, c.window, int64(room))))
}

const frameHeader = 9

// appendHeader appends the header of a frame.
func appendHeader(b []byte, size int, t http2.FrameType, flags http2.Flags, id uint32) []byte {
	b = append(b, byte(size>>16), byte(size>>8), byte(size), byte(t), byte(flags))
	return binary.BigEndian.AppendUint32(b, id)
}

// writeDataLocked gathers a part of a body.
func (c *Conn) writeDataLocked(id uint32, p []byte, end bool) {
	for first := true; first || len(p) > 0; first = false {
		part := p[:min(len(p), frameSize)]
		p = p[len(part):]
		var flags http2.Flags
		if end && len(p) == 0 {
			flags = http2.FlagDataEndStream
		}
		c.output.b = append(appendHeader(c.output.b, len(part), http2.FrameData, flags, id), part...)
	}
}

// writeHeadersLocked gathers a list of fields.
func (c *Conn) writeHeadersLocked(id uint32, fields []hpack.HeaderField, more []Field, end bool) {
	o := &c.output
	var flags http2.Flags
	if end {
		flags = http2.FlagHeadersEndStream
	}
	start := len(o.b)
	o.b = appendHeader(o.b, 0, http2.FrameHeaders, flags, id)
	for i := range fields {
		if f := &fields[i]; varies(f.Name) {
			o.b = appendLiteral(o.b, f.Name, f.Value)
		} else {
			c.encoder.WriteField(*f)
		}
	}
	for i := range more {
		o.b = appendLiteral(o.b, more[i].Name, more[i].Value)
	}
	size := len(o.b) - start - frameHeader
	if size <= frameSize {
		o.b[start], o.b[start+1], o.b[start+2] = byte(size>>16), byte(size>>8), byte(size)
		o.b[start+4] |= byte(http2.FlagHeadersEndHeaders)
		return
	}
	block := slices.Clone(o.b[start+frameHeader:])
	o.b = appendHeader(o.b[:start], frameSize, http2.FrameHeaders, flags, id)
	o.b = append(o.b, block[:frameSize]...)
	for block = block[frameSize:]; len(block) > 0; {
		part := block[:min(len(block), frameSize)]
		block = block[len(part):]
		flags = 0
		if len(block) == 0 {
			flags = http2.FlagContinuationEndHeaders
		}
		o.b = append(appendHeader(o.b, len(part), http2.FrameContinuation, flags, id), part...)
	}
}

// varies reports whether a field says something else in each message, so that remembering it only displaces others.
func varies(name string) bool {
	switch name {
	case "content-length", "grpc-timeout", "traceparent", "tracestate", "x-request-id":
		return true
	}
	return false
}

// appendLiteral appends a field that neither end is to remember (RFC 7541, 6.2.2).
func appendLiteral[T string | []byte](b []byte, name string, value T) []byte {
	b = appendSize(append(b, 0), len(name))
	b = append(b, name...)
	b = appendSize(b, len(value))
	return append(b, value...)
}

// appendSize appends the length of a string that is not compressed (RFC 7541, 5.1).
func appendSize(b []byte, n int) []byte {
	const most = 127
	if n < most {
		return append(b, byte(n))
	}
	return binary.AppendUvarint(append(b, most), uint64(n-most))
}
