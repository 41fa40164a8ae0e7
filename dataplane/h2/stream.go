package h2

import (
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// Stream is one request and its response. Its methods may be called at any time; on one that has ended they do nothing.
// What they send goes out with the next flush of the connection.
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
	declared int64 // Content-Length of what comes, or what is left of it; -1: none
	bodiless bool  // what comes has no body, whatever it declares: the answer to HEAD
	headed   bool  // the head has come
	ended    bool  // all has come
	closed   bool  // all was sent
	wants    bool  // Write took less than all
	waits    bool  // among those that wait for their turn
	gone     bool  // not among the streams of conn any more
}

// Conn returns the connection of the stream.
func (s *Stream) Conn() *Conn { return s.conn }

// WriteHeaders sends the head of a message, or trailers.
func (s *Stream) WriteHeaders(fields []hpack.HeaderField, more []Field, end bool) {
	c := s.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	if s.gone || s.closed {
		return
	}
	c.writeHeadersLocked(s.id, fields, more, end)
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
	n = min(len(p), c.roomLocked(s))
	s.wants = n < len(p)
	if n > 0 || len(p) == 0 && end {
		s.window -= int64(n)
		c.window -= int64(n)
		c.writeDataLocked(s.id, p[:n], end && !s.wants)
	}
	s.queueLocked()
	s.closeLocked(end && !s.wants)
	return n
}

// queueLocked lets the stream wait for its turn, if that is all that it waits for.
func (s *Stream) queueLocked() {
	if s.wants && !s.waits && s.window > 0 && !s.gone {
		s.waits = true
		s.conn.waiting = append(s.conn.waiting, s)
	}
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
	s.giveBackLocked()
}

func (s *Stream) giveBackLocked() {
	if s.owed >= streamWindow/4 && !s.ended {
		s.conn.framer.WriteWindowUpdate(s.id, uint32(s.owed))
		s.received += s.owed
		s.owed = 0
	}
}

// Reset ends the stream before its time. The Handler is not told.
func (s *Stream) Reset(code http2.ErrCode) {
	c := s.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	if !s.gone {
		c.resetLocked(s, s.id, code)
	}
}

// resetLocked resets a stream; s may be nil, if it was never one.
func (c *Conn) resetLocked(s *Stream, id uint32, code http2.ErrCode) {
	c.framer.WriteRSTStream(id, code)
	c.ours.add(id)
	if s != nil {
		c.removeLocked(s)
	}
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
