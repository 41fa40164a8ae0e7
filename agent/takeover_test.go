package agent

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// TestSlowSuccessor asks one again that did not serve in time.
func TestSlowSuccessor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newSuccessor(nil)
		ctx, cancel := context.WithTimeout(t.Context(), takeOverTimeout)
		defer cancel()
		if n.take(ctx) {
			t.Error("it serves, though it has not said so")
		}
		time.AfterFunc(time.Second, func() { close(n.serving) })
		if !n.take(t.Context()) {
			t.Error("it does not serve, though it has said so")
		}
	})
}

// TestComingSuccessor wants an agent that has to end to wait for the next one, for a while.
func TestComingSuccessor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSuccession(Config{Node: "a", TakeOver: "mesh"})
		began := time.Now()
		s.await(t.Context())
		if waited := time.Since(began); waited != comingTimeout {
			t.Errorf("waited %v in vain, want %v", waited, comingTimeout)
		}
		n := newSuccessor(nil)
		if !s.enter(n) || s.enter(newSuccessor(nil)) {
			t.Error("there can be one successor, and no other at the same time")
		}
		if s.ready() != nil {
			t.Error("it is ready before it has said so")
		}
		time.AfterFunc(time.Second, func() {
			close(n.ready)
			s.readied <- struct{}{}
		})
		began = time.Now()
		if s.await(t.Context()); s.ready() != n || time.Since(began) != time.Second {
			t.Errorf("after %v: got %v, want the one that was ready after a second", time.Since(began), s.ready())
		}
	})
}
