package relay

import "golang.org/x/sys/unix"

// closedByPeer reports whether a TCP socket's other end has closed it.
func closedByPeer(fd int) bool {
	const established = 1 // TCP_ESTABLISHED
	info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	return err == nil && info.State != established
}
