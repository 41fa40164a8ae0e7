package gossip

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"time"

	"github.com/hashicorp/memberlist"
)

// transport is memberlist's own, except that its streams end with the agent instead of holding it up.
type transport struct {
	*memberlist.NetTransport
	ctx context.Context // of Run
}

// listen opens the sockets and returns the address to advertise.
func (g *Gossip) listen(ctx context.Context) (memberlist.NodeAwareTransport, netip.AddrPort, error) {
	bind, advertised := g.cfg.Bind, g.cfg.Advertise
	c := &memberlist.NetTransportConfig{
		BindAddrs: []string{bind.Addr().String()},
		BindPort:  int(bind.Port()),
		Logger:    newLibraryLog(g.cfg.Log, g.metrics),
	}
	t, err := memberlist.NewNetTransport(c)
	// A free port for TCP may be taken for UDP.
	for tries := 0; err != nil && bind.Port() == 0 && tries < 9; tries++ {
		t, err = memberlist.NewNetTransport(c)
	}
	for g.cfg.Wait && isInUse(err) && pause(ctx) {
		t, err = memberlist.NewNetTransport(c)
	}
	if err != nil {
		return nil, netip.AddrPort{}, fmt.Errorf("listen on %s: %w", bind, err)
	}
	if advertised.Port() == 0 {
		advertised = netip.AddrPortFrom(advertised.Addr(), uint16(t.GetAutoBindPort()))
	}
	return transport{NetTransport: t, ctx: ctx}, advertised, nil
}

// isInUse goes by the text of the error, which is all that the library keeps.
func isInUse(err error) bool {
	return err != nil && strings.Contains(err.Error(), syscall.EADDRINUSE.Error())
}

// pause waits until an address may be free. It reports false if ctx ends first.
func pause(ctx context.Context) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(50 * time.Millisecond):
		return true
	}
}

func (t transport) DialTimeout(addr string, timeout time.Duration) (net.Conn, error) {
	return t.DialAddressTimeout(memberlist.Address{Addr: addr}, timeout)
}

func (t transport) DialAddressTimeout(a memberlist.Address, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(t.ctx, timeout)
	defer cancel()
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", a.Addr)
	if err != nil {
		return nil, err
	}
	return stream{Conn: c, release: context.AfterFunc(t.ctx, func() { _ = c.Close() })}, nil
}

// stream is a connection that is closed when the agent ends.
type stream struct {
	net.Conn
	release func() bool
}

func (s stream) Close() error {
	s.release()
	return s.Conn.Close()
}
