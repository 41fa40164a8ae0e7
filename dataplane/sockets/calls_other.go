//go:build !linux || race

package sockets

import "syscall"

func read(fd uintptr, b []byte) (int, error) { return syscall.Read(int(fd), b) }

func write(fd uintptr, b []byte) (int, error) { return syscall.Write(int(fd), b) }
