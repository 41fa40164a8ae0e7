package relay

import (
	"bytes"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/headroom-mesh/headroom/dataplane/h1"
	"github.com/headroom-mesh/headroom/dataplane/sockets"
)

const (
	// bulk is how many full pieces in a row are worth the pipe by which the kernel moves what follows (splice).
	bulk = 8
	// sipSize is what is read at once where nothing is known to be there: as there it must be held while nothing comes, it is small.
	sipSize = 2 << 10
)

// tunnel passes bytes both ways until both ends are done. While nothing comes it needs next to no memory.
func (x *exchange) tunnel() Ending {
	s := x.session
	x.tunneled = true
	s.place.waits(nothing, time.Now())
	x.up.SetDeadline(time.Time{})
	s.conn.SetDeadline(time.Time{})
	early, first := bytes.Clone(s.in.bytes()), bytes.Clone(s.up.bytes())
	defer s.lend()()

	t := tunnel{caller: s.conn, replica: x.up.socket, pieces: &s.server.pieces}
	var wg sync.WaitGroup
	wg.Go(func() { t.pour(t.replica, t.caller, early) })
	t.pour(t.caller, t.replica, first)
	wg.Wait()
	if s.isGone() {
		return Ending{Reason: fault.Canceled}
	}
	return Ending{Reason: t.failure}
}

// lend gives up the memory of the call for as long as it carries bytes only. The function that it returns takes other in
// its place.
func (s *session) lend() (regain func()) {
	lent := work{up: s.up, out: s.out, up1: s.up1}
	s.up, s.out, s.up1 = buffer{}, nil, nil
	head := bytes.Clone(s.in.b[:s.in.base]) // which others may still ask for
	var again h1.Request
	if n, err := again.Parse(head); n == len(head) && err == nil {
		s.head.Request = again
		lent.in, s.in = s.in, buffer{}
	} else {
		lent.in = buffer{b: make([]byte, bufferSize)}
	}
	lent.reset()
	s.engine.works.Put(&lent)
	return func() {
		w := s.engine.works.Get().(*work)
		if s.in.b == nil {
			s.in = w.in
		}
		s.up, s.out, s.up1 = w.up, w.out, w.up1
	}
}

// tunnel carries bytes between two connections.
type tunnel struct {
	caller, replica *socket
	pieces          *pieces

	mu sync.Mutex
	// mu guards the fields below.

	over    bool         // it has ended before its time
	heard   bool         // the replica has said all that it had to say
	failure fault.Reason // why it ended before its time
}

// pour copies all that comes from one connection to another, and then tells the other that there is no more. If that fails
// both are of no use any more, and are closed so that nobody takes that for an ordinary end.
func (t *tunnel) pour(to, from *socket, early []byte) {
	failing := t.carry(to, from, early)
	if failing == nil {
		t.ended(from)
		if to.closeWrite() != nil {
			failing = to
		}
	}
	if failing != nil {
		t.fail(failing)
	}
}

func (t *tunnel) ended(from *socket) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.heard = t.heard || from == t.replica
}

// fail ends the tunnel before its time, as one of the connections has failed.
func (t *tunnel) fail(failing *socket) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.over: // this is what comes of it
		return
	case failing == t.caller:
		t.failure = fault.Canceled
	case !t.heard: // a replica that is done may close its connection without hearing the caller out
		t.failure = fault.Reset
	}
	t.over = true
	t.caller.reset()
	t.replica.reset()
}

// carry copies all that comes. It returns the connection that fails, nil if none does.
func (t *tunnel) carry(to, from *socket, early []byte) (failing *socket) {
	if len(early) > 0 {
		if _, err := to.Write(early); err != nil {
			return to
		}
	}
	src := newSource(from, t.pieces)
	defer src.giveUp()
	kernelCan := to.plain != nil && from.plain != nil
	for full := 0; !kernelCan || full < bulk; {
		b, err := src.read()
		if len(b) > 0 {
			if err := to.writeMuch(b, t.pieces); err != nil {
				return to
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return from
		case len(b) == pieceRoom:
			full++
		default:
			full = 0
		}
		src.giveUp()
	}
	src.giveUp()
	return splice(to, from)
}

// splice lets the kernel move the rest.
func splice(to, from *socket) (failing *socket) {
	_, err := to.plain.ReadFrom(from.plain)
	switch {
	case err == nil:
		return nil
	case from.hungUp() && !to.hungUp():
		return from
	}
	return to
}

// source is where one direction of a tunnel comes from. It has no memory for bytes until there are some.
type source struct {
	from   *socket
	pieces *pieces

	piece *piece // in which the bytes are that were read last; nil: not in one
	n     int
	err   error

	ready func() bool // readReady; nil if the kernel can't say when there is something to read
	sip   []byte      // what is read into then,
	more  bool        // unless there was so much last time that there is likely more
}

func newSource(from *socket, pieces *pieces) *source {
	s := &source{from: from, pieces: pieces}
	if from.wire != nil {
		s.ready = s.readReady
	} else {
		s.sip = make([]byte, sipSize)
	}
	return s
}

// read waits for bytes, and returns them. They are valid until giveUp. The error is io.EOF at the end.
func (s *source) read() ([]byte, error) {
	if s.ready != nil {
		if err := s.from.wire.Attend(s.ready); err != nil {
			return nil, err
		}
		return s.piece[:s.n], s.err
	}
	into := s.sip
	if s.more {
		s.take()
		into = s.piece[:pieceRoom]
	}
	n, err := s.from.Read(into)
	s.more = n >= len(s.sip)
	return into[:n], err
}

// readReady reads without waiting. It returns false if there is nothing.
func (s *source) readReady() bool {
	s.take()
	s.n, s.err = s.from.readAllNow(s.piece[:pieceRoom])
	if s.err == sockets.ErrNothing {
		s.giveUp()
		return false
	}
	return true
}

func (s *source) take() { s.piece = s.pieces.take() }

// giveUp gives up the memory for the bytes that were read.
func (s *source) giveUp() {
	if s.piece != nil {
		s.pieces.put(s.piece)
		s.piece = nil
	}
}

// upgrade passes on the change of protocols, and then bytes.
func (x *exchange) upgrade(fields []Field) Ending {
	s := x.session
	out := s.resp.Append(s.out[:0], h1.None)
	out = appendFields(out, fields)
	out = append(out, "Connection: Upgrade\r\n"...)
	out = h1.AppendField(out, "Upgrade", s.resp.Upgrade)
	s.out = append(out, "\r\n"...)
	x.stopUpload()
	if x.flush() != nil {
		return Ending{Reason: fault.Canceled}
	}
	if !s.body.done { // nobody could tell the rest of the request from what comes after it
		return Ending{Reason: fault.Reset}
	}
	return x.tunnel()
}

// reset closes the connection in a way that the other end can't take for an ordinary end.
func (s *socket) reset() {
	s.discredit()
	s.Close()
}
