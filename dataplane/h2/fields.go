package h2

import (
	"math"
	"strings"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// fieldList is a list of fields as it is decoded, and what is wrong with it.
type fieldList struct {
	decoder   *hpack.Decoder
	fields    []hpack.HeaderField // memory that is used again
	bytes     int
	regular   bool // no more pseudo-fields may come
	tooLarge  bool
	malformed bool
}

func (l *fieldList) init() {
	l.decoder = hpack.NewDecoder(tableSize, l.add)
	l.decoder.SetMaxStringLength(2 * MaxHeaderBytes) // one that is too long is no error of coding
}

func (l *fieldList) reset() {
	if clear(l.fields); cap(l.fields) > 64 {
		l.fields = nil
	}
	*l = fieldList{decoder: l.decoder, fields: l.fields[:0]}
	l.decoder.SetEmitEnabled(true)
}

// add takes in a field. One that is too much, or malformed, is the last that is decoded.
func (l *fieldList) add(f hpack.HeaderField) {
	l.bytes += int(f.Size())
	l.tooLarge = l.bytes > MaxHeaderBytes || len(l.fields) == MaxFields
	pseudo := f.IsPseudo()
	l.malformed = pseudo && l.regular || !pseudo && !validField(f.Name) || !validValue(f.Value)
	l.regular = !pseudo
	if l.tooLarge || l.malformed {
		l.decoder.SetEmitEnabled(false)
		return
	}
	l.fields = append(l.fields, f)
}

// readFields decodes a list of fields, which may come in several frames, to its end.
func (c *Conn) readFields(f *http2.HeadersFrame) error {
	c.list.reset()
	fragment, done := f.HeaderBlockFragment(), f.HeadersEnded()
	size := 0
	for n := 1; ; n++ {
		if size += len(fragment); size > 2*MaxHeaderBytes || n > mostFragments {
			return http2.ConnectionError(http2.ErrCodeEnhanceYourCalm)
		}
		if _, err := c.list.decoder.Write(fragment); err != nil {
			return http2.ConnectionError(http2.ErrCodeCompression)
		}
		if done {
			break
		}
		next, err := c.reader.ReadFrame()
		if err != nil {
			return err
		}
		more := next.(*http2.ContinuationFrame) // the Framer takes nothing else
		fragment, done = more.HeaderBlockFragment(), more.HeadersEnded()
	}
	if c.list.decoder.Close() != nil {
		return http2.ConnectionError(http2.ErrCodeCompression)
	}
	return nil
}

// Tables of 256 bytes mark what names of fields are made of (RFC 9113, 8.2.1), and methods (RFC 9110, 5.6.2).
const (
	names   = none + ".x.xxxxx..xx.xx.xxxxxxxxxx......" + "..............................xx" + letters
	tokens  = none + ".x.xxxxx..xx.xx.xxxxxxxxxx......" + ".xxxxxxxxxxxxxxxxxxxxxxxxxx...xx" + letters
	none    = "................................"
	letters = "xxxxxxxxxxxxxxxxxxxxxxxxxxx.x.x." + none + none + none + none
)

func all(s, table string) bool {
	for i := range len(s) {
		if table[s[i]] != 'x' {
			return false
		}
	}
	return s != ""
}

// validField reports whether a field may be called so, in HTTP/2: there is none for a connection (RFC 9113, 8.2.2).
func validField(name string) bool {
	switch name {
	case "connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade":
		return false
	}
	return all(name, names)
}

// validValue refuses control characters, but for tabs, and spaces around (RFC 9113, 8.2.1).
func validValue(v string) bool {
	for i := range len(v) {
		if c := v[i]; c < ' ' && c != '\t' || c == 0x7f {
			return false
		}
	}
	return v == "" || !isSpace(v[0]) && !isSpace(v[len(v)-1])
}

func isSpace(c byte) bool { return c == ' ' || c == '\t' }

// request is what a list of fields says as the head of a request.
type request struct {
	method, scheme, authority, path string
	host                            string
	length                          int64 // -1: not declared
}

// readRequest reports whether fields are the head of a request (RFC 9113, 8.3.1).
func readRequest(fields []hpack.HeaderField) (r request, ok bool) {
	seen := 0
	for ; seen < len(fields) && fields[seen].IsPseudo(); seen++ {
		f := &fields[seen]
		part := r.pseudo(f.Name)
		if part == nil || *part != "" || f.Value == "" {
			return r, false // ":authority" may be empty in some schemes, but not in http
		}
		*part = f.Value
	}
	if r.length, r.host, ok = readRegular(fields[seen:]); !ok {
		return r, false
	}
	return r, all(r.method, tokens) && r.targeted()
}

func (r *request) pseudo(name string) *string {
	switch name {
	case ":method":
		return &r.method
	case ":scheme":
		return &r.scheme
	case ":authority":
		return &r.authority
	case ":path":
		return &r.path
	}
	return nil
}

// targeted reports whether it is clear, to everybody, where the request goes.
func (r *request) targeted() bool {
	if r.authority != "" && r.host != "" && !strings.EqualFold(r.authority, r.host) {
		return false
	}
	if strings.ContainsAny(r.authority, " \t@/?#\\,") || strings.ContainsAny(r.host, " \t@/?#\\,") {
		return false
	}
	if r.method == "CONNECT" {
		return r.authority != "" && r.scheme == "" && r.path == ""
	}
	if r.scheme == "" || r.path == "" || strings.ContainsAny(r.path, " \t#") {
		return false
	}
	return r.path[0] == '/' || r.path == "*" && r.method == "OPTIONS"
}

// readResponse reports whether fields are the head of a response (RFC 9113, 8.3.2), which is of HTTP/2.
func readResponse(fields []hpack.HeaderField) (status int, length int64, ok bool) {
	if len(fields) == 0 || fields[0].Name != ":status" || len(fields) > 1 && fields[1].IsPseudo() {
		return 0, 0, false
	}
	if status, ok = readStatus(fields[0].Value); !ok || status == 101 {
		return 0, 0, false
	}
	length, _, ok = readRegular(fields[1:])
	return status, length, ok
}

func readStatus(v string) (status int, ok bool) {
	if len(v) != 3 || v[0] < '1' || v[0] > '9' {
		return 0, false
	}
	n, ok := readLength(v)
	return int(n), ok
}

// readRegular reads the fields after the pseudo-fields that must not contradict others.
func readRegular(fields []hpack.HeaderField) (length int64, host string, ok bool) {
	length = -1
	for i := range fields {
		switch f := &fields[i]; f.Name {
		case "te":
			if f.Value != "trailers" {
				return 0, "", false
			}
		case "host":
			if host != "" || f.Value == "" {
				return 0, "", false
			}
			host = f.Value
		case "content-length":
			n, ok := readLength(f.Value)
			if !ok || length >= 0 && n != length {
				return 0, "", false
			}
			length = n
		}
	}
	return length, host, true
}

func readLength(v string) (n int64, ok bool) {
	for i := range len(v) {
		c := v[i]
		if c < '0' || c > '9' || n > (math.MaxInt64-9)/10 {
			return 0, false
		}
		n = 10*n + int64(c-'0')
	}
	return n, v != ""
}
