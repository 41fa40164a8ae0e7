//go:build !unix

package transport

import "net"

func peek(c net.Conn) (byte, net.Conn, error) { return peekAhead(c) }
