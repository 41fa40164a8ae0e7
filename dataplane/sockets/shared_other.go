//go:build !linux

package sockets

import (
	"net"
	"net/netip"
)

// ListenShared listens at an address that nobody else can have meanwhile: other systems don't spread connections.
func ListenShared(at netip.AddrPort) (net.Listener, error) { return net.Listen("tcp", at.String()) }
