package h1

import (
	"bytes"
	"strconv"
)

// Framing says how the end of a body is told.
type Framing uint8

const (
	None       Framing = iota // there is no body
	Length                    // by its length
	Chunked                   // by the chunk of length 0
	UntilClose                // by the end of the connection
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

	said
}

// said is what single fields say.
type said struct {
	chunked  bool
	declared int64 // Content-Length; -1: none
	length   []byte
	host     []byte
	hosts    int

	options  int // of Connection
	close    bool
	open     bool
	upgrades bool
	named    bool // Connection names other fields
}

// Field appends the value of the first field with a name, given in lower case, to dst.
func (h *head) Field(dst []byte, name string) ([]byte, bool) { return fieldOf(h.Fields, dst, name) }

// Drop keeps the fields with a name, given in lower case, from being sent on.
func (h *head) Drop(name string) {
	for i := range h.Fields {
		if f := &h.Fields[i]; f.kind == plain && is(f.Name, name) {
			f.kind = hop
		}
	}
}

func (h *head) reset() {
	*h = head{Fields: h.Fields[:0], said: said{declared: -1}}
}

// readFields reads the field lines from an offset on, to the empty one, and returns where they end; 0 if more is to come.
func (h *head) readFields(b []byte, at int) (n int, err error) {
	for {
		l, next, err := cutLine(b, at, MaxHead)
		switch {
		case err != nil:
			return 0, err
		case next < 0:
			return 0, headTooLong()
		case next == 0:
			return 0, nil
		case len(l) == 0:
			return next, h.settle()
		}
		if err := h.add(l); err != nil {
			return 0, err
		}
		at = next
	}
}

func headTooLong() *Error {
	return &Error{statusHeadTooLarge, "the head is longer than 65536 bytes"}
}

// add takes in a field line.
func (h *head) add(l []byte) error {
	if len(h.Fields) == MaxFields {
		return &Error{statusHeadTooLarge, "there are more than 256 fields"}
	}
	f, err := readField(l)
	if err != nil {
		return err
	}
	h.Fields = append(h.Fields, f)
	if f.kind == plain {
		return nil
	}
	return h.note(&f)
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
		return h.noteCoding(f.Value)
	case connection:
		return h.noteConnection(f.Value)
	case upgrade:
		return h.noteUpgrade(f.Value)
	case te:
		for element := range bytes.SplitSeq(f.Value, []byte(",")) {
			h.TakesTrailers = h.TakesTrailers || is(trim(element), "trailers")
		}
	case announce:
		return checkAnnouncement(f.Value)
	case disguise:
		return bad("field %s may pass for one that frames the body", f.Name)
	}
	return nil
}

// noteLength takes in Content-Length, which may be there twice if it says the same.
func (h *head) noteLength(v []byte) error {
	if len(v) == 0 || len(v) > 18 {
		return bad("Content-Length is no number of up to 18 digits: %.40q", v)
	}
	var n int64
	for _, c := range v {
		if !isDigit(c) {
			return bad("Content-Length is no number: %.40q", v)
		}
		n = 10*n + int64(c-'0')
	}
	if h.declared >= 0 && !bytes.Equal(v, h.length) {
		return bad("there are two values of Content-Length")
	}
	h.declared, h.length = n, v
	return nil
}

// noteCoding takes in Transfer-Encoding. Unless it ends with chunked nobody knows where the body ends (RFC 9112, 6.3).
func (h *head) noteCoding(v []byte) error {
	if h.chunked {
		return bad("there is more than one Transfer-Encoding field")
	}
	if h.chunked = is(v, "chunked"); h.chunked {
		return nil
	}
	last, chunks := v, 0
	for coding := range bytes.SplitSeq(v, []byte(",")) {
		if last = trim(coding); !isToken(last) {
			return bad("Transfer-Encoding is malformed: %.40q", v)
		}
		if is(last, "chunked") {
			chunks++
		}
	}
	if chunks != 1 || !is(last, "chunked") {
		return bad("Transfer-Encoding does not end with chunked, once: %.40q", v)
	}
	return &Error{statusNotImplemented, "Transfer-Encoding has more in it than chunked"}
}

