package httpio

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
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

// Run serves the connections of l until ctx ends, then takes no new ones, waits for the requests in flight and returns. It is an
// error if some had to be cut off.
func (s Server) Run(ctx context.Context, l net.Listener) error {
	var flying sync.WaitGroup
	// Requests live on when ctx ends; they are cut off by the end of this context, upgraded connections too.
	base, cutOff := context.WithCancel(context.WithoutCancel(ctx))
	defer cutOff()
	log := s.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	server := &http.Server{
		// The wait group counts upgraded connections too, which Shutdown does not wait for.
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			flying.Add(1)
			defer flying.Done()
			s.Handler.ServeHTTP(w, r)
		}),
		BaseContext:       func(net.Listener) context.Context { return base },
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       orDefault(s.IdleTimeout, 2*time.Minute),
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
	var serving sync.WaitGroup
	var failed error
	done := make(chan struct{})
	serving.Go(func() {
		defer close(done)
		if err := server.Serve(listener{l}); !errors.Is(err, http.ErrServerClosed) {
			failed = err
		}
	})
	select {
	case <-ctx.Done():
	case <-done:
	}
	limit, cancel := context.WithTimeout(base, orDefault(s.DrainTimeout, 30*time.Second))
	defer cancel()
	landed := make(chan struct{})
	serving.Go(func() {
		server.Shutdown(limit)
		flying.Wait()
		close(landed)
	})
	var err error
	select {
	case <-landed:
	case <-limit.Done():
		err = errors.New("requests still in flight at the end of the drain time were cut off")
		cutOff()
		server.Close()
	}
	serving.Wait()
	return errors.Join(failed, err)
}

func orDefault(d, fallback time.Duration) time.Duration {
	if d == 0 {
		return fallback
	}
	return d
}

// listener makes its connections give the reason for refusing what is not HTTP.
type listener struct{ net.Listener }

func (l listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return refusingConn{c}, nil
}

// refusingConn adds the reason to the answers that net/http itself gives to a malformed request, before any handler sees
// it. Those are written in one piece and begin like no other answer.
type refusingConn struct{ net.Conn }

const (
	refusal    = "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n"
	reasonLine = fault.Header + ": " + string(fault.BadRequest) + "\r\n"
)

func (c refusingConn) Write(p []byte) (int, error) {
	detail, ok := bytes.CutPrefix(p, []byte(refusal))
	if !ok {
		return c.Conn.Write(p)
	}
	head := strings.TrimSuffix(refusal, "\r\n")
	answer := fmt.Appendf(nil, "%s%s\r\nheadroom: %s\n", head, reasonLine, detail)
	if _, err := c.Conn.Write(answer); err != nil {
		return 0, err
	}
	return len(p), nil
}
