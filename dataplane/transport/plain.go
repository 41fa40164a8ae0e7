package transport

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/identity"
	"github.com/headroom-mesh/headroom/dataplane/sockets"
)

// Plain is a Transport in the clear: neither end proves who it is. The dialer says what it wants in one line, such as
// "HEADROOM headroom-http/1\n", and goes on at once; nothing is answered.
type Plain struct {
	// Mark is set on the connections that are dialed (sockets.Mark). Default none.
	Mark uint32
}

var _ Transport = Plain{}

var errPreface = errors.New("not an agent of a compatible version of headroom")

// Dial connects to an agent for one protocol.
func (t Plain) Dial(ctx context.Context, agent netip.AddrPort, p Protocol) (net.Conn, error) {
	c, err := dial(ctx, agent, p, t.Mark)
	if err != nil {
		return nil, err // says what was dialed
	}
	err = within(ctx, c, func() error {
		_, err := io.WriteString(c, preface(p))
		return err
	})
	if err != nil {
		c.Close()
		return nil, fmt.Errorf("begin %s with agent %v: %w", p, agent, err)
	}
	return c, nil
}

// dial makes the connection that a Transport begins on.
func dial(ctx context.Context, agent netip.AddrPort, p Protocol, mark uint32) (net.Conn, error) {
	d := net.Dialer{KeepAliveConfig: keepAlive(), Control: sockets.Mark(mark)}
	c, err := d.DialContext(ctx, "tcp", agent.String())
	if err != nil {
		return nil, err
	}
	if !p.carriesRequests() {
		limitUnacknowledged(c)
	}
	return sockets.Wired(c), nil
}

// As returns t: nobody proves anything.
func (t Plain) As(identity.Workload) Dialer { return t }

// Accept reads the line that Dial wrote, and nothing after it.
func (Plain) Accept(ctx context.Context, c net.Conn) (net.Conn, Protocol, error) {
	watch(c)
	c = sockets.Wired(c)
	var p Protocol
	err := within(ctx, c, func() (err error) {
		p, err = readPreface(c)
		return err
	})
	if err != nil {
		c.Close()
		return nil, "", fmt.Errorf("accept from %v: %w", c.RemoteAddr(), err)
	}
	return c, p, nil
}

// watch keeps a connection that was accepted alive, or notices that it is not.
func watch(c net.Conn) {
	if tc, ok := c.(*net.TCPConn); ok {
		tc.SetKeepAliveConfig(keepAlive()) // fails only on a dead connection, which the next read will tell
	}
}

// keepAlive notices within half a minute that the other end of a quiet connection is gone.
func keepAlive() net.KeepAliveConfig {
	return net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3}
}

// within runs f, whose reads and writes on c fail once ctx ends.
func within(ctx context.Context, c net.Conn, f func() error) error {
	past := time.Unix(1, 0)
	if t, ok := ctx.Deadline(); ok {
		c.SetDeadline(t)
	}
	stop := context.AfterFunc(ctx, func() { c.SetDeadline(past) })
	err := f()
	if !stop() {
		return errors.Join(context.Cause(ctx), err)
	}
	if err != nil {
		return err
	}
	return c.SetDeadline(time.Time{})
}

func preface(p Protocol) string { return "HEADROOM " + string(p) + "\n" }

// readPreface reads exactly one preface: never more bytes than the shortest one that can still come.
func readPreface(r io.Reader) (Protocol, error) {
	possible := protocols()
	var got []byte
	for {
		n := len(preface(possible[0]))
		for _, p := range possible {
			n = min(n, len(preface(p)))
		}
		buf := make([]byte, n-len(got))
		m, err := r.Read(buf)
		got = append(got, buf[:m]...)
		possible = startingWith(possible, got)
		switch {
		case len(got) > 0 && got[0] == tlsHandshake:
			return "", &refusal{reason: "tls", text: "it begins TLS, and this agent has no certificate: start it with --tls or --ca, or the other one with --mtls permissive"}
		case len(possible) == 0:
			return "", fmt.Errorf("the connection begins with %q: %w", got, errPreface)
		case preface(possible[0]) == string(got):
			return possible[0], nil
		case err != nil:
			return "", fmt.Errorf("read the protocol after %q: %w", got, err)
		}
	}
}

func startingWith(ps []Protocol, got []byte) []Protocol {
	var match []Protocol
	for _, p := range ps {
		if strings.HasPrefix(preface(p), string(got)) {
			match = append(match, p)
		}
	}
	return match
}