// noteConnection takes in the options of a Connection field.
func (h *head) noteConnection(v []byte) error {
	for option := range bytes.SplitSeq(v, []byte(",")) {
		if h.options++; h.options > maxOptions {
			return bad("Connection has more than 64 options")
		}
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

func (h *head) noteUpgrade(v []byte) error {
	if h.Upgrade != nil {
		return bad("there is more than one Upgrade field")
	}
	for protocol := range bytes.SplitSeq(v, []byte(",")) {
		name, version, versioned := bytes.Cut(trim(protocol), []byte("/"))
		if !isToken(name) || versioned && !isToken(version) {
			return bad("Upgrade is malformed: %.40q", v)
		}
		// h2c would hide further requests from whoever routes them; RFC 9113 has dropped it.
		if is(name, "h2c") {
			return nil
		}
	}
	h.Upgrade = v
	return nil
}

// checkAnnouncement wants Trailer to name fields that may be trailers.
func checkAnnouncement(v []byte) error {
	for name := range bytes.SplitSeq(v, []byte(",")) {
		if name = trim(name); len(name) > 0 && !isToken(name) {
			return bad("Trailer has something else than names in it: %.40q", v)
		}
		if !mayTrail(kindOf(name)) {
			return bad("field %.40s must not be a trailer", name)
		}
	}
	return nil
}

// settle concludes what the fields say together.
func (h *head) settle() error {
	if h.named {
		h.dropNamed()
	}
	switch {
	case h.chunked && h.declared >= 0:
		return bad("there are both Content-Length and Transfer-Encoding")
	case h.chunked && h.Minor == 0:
		return bad("Transfer-Encoding came with HTTP/1.0")
	case h.chunked:
		h.Framing = Chunked
	case h.declared >= 0:
		h.Framing, h.Length = Length, h.declared
	}
	h.KeepAlive = !h.close && (h.Minor == 1 || h.open)
	if !h.upgrades || h.Minor == 0 {
		h.Upgrade = nil
	}
	return nil
}

// dropNamed marks the fields that Connection names, for this connection only. What routes and frames the message can't be
// dropped.
func (h *head) dropNamed() {
	for i := range h.Fields {
		if f := &h.Fields[i]; f.kind == plain && h.names(f.Name) {
			f.kind = hop
		}
	}
}

// names reports whether Connection names a field.
func (h *head) names(field []byte) bool {
	for i := range h.Fields {
		if h.Fields[i].kind != connection {
			continue
		}
		for option := range bytes.SplitSeq(h.Fields[i].Value, []byte(",")) {
			if bytes.EqualFold(trim(option), field) {
				return true
			}
		}
	}
	return false
}

// readVersion reads the version of HTTP.
func readVersion(b []byte) (minor int, err error) {
	switch string(b) {
	case "HTTP/1.1":
		return 1, nil
	case "HTTP/1.0":
		return 0, nil
	}
	if len(b) == 8 && string(b[:5]) == "HTTP/" && isDigit(b[5]) && b[6] == '.' && isDigit(b[7]) {
		return 0, &Error{statusVersionNotSupported, "the version is not HTTP/1.0 or HTTP/1.1"}
	}
	return 0, bad("the version of HTTP is malformed: %.40q", b)
}

func isDigit(c byte) bool { return '0' <= c && c <= '9' }

// appendFields appends the fields that are for the other end, too.
func (h *head) appendFields(dst []byte) []byte {
	for i := range h.Fields {
		switch f := &h.Fields[i]; f.kind {
		case plain, host, expect:
			dst = appendField(dst, f)
		case announce:
			start := len(dst)
			dst = append(append(dst, f.Name...), ": "...)
			named := len(dst)
			if dst = appendAnnounced(dst, f.Value); len(dst) == named {
				dst = dst[:start]
			} else {
				dst = append(dst, "\r\n"...)
			}
		}
	}
	return dst
}

// Passed calls yield with the fields that are for the other end too, but for those that frame the body.
func (h *head) Passed(yield func(name, value []byte) bool) {
	for i := range h.Fields {
		f := &h.Fields[i]
		value := f.Value
		switch f.kind {
		case plain, host, expect:
		case announce:
			if value = appendAnnounced(nil, value); len(value) == 0 {
				continue
			}
		default:
			continue
		}
		if !yield(f.Name, value) {
			return
		}
	}
}

// appendAnnounced appends the names of the trailers that are for the other end.
func appendAnnounced(dst, value []byte) []byte {
	names := 0
	for name := range bytes.SplitSeq(value, []byte(",")) {
		if name = trim(name); len(name) == 0 || kindOf(name) != plain || onlyInHeads(name) {
			continue
		}
		if names++; names > 1 {
			dst = append(dst, ", "...)
		}
		dst = append(dst, name...)
	}
	return dst
}

// appendFraming appends the field that tells how the body ends.
func appendFraming(dst []byte, f Framing, length int64) []byte {
	switch f {
	case Length:
		dst = append(dst, "Content-Length: "...)
		dst = strconv.AppendInt(dst, length, 10)
		dst = append(dst, "\r\n"...)
	case Chunked:
		dst = append(dst, "Transfer-Encoding: chunked\r\n"...)
	}
	return dst
}
