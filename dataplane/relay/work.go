package relay

import (
	"bytes"
	"net/netip"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/h1"
)

// bufferSize is what is read at once. A head may be longer: then the buffer grows for it.
const bufferSize = 16 << 10

// work is the memory that a call needs while it is under way, and a connection without one does not.
type work struct {
	in    buffer // from the caller
	up    buffer // from upstream
	out   []byte // to either
	up1   []byte // to upstream, while out is in use
	head  requestHead
	resp  h1.Response
	body  requestBody
	reply h1.Decoder
	hop   Hop
	x     exchange
	ended time.Time // when the end of the answer had come; zero: not yet, or it is not known
}

func newWork() *work {
	return &work{
		in: buffer{b: make([]byte, bufferSize)}, up: buffer{b: make([]byte, bufferSize)},
		out: make([]byte, 0, bufferSize+1024), up1: make([]byte, 0, bufferSize+1024),
	}
}

// reset gives up what grew large.
func (w *work) reset() {
	w.in.reset()
	w.up.reset()
	w.hop, w.x, w.head.caller = Hop{}, exchange{}, nil
	if cap(w.out) > 8*bufferSize {
		w.out = make([]byte, 0, bufferSize+1024)
	}
	if cap(w.body.kept) > 2*keptLimit {
		w.body.kept = nil
	}
}

// buffer holds bytes that were read and not yet used, after some that must stay.
type buffer struct {
	b    []byte
	base int // what stays ends here
	r, w int
}

func (b *buffer) reset() {
	b.base, b.r, b.w = 0, 0, 0
	if len(b.b) > bufferSize {
		b.b = make([]byte, bufferSize)
	}
}

// bytes returns those that were not used yet.
func (b *buffer) bytes() []byte { return b.b[b.r:b.w] }

func (b *buffer) use(n int) {
	b.r += n
	if b.r == b.w {
		b.r, b.w = b.base, b.base
	}
}

// hold lets the bytes used so far stay where they are, until free.
func (b *buffer) hold(n int) {
	b.r += n
	b.base = b.r
}

func (b *buffer) free() {
	b.base = 0
	b.use(0)
}

// room makes room for more bytes, and returns it. What was not used yet may move.
func (b *buffer) room() []byte {
	if len(b.b)-b.w < minRead && b.r > b.base {
		b.w = b.base + copy(b.b[b.base:], b.b[b.r:b.w])
		b.r = b.base
	}
	if len(b.b)-b.w < minRead {
		larger := make([]byte, 2*len(b.b))
		copy(larger, b.b[:b.w])
		b.b = larger
	}
	return b.b[b.w:]
}

// minRead is the least that is worth reading.
const minRead = 512

// fill reads more.
func (b *buffer) fill(from *socket) error {
	n, err := from.Read(b.room())
	b.w += n
	if n > 0 {
		return nil
	}
	return err
}

// fillLine reads until the end of a line has come, or more than a head may be long: before that a head that was not
// complete is not either.
func (b *buffer) fillLine(from *socket) error {
	for {
		before := b.w - b.r
		if err := b.fill(from); err != nil {
			return err
		}
		if more := b.bytes(); bytes.IndexByte(more[before:], '\n') >= 0 || len(more) > h1.MaxHead {
			return nil
		}
	}
}

// requestHead is a head of HTTP/1 for a Router.
type requestHead struct {
	h1.Request
	source netip.AddrPort
	caller *Caller
}

var _ Head = (*requestHead)(nil)

func (h *requestHead) Protocol() Protocol {
	if string(h.Request.Method) == "CONNECT" {
		return TCP
	}
	return HTTP1
}
func (h *requestHead) Method(dst []byte) []byte    { return append(dst, h.Request.Method...) }
func (h *requestHead) Authority(dst []byte) []byte { return append(dst, h.Request.Authority...) }
func (h *requestHead) Path(dst []byte) []byte      { return append(dst, h.Request.Path...) }
func (h *requestHead) Source() netip.AddrPort      { return h.source }
func (h *requestHead) Caller() *Caller             { return h.caller }
