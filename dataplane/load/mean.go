package load

import (
	"math"
	"time"
)

// mean answers: how long would a request take that arrives now? The mean latency is the mean number of requests in flight,
// divided by the rate at which they end (Little's law). In a median of those that have ended, a replica that falls behind
// looks fast: for a while only short requests end, and those that wait don't count yet. Here they count from the moment they
// come. The more there are in flight now, compared with that mean number, the longer the next one will take.
//
// A request that gets no answer in time (canceled) counts for the time that it was there, and not as one that ended. If
// latencies were exponential, no other mean would be likelier, given what was seen. All operations take constant time. The
// times that it is told don't go back.
type mean struct {
	at time.Duration // of the sums
	// Sums in which what happened counts by its age: 1 now, 1/e after memory.
	flown     float64 // nanoseconds that requests were in flight
	penalties float64 // nanoseconds that failures count for on top of that
	ended     float64 // requests

	young  int32           // requests in flight that are not old
	begun  [oldAfter]int32 // those by the second in which they began, the present one and those before it
	second int32           // the present one
}

const (
	memory = 400 * time.Millisecond
	// A request in flight for so many seconds is a stream. It says nothing of how long others take.
	oldAfter = 10
	// Requests that must have ended within memory, or what else is known counts too.
	plenty = 16
)

// advance lets time pass.
func (m *mean) advance(now time.Duration) {
	for m.young > 0 && now >= secondsOf(m.second+1) {
		m.second++
		m.pass(secondsOf(m.second))
		old := &m.begun[m.second%oldAfter]
		m.young -= *old
		*old = 0
	}
	m.pass(now)
	m.second = int32(now / time.Second)
}

func secondsOf(n int32) time.Duration { return time.Duration(n) * time.Second }

func (m *mean) pass(now time.Duration) {
	passed := now - m.at
	if passed <= 0 {
		return
	}
	kept := math.Exp(-float64(passed) / float64(memory))
	m.flown = m.flown*kept + float64(m.young)*float64(memory)*(1-kept)
	m.penalties *= kept
	m.ended *= kept
	m.at = now
}

// begin counts a request in, and returns the second in which it began.
func (m *mean) begin() (second int32) {
	m.young++
	m.begun[m.second%oldAfter]++
	return m.second
}

// leave counts a request out, and reports whether it was young.
func (m *mean) leave(second int32) bool {
	if m.second-second >= oldAfter {
		return false
	}
	m.young--
	m.begun[second%oldAfter]--
	return true
}

// end notes that a request has ended, and what it counts for on top of the time that it took.
func (m *mean) end(penalty time.Duration) {
	m.ended++
	m.penalties += float64(penalty)
}

// plenty reports whether the estimate can do without what else is known.
func (m *mean) plenty() bool { return m.ended >= plenty }

// estimate returns the latency to expect without some of the requests in flight. Where few have ended lately, what else is
// known counts as if it were another.
func (m *mean) estimate(leaving int32, known time.Duration) time.Duration {
	crowding := float64(max(m.young-leaving, 0)+1) / (m.flown/float64(memory) + 1)
	other := max(0, 1-m.ended/plenty)
	return time.Duration(((m.flown+m.penalties)*crowding + other*float64(known)) / (m.ended + other))
}
