package outbound

import (
	"testing"
	"time"
)

// TestAbsence expects the time of an absence to count from its first refusal, and only so many to wait.
func TestAbsence(t *testing.T) {
	var a absence
	start := time.Unix(1000, 0)
	want := func(now, since time.Time) {
		t.Helper()
		if got := a.refused(now); !got.Equal(since) {
			t.Errorf("refused since %v, want %v", got, since)
		}
	}
	want(start, start)
	want(start.Add(30*time.Second), start)
	want(start.Add(80*time.Second), start)
	a.end()
	later := start.Add(90 * time.Second)
	want(later, later)
	next := later.Add(forgetful + 1)
	want(next, next)

	if lost := next.Add(time.Second); !a.earlier(lost).Equal(next) {
		t.Errorf("what is lost after refusals counts from %v, want the first of them, %v", a.earlier(lost), next)
	}
	if lost := next.Add(2 * forgetful); !a.earlier(lost).Equal(lost) {
		t.Errorf("what is lost long after refusals counts from %v, want %v", a.earlier(lost), lost)
	}
	a.end()
	if lost := next.Add(time.Second); !a.earlier(lost).Equal(lost) {
		t.Errorf("what is lost after an answer counts from %v, want %v", a.earlier(lost), lost)
	}

	for range mostWaiting {
		if !a.enter() {
			t.Fatal("no place")
		}
	}
	if a.enter() {
		t.Error("one too many may wait")
	}
	a.leave()
	if !a.enter() {
		t.Error("no place, where one has left")
	}
}
