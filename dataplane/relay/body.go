package relay

import (
	"github.com/headroom-mesh/headroom/dataplane/h1"
)

// keptLimit is how much of a request's body is kept for another try.
const keptLimit = 64 << 10

// requestBody is the body of the request under way: what was read of it is kept, up to a limit, to be sent again.
type requestBody struct {
	framing h1.Framing
	left    int64 // by length
	dec     h1.Decoder
	done    bool
	kept    []byte
	spilt   bool // more was read than is kept
}

func (b *requestBody) begin(r *h1.Request) {
	b.framing, b.left, b.kept, b.spilt = r.Framing, r.Length, b.kept[:0], false
	b.done = r.Framing == h1.None || r.Framing == h1.Length && r.Length == 0
	b.dec.Reset()
}

// take returns the part of the body that the buffer has, in its memory; nothing if more must be read first.
func (b *requestBody) take(in *buffer) ([]byte, error) {
	if b.done {
		return nil, nil
	}
	var data []byte
	if b.framing == h1.Length {
		data = in.bytes()
		if int64(len(data)) > b.left {
			data = data[:b.left]
		}
		b.left -= int64(len(data))
		b.done = b.left == 0
		in.use(len(data))
	} else {
		var n int
		var err error
		data, n, b.done, err = b.dec.Next(in.bytes())
		in.use(n)
		if err != nil {
			return nil, err
		}
	}
	b.keep(data)
	return data, nil
}

func (b *requestBody) keep(data []byte) {
	b.spilt = b.spilt || len(b.kept)+len(data) > keptLimit
	if !b.spilt {
		b.kept = append(b.kept, data...)
	}
}

// appendEnd appends what comes after the last data.
func (b *requestBody) appendEnd(dst []byte) []byte {
	if b.framing == h1.Chunked {
		return b.dec.AppendEnd(dst)
	}
	return dst
}

// appendAvailable appends all of the body that has come already.
func (b *requestBody) appendAvailable(dst []byte, in *buffer) ([]byte, error) {
	for !b.done {
		before := in.r
		data, err := b.take(in)
		if err != nil {
			return dst, err
		}
		dst = h1.AppendData(dst, data, b.framing)
		if len(data) == 0 && (in.r == before || in.r == in.w) {
			break
		}
	}
	return dst, nil
}
