package embedded

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestNeverReady(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		err := awaitReady(t.Context(), nil, nil)
		if err == nil || !strings.Contains(err.Error(), "not ready after 30s") {
			t.Errorf("error %v, want one that says how long etcd was waited for", err)
		}
	})
}

func TestCloseHangs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		never := make(chan struct{})
		defer close(never)
		began := time.Now()
		if closes(func() { <-never }) {
			t.Error("closes = true")
		}
		if took := time.Since(began); took > 10*time.Second {
			t.Errorf("the end was awaited for %v, want 10s at most", took)
		}
	})
}
