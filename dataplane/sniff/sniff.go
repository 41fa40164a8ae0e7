// Package sniff tells protocols by the first bytes of a connection.
package sniff

import (
	"bytes"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"time"
)

// Protocol is what the first bytes look like.
type Protocol int

const (
	More   Protocol = iota // too few bytes to tell
	HTTP1                  // a request line of HTTP/1
	HTTP2                  // the preface of HTTP/2
	TLS                    // a ClientHello
	Opaque                 // anything else
)

// preface begins a connection of HTTP/2 (RFC 9113, 3.4).
const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

// maxLine is how long a request line may be to be taken for one.
const maxLine = 16 << 10

// Detect tells the protocol of a connection that begins with b.
func Detect(b []byte) Protocol {
	switch {
	case len(b) == 0:
		return More
	case bytes.HasPrefix([]byte(preface), b[:min(len(b), len(preface))]):
		if len(b) < len(preface) {
			return More
		}
		return HTTP2
	case b[0] == 0x16: // a handshake record
		return record(b)
	}
	return requestLine(b)
}

func record(b []byte) Protocol {
	switch {
	case len(b) >= 2 && b[1] != 3, len(b) >= 6 && b[5] != 1: // no version of TLS, no ClientHello
		return Opaque
	case len(b) < 6:
		return More
	}
	return TLS
}

// requestLine wants a method, and a version of HTTP/1 at the end of the line.
func requestLine(b []byte) Protocol {
	for i, c := range b {
		if c == ' ' && i > 0 {
			break
		}
		if (c < 'A' || c > 'Z') && c != '-' && c != '_' || i >= 32 {
			return Opaque
		}
	}
	line, _, complete := bytes.Cut(b[:min(len(b), maxLine)], []byte("\n"))
	switch {
	case !complete && len(b) < maxLine:
		return More
	case !complete:
		return Opaque
	}
	line = bytes.TrimSuffix(line, []byte("\r"))
	if at := bytes.LastIndexByte(line, ' '); at > 0 && bytes.HasPrefix(line[at+1:], []byte("HTTP/1.")) {
		return HTTP1
	}
	return Opaque
}

// maxHello bounds the bytes of a ClientHello.
const maxHello = 16 << 10

var (
	errMore = errors.New("the ClientHello is not complete")
	errSeen = errors.New("seen")
)

// ServerName returns the name that the ClientHello which b begins with asks for (SNI), "" if none. It returns More until
// the ClientHello is complete, and Opaque if it is none.
func ServerName(b []byte) (name string, p Protocol) {
	config := &tls.Config{GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		name = hello.ServerName
		return nil, errSeen
	}}
	err := tls.Server(&replay{left: b[:min(len(b), maxHello)]}, config).Handshake()
	switch {
	case errors.Is(err, errSeen):
		return name, TLS
	case errors.Is(err, errMore) && len(b) < maxHello:
		return "", More
	}
	return "", Opaque
}

// replay is a connection that has said something, and waits.
type replay struct {
	net.Conn
	left []byte
}

func (r *replay) Read(p []byte) (int, error) {
	if len(r.left) == 0 {
		return 0, errMore
	}
	n := copy(p, r.left)
	r.left = r.left[n:]
	return n, nil
}

func (r *replay) Write(p []byte) (int, error)      { return 0, io.ErrClosedPipe }
func (r *replay) SetWriteDeadline(time.Time) error { return nil }
func (r *replay) Close() error                     { return nil }
