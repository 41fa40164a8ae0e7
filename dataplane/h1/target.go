package h1

import (
	"bytes"
	"net/netip"
	"slices"
)

// settleTarget finds out whom the request is for (RFC 9112, 3.2).
func (r *Request) settleTarget() error {
	if r.hosts > 1 || r.hosts == 0 && r.Minor == 1 {
		return bad("there are %d Host fields, where there must be one", r.hosts)
	}
	if len(r.host) > 0 && !validHost(r.host) {
		return bad("Host is malformed: %.60q", r.host)
	}
	r.Authority, r.Path = r.host, r.Target
	switch {
	case string(r.Method) == "CONNECT":
		return r.settleAuthorityForm()
	case r.Target[0] == '/':
	case string(r.Target) == "*" && string(r.Method) == "OPTIONS":
	default:
		if err := r.settleAbsoluteForm(); err != nil {
			return err
		}
	}
	if !validEscapes(r.Path) {
		return bad("the path has a %% without two digits: %.60q", r.Path)
	}
	return nil
}

func (r *Request) settleAuthorityForm() error {
	if !validHost(r.Target) || bytes.LastIndexByte(r.Target, ':') <= bytes.LastIndexByte(r.Target, ']') {
		return bad("the target of CONNECT is not HOST:PORT: %.60q", r.Target)
	}
	if r.Framing != None && (r.Framing != Length || r.Length > 0) {
		return bad("CONNECT has a body")
	}
	r.aim(r.Target)
	r.Path = nil
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
	if !validHost(rest[:end]) {
		return bad("the target names no valid host: %.60q", r.Target)
	}
	r.aim(rest[:end])
	r.Path = rest[end:]
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

// aim lets the request be for whom the target says. If Host says something else, that must be ignored, and Host made anew
// (RFC 9112, 3.2.2).
func (r *Request) aim(authority []byte) {
	r.Authority = authority
	if bytes.Equal(authority, r.host) {
		return
	}
	for i := range r.Fields {
		if r.Fields[i].kind == host {
			r.Fields[i].kind = hop
		}
	}
	r.hosts = 0
}

// validEscapes reports whether each % in the path is followed by two digits: servers disagree on what else it means.
func validEscapes(path []byte) bool {
	if query := bytes.IndexByte(path, '?'); query >= 0 {
		path = path[:query]
	}
	for {
		at := bytes.IndexByte(path, '%')
		if at < 0 {
			return true
		}
		if len(path) < at+3 || unhex(path[at+1]) < 0 || unhex(path[at+2]) < 0 {
			return false
		}
		path = path[at+3:]
	}
}

// validHost reports whether b is a name or an address of IPv6 in brackets, and perhaps a port (RFC 3986, 3.2.2).
func validHost(b []byte) bool {
	end := bytes.IndexByte(b, ':')
	if len(b) > 0 && b[0] == '[' {
		end = bytes.IndexByte(b, ']') + 1
		if end == 0 || !validIPv6(b[1:end-1]) {
			return false
		}
	} else {
		if end < 0 {
			end = len(b)
		}
		if end == 0 || !all(b[:end], hosts) {
			return false
		}
	}
	return end == len(b) || b[end] == ':' && validPort(b[end+1:])
}

func validIPv6(b []byte) bool {
	a, err := netip.ParseAddr(string(b))
	return err == nil && a.Is6() && a.Zone() == ""
}

func validPort(b []byte) bool {
	if len(b) == 0 || len(b) > 5 {
		return false
	}
	n := 0
	for _, c := range b {
		if !isDigit(c) {
			return false
		}
		n = 10*n + int(c-'0')
	}
	return n <= 65535
}
