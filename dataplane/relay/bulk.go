package relay

import (
	"sync"

	"github.com/headroom-mesh/headroom/dataplane/h1"
	"github.com/headroom-mesh/headroom/dataplane/sockets"
)

const (
	pieceSize = 64 << 10
	// pieceRoom is what of a piece is carried at once: with what TLS adds to it, it is a piece.
	pieceRoom = pieceSize - 256
	// recordSize is the most that one record of TLS holds.
	recordSize = 16 << 10
)

// piece is memory for much at once: of bodies that are large, and of tunnels.
type piece [pieceSize]byte

// pieces lends memory for as long as it is in use.
type pieces struct{ pool sync.Pool }

func (p *pieces) take() *piece {
	if b, ok := p.pool.Get().(*piece); ok {
		return b
	}
	return new(piece)
}

func (p *pieces) put(b *piece) { p.pool.Put(b) }

// readMuch reads all that has come, as far as there is room; if nothing has, it waits.
func (s *socket) readMuch(b []byte) (int, error) {
	if s.wire == nil || s.plain != nil {
		return s.Read(b)
	}
	if s.drain == nil {
		s.drain = s.drainNow
	}
	s.draining = draining{into: b}
	err := s.wire.Attend(s.drain)
	d := s.draining
	s.draining = draining{}
	if err == nil {
		err = d.err
	}
	return d.got, err
}

// drainNow is called at first, and each time that there may be something to read.
func (s *socket) drainNow() bool {
	d := &s.draining
	d.got, d.err = s.readAllNow(d.into)
	return d.err != sockets.ErrNothing
}

// readAllNow reads all that has come, as far as there is room: of TLS, that may be many records.
func (s *socket) readAllNow(b []byte) (n int, err error) {
	for n < len(b) {
		var more int
		more, err = s.readNow(b[n:])
		n += more
		if err != nil || s.plain != nil {
			break
		}
	}
	if n > 0 && err == sockets.ErrNothing {
		err = nil
	}
	return n, err
}

// writeMuch writes all: what TLS makes of it, at once.
func (s *socket) writeMuch(b []byte, pieces *pieces) error {
	if s.wire == nil || s.plain != nil || len(b) <= recordSize {
		_, err := s.Write(b)
		return err
	}
	p := pieces.take()
	defer pieces.put(p)
	s.wire.Gather(p[:0])
	_, err := s.Write(b)
	if flushed := s.wire.Flush(); err == nil {
		err = flushed
	}
	return err
}

// carryOn carries bytes from one connection to another, and returns how many it has written, and which of the connections has
// failed with an error, nil if none has.
func carryOn(to, from *socket, left int64, pieces *pieces) (n int64, failing *socket, err error) {
	p := pieces.take()
	defer pieces.put(p)
	for n < left {
		some, err := from.readMuch(p[:min(pieceRoom, left-n)])
		if some > 0 {
			if err := to.writeMuch(p[:some], pieces); err != nil {
				return n, to, err
			}
			n += int64(some)
		}
		if err != nil && n < left {
			return n, from, err
		}
	}
	return n, nil, nil
}

// worthCarrying is the length from which the rest of a body goes from one connection to the other past the buffers of a
// call: inside the kernel, if both are plain, else in large pieces.
const worthCarrying = 128 << 10

// canCarryUp reports whether the rest of the body can go so. What does is not kept to be sent again: so the beginning does
// not, with which most failures come.
func (x *exchange) canCarryUp() bool {
	b := &x.body
	return b.framing == h1.Length && b.left >= worthCarrying && len(b.kept) >= bufferSize/2
}
