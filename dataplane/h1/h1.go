// Package h1 is HTTP/1.1 on the wire (RFC 9112): it reads heads and chunked bodies from bytes, strictly, and writes them.
package h1

import (
	"fmt"
	"net/http"
)

// Bounds on what is read. A longer message is refused.
const (
	MaxHead     = 64 << 10
	MaxFields   = 256
	MaxTarget   = 16 << 10
	MaxTrailers = 16 << 10
)

// Error says what is wrong with a message, and the status with which to refuse it if it is a request.
type Error struct {
	Status int
	Detail string
}

func (e *Error) Error() string { return e.Detail }

func bad(format string, args ...any) *Error {
	return &Error{Status: http.StatusBadRequest, Detail: fmt.Sprintf(format, args...)}
}

// Field is a field of a head or a trailer. Its bytes are those that it was read from.
type Field struct {
	Name, Value []byte
	kind        kind
}

// kind says what a field means to whoever passes a message on.
type kind uint8

const (
	plain kind = iota
	hop        // concerns one connection only
	mesh       // concerns agents only
	framing
	host
	connection
	contentLength
	transferEncoding
	upgrade
	te
	expect
	announce // of trailers
	report   // ORCA
)

// Framing says how the end of a body is told.
type Framing uint8

const (
	None       Framing = iota // there is no body
	Length                    // by its length
	Chunked                   // by the chunk of length 0
	UntilClose                // by the end of the connection
)

// Field appends the value of the first field with a name, given in lower case.
func fieldOf(fields []Field, dst []byte, name string) ([]byte, bool) {
	for i := range fields {
		if f := &fields[i]; len(f.Name) == len(name) && equalFold(f.Name, name) {
			return append(dst, f.Value...), true
		}
	}
	return dst, false
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

// Is compares a name with one in lower case.
func Is(b []byte, lower string) bool { return is(b, lower) }

func is(b []byte, lower string) bool { return len(b) == len(lower) && equalFold(b, lower) }

func hasPrefix(b []byte, lower string) bool {
	return len(b) >= len(lower) && equalFold(b[:len(lower)], lower)
}

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
	case len(name) < 10:
		return plain
	case is(name, "connection"):
		return connection
	case is(name, "keep-alive"), is(name, "proxy-connection"):
		return hop
	case is(name, "content-length"):
		return contentLength
	case is(name, "transfer-encoding"):
		return transferEncoding
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

// The characters that tokens are made of (RFC 9110, 5.6.2), and those that targets and values may have in them, are marked
// in tables of 256 bytes.
const (
	row0      = "................................"
	tokens    = row0 + ".x.xxxxx..xx.xx.xxxxxxxxxx......" + ".xxxxxxxxxxxxxxxxxxxxxxxxxx...xx" + "xxxxxxxxxxxxxxxxxxxxxxxxxxx.x.x." + row0 + row0 + row0 + row0
	printable = row0 + allx + allx + "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx." + row0 + row0 + row0 + row0
	allx      = "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
	targets   = row0 + ".xx.xxxxxxxxxxxxxxxxxxxxxxxxxxxx" + "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx" + "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx." + allx + allx + allx + allx
	values    = ".........x......................" + allx + allx + "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx." + allx + allx + allx + allx
	hostChars = row0 + ".x..xxxxxxxxxxx.xxxxxxxxxxxx.x.." + ".xxxxxxxxxxxxxxxxxxxxxxxxxx....x" + ".xxxxxxxxxxxxxxxxxxxxxxxxxx...x." + row0 + row0 + row0 + row0
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

// AppendField appends a field line.
func AppendField(dst []byte, name string, value []byte) []byte {
	dst = append(dst, name...)
	dst = append(dst, ": "...)
	dst = append(dst, value...)
	return append(dst, "\r\n"...)
}
