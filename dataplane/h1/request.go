package h1

import "bytes"

// Request is the head of a request. It can be used again for another one, and then allocates nothing.
type Request struct {
	head
	Method, Target []byte
	// Authority is who the request is for: what the target says, or else the field Host.
	Authority []byte
	// Path is the target in origin form, with its query; "*" and, for CONNECT, nothing are possible.
	Path []byte
}

// Parse reads the head that b begins with, and returns its length; 0 if more of it is to come. What is read refers to b. The
// error is an *Error, and comes as soon as a line is there that is wrong.
func (r *Request) Parse(b []byte) (n int, err error) {
	r.reset()
	at := 0
	if len(b) > 0 && b[0] == '\r' {
		if len(b) == 1 {
			return 0, nil
		}
		if b[1] == '\n' {
			at = 2 // an empty line before a request is tolerated (RFC 9112, 2.2)
		}
	}
	if at < len(b) && tokens[b[at]] != 'x' {
		return 0, bad("the request does not begin with a method: %.20q", b[at:])
	}
	first, next, err := cutLine(b, at, at+maxRequestLine)
	switch {
	case err != nil:
		return 0, err
	case next < 0:
		return 0, targetTooLong()
	case next == 0:
		return 0, nil
	}
	if err := r.readLine(first); err != nil {
		return 0, err
	}
	n, err = r.readFields(b, next)
	if n == 0 || err != nil {
		return 0, err
	}
	if err := r.settleTarget(); err != nil {
		return 0, err
	}
	return n, nil
}

func targetTooLong() *Error {
	return &Error{statusTargetTooLong, "the target is longer than 16384 bytes"}
}

func (r *Request) readLine(l []byte) error {
	space := bytes.IndexByte(l, ' ')
	last := bytes.LastIndexByte(l, ' ')
	if space == last || !isToken(l[:space]) || last == space+1 {
		return bad("the request line is malformed: %.60q", l)
	}
	r.Method, r.Target = l[:space], l[space+1:last]
	if len(r.Target) > MaxTarget {
		return targetTooLong()
	}
	if !all(r.Target, target) {
		return bad("the target has a character in it that must be encoded: %.60q", r.Target)
	}
	var err error
	r.Minor, err = readVersion(l[last+1:])
	return err
}

// Append appends the head as it is to be sent on, in origin form, without the fields for one connection and those for
// agents, and without the empty line at its end.
func (r *Request) Append(dst []byte) []byte {
	dst = append(dst, r.Method...)
	dst = append(dst, ' ')
	if r.Path == nil {
		dst = append(dst, r.Target...)
	} else {
		dst = append(dst, r.Path...)
	}
	dst = append(dst, " HTTP/1.1\r\n"...)
	if r.hosts == 0 {
		dst = AppendField(dst, "Host", r.Authority)
	}
	dst = r.appendFields(dst)
	dst = appendFraming(dst, r.Framing, r.Length)
	switch {
	case r.Upgrade != nil && r.TakesTrailers:
		dst = append(dst, "Connection: Upgrade, TE\r\nTE: trailers\r\n"...)
	case r.Upgrade != nil:
		dst = append(dst, "Connection: Upgrade\r\n"...)
	case r.TakesTrailers:
		dst = append(dst, "Connection: TE\r\nTE: trailers\r\n"...)
	}
	if r.Upgrade != nil {
		dst = AppendField(dst, "Upgrade", r.Upgrade)
	}
	return dst
}

// Idempotent reports whether sending a request with a method twice does what sending it once does (RFC 9110, 9.2.2).
func Idempotent[T string | []byte](method T) bool {
	switch string(method) {
	case "GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE":
		return true
	}
	return false
}
