package transport

import (
	"net"
	"syscall"
	"time"
)

// limitUnacknowledged makes c fail when what was written stays unacknowledged for ten seconds: keepalive does not work
// while data is under way, and retransmission goes on for a quarter of an hour. The kernel counts a peer that is alive
// but does not read as well, so this is only for protocols whose readers never pause: not for requests, where
// back-pressure may hold a stream for as long as an application likes.
func limitUnacknowledged(c net.Conn) {
	const tcpUserTimeout = 18 // TCP_USER_TIMEOUT, which package syscall lacks
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		return
	}
	// A kernel without the option leaves its default, so an error changes nothing.
	raw.Control(func(fd uintptr) {
		limit := 10 * time.Second
		syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpUserTimeout, int(limit.Milliseconds()))
	})
}
