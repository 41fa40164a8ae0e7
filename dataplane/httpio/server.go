package httpio

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/fault"
)

// Server serves HTTP until its context ends, and then lets requests in flight finish.
type Server struct {
	Handler http.Handler
	// IdleTimeout is how long a connection without a request stays open. Default 2m.
	IdleTimeout time.Duration
	// DrainTimeout bounds the time for requests in flight once the context has ended. Default 30s.
	DrainTimeout time.Duration
	Log          *slog.Logger // nil: no logs
}

// headerTimeout bounds the time that a caller takes to send a request's header.
const headerTimeout = 30 * time.Second

// Run serves the connections of l until ctx ends, then takes no new ones, waits for the requests in flight and returns.
// It is an error if some had to be cut off.
func (s Server) Run(ctx context.Context, l net.Listener) error {
	// Requests live on when ctx ends; they are cut off by the end of this context, upgraded connections too.
	base, cutOff := context.WithCancel(context.WithoutCancel(ctx))
	defer cutOff()
	var open connections
	server := s.server(base, &open)
	var background sync.WaitGroup
	defer background.Wait()

	served := make(chan error, 1)
	background.Go(func() { served <- server.Serve(&listener{l, &open}) })
	var failed error
	select {
	case <-ctx.Done():
	case failed = <-served:
		served <- nil
	}

	limit, cancel := context.WithTimeout(base, orDefault(s.DrainTimeout, 30*time.Second))
	defer cancel()
	landed := make(chan struct{})
	background.Go(func() {
		server.Shutdown(limit)
		open.all.Wait()
		close(landed)
	})
	background.Go(func() {
		<-served
		open.closeUnused()
	})
	select {
	case <-landed:
		return failed
	case <-limit.Done():
		cutOff()
		server.Close()
		return errors.Join(failed, errors.New("requests still in flight at the end of the drain time were cut off"))
	}
}

func (s Server) server(base context.Context, open *connections) *http.Server {
	log := s.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			c := r.Context().Value(connKey{}).(*conn)
			defer c.handled()
			c.busy.Store(true)
			s.Handler.ServeHTTP(w, r)
		}),
		BaseContext: func(net.Listener) context.Context { return base },
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, connKey{}, c)
		},
		ConnState:                    func(c net.Conn, state http.ConnState) { c.(*conn).become(state) },
		DisableGeneralOptionsHandler: true, // replicas answer OPTIONS *
		ReadHeaderTimeout:            headerTimeout,
		IdleTimeout:                  orDefault(s.IdleTimeout, 2*time.Minute),
		ErrorLog:                     slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
}

func orDefault(d, fallback time.Duration) time.Duration {
	if d == 0 {
		return fallback
	}
	return d
}

// connections are those that a Server has to end before it can return, upgraded ones too, which http.Server forgets.
type connections struct {
	all sync.WaitGroup

	mu sync.Mutex
	// mu guards the fields below.

	unused map[*conn]bool // those on which no request has come yet
}

func (cs *connections) add(c *conn) {
	cs.all.Add(1)
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if cs.unused == nil {
		cs.unused = map[*conn]bool{}
	}
	cs.unused[c] = true
}

func (cs *connections) used(c *conn) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	delete(cs.unused, c)
}

func (cs *connections) remove(c *conn) {
	cs.used(c)
	cs.all.Done()
}

// closeUnused closes the connections that http.Server.Shutdown would give five seconds to send a first request.
func (cs *connections) closeUnused() {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	for c := range cs.unused {
		c.Close()
	}
}

type listener struct {
	net.Listener
	open *connections
}

func (l *listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &conn{Conn: c, open: l.open}, nil
}

type connKey struct{}

// conn is a caller's connection.
type conn struct {
	net.Conn
	open     *connections
	busy     atomic.Bool // since a handler took a request, until the answer is complete
	upgraded bool        // owned by the handler
}

func (c *conn) become(state http.ConnState) {
	switch state {
	case http.StateNew:
		c.open.add(c)
	case http.StateActive:
		c.open.used(c)
	case http.StateIdle:
		c.busy.Store(false)
	case http.StateHijacked:
		c.upgraded = true
	case http.StateClosed:
		c.open.remove(c)
	}
}

// handled is called when a handler has returned.
func (c *conn) handled() {
	if c.upgraded {
		c.open.remove(c)
	}
}

// Write adds the reason to the answers that net/http itself gives to a malformed request, before any handler sees it. It
// writes them in one piece.
func (c *conn) Write(p []byte) (int, error) {
	if c.busy.Load() {
		return c.Conn.Write(p)
	}
	head, text, whole := bytes.Cut(p, []byte("\r\n\r\n"))
	if !whole {
		return c.Conn.Write(p)
	}
	answer := string(head) + "\r\n" + fault.Header + ": " + string(fault.BadRequest) + "\r\n\r\n"
	if len(text) > 0 {
		answer += "headroom: the request is malformed: " + string(text) + "\n"
	}
	if _, err := c.Conn.Write([]byte(answer)); err != nil {
		return 0, err
	}
	return len(p), nil
}

// CloseWrite lets net/http, and upgrades, end the direction to the caller.
func (c *conn) CloseWrite() error { return closeWrite(c.Conn) }
