package h2

import (
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// Stream is one request and its response. Its methods may be called at any time; on one that has ended they do nothing.
type Stream struct {
	// State is for the Handler.
	State any

	conn *Conn
	id   uint32

	// The fields below are guarded by conn.mu.

	window   int64 // that we may still send
	received int64 // that the other end may still send
	owed     int64 // consumed, and not yet given back
	queued   int64 // received, and not yet consumed
	declared int64 // Content-Length of what comes; -1: none
	headed   bool  // the head has come
	ended    bool  // all has come
	closed   bool  // all was sent
	blocked  bool  // Write took less than all
	gone     bool  // not among the streams of conn any more
}

// WriteHeaders sends the head of a message, or trailers.
func (s *Stream) WriteHeaders(fields []hpack.HeaderField, end bool) {
	c := s.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	if s.gone || s.closed {
		return
	}
	c.writeHeadersLocked(s.id, fields, end)
	s.closeLocked(end)
}

// Write sends a part of the body. It takes as much of it as may be sent now; the Handler is told when more may.
func (s *Stream) Write(p []byte, end bool) (n int) {
	c := s.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	if s.gone || s.closed {
		return len(p)
	}
	for n < len(p) {
		most := min(int64(len(p)-n), s.window, c.window, frameSize, int64(mostPending-len(c.out)))
		if most <= 0 {
			s.blocked = true
			break
		}
		part := p[n : n+int(most)]
		n += len(part)
		s.window -= most
		c.window -= most
		c.framer.WriteData(s.id, end && n == len(p), part)
	}
	if len(p) == 0 && end {
		c.framer.WriteData(s.id, true, nil)
	}
	c.wakeLocked()
	s.closeLocked(end && n == len(p))
	return n
}

// Consumed lets the other end send as much again.
func (s *Stream) Consumed(n int) {
	if n == 0 {
		return
	}
	c := s.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	if s.gone {
		return // it was given back when the stream ended
	}
	s.queued -= int64(n)
	c.dequeuedLocked(int64(n))
	s.owed += int64(n)
	if s.owed >= streamWindow/4 && !s.ended {
		c.framer.WriteWindowUpdate(s.id, uint32(s.owed))
		s.received += s.owed
		s.owed = 0
		c.wakeLocked()
	}
}

// Reset ends the stream before its time. The Handler is not told.
func (s *Stream) Reset(code http2.ErrCode) {
	c := s.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	if s.gone {
		return
	}
	c.framer.WriteRSTStream(s.id, code)
	c.wakeLocked()
	c.removeLocked(s)
}

// closeLocked notes that all was sent.
func (s *Stream) closeLocked(end bool) {
	if !end {
		return
	}
	s.closed = true
	if s.ended {
		s.conn.removeLocked(s)
	}
}

// endLocked notes that all has come.
func (s *Stream) endLocked() {
	s.ended = true
	if s.closed {
		s.conn.removeLocked(s)
	}
}
