package transport

import (
	"io"
	"net"
)

// peekAhead reads the first byte of c, and returns a connection on which it is still to be read.
func peekAhead(c net.Conn) (byte, net.Conn, error) {
	var first [1]byte
	if _, err := io.ReadFull(c, first[:]); err != nil {
		return 0, c, err
	}
	return first[0], &peeked{Conn: c, first: first[:]}, nil
}

// peeked is a connection of which a part was read already.
type peeked struct {
	net.Conn
	first []byte
}

func (p *peeked) Read(b []byte) (int, error) {
	if len(p.first) > 0 {
		n := copy(b, p.first)
		p.first = p.first[n:]
		return n, nil
	}
	return p.Conn.Read(b)
}
