package capture

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// checkTime bounds what the kernel does at once if all is well.
const checkTime = time.Second

// Arrived reports whether a connection that an application of this network namespace has opened, at an address of its own,
// has come to the agent.
func (c *Capture) Arrived(ctx context.Context, from netip.AddrPort) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, checkTime)
	defer cancel()
	poll := time.NewTicker(10 * time.Millisecond) // the last packet of the handshake may be on its way
	defer poll.Stop()
	for {
		there, err := c.connected(from)
		if there || err != nil {
			return there, err
		}
		select {
		case <-ctx.Done():
			return false, nil
		case <-poll.C:
		}
	}
}

// connected looks for the agent's end of a connection.
func (c *Capture) connected(from netip.AddrPort) (bool, error) {
	for _, at := range c.cfg.addresses(c.Port()) {
		if at.Addr().Is4() != from.Addr().Is4() {
			continue
		}
		s, err := netlink.SocketGet(net.TCPAddrFromAddrPort(at), net.TCPAddrFromAddrPort(from))
		switch {
		case errors.Is(err, unix.EPERM), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOENT):
			return false, fmt.Errorf("look for connections to the agent, which takes the kernel's module tcp_diag: %w", err)
		case err == nil && s.ID.Source.Equal(at.Addr().AsSlice()) && s.ID.Destination.Equal(from.Addr().AsSlice()):
			return true, nil
		}
	}
	return false, nil
}
