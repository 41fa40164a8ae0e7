package h1

import (
	"bytes"
	"net/http"
)

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
	n, err = r.find(b)
	if n == 0 || err != nil {
		if err != nil {
			r.searched = 0
		}
		return 0, err
	}
	r.reset()
	r.searched = 0
	first, rest := line(b[:n])
	if err := r.readLine(first); err != nil {
		return 0, err
	}
	if err := r.readFields(rest); err != nil {
		return 0, err
	}
	if err := r.settle(); err != nil {
		return 0, err
	}
	r.settleBody(method)
	return n, nil
}

func (r *Response) readLine(l []byte) error {
	v, rest, ok := bytes.Cut(l, []byte(" "))
	code, reason, _ := bytes.Cut(rest, []byte(" "))
	if !ok || len(code) != 3 || code[0] < '1' || code[0] > '9' || !digit(code[1]) || !digit(code[2]) {
		return bad("the status line is malformed: %.60q", l)
	}
	if !all(reason, values) {
		return bad("the status line has a control character in it")
	}
	r.Code, r.Reason = 100*int(code[0]-'0')+10*int(code[1]-'0')+int(code[2]-'0'), reason
	var err error
	r.Minor, err = version(v)
	return err
}

func digit(c byte) bool { return '0' <= c && c <= '9' }

// settleBody finds out whether there is a body (RFC 9112, 6.3).
func (r *Response) settleBody(method []byte) {
	switch {
	case r.Code < 200, r.Code == http.StatusNoContent, r.Code == http.StatusNotModified, string(method) == "HEAD",
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
	if body == None && r.declared >= 0 && r.Code >= 200 && r.Code != http.StatusNoContent {
		body = Length // of what there would be
	}
	return r.appendFraming(dst, body, r.declared)
}
