package pods

import (
	"net"
	"sync"
)

// listener brings together the connections that were accepted in all pods.
type listener struct {
	accepted chan net.Conn
	closed   chan struct{}
	close    func()
}

func newListener() *listener {
	l := &listener{accepted: make(chan net.Conn), closed: make(chan struct{})}
	l.close = sync.OnceFunc(func() { close(l.closed) })
	return l
}

// hand gives a connection to whoever accepts; if nobody does any more it is closed.
func (l *listener) hand(c net.Conn) {
	select {
	case l.accepted <- c:
	case <-l.closed:
		_ = c.Close()
	}
}

// Accept waits for the next connection.
func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.accepted:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

// Close lets no more connections through.
func (l *listener) Close() error {
	l.close()
	return nil
}

// Addr returns none in particular.
func (l *listener) Addr() net.Addr { return &net.TCPAddr{} }
