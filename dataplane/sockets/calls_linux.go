//go:build linux && !race

package sockets

import (
	"syscall"
	"unsafe"
)

// quick is the most bytes whose copying takes no time worth telling the runtime of.
const quick = 64 << 10

// read and write call the kernel without a word to the runtime, as long as that is quick: on sockets that don't wait, what
// the runtime does around a call that might costs as much as a tenth of the call, and more when it takes the processor
// away meanwhile.

func read(fd uintptr, b []byte) (int, error) {
	if len(b) > quick {
		b = b[:quick]
	}
	return call(syscall.SYS_READ, fd, b)
}

func write(fd uintptr, b []byte) (int, error) {
	if len(b) > quick {
		return syscall.Write(int(fd), b)
	}
	return call(syscall.SYS_WRITE, fd, b)
}

func call(number, fd uintptr, b []byte) (int, error) {
	n, _, errno := syscall.RawSyscall(number, fd, uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)))
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}
