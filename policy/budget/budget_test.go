package budget_test

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/policy/budget"
	"pgregory.net/rapid"
)

func epoch() time.Time { return time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC) }

// model keeps the time of every event.
type model struct {
	requests, retries []time.Time
}

func within(events []time.Time, now time.Time, window time.Duration) (n float64) {
	for _, t := range events {
		if now.Sub(t) < window {
			n++
		}
	}
	return n
}

// left is how many retries could be allowed at now if requests counted for one length of time and retries for another.
func (m *model) left(p policy.RetryBudget, now time.Time, requests, retries time.Duration) float64 {
	return p.Ratio*within(m.requests, now, requests) + p.MinPerSecond*p.Window.Seconds() - within(m.retries, now, retries)
}

func TestRetriesStayWithinTheBudget(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := policy.RetryBudget{
			Ratio:        rapid.Float64Range(0, 1).Draw(t, "ratio"),
			MinPerSecond: rapid.SampledFrom([]float64{0, 0.3, 1, 5}).Draw(t, "min"),
			Window:       time.Duration(rapid.Int64Range(int64(time.Second), int64(time.Minute)).Draw(t, "window")),
		}
		b, m, now := budget.New(p), model{}, epoch()
		slice := p.Window / 100
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.Int64Range(0, int64(p.Window)/20).Draw(t, "pause")))
			if rapid.Bool().Draw(t, "request") {
				b.Deposit(now)
				m.requests = append(m.requests, now)
				continue
			}
			most, least := m.left(p, now, p.Window, p.Window), m.left(p, now, p.Window-2*slice, p.Window+2*slice)
			if got := b.Balance(now); got < 0 || got > max(0, most)+1e-6 || got < least-1e-6 {
				t.Fatalf("balance is %v, want %v to %v", got, least, most)
			}
			allowed := b.Withdraw(now)
			if allowed && most < 1-1e-6 {
				t.Fatalf("a retry was allowed with %v left", most)
			}
			if !allowed && least > 1+1e-6 {
				t.Fatalf("a retry was refused with %v left", least)
			}
			if allowed {
				m.retries = append(m.retries, now)
			}
		}
	})
}

func TestNoBudgetAllowsNothing(t *testing.T) {
	b := budget.New(policy.RetryBudget{Window: 10 * time.Second})
	for range 1000 {
		b.Deposit(epoch())
	}
	if b.Withdraw(epoch()) || b.Balance(epoch()) != 0 {
		t.Errorf("a retry was allowed; balance %v", b.Balance(epoch()))
	}
}

func TestReserveIsThereWithoutRequests(t *testing.T) {
	b := budget.New(policy.RetryBudget{MinPerSecond: 10, Window: 10 * time.Second})
	if got := drain(b, epoch()); got != 100 {
		t.Errorf("%d retries allowed at first, want 100", got)
	}
	if got := drain(b, epoch().Add(9*time.Second)); got != 0 {
		t.Errorf("%d retries allowed before the window was over, want none", got)
	}
	if got := drain(b, epoch().Add(11*time.Second)); got != 100 {
		t.Errorf("%d retries allowed after the window, want 100", got)
	}
}

func TestSteadyRateOfTheReserveIsAllowed(t *testing.T) {
	b := budget.New(policy.RetryBudget{MinPerSecond: 10, Window: 10 * time.Second})
	refused := 0
	for i := range 1000 {
		if !b.Withdraw(epoch().Add(time.Duration(i) * 100 * time.Millisecond)) {
			refused++
		}
	}
	if refused > 10 { // a retry counts for one percent longer than the window
		t.Errorf("%d of 1000 retries at 10 a second were refused", refused)
	}
}

func TestRequestsCountForTheWindow(t *testing.T) {
	b := budget.New(policy.RetryBudget{Ratio: 0.29, Window: 10 * time.Second})
	for range 100 {
		b.Deposit(epoch())
	}
	if got := b.Balance(epoch().Add(9800 * time.Millisecond)); got < 28.99 || got > 29.01 {
		t.Errorf("balance is %v shortly before the window is over, want 29", got)
	}
	if got := b.Balance(epoch().Add(10 * time.Second)); got != 0 {
		t.Errorf("balance is %v after the window, want 0", got)
	}
	if got := drain(b, epoch().Add(time.Hour)); got != 0 {
		t.Errorf("%d retries allowed an hour later, want none", got)
	}
}

func TestTimeThatRunsBackwardIsHarmless(t *testing.T) {
	b := budget.New(policy.RetryBudget{Ratio: 1, Window: time.Second})
	b.Deposit(epoch())
	b.Deposit(epoch().Add(-time.Hour))
	if got := drain(b, epoch().Add(-time.Minute)); got != 2 {
		t.Errorf("%d retries allowed, want 2", got)
	}
}

func TestManyGoroutinesShareOneBudget(t *testing.T) {
	b := budget.New(policy.RetryBudget{Ratio: 0.5, Window: time.Minute})
	var allowed atomic.Int64
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			for range 100 {
				b.Deposit(epoch())
				if b.Withdraw(epoch()) {
					allowed.Add(1)
				}
			}
		})
	}
	group.Wait()
	if got := allowed.Load() + int64(drain(b, epoch())); got != 400 {
		t.Errorf("%d retries allowed for 800 requests, want 400", got)
	}
}

func drain(b *budget.Budget, now time.Time) (n int) {
	for b.Withdraw(now) {
		n++
	}
	return n
}

func BenchmarkDepositAndWithdraw(b *testing.B) {
	budget := budget.New(policy.Default().RetryBudget)
	b.ReportAllocs()
	for b.Loop() {
		now := time.Now()
		budget.Deposit(now)
		budget.Withdraw(now)
	}
}
