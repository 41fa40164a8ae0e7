//go:build !linux

package sockets

import (
	"errors"
	"net"
	"net/netip"
)

// OriginalDestination fails: only Linux redirects connections.
func OriginalDestination(net.Conn) (netip.AddrPort, error) {
	return netip.AddrPort{}, errors.New("original destination: only Linux tells it")
}
