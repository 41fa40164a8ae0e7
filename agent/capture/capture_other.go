//go:build !linux

package capture

import (
	"context"
	"errors"
	"net"
	"net/netip"
)

var errLinux = errors.New("capture needs Linux: elsewhere applications must be told of the proxy port")

// Capture directs connections to the agent.
type Capture struct{}

// New fails.
func New(Config) (*Capture, error) { return nil, errLinux }

// Listen fails.
func (*Capture) Listen() ([]net.Listener, error) { return nil, errLinux }

// Port is never used.
func (*Capture) Port() uint16 { return 0 }

// Waiting returns none.
func Waiting(net.Listener) int { return 0 }

// Run fails.
func (*Capture) Run(context.Context) error { return errLinux }

// Ready is never closed.
func (*Capture) Ready() <-chan struct{} { return nil }

// Release fails.
func (*Capture) Release() error { return errLinux }

// SetReal fails.
func (*Capture) SetReal([]netip.AddrPort) error { return errLinux }

// ShareReal fails.
func (*Capture) ShareReal(Real) error { return errLinux }

// Status fails.
func (*Capture) Status() (Status, error) { return Status{}, errLinux }

// Arrived fails.
func (*Capture) Arrived(context.Context, netip.AddrPort) (bool, error) { return false, errLinux }

// Remove fails.
func Remove(string) ([]string, error) { return nil, errLinux }

// RemoveAll fails.
func RemoveAll(string) ([]string, error) { return nil, errLinux }

// ListenIn fails, except in the network namespace of this process.
func ListenIn(netns, addr string) (net.Listener, error) {
	if netns != "" {
		return nil, errLinux
	}
	return net.Listen("tcp", addr)
}
