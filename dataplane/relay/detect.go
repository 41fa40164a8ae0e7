package relay

import (
	"bytes"
	"cmp"
	"errors"
	"io"
	"os"
	"sync"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/headroom-mesh/headroom/dataplane/sniff"
	"github.com/headroom-mesh/headroom/policy"
)

// Declared returns the protocol that a declaration amounts to.
func Declared(p policy.Protocol) Protocol {
	switch p {
	case policy.ProtocolHTTP:
		return HTTP1
	case policy.ProtocolHTTP2:
		return HTTP2
	case policy.ProtocolTCP:
		return TCP
	}
	return Unknown
}

// protocol finds out what the caller speaks. What was read for that is in s.in. Unknown means that the connection is over.
func (s *session) protocol() Protocol {
	if s.entry.Protocol != Unknown {
		return s.entry.Protocol
	}
	if s.entry.Service == nil {
		return s.awaitProtocol()
	}
	service := s.entry.Service()
	switch {
	case service.Protocol == TCP:
		return TCP
	case service.Protocol != Unknown: // HTTP of either version: the caller speaks first
		return s.awaitProtocol()
	case service.DetectTimeout <= 0:
		return TCP // at first: serveTCP finds out
	}
	limit := time.Now().Add(service.DetectTimeout)
	s.conn.SetReadDeadline(limit)
	defer s.conn.SetReadDeadline(time.Time{})
	if s.awaitFirst() {
		return s.detect()
	}
	if s.isOver() || time.Now().Before(limit) {
		return Unknown
	}
	return TCP
}

func (s *session) awaitProtocol() Protocol {
	if !s.awaitFirst() {
		return Unknown
	}
	return s.detect()
}

// detect tells the protocol by the first bytes.
func (s *session) detect() Protocol {
	for {
		switch sniff.Detect(s.in.bytes()) {
		case sniff.HTTP1:
			return HTTP1
		case sniff.HTTP2:
			return HTTP2
		case sniff.TLS:
			return TCP
		case sniff.Opaque:
			return s.opaque()
		}
		err := s.in.fill(s.conn)
		switch {
		case err == nil:
		case s.isOver():
			s.refuseMalformed(err)
			return Unknown
		default: // no more comes, or not in time
			return s.opaque()
		}
	}
}

func (s *session) isOver() bool { return s.place.word.Load()%states == over }

// opaque is what bytes are that say nothing: only one who knows where they go can take them. HTTP refuses them.
func (s *session) opaque() Protocol {
	if s.entry.Service != nil {
		return cmp.Or(s.entry.Service().Protocol, TCP)
	}
	s.engine.metrics.unknown.Inc()
	s.engine.cfg.Log.Debug("a connection says nothing of the service that it is for", "peer", s.source)
	return HTTP1
}

// taken returns what was read of the caller.
func (s *session) taken() []byte {
	if s.work == nil {
		return nil
	}
	return bytes.Clone(s.in.bytes())
}

// serveDetected serves a caller of whom it is known by now that it speaks HTTP.
func (s *session) serveDetected() {
	if sniff.Detect(s.in.bytes()) == sniff.HTTP2 {
		begun := s.taken()
		s.release()
		s.serveHTTP2(begun)
		return
	}
	s.serveHTTP1()
}

// speaksHTTP waits for who speaks first, and reports whether that is a caller who speaks HTTP: then nothing was sent to the
// replica. Meanwhile it needs next to no memory.
func (s *session) speaksHTTP(up *upstreamConn) (bool, *fault.Error) {
	if s.entry.Service == nil {
		return false, nil
	}
	service := s.entry.Service()
	if service.Protocol != Unknown || s.in.r < s.in.w || s.up.r < s.up.w { // or it was said already
		return false, nil
	}
	s.release()
	err := s.awaitEither(up)
	switch {
	case err != nil && !errors.Is(err, io.EOF):
		return false, fault.New(fault.Reset, "the connection to %s broke: %v", up.upstream.target.Name, innermost(err))
	case s.in.r == s.in.w || s.up.r < s.up.w:
		return false, nil
	}
	return s.isHTTP(max(service.DetectTimeout, time.Millisecond)), nil
}

// awaitEither waits until the caller, the replica or both have said something, or will never. It returns what is wrong with
// the replica's connection.
func (s *session) awaitEither(up *upstreamConn) error {
	caller, replica := newSource(s.conn, &s.server.pieces), newSource(up.socket, &s.server.pieces)
	var wg sync.WaitGroup
	var said []byte
	var failed error
	wg.Go(func() {
		said, failed = replica.read()
		s.conn.SetReadDeadline(past()) // it need not be waited for any more
	})
	first, _ := caller.read() // what is wrong with the caller will be seen again
	up.SetReadDeadline(past())
	wg.Wait()
	up.SetReadDeadline(time.Time{})
	s.conn.SetReadDeadline(time.Time{})
	s.acquire()
	s.in.add(first)
	s.up.add(said)
	caller.giveUp()
	replica.giveUp()
	if errors.Is(failed, os.ErrDeadlineExceeded) {
		return nil
	}
	return failed
}

// add takes in bytes that were read elsewhere.
func (b *buffer) add(p []byte) {
	for len(p) > 0 {
		n := copy(b.room(), p)
		b.w += n
		p = p[n:]
	}
}

// isHTTP reports whether what the caller says is HTTP. It waits for no more than a moment if it may be the start of several
// things.
func (s *session) isHTTP(patience time.Duration) bool {
	s.conn.SetReadDeadline(time.Now().Add(patience))
	defer s.conn.SetReadDeadline(time.Time{})
	for {
		switch sniff.Detect(s.in.bytes()) {
		case sniff.HTTP1, sniff.HTTP2:
			return true
		case sniff.TLS, sniff.Opaque:
			return false
		}
		if s.in.fill(s.conn) != nil {
			return false
		}
	}
}
