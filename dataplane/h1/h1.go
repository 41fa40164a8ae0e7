// Package h1 is HTTP/1.1 on the wire (RFC 9112): it reads heads and chunked bodies from bytes, strictly, and writes them.
// It refuses whatever two servers might read differently.
package h1

import (
	"bytes"
	"encoding/binary"
	"fmt"
)

// Bounds on what is read. A longer message is refused.
const (
	MaxHead     = 64 << 10
	MaxFields   = 256
	MaxTarget   = 16 << 10
	MaxTrailers = 16 << 10

	maxRequestLine = MaxTarget + 64
	maxOptions     = 64 // of Connection
)

// The statuses with which requests are refused.
const (
	statusBadRequest          = 400
	statusTargetTooLong       = 414
	statusHeadTooLarge        = 431
	statusNotImplemented      = 501
	statusVersionNotSupported = 505
)

// Error says what is wrong with a message, and the status with which to refuse it if it is a request.
type Error struct {
	Status int
	Detail string
}

func (e *Error) Error() string { return e.Detail }

func bad(format string, args ...any) *Error {
	return &Error{Status: statusBadRequest, Detail: fmt.Sprintf(format, args...)}
}

// Field is a field of a head or a trailer. Its bytes are those that it was read from.
type Field struct {
	Name, Value []byte
	kind        kind
}

// kind says what a field means to whoever passes a message on.
type kind uint8

const (
	plain  kind = iota
	hop         // concerns one connection only
	mesh        // concerns agents only
	report      // ORCA: concerns agents only
	host
	connection
	contentLength
	transferEncoding
	upgrade
	te
	expect
	announce // of trailers
	disguise // of a field that frames: some servers take "_" for "-"
)

// kindOf classifies a field by its name.
func kindOf(name []byte) kind {
	switch len(name) {
	case 2:
		return when(is(name, "te"), te)
	case 4:
		return when(is(name, "host"), host)
	case 6:
		return when(is(name, "expect"), expect)
	case 7:
		return when(is(name, "upgrade"), upgrade) | when(is(name, "trailer"), announce)
	}
	switch {
	case len(name) < len("headroom-"):
		return plain
	case is(name, "connection"):
		return connection
	case is(name, "keep-alive"), is(name, "proxy-connection"):
		return hop
	case is(name, "content-length"):
		return contentLength
	case is(name, "transfer-encoding"):
		return transferEncoding
	case is(name, "content_length"), is(name, "transfer_encoding"):
		return disguise
	case hasPrefix(name, "headroom-"):
		return mesh
	case is(name, "endpoint-load-metrics"), is(name, "endpoint-load-metrics-bin"):
		return report
	}
	return plain
}

func when(yes bool, k kind) kind {
	if yes {
		return k
	}
	return plain
}

// onlyInHeads reports whether a plain field means nothing, or something dangerous, after a body: it authenticates, controls
// or describes what has been dealt with by then (RFC 9110, 6.5.1).
func onlyInHeads(name []byte) bool {
	switch len(name) {
	case 3:
		return is(name, "age")
	case 4:
		return is(name, "date") || is(name, "vary")
	case 5:
		return is(name, "range")
	case 6:
		return is(name, "cookie") || is(name, "pragma")
	case 7:
		return is(name, "expires")
	case 8:
		return is(name, "location") || hasPrefix(name, "if-")
	case 10:
		return is(name, "set-cookie")
	case 11:
		return is(name, "retry-after")
	case 12:
		return is(name, "content-type") || is(name, "max-forwards")
	}
	return is(name, "authorization") || is(name, "cache-control") || is(name, "content-range") ||
		is(name, "content-encoding") || is(name, "www-authenticate") || is(name, "proxy-authenticate") ||
		is(name, "proxy-authorization") || hasPrefix(name, "if-")
}

// Is compares a name with one in lower case.
func Is(b []byte, lower string) bool { return is(b, lower) }

func is(b []byte, lower string) bool { return len(b) == len(lower) && equalFold(b, lower) }

func hasPrefix(b []byte, lower string) bool {
	return len(b) >= len(lower) && equalFold(b[:len(lower)], lower)
}

// equalFold compares a name with one in lower case of the same length.
func equalFold(b []byte, lower string) bool {
	for i, c := range b {
		if 'A' <= c && c <= 'Z' {
			c += 'a' - 'A'
		}
		if c != lower[i] {
			return false
		}
	}
	return true
}

