package outbound

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/fault"
)

// A replica that comes may do so before that is known here, and one that refuses may come back unchanged: those who wait try
// again after ever longer pauses.
const (
	firstPause   = 25 * time.Millisecond // each is twice as long as the one before
	longestPause = 400 * time.Millisecond
	// mostWaiting bounds what a service that is away costs this node, and what its first replica gets when it is back.
	mostWaiting = 1000
)

// absence says since when a service has been without a replica that takes requests, as its callers find.
type absence struct {
	waiting atomic.Int32

	// Since when all replicas have refused connections (0: they don't), and when they last did, in Unix nanoseconds.
	refusing, lastRefusal atomic.Int64
}

// forgetful is how long replicas must not have been asked for what they refuse to be a new absence.
const forgetful = time.Minute

// refused notes that all replicas refuse connections, and returns since when.
func (a *absence) refused(now time.Time) time.Time {
	last, since := a.lastRefusal.Swap(now.UnixNano()), a.refusing.Load()
	if since == 0 || now.UnixNano()-last > int64(forgetful) {
		since = now.UnixNano()
		a.refusing.Store(since)
	}
	return time.Unix(0, since)
}

// earlier returns when replicas began to refuse, if that is part of an absence which began at a time after it.
func (a *absence) earlier(than time.Time) time.Time {
	if since := time.Unix(0, a.refusing.Load()); since.UnixNano() != 0 && than.UnixNano()-a.lastRefusal.Load() < int64(forgetful) && since.Before(than) {
		return since
	}
	return than
}

// end notes that a replica has answered.
func (a *absence) end() {
	if a.refusing.Load() != 0 {
		a.refusing.Store(0)
	}
}

// enter reports whether one more call may wait; if so, it leaves afterwards.
func (a *absence) enter() bool {
	if a.waiting.Add(1) > mostWaiting {
		a.leave()
		return false
	}
	return true
}

func (a *absence) leave() { a.waiting.Add(-1) }

// await waits for a while, after which all may be tried again. It returns the fault to answer with if there is no use in that.
func (c *call) await(ctx context.Context, why *fault.Error) *fault.Error {
	now := time.Now()
	left, back := c.patience(now, why)
	if left <= 0 || ctx.Done() == nil {
		return why
	}
	if deadline := c.deadline(); !deadline.IsZero() {
		if left = min(left, deadline.Sub(now)); left <= 0 {
			return timeoutFault()
		}
	}
	if !c.service.absence.enter() {
		return why
	}
	defer c.service.absence.leave()
	if c.waits == 0 {
		c.service.metrics.waits.Inc()
	}
	pause := time.NewTimer(min(left, longestPause, firstPause<<min(c.waits, 10)))
	defer pause.Stop()
	select {
	case <-ctx.Done():
		return pickFault(ctx, c.service.name, errAllTried, why)
	case <-back:
	case <-pause.C:
	}
	c.waits++
	c.left, c.tries = nil, 0
	return nil
}

// patience returns how long the call may wait for a replica, and what tells that there is one.
func (c *call) patience(now time.Time, why *fault.Error) (left time.Duration, back <-chan struct{}) {
	s := c.service
	if s == nil || why.Lasting {
		return 0, nil
	}
	longest := s.policy.Load().WaitForReady
	switch why.Reason {
	case fault.RetriesExhausted:
		return longest - now.Sub(s.absence.refused(now)), nil
	case fault.NoEndpoints, fault.NoneReady:
		set := s.fleet.Set(now)
		if len(set.Endpoints) > 0 { // just now
			return longest, nil
		}
		if set.Lost.IsZero() {
			return 0, nil
		}
		return longest - now.Sub(s.absence.earlier(set.Lost)), set.Back
	}
	return 0, nil
}
