package relay

import (
	"sync"
	"sync/atomic"
	"time"
)

// What a caller's connection may wait for.
const (
	nothing int64 = iota
	idle          // the next request
	head          // the rest of a head
	answer        // the response of a call
	streams       // whatever comes on a connection of HTTP/2
	over          // its end: it has waited for too long, or is gone
	states  = 8
)

const (
	scanEvery = 50 * time.Millisecond
	// headTimeout bounds the time that a caller takes to send a head.
	headTimeout = 30 * time.Second
	// mostPatient is the longest time between two looks at whether a caller is still there.
	mostPatient = time.Second
)

// watch looks after the connections of callers. What each waits for, and since when, is one word in a table, which takes
// no time to look over: there are no timers.
type watch struct {
	clock atomic.Int64 // milliseconds since 1970, at the last scan

	mu sync.Mutex
	// mu guards the fields below.

	blocks []*[blockSize]place
	free   []*place
}

const blockSize = 256

// place is a connection's place in the table.
type place struct {
	word    atomic.Int64 // milliseconds since 1970, and a state
	limit   int64        // milliseconds for which it may be idle
	next    int64        // the time, in milliseconds, of the next look at it; owned by scan
	session *session     // guarded by watch.mu
}

func (w *watch) enter(s *session) *place {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.free) == 0 {
		w.growLocked()
	}
	last := len(w.free) - 1
	p := w.free[last]
	w.free = w.free[:last]
	p.word.Store(nothing)
	p.session, p.limit, p.next = s, s.entry.IdleTimeout.Milliseconds(), 0
	return p
}

// growLocked adds places. Those that are next to one another are not given out one after the other: connections that are
// busy at the same time should not share a line of the processor's cache.
func (w *watch) growLocked() {
	const stride = 8
	b := new([blockSize]place)
	w.blocks = append(w.blocks, b)
	for i := range blockSize {
		w.free = append(w.free, &b[i%(blockSize/stride)*stride+i/(blockSize/stride)])
	}
}

func (w *watch) leave(p *place) {
	w.mu.Lock()
	defer w.mu.Unlock()
	p.word.Store(nothing)
	p.session = nil
	w.free = append(w.free, p)
}

// now returns a time, in milliseconds, that costs nothing to know: it is that of the last scan.
func (w *watch) now() int64 { return w.clock.Load() }

// waits notes what the connection waits for from now on. It returns false if the connection is over.
func (p *place) waits(state int64, now time.Time) bool { return p.waitsSince(state, now.UnixMilli()) }

func (p *place) waitsSince(state, ms int64) bool {
	before := p.word.Load()
	return before%states != over && p.word.CompareAndSwap(before, ms*states+state)
}

// end marks the connection as over, if it still waits for the same.
func (p *place) end(word int64) bool { return p.word.CompareAndSwap(word, word/states*states+over) }

// scan ends what has waited for too long.
func (w *watch) scan(now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	ms := now.UnixMilli()
	w.clock.Store(ms)
	for _, b := range w.blocks {
		for i := range b {
			p := &b[i]
			word := p.word.Load()
			waited := ms - word/states
			switch word % states {
			case idle:
				w.lookIdleLocked(p, word, waited)
			case head:
				if waited > headTimeout.Milliseconds() && p.end(word) {
					p.session.conn.SetReadDeadline(past())
				}
			case streams:
				if waited > p.limit {
					p.session.lookAtStreams(now)
				}
			case answer:
				w.lookLocked(p, word, waited, ms)
			}
		}
	}
}

// lookIdleLocked ends a connection that has been idle for too long, or whose caller has closed it in the same moment in
// which it sent its last request: then nothing more wakes who reads.
func (w *watch) lookIdleLocked(p *place, word, waited int64) {
	late := waited > p.limit
	if !late && (p.next == word || waited <= scanEvery.Milliseconds()) {
		return
	}
	p.next = word // it has been looked at
	if (late || p.session.conn.hungUp()) && p.end(word) {
		p.session.conn.Close()
	}
}

// lookLocked finds out whether the caller that waits for an answer is still there: ever more seldom. Most answers are
// there before it looks for the first time.
func (w *watch) lookLocked(p *place, word, waited, ms int64) {
	if waited <= scanEvery.Milliseconds() {
		p.next = 0
		return
	}
	if p.next > ms && p.next-ms <= mostPatient.Milliseconds() {
		return
	}
	p.next = ms + min(waited, mostPatient.Milliseconds())
	if p.session.conn.hungUp() && p.end(word) {
		p.session.hangUp()
	}
}
