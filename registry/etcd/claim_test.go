package etcd

import (
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/registry"
	"github.com/headroom-mesh/headroom/registry/registrytest"
)

// logText keeps what is logged.
type logText struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *logText) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logText) lines(part string) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var found []string
	for line := range strings.Lines(l.text.String()) {
		if strings.Contains(line, part) {
			found = append(found, line)
		}
	}
	return found
}

// namesake starts another agent of the same name, past the proxy of the store.
func namesake(t *testing.T, s *store, node registry.NodeName) (*registrytest.Agent, *Registry, *logText) {
	t.Helper()
	log := new(logText)
	cfg := s.config(node)
	cfg.Endpoints = []string{"http://" + shared}
	cfg.Owner, cfg.Agent = "another", "10.0.0.2:15008"
	cfg.Log = slog.New(slog.NewTextHandler(log, nil))
	r := mustNew(t, cfg)
	return registrytest.Start(t, r), r, log
}

func awaitTrue(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for timeout := time.After(20 * time.Second); !ok(); {
		select {
		case <-tick.C:
		case <-timeout:
			t.Fatalf("%s: not so after 20s", what)
		}
	}
}

// nodeLease is the lease of the claim of a name.
func (s *store) nodeLease(node registry.NodeName) int64 {
	response, err := s.direct.Get(s.t.Context(), s.config(node).Prefix+"/"+node.Key())
	if err != nil {
		s.t.Fatal(err)
	}
	if len(response.Kvs) == 0 {
		return 0
	}
	return response.Kvs[0].Lease
}

func TestNodeNameTwice(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	cfg := s.config("a")
	cfg.Agent = "10.0.0.1:15008"
	first := mustNew(t, cfg)
	a, watcher := registrytest.Start(t, first), start(t, s, "watcher")
	a.Register(t, registrytest.Endpoint("web", "a"))
	if !first.Claimed() {
		t.Error("Claimed() = false of the agent that was first")
	}
	watcher.Await(t, "web", "a ready")

	newcomer, r, log := namesake(t, s, "a")
	newcomer.Advertise([]registry.Endpoint{registrytest.Endpoint("db", "a")})
	awaitTrue(t, "the newcomer complains", func() bool { return len(log.lines("level=ERROR")) > 0 })
	if err := newcomer.Flush(t.Context()); !errors.Is(err, errForeign) {
		t.Errorf("Flush of the newcomer: %v, want at once %v", err, errForeign)
	}
	if r.Claimed() {
		t.Error("Claimed() = true of the newcomer")
	}
	newcomer.Advertise(nil) // as an agent does that ends
	if err := newcomer.Flush(t.Context()); !errors.Is(err, errForeign) {
		t.Errorf("Flush of the newcomer that ends: %v, want at once %v", err, errForeign)
	}
	a.Register(t, registrytest.Endpoint("web", "a"), registrytest.Endpoint("mail", "a"))
	got := watcher.Await(t, "mail", "a ready")
	if len(got.Services) != 2 || len(got.Services["web"].Endpoints) != 1 {
		t.Errorf("services are %v, want web and mail with their endpoints, and no db", got.Services)
	}

	newcomer.Advertise([]registry.Endpoint{registrytest.Endpoint("db", "a")})
	a.Stop()
	s.Expire("a")
	watcher.Await(t, "db", "a ready")
	awaitTrue(t, "the newcomer has the name", r.Claimed)
	if err := newcomer.Flush(t.Context()); err != nil {
		t.Errorf("Flush after the name is free: %v", err)
	}
	lines := log.lines("another agent holds this node's name")
	if len(lines) != 1 || !strings.Contains(lines[0], "peer=10.0.0.1:15008") || !strings.Contains(lines[0], "--node") {
		t.Errorf("the newcomer logged %q, want one line with the address of the first and what to do", lines)
	}
}

// An agent that was cut off for longer than its lease finds its name taken, and leaves it alone.
func TestNodeNameTakenWhileAway(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	first := mustNew(t, s.config("a"))
	a := registrytest.Start(t, first)
	a.Register(t, registrytest.Endpoint("web", "a"))
	s.SetAway(true)
	a.AwaitConnected(t, false)
	s.Expire("a")
	other, r, _ := namesake(t, s, "a")
	other.Register(t, registrytest.Endpoint("web", "a"), registrytest.Endpoint("db", "a"))
	lease := s.nodeLease("a")

	s.SetAway(false)
	awaitTrue(t, "the first learns that its name is taken", func() bool {
		return errors.Is(first.Flush(t.Context()), errForeign)
	})
	if first.Claimed() || !r.Claimed() {
		t.Errorf("Claimed() = %v of the first and %v of the other, want the other to have it", first.Claimed(), r.Claimed())
	}
	if leases := s.leases("a"); len(leases) != 1 || s.nodeLease("a") != lease {
		t.Errorf("endpoints are under leases %v and the name under %x, want all as it was", leases, s.nodeLease("a"))
	}
	other.Await(t, "db", "a ready")
}

func TestRestartKeepsNodeName(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	s.ttl = time.Hour
	a := start(t, s, "a")
	a.Register(t, registrytest.Endpoint("web", "a"))
	before := s.nodeLease("a")
	a.Stop()
	again := mustNew(t, s.config("a"))
	registrytest.Start(t, again).Register(t, registrytest.Endpoint("web", "a"))
	if after := s.nodeLease("a"); !again.Claimed() || after == before || after == 0 {
		t.Errorf("Claimed() = %v under lease %x, want the name under a new lease", again.Claimed(), after)
	}
}

// Somebody deletes the claim: no endpoint is lost, and the claim comes back with the next change.
func TestDeletedClaim(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	a := start(t, s, "a")
	a.Register(t, registrytest.Endpoint("web", "a"))
	if _, err := s.direct.Delete(t.Context(), s.config("a").Prefix+"/nodes/a"); err != nil {
		t.Fatal(err)
	}
	a.Register(t, registrytest.Endpoint("web", "a"), registrytest.Endpoint("db", "a"))
	if s.nodeLease("a") == 0 || len(s.leases("a")) != 1 {
		t.Errorf("the name is under lease %x and endpoints under %v, want all under one", s.nodeLease("a"), s.leases("a"))
	}
}
