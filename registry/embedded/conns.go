package embedded

import (
	"errors"
	"net"
	"sync"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
)

// conns are the connections of clients. etcd hands them over where TLS would have its place. When it stops it would
// wait several seconds for watches to end, which they never do; so their connections are closed first.
type conns struct {
	credentials.TransportCredentials

	// mu guards the fields below
	mu     sync.Mutex
	open   map[*conn]bool
	closed bool
}

type conn struct {
	net.Conn
	from *conns
}

func newConns() *conns {
	return &conns{TransportCredentials: insecure.NewCredentials(), open: map[*conn]bool{}}
}

// ServerHandshake implements credentials.TransportCredentials.
func (c *conns) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, nil, errors.New("the store is stopping")
	}
	kept := &conn{Conn: raw, from: c}
	c.open[kept] = true
	return c.TransportCredentials.ServerHandshake(kept)
}

// Clone implements credentials.TransportCredentials.
func (c *conns) Clone() credentials.TransportCredentials { return c }

// close closes all connections, also those to come.
func (c *conns) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	for open := range c.open {
		open.Conn.Close()
	}
	clear(c.open)
}

// Close implements net.Conn.
func (c *conn) Close() error {
	c.from.mu.Lock()
	delete(c.from.open, c)
	c.from.mu.Unlock()
	return c.Conn.Close()
}
