//go:build linux && !race

package sockets

import (
	"syscall"
	"unsafe"
)

// quick is the most bytes whose copying takes no time worth telling the runtime of.
const quick = 64 << 10

// read and write call the kernel without a word to the runtime, as long as that is quick: on sockets that don't wait, what
// the runtime does around a call that might costs as much as a tenth of the call, and more when its monitor takes the
// processor away meanwhile. They are calls for sockets, which do less than those for any file.

func read(fd uintptr, b []byte) (int, error) {
	return call(syscall.SYS_RECVFROM, fd, b[:min(len(b), quick)], syscall.MSG_DONTWAIT)
}

func write(fd uintptr, b []byte) (int, error) {
	return call(syscall.SYS_SENDTO, fd, b[:min(len(b), quick)], syscall.MSG_DONTWAIT|syscall.MSG_NOSIGNAL)
}

func call(number, fd uintptr, b []byte, flags uintptr) (int, error) {
	n, _, errno := syscall.RawSyscall6(number, fd, uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), flags, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}
