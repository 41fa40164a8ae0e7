// Package floor is the least that a proxy can do: copy bytes, in the clear or with mutual TLS. What proxies cost is held
// against it.
package floor

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
)

// Relay passes on connections.
type Relay struct {
	To []string // where to, in turns
	// In is for callers, and Out for those where connections are passed on to. nil: in the clear.
	In, Out *tls.Config

	turn atomic.Uint32
}

// Serve passes on connections that l accepts, until ctx ends.
func (r *Relay) Serve(ctx context.Context, l net.Listener) error {
	var serving sync.WaitGroup
	defer serving.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(ctx, func() { l.Close() })()
	for {
		c, err := l.Accept()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("accept a connection: %w", err)
		}
		serving.Go(func() { r.pass(ctx, c) })
	}
}

// conn is a TCP connection, or a TLS connection.
type conn interface {
	net.Conn
	CloseWrite() error
}

func (r *Relay) pass(ctx context.Context, accepted net.Conn) {
	defer accepted.Close()
	to := r.To[r.turn.Add(1)%uint32(len(r.To))]
	dialed, err := new(net.Dialer).DialContext(ctx, "tcp", to)
	if err != nil {
		return // the caller sees that
	}
	defer dialed.Close()
	defer context.AfterFunc(ctx, func() { accepted.Close(); dialed.Close() })()
	caller, callee := accepted.(conn), dialed.(conn)
	if r.In != nil {
		caller = tls.Server(accepted, r.In)
	}
	if r.Out != nil {
		callee = tls.Client(dialed, r.Out)
	}
	var copying sync.WaitGroup
	copying.Go(func() { pump(callee, caller) })
	pump(caller, callee)
	copying.Wait()
}

// pump copies until there is no more to come, and says so. Between TCP connections the kernel copies (splice).
func pump(to, from conn) {
	if _, err := io.Copy(to, from); err != nil && !errors.Is(err, io.EOF) {
		to.Close()
		from.Close()
		return
	}
	to.CloseWrite()
}
