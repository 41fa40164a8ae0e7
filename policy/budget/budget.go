// Package budget keeps the retries to a service within a share of its requests.
package budget

import (
	"sync"
	"time"

	"github.com/headroom-mesh/headroom/policy"
)

// slices is how many parts of a window are counted apart. A request counts for the window less one slice at least, a
// retry for the window and one slice at most: the error is on the side of fewer retries.
const slices = 100

// Budget allows a retry as long as the retries of the last window stay within Ratio times the requests of that window,
// plus a reserve of MinPerSecond for each of its seconds. So every retry gives its token back when it is a window old.
// A Budget may be used by many goroutines at once.
type Budget struct {
	ratio   float64
	reserve float64
	slice   time.Duration

	mu sync.Mutex
	// mu guards the fields below

	start    time.Time         // of slice 0; zero until first used
	newest   int64             // the slice that is being counted
	ring     [slices + 1]count // slice i is at i modulo the length
	requests int               // sum of the ring
	retries  int               // sum of the ring
}

type count struct{ requests, retries int }

// New returns a budget that has seen nothing yet: its reserve is full.
func New(p policy.RetryBudget) *Budget {
	return &Budget{
		ratio:   p.Ratio,
		reserve: p.MinPerSecond * p.Window.Seconds(),
		slice:   max(1, p.Window/slices),
	}
}

// Deposit counts a request. A retry of it is not another one.
func (b *Budget) Deposit(now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.advanceLocked(now)
	b.at(b.newest).requests++
	b.requests++
}

// Withdraw reports whether a retry is allowed, and counts it if it is.
func (b *Budget) Withdraw(now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.advanceLocked(now)
	const rounding = 1e-9 // 0.29 times 100 is a little less than 29
	if b.balanceLocked() < 1-rounding {
		return false
	}
	b.at(b.newest).retries++
	b.retries++
	return true
}

// Balance returns how many retries are allowed now, with the fraction that is saved toward the next; never below 0.
func (b *Budget) Balance(now time.Time) float64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.advanceLocked(now)
	return max(0, b.balanceLocked())
}

func (b *Budget) balanceLocked() float64 {
	return b.ratio*float64(b.requests) + b.reserve - float64(b.retries)
}

func (b *Budget) at(slice int64) *count { return &b.ring[slice%int64(len(b.ring))] }

// advanceLocked forgets what is too old at now. Should now lie in the past, it does nothing.
func (b *Budget) advanceLocked(now time.Time) {
	if b.start.IsZero() {
		b.start = now
	}
	current := int64(now.Sub(b.start) / b.slice)
	if current-b.newest > slices {
		b.ring = [slices + 1]count{}
		b.requests, b.retries, b.newest = 0, 0, current
	}
	for b.newest < current {
		b.newest++
		b.retries -= b.at(b.newest).retries // that slice is a window and one slice old
		*b.at(b.newest) = count{}
		if oldest := b.newest - slices; oldest >= 0 {
			b.requests -= b.at(oldest).requests
			b.at(oldest).requests = 0
		}
	}
}
