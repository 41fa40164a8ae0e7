package h1

import (
	"bytes"
	"net/http"
	"strconv"
)

// Decoder reads a chunked body (RFC 9112, 7.1). The zero value is at its beginning.
type Decoder struct {
	state    chunkState
	left     int64 // of the chunk
	trailers []byte
	ends     []span
	fields   []Field
}

type chunkState uint8

const (
	atSize chunkState = iota
	inData
	afterData
	inTrailers
	atEnd
)

// span is where a trailer is among the bytes kept.
type span struct{ name, value, end int }

// Reset makes the decoder ready for another body.
func (d *Decoder) Reset() {
	*d = Decoder{trailers: d.trailers[:0], ends: d.ends[:0], fields: d.fields[:0]}
}

// Next takes n bytes off b, and returns those of the body among them, if any. If n is 0 it needs more than b. Once done is
// true the body has ended, and b[n:] is what follows it. The error is an *Error.
func (d *Decoder) Next(b []byte) (data []byte, n int, done bool, err error) {
	for {
		switch d.state {
		case atSize:
			used, err := d.size(b[n:])
			if used == 0 || err != nil {
				return nil, n, false, err
			}
			n += used
		case inData:
			data = b[n:]
			if int64(len(data)) > d.left {
				data = data[:d.left]
			}
			d.left -= int64(len(data))
			if d.left == 0 {
				d.state = afterData
			}
			return data, n + len(data), false, nil
		case afterData:
			if len(b)-n < 2 {
				if len(b) > n && b[n] != '\r' {
					return nil, n, false, bad("a chunk is longer than it says")
				}
				return nil, n, false, nil
			}
			if b[n] != '\r' || b[n+1] != '\n' {
				return nil, n, false, bad("a chunk is longer than it says")
			}
			n += 2
			d.state = atSize
		case inTrailers:
			used, err := d.trailer(b[n:])
			if used == 0 || err != nil {
				return nil, n, false, err
			}
			n += used
		case atEnd:
			return nil, n, true, nil
		}
	}
}

// size reads the line that begins a chunk. Extensions are refused: nobody uses them but to smuggle.
func (d *Decoder) size(b []byte) (n int, err error) {
	const most = 16
	i := bytes.IndexByte(b, '\n')
	if i < 0 {
		if len(b) > most+1 {
			return 0, bad("the size of a chunk is too long")
		}
		for j, c := range b {
			if unhex(c) < 0 && (c != '\r' || j == 0 || j != len(b)-1) {
				return 0, bad("the size of a chunk is malformed: %.20q", b)
			}
		}
		return 0, nil
	}
	if i < 2 || i > most+1 || b[i-1] != '\r' {
		return 0, bad("the size of a chunk is malformed: %.20q", b[:min(i, 20)])
	}
	var size uint64
	for _, c := range b[:i-1] {
		digit := unhex(c)
		if digit < 0 {
			return 0, bad("the size of a chunk is malformed: %.20q", b[:i-1])
		}
		size = size<<4 | uint64(digit)
	}
	if size > 1<<62 {
		return 0, bad("a chunk is too large")
	}
	d.left, d.state = int64(size), inData
	if size == 0 {
		d.state = inTrailers
	}
	return i + 1, nil
}

func unhex(c byte) int {
	switch {
	case '0' <= c && c <= '9':
		return int(c - '0')
	case 'a' <= c && c <= 'f':
		return int(c-'a') + 10
	case 'A' <= c && c <= 'F':
		return int(c-'A') + 10
	}
	return -1
}

// trailer reads a line of the trailer section.
func (d *Decoder) trailer(b []byte) (n int, err error) {
	i := bytes.IndexByte(b, '\n')
	if i < 0 {
		if len(d.trailers)+len(b) > MaxTrailers {
			return 0, tooManyTrailers()
		}
		return 0, nil
	}
	if i < 1 || b[i-1] != '\r' {
		return 0, bad("a line ends with LF alone")
	}
	if i == 1 {
		d.finish()
		return 2, nil
	}
	f, err := readField(b[:i-1])
	if err != nil {
		return 0, err
	}
	if !allowed(f) {
		return 0, bad("field %s must not be a trailer", f.Name)
	}
	if len(d.trailers)+i > MaxTrailers || len(d.ends) == MaxFields {
		return 0, tooManyTrailers()
	}
	at := len(d.trailers)
	d.trailers = append(append(d.trailers, f.Name...), f.Value...)
	d.ends = append(d.ends, span{at, at + len(f.Name), len(d.trailers)})
	return i + 1, nil
}

func tooManyTrailers() *Error {
	return &Error{http.StatusRequestHeaderFieldsTooLarge, "there are more than 16384 bytes, or 256 fields, of trailers"}
}

// allowed reports whether a field may come after the body: not if it routes or frames the message (RFC 9110, 6.5.1).
func allowed(f Field) bool {
	switch f.kind {
	case host, contentLength, transferEncoding, connection, upgrade, te, expect, hop, announce:
		return false
	}
	return true
}

func (d *Decoder) finish() {
	d.state = atEnd
	for _, s := range d.ends {
		f := Field{Name: d.trailers[s.name:s.value], Value: d.trailers[s.value:s.end]}
		f.kind = kindOf(f.Name)
		d.fields = append(d.fields, f)
	}
}

// Trailers returns the trailers once the body has ended.
func (d *Decoder) Trailers() []Field { return d.fields }

// Field appends the value of the first trailer with a name, given in lower case, to dst.
func (d *Decoder) Field(dst []byte, name string) ([]byte, bool) { return fieldOf(d.fields, dst, name) }

// AppendChunk appends the line that begins a chunk of a size. The data and CR LF follow.
func AppendChunk(dst []byte, size int) []byte {
	dst = strconv.AppendInt(dst, int64(size), 16)
	return append(dst, "\r\n"...)
}

// AppendEnd appends the last chunk and the trailers that are for the other end, too.
func (d *Decoder) AppendEnd(dst []byte) []byte {
	dst = append(dst, "0\r\n"...)
	for i := range d.fields {
		if f := &d.fields[i]; f.kind == plain {
			dst = append(dst, f.Name...)
			dst = append(dst, ": "...)
			dst = append(dst, f.Value...)
			dst = append(dst, "\r\n"...)
		}
	}
	return append(dst, "\r\n"...)
}