// fieldOf appends the value of the first field with a name, given in lower case.
func fieldOf(fields []Field, dst []byte, name string) ([]byte, bool) {
	for i := range fields {
		if f := &fields[i]; is(f.Name, name) {
			return append(dst, f.Value...), true
		}
	}
	return dst, false
}

// Tables of 256 bytes mark what tokens are made of (RFC 9110, 5.6.2), and the characters that targets and hosts may have in
// them. A target may have some that ought to be encoded, for many callers don't. Those of a host leave out "%", for a host
// that is encoded is another one to whoever does not decode it, and ",", which is between two hosts in a list.
const (
	tokens = none + ".x.xxxxx..xx.xx.xxxxxxxxxx......" + ".xxxxxxxxxxxxxxxxxxxxxxxxxx...xx" + "xxxxxxxxxxxxxxxxxxxxxxxxxxx.x.x." + none4
	target = none + ".xx.xxxxxxxxxxxxxxxxxxxxxxxxxxxx" + allOf + "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx." + allOf4
	hosts  = none + ".x..x.xxxxxx.xx.xxxxxxxxxx.x.x.." + ".xxxxxxxxxxxxxxxxxxxxxxxxxx....x" + ".xxxxxxxxxxxxxxxxxxxxxxxxxx...x." + none4
	none   = "................................"
	none4  = none + none + none + none
	allOf  = "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
	allOf4 = allOf + allOf + allOf + allOf
)

func all(b []byte, table string) bool {
	for _, c := range b {
		if table[c] != 'x' {
			return false
		}
	}
	return true
}

func isToken(b []byte) bool { return len(b) > 0 && all(b, tokens) }

// printable reports whether there are no control characters in b, but perhaps tabs. Bytes above ASCII are none.
func printable(b []byte) bool {
	const (
		ones = 0x0101010101010101
		tops = 0x80 * ones
	)
	for ; len(b) >= 8; b = b[8:] {
		w := binary.LittleEndian.Uint64(b)
		del := w ^ 0x7f*ones
		if ((w-' '*ones)&^w|(del-ones)&^del)&tops != 0 && !printableSlow(b[:8]) {
			return false
		}
	}
	return printableSlow(b)
}

func printableSlow(b []byte) bool {
	for _, c := range b {
		if c < ' ' && c != '\t' || c == 0x7f {
			return false
		}
	}
	return true
}

// trim removes spaces and tabs at both ends.
func trim(b []byte) []byte {
	for len(b) > 0 && (b[0] == ' ' || b[0] == '\t') {
		b = b[1:]
	}
	for len(b) > 0 && (b[len(b)-1] == ' ' || b[len(b)-1] == '\t') {
		b = b[:len(b)-1]
	}
	return b
}

// cutLine returns the line that begins at an offset, without CR LF, and where the next one begins: at 0 if the line is not
// complete, and below 0 if it does not end before the offset end.
func cutLine(b []byte, at, end int) (l []byte, next int, err error) {
	i := bytes.IndexByte(b[at:min(len(b), end)], '\n')
	switch {
	case i < 0 && len(b) >= end:
		return nil, -1, nil
	case i < 0:
		return nil, 0, nil
	case i == 0 || b[at+i-1] != '\r':
		return nil, 0, bad("a line ends with LF alone")
	}
	return b[at : at+i-1], at + i + 1, nil
}

// readField reads a field line.
func readField(l []byte) (f Field, err error) {
	n := 0
	for n < len(l) && tokens[l[n]] == 'x' {
		n++
	}
	if n == 0 || n == len(l) || l[n] != ':' {
		return f, badName(l)
	}
	f.Name, f.Value = l[:n], trim(l[n+1:])
	if !printable(f.Value) {
		return f, bad("field %s has a control character in it", f.Name)
	}
	f.kind = kindOf(f.Name)
	return f, nil
}

func badName(l []byte) *Error {
	if l[0] == ' ' || l[0] == '\t' {
		return bad("a line is folded")
	}
	name, _, ok := bytes.Cut(l, []byte(":"))
	if !ok {
		return bad("a field line has no colon: %.40q", l)
	}
	return bad("the name of a field is no token: %.40q", name)
}

// AppendField appends a field line.
func AppendField(dst []byte, name string, value []byte) []byte {
	dst = append(dst, name...)
	dst = append(dst, ": "...)
	dst = append(dst, value...)
	return append(dst, "\r\n"...)
}

func appendField(dst []byte, f *Field) []byte {
	dst = append(dst, f.Name...)
	dst = append(dst, ": "...)
	dst = append(dst, f.Value...)
	return append(dst, "\r\n"...)
}
