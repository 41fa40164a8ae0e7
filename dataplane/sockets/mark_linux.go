package sockets

import (
	"errors"
	"fmt"
	"syscall"
)

// Mark returns what a net.Dialer needs as its Control for connections that carry a mark, by which rules of the kernel tell them
// from others; nil for 0, which is none. To set a mark takes CAP_NET_ADMIN, as such rules do: without it connections are made
// all the same, and carry none.
func Mark(mark uint32) func(network, address string, c syscall.RawConn) error {
	if mark == 0 {
		return nil
	}
	return func(_, _ string, c syscall.RawConn) error {
		var failed error
		err := c.Control(func(fd uintptr) {
			failed = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_MARK, int(mark))
		})
		if err == nil && failed != nil && !errors.Is(failed, syscall.EPERM) {
			err = fmt.Errorf("mark the connection as the agent's own: %w", failed)
		}
		return err
	}
}
