// Package sockets is what package net leaves to those who use it: accepting in spite of errors that pass, and reading and
// writing without waiting.
package sockets

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"syscall"
	"time"
)

// Accept waits for the next connection. Whatever goes wrong while the listener is open may pass, such as a want of file
// descriptors: it says so, and tries again, ever more slowly. It fails when ctx ends or the listener is closed.
func Accept(ctx context.Context, l net.Listener, log *slog.Logger) (net.Conn, error) {
	pause := 5 * time.Millisecond
	for {
		c, err := l.Accept()
		if err == nil || ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
			return c, err
		}
		log.Warn("can't accept connections, trying again", "err", err)
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
		pause = min(2*pause, time.Second)
	}
}

// Read reads what there is. It returns false if there is nothing yet.
func Read(fd uintptr, b []byte) (n int, err error, done bool) {
	for {
		n, err := read(fd, b)
		switch {
		case err == syscall.EINTR:
		case err == syscall.EAGAIN:
			return 0, nil, false
		case err != nil:
			return 0, os.NewSyscallError("read", err), true
		case n == 0:
			return 0, io.EOF, true
		default:
			return n, nil, true
		}
	}
}

// Write writes what can be written without waiting, which may be nothing.
func Write(fd uintptr, b []byte) (n int, err error) {
	for {
		n, err := write(fd, b)
		switch {
		case err == syscall.EINTR:
		case err == syscall.EAGAIN:
			return 0, nil
		case err != nil:
			return 0, os.NewSyscallError("write", err)
		default:
			return n, nil
		}
	}
}
