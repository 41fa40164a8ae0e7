package h1

// Response is the head of a response. It can be used again for another one, and then allocates nothing.
type Response struct {
	head
	Code   int
	Reason []byte
}

// Status returns the status code.
func (r *Response) Status() int { return r.Code }

// Parse reads the head that b begins with, in answer to a request with a method, and returns its length; 0 if more of it is
// to come. See Request.Parse.
func (r *Response) Parse(b, method []byte) (n int, err error) {
	r.reset()
	const prefix = "HTTP/1."
	if k := min(len(b), len(prefix)); string(b[:k]) != prefix[:k] {
		return 0, bad("the response does not begin with HTTP/1: %.40q", b)
	}
	first, next, err := cutLine(b, 0, MaxHead)
	switch {
	case err != nil:
		return 0, err
	case next < 0:
		return 0, headTooLong()
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
	r.settleBody(method)
	return n, nil
}

// readLine reads the status line. The space after the status is often left out with the reason.
func (r *Response) readLine(l []byte) error {
	const version = len("HTTP/1.1")
	if len(l) < version+4 || l[version] != ' ' || len(l) > version+4 && l[version+4] != ' ' {
		return bad("the status line is malformed: %.60q", l)
	}
	code, reason := l[version+1:version+4], l[min(version+5, len(l)):]
	if code[0] == '0' || !isDigit(code[0]) || !isDigit(code[1]) || !isDigit(code[2]) {
		return bad("the status line is malformed: %.60q", l)
	}
	if !printable(reason) {
		return bad("the status line has a control character in it")
	}
	r.Code, r.Reason = 100*int(code[0]-'0')+10*int(code[1]-'0')+int(code[2]-'0'), reason
	var err error
	r.Minor, err = readVersion(l[:version])
	return err
}

const (
	statusNoContent   = 204
	statusNotModified = 304
)

// settleBody finds out whether there is a body (RFC 9112, 6.3).
func (r *Response) settleBody(method []byte) {
	switch {
	case r.Code < 200, r.Code == statusNoContent, r.Code == statusNotModified, string(method) == "HEAD",
		string(method) == "CONNECT" && r.Code < 300:
		r.Framing, r.Length = None, 0
	case r.Framing == None:
		r.Framing, r.KeepAlive = UntilClose, false
	}
}

// Append appends the head as it is to be sent on, without the fields for one connection and those for agents, and without
// the empty line at its end. The body will be framed in a way that need not be that in which it comes.
func (r *Response) Append(dst []byte, body Framing) []byte {
	dst = append(dst, "HTTP/1.1 "...)
	dst = append(dst, byte('0'+r.Code/100), byte('0'+r.Code/10%10), byte('0'+r.Code%10), ' ')
	dst = append(dst, r.Reason...)
	dst = append(dst, "\r\n"...)
	dst = r.appendFields(dst)
	if body == None && r.declared >= 0 && r.Code >= 200 && r.Code != statusNoContent {
		body = Length // of what there would be
	}
	return appendFraming(dst, body, r.declared)
}
