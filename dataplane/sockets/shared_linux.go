package sockets

import (
	"context"
	"net"
	"net/netip"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// ListenShared listens at an address that other listeners of the same user may share, if they were made in the same way: the
// kernel spreads connections over them.
func ListenShared(at netip.AddrPort) (net.Listener, error) {
	c := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		controlErr := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) })
		if controlErr != nil {
			return controlErr
		}
		return os.NewSyscallError("setsockopt", err)
	}}
	return c.Listen(context.Background(), "tcp", at.String())
}
