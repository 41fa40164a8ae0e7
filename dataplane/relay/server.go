package relay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/sockets"
)

// Entry is where calls come from.
type Entry struct {
	Router Router
	// Protocol is what callers speak. Default: their first bytes tell.
	Protocol Protocol
	// Agents is whether the callers are other agents.
	Agents bool
	// Strangers is whether callers are outside the mesh: nobody vouches for them.
	Strangers bool
	// Service says how connections are to be taken that can only be meant for one service. Nil: calls name theirs.
	Service func() Service
	// Each says more of a connection that was just accepted, or that it leads nowhere: then it is cut off. Nil: nothing to add.
	Each func(c net.Conn) (Entry, bool)
	// IdleTimeout is how long a connection stays open without a call. Default 2m.
	IdleTimeout time.Duration
}

// Service says what is known of the service that connections are meant for.
type Service struct {
	// Protocol is what it speaks, HTTP of either version if that is HTTP. Unknown: the first bytes tell.
	Protocol Protocol
	// DetectTimeout is how long to wait for the first bytes before a replica may speak first. 0: it may at once.
	DetectTimeout time.Duration
}

// Serve serves the connections of l until ctx ends, then takes no new calls, lets those in flight finish, and returns. It is
// an error if some had to be cut off.
func (e *Engine) Serve(ctx context.Context, l net.Listener, entry Entry) error {
	s := &server{engine: e, entry: entry.withDefaults(), sessions: map[*session]bool{}}
	defer s.wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s.wg.Go(func() {
		select {
		case <-e.leaving:
			if e.rests() {
				l.Close()
			}
			s.announce()
			<-ctx.Done()
		case <-ctx.Done():
		}
		l.Close()
		s.drain()
	})
	failed := s.accept(ctx, l)
	return errors.Join(failed, s.wait())
}

func (e Entry) withDefaults() Entry {
	e.IdleTimeout = cmp.Or(e.IdleTimeout, 2*time.Minute)
	return e
}

// server is the callers of one listener.
type server struct {
	engine *Engine
	entry  Entry
	wg     sync.WaitGroup
	pieces pieces

	mu sync.Mutex
	// mu guards the fields below.

	draining bool
	sessions map[*session]bool
	emptied  chan struct{} // closed when draining and without sessions
}

// accept takes connections until ctx ends.
func (s *server) accept(ctx context.Context, l net.Listener) error {
	for {
		c, err := sockets.Accept(ctx, l, s.engine.cfg.Log)
		switch {
		case err == nil:
			s.take(c)
		case ctx.Err() != nil:
			return nil
		case s.engine.rests():
			<-ctx.Done()
			return nil
		default:
			return fmt.Errorf("accept connections: %w", err)
		}
	}
}

func (s *server) take(c net.Conn) {
	c, workload := ofWorkload(c)
	entry := &s.entry
	if s.entry.Each != nil {
		each, ok := s.entry.Each(c)
		if !ok {
			newSocket(c).reset()
			return
		}
		each = each.withDefaults()
		entry = &each
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.draining {
		c.Close()
		return
	}
	x := newSession(s, c, entry, workload)
	if s.engine.rests() {
		x.announce() // it was accepted in the last moment
	}
	s.sessions[x] = true
	s.engine.metrics.accepted.Inc()
	s.engine.metrics.open.Inc()
	s.wg.Go(func() {
		x.run()
		s.left(x)
	})
}

func (s *server) left(x *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.sessions, x)
	s.engine.metrics.open.Dec()
	if s.draining && len(s.sessions) == 0 {
		close(s.emptied)
	}
}

// announce tells callers that their connections end. Those made from now on are not concerned.
func (s *server) announce() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for x := range s.sessions {
		x.announce()
	}
}

// drain closes the connections that wait for a call, and lets the others end after the one that they carry.
func (s *server) drain() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.draining {
		return
	}
	s.draining, s.emptied = true, make(chan struct{})
	if len(s.sessions) == 0 {
		close(s.emptied)
	}
	for x := range s.sessions {
		x.drain()
	}
}

// wait waits for the calls in flight, which it cuts off in the end.
func (s *server) wait() error {
	limit := time.NewTimer(s.engine.cfg.DrainTimeout)
	defer limit.Stop()
	s.drain()
	select {
	case <-s.emptied:
		return nil
	case <-limit.C:
	}
	s.mu.Lock()
	for x := range s.sessions {
		x.cutOff()
	}
	s.mu.Unlock()
	<-s.emptied
	return errors.New("calls still in flight at the end of the drain time were cut off")
}
