package h1

import (
	"strconv"
)

// Decoder reads a chunked body (RFC 9112, 7.1). The zero value is at its beginning.
//
// A trailer that frames or routes a message, or is for one connection, makes the body malformed. One that means nothing
// after a body, or might pass for a field of the head that authenticates or controls (RFC 9110, 6.5.1), is left out.
type Decoder struct {
	state    chunkState
	left     int64  // of the chunk
	kept     []byte // names and values of the trailers
	spans    []span
	trailers []Field
	lines    int // of trailers
	read     int // bytes of trailers
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

// Reset makes the decoder ready for another body. The trailers of the one before are gone then.
func (d *Decoder) Reset() {
	*d = Decoder{kept: d.kept[:0], spans: d.spans[:0], trailers: d.trailers[:0]}
}

// Next takes n bytes off b, and returns those of the body among them, if any. If n is 0 it needs more than b. Once done is
// true the body has ended, and b[n:] is what follows it. The error is an *Error.
func (d *Decoder) Next(b []byte) (data []byte, n int, done bool, err error) {
	for {
		used := 0
		switch d.state {
		case inData:
			data = d.data(b[n:])
			return data, n + len(data), false, nil
		case atEnd:
			return nil, n, true, nil
		case atSize:
			used, err = d.size(b[n:])
		case afterData:
			used, err = d.dataEnd(b[n:])
		case inTrailers:
			used, err = d.trailer(b[n:])
		}
		if used == 0 || err != nil {
			return nil, n, false, err
		}
		n += used
	}
}

// size reads the line that begins a chunk. Extensions are refused: they are in use but for smuggling.
func (d *Decoder) size(b []byte) (n int, err error) {
	const digits = 16
	var size uint64
	for i, c := range b {
		digit := unhex(c)
		switch {
		case digit >= 0 && i < digits:
			size = size<<4 | uint64(digit)
		case c == '\r' && i > 0 && i+1 == len(b):
			return 0, nil
		case c == '\r' && i > 0 && b[i+1] == '\n':
			return i + 2, d.beginChunk(size)
		case c == ';' && i > 0:
			return 0, bad("a chunk has an extension: %.40q", b)
		default:
			return 0, bad("the size of a chunk is not 1 to 16 hexadecimal digits: %.20q", b)
		}
	}
	return 0, nil
}

func (d *Decoder) beginChunk(size uint64) error {
	if size > 1<<62 {
		return bad("a chunk of %d bytes is too large", size)
	}
	d.left, d.state = int64(size), inData
	if size == 0 {
		d.state = inTrailers
	}
	return nil
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

func (d *Decoder) data(b []byte) []byte {
	if int64(len(b)) > d.left {
		b = b[:d.left]
	}
	if d.left -= int64(len(b)); d.left == 0 {
		d.state = afterData
	}
	return b
}

func (d *Decoder) dataEnd(b []byte) (n int, err error) {
	const end = "\r\n"
	n = min(len(b), len(end))
	if string(b[:n]) != end[:n] {
		return 0, bad("a chunk is longer than it says")
	}
	if n < len(end) {
		return 0, nil
	}
	d.state = atSize
	return n, nil
}

// trailer reads a line of the trailer section.
func (d *Decoder) trailer(b []byte) (n int, err error) {
	l, next, err := cutLine(b, 0, MaxTrailers-d.read)
	switch {
	case err != nil:
		return 0, err
	case next < 0:
		return 0, &Error{statusHeadTooLarge, "the trailers are longer than 16384 bytes"}
	case next == 0:
		return 0, nil
	case len(l) == 0:
		d.finish()
		return next, nil
	}
	if d.lines++; d.lines > MaxFields {
		return 0, &Error{statusHeadTooLarge, "there are more than 256 trailers"}
	}
	d.read += next
	return next, d.addTrailer(l)
}

func (d *Decoder) addTrailer(l []byte) error {
	f, err := readField(l)
	if err != nil {
		return err
	}
	if !mayTrail(f.kind) {
		return bad("field %.40s must not be a trailer", f.Name)
	}
	if f.kind == plain && onlyInHeads(f.Name) {
		return nil
	}
	at := len(d.kept)
	d.kept = append(append(d.kept, f.Name...), f.Value...)
	d.spans = append(d.spans, span{at, at + len(f.Name), len(d.kept)})
	return nil
}

// mayTrail reports whether a field may come after the body: not if it frames or routes, or is for one connection.
func mayTrail(k kind) bool { return k == plain || k == mesh || k == report }

func (d *Decoder) finish() {
	d.state = atEnd
	for _, s := range d.spans {
		f := Field{Name: d.kept[s.name:s.value], Value: d.kept[s.value:s.end]}
		f.kind = kindOf(f.Name)
		d.trailers = append(d.trailers, f)
	}
}

// Trailers returns the trailers once the body has ended.
func (d *Decoder) Trailers() []Field { return d.trailers }

// Field appends the value of the first trailer with a name, given in lower case, to dst.
func (d *Decoder) Field(dst []byte, name string) ([]byte, bool) {
	return fieldOf(d.trailers, dst, name)
}

// AppendChunk appends a chunk. No data makes none: that would be the end.
func AppendChunk(dst, data []byte) []byte {
	if len(data) == 0 {
		return dst
	}
	dst = strconv.AppendInt(dst, int64(len(data)), 16)
	dst = append(dst, "\r\n"...)
	dst = append(dst, data...)
	return append(dst, "\r\n"...)
}

// AppendData appends a part of a body as its framing has it.
func AppendData(dst, data []byte, f Framing) []byte {
	if f == Chunked {
		return AppendChunk(dst, data)
	}
	return append(dst, data...)
}

// AppendEnd appends the last chunk and the trailers that are for the other end, too.
func (d *Decoder) AppendEnd(dst []byte) []byte {
	dst = append(dst, "0\r\n"...)
	for i := range d.trailers {
		if f := &d.trailers[i]; f.kind == plain {
			dst = appendField(dst, f)
		}
	}
	return append(dst, "\r\n"...)
}
