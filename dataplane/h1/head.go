package h1

import (
	"bytes"
	"net/http"
	"slices"
	"strconv"
)

// head is what requests and responses have in common.
type head struct {
	Minor  int // of the version, HTTP/1.Minor
	Fields []Field

	Framing Framing
	Length  int64 // of the body if Framing is Length
	// KeepAlive is whether the connection is to stay open after the message.
	KeepAlive bool
	// Upgrade is the protocol to change to; nil if that is not wanted.
	Upgrade []byte
	// TakesTrailers is whether the field TE says so.
	TakesTrailers bool

	searched int // bytes among which the end of the head was looked for
	chunked  bool
	lengths  int
	declared int64 // Content-Length; -1: none
	close    bool
	open     bool
	upgrades bool // Connection says so
	te       bool
	hosts    int
	host     []byte
	named    bool // Connection names other fields
}

// Field appends the value of the first field with a name, given in lower case, to dst.
func (h *head) Field(dst []byte, name string) ([]byte, bool) { return fieldOf(h.Fields, dst, name) }

func (h *head) reset() {
	*h = head{Fields: h.Fields[:0], declared: -1, searched: h.searched}
}

// find returns the length of the head that b begins with, 0 if it is not complete. Lines end with CR LF.
func (h *head) find(b []byte) (n int, err error) {
	at := h.searched
	for {
		i := bytes.IndexByte(b[at:], '\n')
		if i < 0 {
			h.searched = at
			if len(b) > MaxHead {
				return 0, &Error{http.StatusRequestHeaderFieldsTooLarge, "the head is longer than 65536 bytes"}
			}
			return 0, nil
		}
		at += i + 1
		if at < 2 || b[at-2] != '\r' {
			return 0, bad("a line ends with LF alone")
		}
		if at >= 3 && b[at-3] == '\n' {
			h.searched = 0
			if at > MaxHead {
				return 0, &Error{http.StatusRequestHeaderFieldsTooLarge, "the head is longer than 65536 bytes"}
			}
			return at, nil
		}
	}
}

// line cuts the first line off b, which has one.
func line(b []byte) (line, rest []byte) {
	i := bytes.IndexByte(b, '\n')
	return b[:i-1], b[i+1:]
}

// readFields reads the field lines up to the empty one.
func (h *head) readFields(b []byte) error {
	for {
		var l []byte
		l, b = line(b)
		if len(l) == 0 {
			break
		}
		if len(h.Fields) == MaxFields {
			return &Error{http.StatusRequestHeaderFieldsTooLarge, "there are more than 256 fields"}
		}
		f, err := readField(l)
		if err != nil {
			return err
		}
		if f.kind != plain {
			if err := h.note(&f); err != nil {
				return err
			}
		}
		h.Fields = append(h.Fields, f)
	}
	if h.named {
		h.dropNamed()
	}
	return nil
}

