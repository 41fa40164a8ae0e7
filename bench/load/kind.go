//go:build linux

package load

import (
	"errors"
	"fmt"
	"net/netip"
)

// Protocol is what callers and origin speak.
type Protocol string

const (
	HTTP1 Protocol = "h1"
	HTTP2 Protocol = "h2"
	TCP   Protocol = "tcp"
)

// Port is where hops and the origin listen for a protocol.
func (p Protocol) Port() uint16 {
	switch p {
	case HTTP1:
		return 8001
	case HTTP2:
		return 8002
	}
	return 8003
}

// Kind is a kind of call.
type Kind struct {
	Name     string
	Protocol Protocol
	// Connections are made, each for a number of calls at the same time.
	Connections, Calls int
	// Rate is how many calls a second are made when their latency is measured.
	Rate float64

	up, down  int // bytes, messages aside
	messages  int // of gRPC, each way
	newCaller func(*conn, Kind, string) caller
}

const (
	bulk        = 1 << 20
	messageSize = 5 + 128 // its head, and what it says
)

// Kinds returns all of them.
func Kinds() []Kind {
	return []Kind{
		{Name: "h1-128", Protocol: HTTP1, Connections: 50, Calls: 1, Rate: 2000, down: 128, newCaller: newH1Caller},
		{Name: "h1-10k", Protocol: HTTP1, Connections: 50, Calls: 1, Rate: 2000, down: 10 << 10, newCaller: newH1Caller},
		{Name: "down-1m", Protocol: HTTP1, Connections: 8, Calls: 1, Rate: 100, down: bulk, newCaller: newH1Caller},
		{Name: "up-1m", Protocol: HTTP1, Connections: 8, Calls: 1, Rate: 100, up: bulk, down: 128, newCaller: newH1Caller},
		{Name: "grpc-unary", Protocol: HTTP2, Connections: 10, Calls: 10, Rate: 2000, messages: 1, newCaller: newGRPCCaller},
		{Name: "grpc-stream", Protocol: HTTP2, Connections: 10, Calls: 10, Rate: 50, messages: 100, newCaller: newGRPCCaller},
		{Name: "tcp", Protocol: TCP, Connections: 8, Calls: 1, Rate: 100, down: bulk, newCaller: newTCPCaller},
	}
}

// Serve makes the loop the origin at an address, for all protocols.
func (l *Loop) Serve(at netip.Addr) error {
	for protocol, serve := range map[Protocol]func(*conn) handler{HTTP1: newH1Origin, HTTP2: newGRPCOrigin, TCP: newTCPOrigin} {
		if err := l.listen(netip.AddrPortFrom(at, protocol.Port()), serve); err != nil {
			return fmt.Errorf("start the origin: %w", err)
		}
	}
	return nil
}

// caller is the end of a connection where calls are made.
type caller interface {
	handler
	calls() []*call
}

var errTooMuch = errors.New("more bytes than were asked for")
