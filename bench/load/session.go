//go:build linux

package load

import (
	"errors"
	"fmt"
	"net/netip"
	"time"
)

// call is one of those that a connection can carry at the same time. It is made again and again.
type call struct {
	conn   *conn
	begin  func()
	active bool
	due    time.Time // when it should have begun
	broken bool      // the connection is gone
	ended  func(*call, error)
}

func newCall(c *conn, begin func()) *call { return &call{conn: c, begin: begin} }

func (c *call) start() {
	c.active = true
	c.begin()
}

func (c *call) done(err error) {
	c.active = false
	c.ended(c, err)
}

// fail ends the call for good.
func (c *call) fail(err error) {
	c.broken = true
	if c.active {
		c.done(err)
	}
}

// Session is a number of connections of one kind, to the same proxy.
type Session struct {
	loop      *Loop
	kind      Kind
	authority string
	to        []netip.AddrPort
	dialed    int
	calls     []*call
	idle      []*call
	active    int
	ended     func(*call, error)
	failures  int
	failed    error // the first of them
}

// Open connects to proxies, which are asked for an authority.
func (l *Loop) Open(k Kind, authority string, to ...netip.AddrPort) (*Session, error) {
	s := &Session{loop: l, kind: k, authority: authority, to: to}
	if err := s.connect(k.Connections); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

func (s *Session) connect(n int) error {
	for range n {
		to := s.to[s.dialed%len(s.to)]
		s.dialed++
		err := s.loop.dial(to, func(c *conn) handler {
			caller := s.kind.newCaller(c, s.kind, s.authority)
			for _, call := range caller.calls() {
				call.ended = s.end
				s.calls = append(s.calls, call)
				s.idle = append(s.idle, call)
			}
			return caller
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// Close closes the connections.
func (s *Session) Close() {
	s.ended = func(*call, error) {}
	for _, c := range s.calls {
		c.conn.close()
	}
}

func (s *Session) end(c *call, err error) {
	s.active--
	if err != nil {
		s.failures++
		if s.failed == nil {
			s.failed = err
		}
	}
	s.ended(c, err)
}

// start starts a call. What it sends goes out when the handler returns that is at work; without one, begin is wanted.
func (s *Session) start(c *call) {
	s.active++
	c.start()
	if c.broken { // before it has begun
		c.done(errClosed)
	}
}

func (s *Session) begin(c *call) {
	s.start(c)
	c.conn.flush()
}

// repair replaces connections that were closed, or that calls are stuck on, and forgets what has failed.
func (s *Session) repair() error {
	s.ended = func(*call, error) {}
	for _, c := range s.calls {
		if c.active {
			c.conn.close()
		}
	}
	s.failures, s.failed = 0, nil
	s.idle = s.idle[:0]
	kept := s.calls[:0]
	for _, c := range s.calls {
		if !c.broken {
			kept = append(kept, c)
		}
	}
	s.calls = kept
	s.idle = append(s.idle, kept...)
	missing := s.kind.Connections - len(kept)/s.kind.Calls
	return s.connect(max(missing, 0))
}

const (
	maxFailures = 100
	maxWait     = 5 * time.Second // for any call to end
)

// Rate is what came of making as many calls as can be.
type Rate struct {
	Calls int
	Took  time.Duration
	Spent time.Duration // of what the meter showed
}

// Saturate makes the next call as soon as one has ended. After a time to get warm it reads a meter, at the beginning and
// at the end of the given time.
func (s *Session) Saturate(warm, lasts time.Duration, meter func() time.Duration) (Rate, error) {
	if err := s.repair(); err != nil {
		return Rate{}, err
	}
	calls, more := 0, true
	s.ended = func(c *call, err error) {
		calls++
		if more && !c.broken {
			s.start(c)
		}
	}
	for _, c := range s.idle {
		s.begin(c)
	}
	if err := s.turnFor(warm, &calls); err != nil {
		return Rate{}, err
	}
	begin, before, first := time.Now(), meter(), calls
	if err := s.turnFor(lasts, &calls); err != nil {
		return Rate{}, err
	}
	rate := Rate{calls - first, time.Since(begin), meter() - before}
	more = false
	return rate, s.settle()
}

// turnFor serves the loop for some time. It is an error if calls don't end any more.
func (s *Session) turnFor(lasts time.Duration, calls *int) error {
	begin := time.Now()
	last, progress := *calls, begin
	for now := begin; now.Sub(begin) < lasts; now = time.Now() {
		if err := s.loop.turn(1); err != nil {
			return err
		}
		if *calls != last {
			last, progress = *calls, now
		}
		if err := s.trouble(now.Sub(progress)); err != nil {
			return err
		}
	}
	return nil
}

func (s *Session) trouble(stalled time.Duration) error {
	switch {
	case s.failures > maxFailures, s.failures > 0 && s.active == 0:
		return fmt.Errorf("%d calls failed, the first: %w", s.failures, s.failed)
	case stalled > maxWait && s.failed != nil:
		return fmt.Errorf("no call came to its end for %s, after %w", maxWait, s.failed)
	case stalled > maxWait:
		return fmt.Errorf("no call came to its end for %s", maxWait)
	}
	return nil
}

// settle waits for the calls that are under way.
func (s *Session) settle() error {
	begin := time.Now()
	for s.active > 0 {
		if err := s.loop.turn(10); err != nil {
			return err
		}
		if time.Since(begin) > maxWait {
			return fmt.Errorf("%d calls do not end", s.active)
		}
	}
	if s.failures > 0 {
		return fmt.Errorf("%d calls failed, the first: %w", s.failures, s.failed)
	}
	return nil
}

// Grow opens connections till there are n, and makes one call on each that is new.
func (s *Session) Grow(n int) error {
	const atOnce = 50
	for len(s.calls) < n*s.kind.Calls {
		first := len(s.calls)
		if err := s.connect(min(atOnce, n-first/s.kind.Calls)); err != nil {
			return err
		}
		s.ended = func(*call, error) {}
		for _, c := range s.calls[first:] {
			s.begin(c)
		}
		if err := s.settle(); err != nil {
			return err
		}
	}
	return nil
}

// Try makes one call.
func (s *Session) Try() error {
	if err := s.repair(); err != nil {
		return err
	}
	if len(s.idle) == 0 {
		return errors.New("there is no connection")
	}
	s.ended = func(*call, error) {}
	s.begin(s.idle[0])
	return s.settle()
}
