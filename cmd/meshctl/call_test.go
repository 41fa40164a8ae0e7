package main

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"
)

// startEcho runs an echo, and returns its address and what ends it.
func startEcho(t *testing.T, e echoed, delay time.Duration) (string, func()) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		if err := serveEcho(ctx, l, e, delay); err != nil {
			t.Error(err)
		}
	})
	end := sync.OnceFunc(func() { cancel(); running.Wait() })
	t.Cleanup(end)
	return "http://" + l.Addr().String() + "/", end
}

// through is a stand-in for the mesh: it sends requests to one replica after the other, and says so as an agent does.
func through(t *testing.T, replicas ...string) string {
	t.Helper()
	var mu sync.Mutex
	next := 0
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		replica := replicas[next%len(replicas)]
		next++
		mu.Unlock()
		onward, _ := http.NewRequestWithContext(r.Context(), r.Method, replica, nil)
		onward.Header.Set("Via", "1.0 fred, 1.1 headroom")
		answer, err := http.DefaultClient.Do(onward)
		if err != nil {
			w.Header().Set("Headroom-Reason", "no_endpoints")
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		defer answer.Body.Close()
		_, _ = io.Copy(w, answer.Body)
	}))
	t.Cleanup(s.Close)
	return s.URL
}

func TestCallShowsWhoAnswers(t *testing.T) {
	first, _ := startEcho(t, echoed{Replica: "echo-1", Node: "a"}, 0)
	var out bytes.Buffer
	if err := callUntil(t.Context(), &out, first, callWants{requests: 3, replicas: 1}); err != nil {
		t.Error(err)
	}
	want := "3 requests: 3 answered, 0 through the mesh; replicas: 1, nodes: 1\nREPLICA  NODE  REQUESTS\necho-1   a     3\n"
	if out.String() != want {
		t.Errorf("got:\n%s\nwant:\n%s", &out, want)
	}
}

// TestCallAtOnce has an echo that answers no request before another is there.
func TestCallAtOnce(t *testing.T) {
	pairs := make(chan struct{})
	echo := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case pairs <- struct{}{}:
		case <-pairs:
		case <-r.Context().Done():
		}
		echoed{Replica: "echo-1"}.answer(w, r, 0)
	}))
	defer echo.Close()
	if err := callUntil(t.Context(), io.Discard, echo.URL, callWants{requests: 10, atOnce: 2, replicas: 1}); err != nil {
		t.Error(err)
	}
}

func TestCallWaits(t *testing.T) {
	first, _ := startEcho(t, echoed{Replica: "echo-1", Node: "a"}, 0)
	second, _ := startEcho(t, echoed{Replica: "echo-2", Node: "b"}, 0)
	var out bytes.Buffer
	// In the first round, one replica answers both requests.
	mesh := through(t, first, first, second, first)
	if err := callUntil(t.Context(), &out, mesh, callWants{requests: 2, mesh: true, replicas: 2, wait: time.Minute}); err != nil {
		t.Error(err)
	}
	if !strings.HasPrefix(out.String(), "2 requests: 2 answered, 2 through the mesh; replicas: 2, nodes: 2\n") {
		t.Errorf("got:\n%s", &out)
	}
}

func TestCallFailsUnlessAllIsAsWanted(t *testing.T) {
	echo, end := startEcho(t, echoed{Replica: "echo-1"}, 0)
	wants := callWants{requests: 2, mesh: true, replicas: 2}
	err := callUntil(t.Context(), new(bytes.Buffer), echo, wants)
	for _, want := range []string{"2 of 2 requests did not come through the mesh: is there an agent on this node", "replicas that answered: 1, want 2"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q in it", err, want)
		}
	}
	mesh := through(t, echo)
	end()
	err = callUntil(t.Context(), new(bytes.Buffer), mesh, wants)
	if err == nil || !strings.Contains(err.Error(), "2 of 2 requests failed: status 503, by no_endpoints") {
		t.Errorf("got %v, want it to say that the mesh has no replicas", err)
	}
}

func TestEchoFinishesWhatItHasBegun(t *testing.T) {
	echo, end := startEcho(t, echoed{Replica: "echo-1"}, 50*time.Millisecond)
	answered := make(chan error)
	var calling sync.WaitGroup
	calling.Go(func() {
		answered <- callUntil(t.Context(), new(bytes.Buffer), echo, callWants{requests: 1})
	})
	select {
	case <-time.After(20 * time.Millisecond):
	case err := <-answered:
		t.Fatalf("answered at once: %v", err)
	}
	end()
	if err := <-answered; err != nil {
		t.Error(err)
	}
	calling.Wait()
}
