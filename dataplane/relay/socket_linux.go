package relay

import (
	"syscall"
	"unsafe"
)

// closedByPeer reports whether a TCP socket's other end has closed it. Sockets of other kinds can't tell.
func closedByPeer(fd uintptr) bool {
	const established = 1 // TCP_ESTABLISHED
	var state uint8       // the first field of tcp_info; the kernel fills in no more than there is room for
	size := uint32(1)
	_, _, errno := syscall.RawSyscall6(syscall.SYS_GETSOCKOPT, fd, syscall.IPPROTO_TCP, syscall.TCP_INFO,
		uintptr(unsafe.Pointer(&state)), uintptr(unsafe.Pointer(&size)), 0)
	return errno == 0 && state != established
}

// nothingToRead reports whether a read would have to wait: nothing has come, nor the end. It never waits itself, so the
// runtime need not know of the call.
func nothingToRead(fd uintptr) bool {
	var one byte
	_, _, errno := syscall.RawSyscall6(syscall.SYS_RECVFROM, fd, uintptr(unsafe.Pointer(&one)), 1,
		syscall.MSG_PEEK|syscall.MSG_DONTWAIT, 0, 0)
	return errno == syscall.EAGAIN
}