func readField(l []byte) (f Field, err error) {
	if l[0] == ' ' || l[0] == '\t' {
		return f, bad("a line is folded")
	}
	colon := bytes.IndexByte(l, ':')
	if colon < 0 {
		return f, bad("a field line has no colon: %.40q", l)
	}
	f.Name, f.Value = l[:colon], trim(l[colon+1:])
	if !isToken(f.Name) {
		return f, bad("the name of a field is no token: %.40q", f.Name)
	}
	if !all(f.Value, values) {
		return f, bad("field %s has a control character in it", f.Name)
	}
	f.kind = kindOf(f.Name)
	return f, nil
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

// note takes in a field that says how the message is to be read.
func (h *head) note(f *Field) error {
	switch f.kind {
	case host:
		h.hosts++
		h.host = f.Value
	case contentLength:
		return h.noteLength(f.Value)
	case transferEncoding:
		if h.chunked || !is(f.Value, "chunked") {
			return &Error{http.StatusNotImplemented, "Transfer-Encoding is something else than chunked, once"}
		}
		h.chunked = true
	case connection:
		return h.noteConnection(f.Value)
	case upgrade:
		if h.Upgrade != nil {
			return bad("there is more than one Upgrade field")
		}
		if !all(f.Value, printable) {
			return bad("Upgrade is not plain ASCII: %.40q", f.Value)
		}
		h.Upgrade = f.Value
	case te:
		h.te = h.te || is(f.Value, "trailers")
	}
	return nil
}

func (h *head) noteLength(v []byte) error {
	if len(v) == 0 || len(v) > 18 {
		return bad("Content-Length is no number of up to 18 digits: %.40q", v)
	}
	var n int64
	for _, c := range v {
		if c < '0' || c > '9' {
			return bad("Content-Length is no number: %.40q", v)
		}
		n = 10*n + int64(c-'0')
	}
	if h.lengths > 0 && n != h.declared {
		return bad("there are two values of Content-Length")
	}
	h.lengths++
	h.declared = n
	return nil
}

// noteConnection takes in the options of a Connection field.
func (h *head) noteConnection(v []byte) error {
	for option := range bytes.SplitSeq(v, []byte(",")) {
		option = trim(option)
		switch {
		case len(option) == 0:
		case !isToken(option):
			return bad("Connection has something else than tokens in it: %.40q", v)
		case is(option, "close"):
			h.close = true
		case is(option, "keep-alive"):
			h.open = true
		case is(option, "upgrade"):
			h.upgrades = true
		default:
			h.named = true
		}
	}
	return nil
}

// dropNamed marks the fields that Connection names, for this connection only. What routes and frames the message can't be
// dropped.
func (h *head) dropNamed() {
	for i := range h.Fields {
		f := &h.Fields[i]
		if (f.kind == plain || f.kind == report) && h.names(f.Name) {
			f.kind = hop
		}
	}
}

func (h *head) names(field []byte) bool {
	return slices.ContainsFunc(h.Fields, func(c Field) bool {
		if c.kind != connection {
			return false
		}
		for option := range bytes.SplitSeq(c.Value, []byte(",")) {
			if bytes.EqualFold(trim(option), field) {
				return true
			}
		}
		return false
	})
}

// settle concludes what the fields say together.
func (h *head) settle() error {
	switch {
	case h.chunked && h.lengths > 0:
		return bad("there are both Content-Length and Transfer-Encoding")
	case h.chunked && h.Minor == 0:
		return bad("Transfer-Encoding came with HTTP/1.0")
	case h.chunked:
		h.Framing = Chunked
	case h.lengths > 0:
		h.Framing, h.Length = Length, h.declared
	}
	h.KeepAlive = !h.close && (h.Minor == 1 || h.open)
	if !h.upgrades {
		h.Upgrade = nil
	}
	h.TakesTrailers = h.te
	return nil
}

// version reads what follows "HTTP/".
func version(b []byte) (minor int, err error) {
	switch string(b) {
	case "HTTP/1.1":
		return 1, nil
	case "HTTP/1.0":
		return 0, nil
	}
	if len(b) == 8 && string(b[:5]) == "HTTP/" && b[6] == '.' {
		return 0, &Error{http.StatusHTTPVersionNotSupported, "the version is not HTTP/1.0 or HTTP/1.1"}
	}
	return 0, bad("the version of HTTP is malformed: %.40q", b)
}

// appendFields appends the fields that are for the other end, too.
func (h *head) appendFields(dst []byte) []byte {
	for i := range h.Fields {
		f := &h.Fields[i]
		switch f.kind {
		case plain, host, expect:
		case announce:
			dst = appendAnnouncement(dst, f)
			continue
		default:
			continue
		}
		dst = append(dst, f.Name...)
		dst = append(dst, ": "...)
		dst = append(dst, f.Value...)
		dst = append(dst, "\r\n"...)
	}
	return dst
}

// appendAnnouncement announces the trailers that are for the other end.
func appendAnnouncement(dst []byte, f *Field) []byte {
	start, names := len(dst), 0
	dst = append(append(dst, f.Name...), ": "...)
	for name := range bytes.SplitSeq(f.Value, []byte(",")) {
		if name = trim(name); len(name) == 0 || kindOf(name) == mesh || kindOf(name) == report {
			continue
		}
		if names++; names > 1 {
			dst = append(dst, ", "...)
		}
		dst = append(dst, name...)
	}
	if names == 0 {
		return dst[:start]
	}
	return append(dst, "\r\n"...)
}

// appendFraming appends the fields that tell how the body ends, and those that concern the connection.
func (h *head) appendFraming(dst []byte, f Framing, length int64) []byte {
	switch {
	case f == Length && length >= 0:
		dst = append(dst, "Content-Length: "...)
		dst = strconv.AppendInt(dst, length, 10)
		dst = append(dst, "\r\n"...)
	case f == Chunked:
		dst = append(dst, "Transfer-Encoding: chunked\r\n"...)
	}
	return dst
}
