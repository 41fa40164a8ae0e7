package h1

import (
	"bytes"
	"net/http"
	"slices"
)

// Request is the head of a request. It can be used again for another one, and then allocates nothing.
type Request struct {
	head
	Method, Target []byte
	// Authority is who the request is for: what the target says, or else the field Host.
	Authority []byte
	// Path is the target in origin form, with its query; "*" and, for CONNECT, nothing are possible.
	Path []byte
}

// Parse reads the head that b begins with, and returns its length; 0 if more of it is to come. Until it is complete, b is
// to begin with the same bytes each time. What is read refers to b. The error is an *Error.
func (r *Request) Parse(b []byte) (n int, err error) {
	skip := 0
	if len(b) >= 2 && b[0] == '\r' && b[1] == '\n' {
		skip = 2 // an empty line before a request is tolerated (RFC 9112, 2.2)
	}
	n, err = r.find(b[skip:])
	if n == 0 || err != nil {
		if err != nil {
			r.searched = 0
		}
		return 0, err
	}
	b = b[skip : skip+n]
	r.reset()
	r.searched = 0
	first, rest := line(b)
	if err := r.readLine(first); err != nil {
		return 0, err
	}
	if err := r.readFields(rest); err != nil {
		return 0, err
	}
	if err := r.settle(); err != nil {
		return 0, err
	}
	if err := r.settleTarget(); err != nil {
		return 0, err
	}
	if !validEscapes(r.Path) {
		return 0, bad("the path has a %% without two digits: %.60q", r.Path)
	}
	return skip + n, nil
}

func (r *Request) readLine(l []byte) error {
	method, rest, ok1 := bytes.Cut(l, []byte(" "))
	target, v, ok2 := bytes.Cut(rest, []byte(" "))
	if !ok1 || !ok2 || !isToken(method) || len(target) == 0 {
		return bad("the request line is malformed: %.60q", l)
	}
	if len(target) > MaxTarget {
		return &Error{http.StatusRequestURITooLong, "the target is longer than 16384 bytes"}
	}
	if !all(target, targets) {
		return bad("the target has a character in it that must be encoded: %.60q", target)
	}
	var err error
	r.Method, r.Target = method, target
	r.Minor, err = version(v)
	return err
}

// settleTarget finds out whom the request is for.
func (r *Request) settleTarget() error {
	if r.hosts > 1 || r.hosts == 0 && r.Minor == 1 {
		return bad("there are %d Host fields, where there must be one", r.hosts)
	}
	if !validHost(r.host) {
		return bad("Host is malformed: %.60q", r.host)
	}
	r.Authority, r.Path = r.host, r.Target
	switch {
	case string(r.Method) == "CONNECT":
		return r.settleAuthorityForm()
	case r.Target[0] == '/':
		return nil
	case string(r.Target) == "*" && string(r.Method) == "OPTIONS":
		return nil
	}
	return r.settleAbsoluteForm()
}

func (r *Request) settleAuthorityForm() error {
	colon := bytes.LastIndexByte(r.Target, ':')
	if colon <= 0 || !validHost(r.Target) || colon == len(r.Target)-1 {
		return bad("the target of CONNECT is not HOST:PORT: %.60q", r.Target)
	}
	if r.Framing != None && (r.Framing != Length || r.Length > 0) {
		return bad("CONNECT has a body")
	}
	r.Authority, r.Path = r.Target, nil
	return nil
}

func (r *Request) settleAbsoluteForm() error {
	scheme, rest, ok := bytes.Cut(r.Target, []byte("://"))
	if !ok || !is(scheme, "http") && !is(scheme, "https") {
		return bad("the target is neither a path nor a URL of HTTP: %.60q", r.Target)
	}
	end := bytes.IndexAny(rest, "/?")
	if end < 0 {
		end = len(rest)
	}
	r.Authority, r.Path = rest[:end], rest[end:]
	if len(r.Authority) == 0 || !validHost(r.Authority) {
		return bad("the target names no valid host: %.60q", r.Target)
	}
	if !bytes.Equal(r.Authority, r.host) {
		r.dropHost() // the target counts (RFC 9112, 3.2.2)
	}
	switch {
	case len(r.Path) == 0 && string(r.Method) == "OPTIONS":
		r.Path = []byte("*")
	case len(r.Path) == 0:
		r.Path = []byte("/")
	case r.Path[0] == '?':
		r.Path = slices.Concat([]byte("/"), r.Path)
	}
	return nil
}

// dropHost lets the field Host be made anew.
func (r *Request) dropHost() {
	for i := range r.Fields {
		if r.Fields[i].kind == host {
			r.Fields[i].kind = hop
		}
	}
	r.hosts = 0
}

// validEscapes reports whether each % in the path is followed by two digits: servers disagree on what else it means.
func validEscapes(path []byte) bool {
	for {
		at := bytes.IndexAny(path, "%?")
		if at < 0 || path[at] == '?' {
			return true
		}
		if len(path) < at+3 || unhex(path[at+1]) < 0 || unhex(path[at+2]) < 0 {
			return false
		}
		path = path[at+3:]
	}
}

// validHost reports whether b is a host, and a port if it ends with one (RFC 3986, 3.2.2). An empty one is valid.
func validHost(b []byte) bool {
	if len(b) == 0 {
		return true
	}
	name, port := b, []byte(nil)
	if b[0] == '[' {
		end := bytes.IndexByte(b, ']')
		if end < 3 || !all(b[1:end], hostChars) {
			return false
		}
		if end+1 < len(b) && b[end+1] != ':' {
			return false
		}
		name, port = b[1:end], b[min(end+2, len(b)):]
	} else if colon := bytes.IndexByte(b, ':'); colon >= 0 {
		name, port = b[:colon], b[colon+1:]
		if bytes.IndexByte(port, ':') >= 0 {
			return false
		}
	}
	if len(name) == 0 || !all(name, hostChars) || len(port) > 5 {
		return false
	}
	if b[0] != '[' && bytes.ContainsAny(name, "[]:") {
		return false
	}
	for _, c := range port {
		if c < '0' || c > '9' {
			return false
		}
	}
	return true
}

// ExpectsContinue reports whether the caller waits for 100 before it sends the body.
func (r *Request) ExpectsContinue() bool {
	for i := range r.Fields {
		if f := &r.Fields[i]; f.kind == expect && is(f.Value, "100-continue") {
			return true
		}
	}
	return false
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
	dst = r.appendFraming(dst, r.Framing, r.Length)
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

// Idempotent reports whether sending the request twice does what sending it once does (RFC 9110, 9.2.2).
func (r *Request) Idempotent() bool {
	switch string(r.Method) {
	case "GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE":
		return true
	}
	return false
}
