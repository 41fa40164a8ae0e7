//go:build !linux

package relay

// closedByPeer is false where the kernel does not tell: a write will.
func closedByPeer(uintptr) bool { return false }

// nothingToRead is true where it is not known: then a call may meet a connection that is just being closed.
func nothingToRead(uintptr) bool { return true }
