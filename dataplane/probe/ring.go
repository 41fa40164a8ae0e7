package probe

import (
	"math"
	"time"
)

const (
	minOutstanding = 32
	maxOutstanding = 1024
	never          = time.Duration(math.MaxInt64)
)

// outstanding is a probe that has been sent and not been answered. Times count from the beginning of its peer.
type outstanding struct {
	sink     Sink // nil: a ping
	token    uint64
	sent     time.Duration
	deadline time.Duration
	late     bool // the sink has been told that it's lost
}

// ring holds the outstanding probes of a peer, oldest first. Their ids are consecutive, and since answers come in
// order, only the first one can be answered next. It grows to maxOutstanding and never shrinks.
type ring struct {
	slots       []outstanding // as many as a power of two
	first, next uint32        // ids of the oldest one and of the one to come
}

func (r *ring) len() int { return int(r.next - r.first) }

func (r *ring) at(id uint32) *outstanding { return &r.slots[int(id)&(len(r.slots)-1)] }

// push returns the id of o, unless there are too many.
func (r *ring) push(o outstanding) (id uint32, ok bool) {
	if r.len() == len(r.slots) && !r.grow() {
		return 0, false
	}
	id = r.next
	*r.at(id) = o
	r.next++
	return id, true
}

func (r *ring) grow() bool {
	if len(r.slots) == maxOutstanding {
		return false
	}
	wider := ring{make([]outstanding, max(2*len(r.slots), minOutstanding)), r.first, r.next}
	for id := r.first; id != r.next; id++ {
		*wider.at(id) = *r.at(id)
	}
	*r = wider
	return true
}

// pop removes the oldest one.
func (r *ring) pop() outstanding {
	o := *r.at(r.first)
	*r.at(r.first) = outstanding{}
	r.first++
	return o
}

// expire marks all whose deadline has passed as late and appends them to dst. It returns the next deadline.
func (r *ring) expire(now time.Duration, dst []outstanding) ([]outstanding, time.Duration) {
	next := never
	for id := r.first; id != r.next; id++ {
		o := r.at(id)
		switch {
		case o.late:
		case o.deadline <= now:
			o.late = true
			dst = append(dst, *o)
		default:
			next = min(next, o.deadline)
		}
	}
	return dst, next
}
