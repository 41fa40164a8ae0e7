package sockets

import (
	"errors"
	"net"
	"sync"
	"syscall"
)

// Wire is a connection of which one can see what has come without waiting, also by way of TLS that stands on it.
type Wire struct {
	net.Conn
	raw syscall.RawConn

	// Owned by who reads.

	attending func() bool // Attend runs it; nil: nobody attends
	attended  bool        // it is running
	direct    bool        // it writes, too
	fd        uintptr     // then
	dry       bool        // all was read that had come when it was called
	moved     bool        // something was
	in        transfer

	attend, take, give func(fd uintptr) bool // made once, these need no memory each time

	mu sync.Mutex
	// mu guards the fields below.

	out      transfer
	gathered []byte // what was written since Gather; nil: nothing is gathered
}

// transfer is a read or write that may have to wait.
type transfer struct {
	b    []byte
	once bool // it does not wait
	n    int
	err  error
}

// Wired returns a connection as a Wire, if it has a file descriptor and is none yet; else it returns the connection.
func Wired(c net.Conn) net.Conn {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return c
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return c // it is closed, as whoever uses it will learn
	}
	w := &Wire{Conn: c, raw: raw}
	w.attend, w.take, w.give = w.attendNow, w.takeNow, w.giveNow
	return w
}

// WireOf returns the Wire that a connection is, or stands on; nil if there is none.
func WireOf(c net.Conn) *Wire {
	for {
		if w, ok := c.(*Wire); ok {
			return w
		}
		over, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			return nil
		}
		c = over.NetConn()
	}
}

// NetConn returns the connection.
func (w *Wire) NetConn() net.Conn { return w.Conn }

// Control runs f with the file descriptor.
func (w *Wire) Control(f func(fd uintptr)) error { return w.raw.Control(f) }

// CloseWrite ends the direction to the other end.
func (w *Wire) CloseWrite() error {
	if c, ok := w.Conn.(interface{ CloseWrite() error }); ok {
		return c.CloseWrite()
	}
	return errors.ErrUnsupported
}

// ErrNothing means that nothing has come, yet. TLS takes it for an error that passes: what it has of a record it keeps.
const ErrNothing = nothing("nothing has come, yet")

// nothing is a net.Error.
type nothing string

func (n nothing) Error() string { return string(n) }
func (nothing) Timeout() bool   { return false }
func (nothing) Temporary() bool { return true }

// Attend calls f at first, and again each time that something may have come, until it returns true. While f runs, reads
// return ErrNothing instead of waiting. Nothing is read in vain if f reads until then, but for what it reads at first.
func (w *Wire) Attend(f func() bool) error {
	w.attending = f
	defer func() { w.attending = nil }()
	return w.raw.Read(w.attend)
}

func (w *Wire) attendNow(fd uintptr) bool {
	w.attended, w.fd, w.dry = true, fd, false
	done := w.attending()
	w.attended = false
	return done
}

// FD returns the file descriptor, for as long as a function runs that Attend calls.
func (w *Wire) FD() uintptr { return w.fd }

// ReadThrough reads what c, which stands on the Wire or is it, has. Attend's function should read so: if what has come is
// no more than a part of a record, the end of the connection may have come with it, of which nobody is told again.
func (w *Wire) ReadThrough(c net.Conn, b []byte) (int, error) {
	for {
		w.moved = false
		n, err := c.Read(b)
		if err != ErrNothing || !w.moved {
			return n, err
		}
		w.dry = false
	}
}

// Direct says whether what Attend runs also writes, as then that takes less. While it does nobody else may.
func (w *Wire) Direct(on bool) { w.direct = on }

// Read reads what has come; if nothing has, it waits.
func (w *Wire) Read(b []byte) (int, error) {
	if !w.attended {
		w.in.b = b
		return w.in.end(w.raw.Read(w.take))
	}
	if w.dry {
		return 0, ErrNothing
	}
	n, err, done := Read(w.fd, b)
	w.dry, w.moved = err == nil && n < len(b), w.moved || n > 0
	if !done {
		return 0, ErrNothing
	}
	return n, err
}

func (w *Wire) takeNow(fd uintptr) (done bool) {
	w.in.n, w.in.err, done = Read(fd, w.in.b)
	return done
}

// Write writes all.
func (w *Wire) Write(b []byte) (int, error) {
	if !w.direct || w.gathered != nil { // nobody else writes while direct is set: no need for the lock
		return w.write(transfer{b: b})
	}
	n, err := Write(w.fd, b)
	if n == len(b) || err != nil {
		return n, err
	}
	rest, err := w.write(transfer{b: b[n:]})
	return n + rest, err
}

func (w *Wire) write(t transfer) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.gathered != nil {
		w.gathered = append(w.gathered, t.b...)
		return len(t.b), nil
	}
	w.out = t
	return w.out.end(w.raw.Write(w.give))
}

// Gather gathers what is written, in b's memory if that suffices, until Flush writes it all at once.
func (w *Wire) Gather(b []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.gathered = b[:0]
}

// Flush writes what was gathered.
func (w *Wire) Flush() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.out.b, w.gathered = w.gathered, nil
	_, err := w.out.end(w.raw.Write(w.give))
	return err
}

// WriteNow writes what can be written without waiting.
func (w *Wire) WriteNow(b []byte) (int, error) { return w.write(transfer{b: b, once: true}) }

// giveNow writes what can be written without waiting, and reports whether that was all.
func (w *Wire) giveNow(fd uintptr) bool {
	t := &w.out
	for t.n < len(t.b) {
		n, err := Write(fd, t.b[t.n:])
		t.n, t.err = t.n+n, err
		if n == 0 {
			return err != nil || t.once
		}
	}
	return true
}

// end returns the outcome, and forgets the memory.
func (t *transfer) end(err error) (int, error) {
	n := t.n
	if err == nil {
		err = t.err
	}
	*t = transfer{}
	return n, err
}
