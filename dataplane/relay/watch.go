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
	mu sync.Mutex
	// mu guards the fields below.

	places []*place
	free   []*place
}

// place is a connection's place in the table.
type place struct {
	word    atomic.Int64 // milliseconds since 1970, and a state
	session *session     // guarded by watch.mu
	next    int64        // the time, in milliseconds, of the next look at it; owned by scan
}

func (w *watch) enter(s *session) *place {
	w.mu.Lock()
	defer w.mu.Unlock()
	var p *place
	if last := len(w.free) - 1; last >= 0 {
		p, w.free = w.free[last], w.free[:last]
	} else {
		p = new(place)
		w.places = append(w.places, p)
	}
	p.word.Store(nothing)
	p.session = s
	return p
}

func (w *watch) leave(p *place) {
	w.mu.Lock()
	defer w.mu.Unlock()
	p.word.Store(nothing)
	p.session = nil
	w.free = append(w.free, p)
}

// waits notes what the connection waits for from now on. It returns false if the connection is over.
func (p *place) waits(state int64, now time.Time) bool {
	before := p.word.Load()
	return before%states != over && p.word.CompareAndSwap(before, now.UnixMilli()*states+state)
}

// end marks the connection as over, if it still waits for the same.
func (p *place) end(word int64) bool { return p.word.CompareAndSwap(word, word/states*states+over) }

// scan ends what has waited for too long.
func (w *watch) scan(now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	ms := now.UnixMilli()
	for _, p := range w.places {
		word := p.word.Load()
		since := word / states
		switch word % states {
		case idle:
			if ms-since > p.session.entry.IdleTimeout.Milliseconds() && p.end(word) {
				p.session.conn.Close()
			}
		case head:
			if ms-since > headTimeout.Milliseconds() && p.end(word) {
				p.session.conn.SetReadDeadline(past())
			}
		case streams:
			if ms-since > p.session.entry.IdleTimeout.Milliseconds() {
				p.session.lookAtStreams(now)
			}
		case answer:
			w.look(p, word, since, ms)
		}
	}
}

// look finds out whether the caller that waits for an answer is still there: ever more seldom.
func (w *watch) look(p *place, word, since, ms int64) {
	waited := ms - since
	if waited < scanEvery.Milliseconds() {
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
