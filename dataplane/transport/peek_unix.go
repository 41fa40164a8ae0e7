//go:build unix

package transport

import (
	"io"
	"net"
	"syscall"
)

// peek waits for the first byte of c and leaves it there.
func peek(c net.Conn) (byte, net.Conn, error) {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return peekAhead(c)
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return 0, c, err
	}
	var first [1]byte
	var n int
	var problem error
	err = raw.Read(func(fd uintptr) bool {
		n, _, problem = syscall.Recvfrom(int(fd), first[:], syscall.MSG_PEEK)
		return problem != syscall.EAGAIN && problem != syscall.EINTR
	})
	switch {
	case err != nil:
		return 0, c, err
	case problem != nil:
		return 0, c, problem
	case n == 0:
		return 0, c, io.EOF
	}
	return first[0], c, nil
}
