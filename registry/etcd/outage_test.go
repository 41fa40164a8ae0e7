package etcd

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/registry"
	"github.com/headroom-mesh/headroom/registry/embedded"
	"github.com/headroom-mesh/headroom/registry/registrytest"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// startEtcd runs an etcd of the test's own until stop is called.
func startEtcd(t *testing.T, dir string) (addr string, stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ready := make(chan string, 1)
	var running sync.WaitGroup
	running.Go(func() {
		defer close(ready)
		cfg := embedded.Config{Dir: dir, ClientAddr: "127.0.0.1:0", PeerAddr: "127.0.0.1:0"}
		if err := embedded.Run(ctx, cfg, func(url string) { ready <- url }); err != nil {
			t.Error(err)
		}
	})
	stop = sync.OnceFunc(func() {
		cancel()
		running.Wait()
	})
	t.Cleanup(stop)
	return strings.TrimPrefix(<-ready, "http://"), stop
}

func start(t *testing.T, s *store, node registry.NodeName) *registrytest.Agent {
	t.Helper()
	return registrytest.Start(t, s.Connect(node))
}

func set(t *testing.T, a *registrytest.Agent, service registry.ServiceName, timeout string) {
	t.Helper()
	if _, err := a.SetPolicy(t.Context(), registrytest.Policy(service, timeout, "")); err != nil {
		t.Fatal(err)
	}
}

// timeout is that of a service's policy, as in a snapshot.
func timeout(s *registry.Snapshot, service registry.ServiceName) time.Duration {
	if s.Services[service] == nil {
		return -1
	}
	return s.Services[service].Policy.Timeout
}

func awaitTimeout(t *testing.T, a *registrytest.Agent, service registry.ServiceName, want time.Duration) {
	t.Helper()
	a.AwaitThat(t, fmt.Sprintf("the timeout of %s is %v", service, want), func(s *registry.Snapshot) bool {
		return timeout(s, service) == want
	})
}

func TestCompactionWhileAway(t *testing.T) {
	s := newStore(t)
	a, b, watcher := start(t, s, "a"), start(t, s, "b"), start(t, s, "watcher")
	a.Register(t, registrytest.Endpoint("web", "a"))
	b.Register(t, registrytest.Endpoint("web", "b"))
	set(t, a, "web", "3s")
	watcher.Await(t, "web", "a ready, b ready")
	awaitTimeout(t, watcher, "web", 3*time.Second)
	a.Stop()
	b.Stop()

	s.SetAway(true)
	watcher.AwaitConnected(t, false)
	s.Expire("a")
	prefix := s.config("x").Prefix
	deleted, err := s.direct.Delete(t.Context(), prefix+"/policies/web")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.direct.Compact(t.Context(), deleted.Header.Revision); err != nil {
		t.Fatal(err)
	}
	s.SetAway(false)
	watcher.Await(t, "web", "b ready")
	awaitTimeout(t, watcher, "web", 0)
}

func TestLeasesExpireWhileAway(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	a, b, watcher := start(t, s, "a"), start(t, s, "b"), start(t, s, "watcher")
	a.Register(t, registrytest.Endpoint("web", "a"))
	b.Register(t, registrytest.Endpoint("web", "b"))
	watcher.Await(t, "web", "a ready, b ready")
	a.Stop()
	b.Stop()
	s.SetAway(true)
	watcher.AwaitConnected(t, false)
	s.Expire("a")
	s.Expire("b")
	before, _ := watcher.Latest()
	s.SetAway(false)
	after := watcher.AwaitThat(t, "the list without leases is applied", func(s *registry.Snapshot) bool {
		return s.Revision > before.Revision
	})
	if got := len(after.Services["web"].Endpoints); got != 2 {
		t.Errorf("web has %d endpoints after all leases expired, want the last known 2", got)
	}
}

func TestEtcdRestarts(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	addr, stop := startEtcd(t, dir)
	s := newStore(t)
	s.proxy.target.Store(addr)
	a, b := start(t, s, "a"), start(t, s, "b")
	a.Register(t, registrytest.Endpoint("web", "a"))
	set(t, a, "web", "3s")
	awaitTimeout(t, b, "web", 3*time.Second)
	stop()
	a.AwaitConnected(t, false)
	b.AwaitConnected(t, false)
	b.Await(t, "web", "a ready")

	addr, _ = startEtcd(t, dir)
	s.proxy.target.Store(addr)
	b.AwaitConnected(t, true)
	a.Register(t, registrytest.Endpoint("web", "a"), registrytest.Endpoint("db", "a"))
	got := b.Await(t, "db", "a ready")
	if timeout(got, "web") != 3*time.Second || len(got.Services["web"].Endpoints) != 1 {
		t.Errorf("after the restart web is %+v, want it as before", got.Services["web"])
	}
	set(t, b, "web", "4s")
	awaitTimeout(t, a, "web", 4*time.Second)
}

// An etcd that comes back from an old backup, or empty, is believed.
func TestEtcdLosesData(t *testing.T) {
	t.Parallel()
	full, stop := startEtcd(t, t.TempDir())
	s := newStore(t)
	s.proxy.target.Store(full)
	a, b := start(t, s, "a"), start(t, s, "b")
	a.Register(t, registrytest.Endpoint("web", "a"))
	for range 20 {
		set(t, a, "web", "3s")
	}
	awaitTimeout(t, b, "web", 3*time.Second)
	before, _ := b.Latest()
	stop()

	empty, _ := startEtcd(t, t.TempDir())
	s.proxy.target.Store(empty)
	after := b.AwaitThat(t, "the lower revision is taken", func(s *registry.Snapshot) bool {
		return s.Revision < before.Revision && timeout(s, "web") == 0
	})
	if got := len(after.Services["web"].Endpoints); got != 1 {
		t.Errorf("web has %d endpoints, want the last known one", got)
	}
	direct := directClient(t, clientv3.Config{Endpoints: []string{empty}})
	awaitKey(t, direct, s.config("x").Prefix+"/endpoints/web/a/127.0.0.1:8080")
	set(t, b, "web", "4s")
	awaitTimeout(t, a, "web", 4*time.Second)
}

func awaitKey(t *testing.T, direct *clientv3.Client, key string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	response, err := direct.Get(ctx, key)
	if err != nil {
		t.Fatal(err)
	}
	if len(response.Kvs) > 0 {
		return
	}
	for response := range direct.Watch(ctx, key, clientv3.WithRev(response.Header.Revision+1)) {
		for _, event := range response.Events {
			if event.IsCreate() {
				return
			}
		}
	}
	t.Fatalf("%s was not written", key)
}

func TestLeaseLivesWithItsAgent(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	s.ttl = 2 * time.Second
	a, b := start(t, s, "a"), start(t, s, "b")
	other := start(t, s, "other")
	a.Register(t, registrytest.Endpoint("web", "a"))
	other.Register(t, registrytest.Endpoint("web", "other"))
	b.Await(t, "web", "a ready, other ready")
	began := time.Now()
	a.Stop()
	b.Await(t, "web", "other ready")
	if took := time.Since(began); took < time.Second {
		t.Errorf("the endpoint was gone %v after its agent; a restart needs more", took)
	}
	// other has outlived its first lease only if it renewed it.
	if got, _ := b.Latest(); got.Services["web"].Endpoints[0].Node != "other" {
		t.Error("the agent that still runs is gone")
	}
}

func TestDeletedKeyComesBack(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	a, b := start(t, s, "a"), start(t, s, "b")
	a.Register(t, registrytest.Endpoint("web", "a"))
	awaitAddresses(t, b, "web") // then nobody writes anything else
	deleted, err := s.direct.Delete(t.Context(), s.config("x").Prefix+"/endpoints/", clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	b.AwaitThat(t, "the endpoint is back", func(s *registry.Snapshot) bool {
		return s.Revision > deleted.Header.Revision && len(s.Services["web"].Endpoints) == 1
	})
	if leases := s.leases("a"); len(leases) != 1 {
		t.Errorf("the endpoint is under leases %v, want one", leases)
	}
}

// Others can tell an endpoint that is taken out from one whose agent died.
func TestRemovalGoesThroughDraining(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	a := start(t, s, "a")
	first := a.AwaitThat(t, "etcd has answered", func(*registry.Snapshot) bool { return true }).Revision
	prefix := s.config("x").Prefix + "/endpoints/"
	events := s.direct.Watch(t.Context(), prefix, clientv3.WithPrefix(), clientv3.WithRev(first+1))
	a.Register(t, registrytest.Endpoint("web", "a"))
	a.Register(t)
	var got []string
	for response := range events {
		for _, event := range response.Events {
			word := "deleted"
			if event.Type == clientv3.EventTypePut {
				e, err := registry.EndpointFromValue(event.Kv.Value)
				word = fmt.Sprint(e.State, err)
			}
			got = append(got, word)
		}
		if len(got) > 0 && got[len(got)-1] == "deleted" {
			break
		}
	}
	if want := "ready <nil> draining <nil> deleted"; strings.Join(got, " ") != want {
		t.Errorf("the record was %v, want %s", got, want)
	}
}

// A node may have more endpoints than fit into one transaction.
func TestManyEndpoints(t *testing.T) {
	t.Parallel()
	const many = 250
	s := newStore(t)
	a, b := start(t, s, "a"), start(t, s, "b")
	var list []registry.Endpoint
	for i := range many {
		list = append(list, registrytest.Endpoint(registry.ServiceName(fmt.Sprintf("s%d", i)), "a"))
	}
	a.Register(t, list...)
	count := func(want int) func(*registry.Snapshot) bool {
		return func(s *registry.Snapshot) bool {
			n := 0
			for _, service := range s.Services {
				n += len(service.Endpoints)
			}
			return n == want
		}
	}
	b.AwaitThat(t, "all are registered", count(many))
	a.Register(t, list[0])
	got := b.AwaitThat(t, "all but one are gone", count(1))
	if len(got.Services) != many {
		t.Errorf("%d services are known, want all %d", len(got.Services), many)
	}
}

func TestValuesAreReadable(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	a := start(t, s, "a")
	a.Register(t, registrytest.Endpoint("web", "a"))
	set(t, a, "web", "3s")
	awaitAddresses(t, a, "web")
	for key, want := range map[string]string{
		"services/web": `{"name":"web"}`,
		"endpoints/web/a/127.0.0.1:8080": `{"service":"web","node":"a","zone":"z1","address":"127.0.0.1:8080",` +
			`"agent":"127.0.0.1:15008","state":"READY"}`,
		"addresses/web": `{"service":"web","ipv4":"240.65.11.152","ipv6":"fd68:6561:6472::1:b98"}`,
		"slots/68504":   "web",
		"policies/web": `{"apiVersion":"headroom.dev/v1","kind":"ServicePolicy","metadata":{"name":"web"},` +
			`"spec":{"timeout":"3s"}}`,
	} {
		response, err := s.direct.Get(t.Context(), s.config("x").Prefix+"/"+key)
		if err != nil {
			t.Fatal(err)
		}
		if len(response.Kvs) != 1 || string(response.Kvs[0].Value) != want {
			t.Errorf("%s is %v, want %s", key, response.Kvs, want)
		}
	}
}

// A burst of changes makes few snapshots.
func TestBurst(t *testing.T) {
	t.Parallel()
	const changes = 500
	s := newStore(t)
	r := s.Connect("a")
	ctx, cancel := context.WithCancel(t.Context())
	published, done := 0, make(chan time.Time, 1)
	var running sync.WaitGroup
	running.Go(func() {
		r.Run(ctx, func(s *registry.Snapshot) {
			published++
			if len(s.Services) == changes {
				done <- time.Now()
			}
		})
	})
	began := time.Now()
	for i := range changes {
		s.Put(fmt.Sprintf("services/s%d", i), fmt.Appendf(nil, `{"name":"s%d"}`, i))
	}
	took := (<-done).Sub(began)
	cancel()
	running.Wait()
	if most := int(took/publishEvery) + 5; published > most {
		t.Errorf("%d snapshots in %v, want at most %d", published, took, most)
	}
}

func TestStartFromDisk(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	cfg := s.config("b")
	cfg.SnapshotFile = filepath.Join(t.TempDir(), "made", "registry.json")
	a, b := start(t, s, "a"), registrytest.Start(t, mustNew(t, cfg))
	a.Register(t, registrytest.Endpoint("web", "a"))
	set(t, a, "web", "3s")
	awaitTimeout(t, b, "web", 3*time.Second)
	want := awaitAddresses(t, b, "web")
	a.Stop()
	b.Stop()
	info, err := os.Stat(cfg.SnapshotFile)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode().Perm() != 0o600 {
		t.Errorf("the file has mode %v, want it readable by its owner only", info.Mode())
	}

	s.SetAway(true)
	s.Expire("a")
	again := registrytest.Start(t, mustNew(t, cfg))
	got := again.Await(t, "web", "a ready")
	if got.Revision != want.Revision || timeout(got, "web") != 3*time.Second ||
		got.Services["web"].PolicyRevision != want.Services["web"].PolicyRevision {
		t.Errorf("from disk: %+v, want %+v", got, want)
	}
	if name, ok := got.ServiceAt(want.Services["web"].IPv4); name != "web" {
		t.Errorf("from disk: at the address of web there is %q, %v", name, ok)
	}
	if again.Connected() {
		t.Error("Connected() = true from disk alone")
	}
	s.SetAway(false)
	again.AwaitThat(t, "etcd has answered", func(s *registry.Snapshot) bool { return s.Revision > want.Revision })
	again.Await(t, "web", "a ready") // lost together with its lease
}

func TestFileIsKeptWhileAway(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	s.SetAway(true)
	cfg := s.config("a")
	cfg.SnapshotFile = filepath.Join(t.TempDir(), "registry.json")
	content := `{"revision":"7","services":[{"name":"web"}]}`
	if err := os.WriteFile(cfg.SnapshotFile, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	a := registrytest.Start(t, mustNew(t, cfg))
	a.AwaitThat(t, "web is known", func(s *registry.Snapshot) bool { return s.Services["web"] != nil })
	a.Stop()
	if got, err := os.ReadFile(cfg.SnapshotFile); err != nil || string(got) != content {
		t.Errorf("the file holds %s, %v; want it unchanged", got, err)
	}
}

func TestBrokenFileIsIgnored(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	cfg := s.config("a")
	cfg.SnapshotFile = filepath.Join(t.TempDir(), "registry.json")
	if err := os.WriteFile(cfg.SnapshotFile, []byte(`{"revision":"7","serv`), 0o600); err != nil {
		t.Fatal(err)
	}
	a := registrytest.Start(t, mustNew(t, cfg))
	a.Register(t, registrytest.Endpoint("web", "a"))
	a.Await(t, "web", "a ready")
	a.Stop()
	if got, err := os.ReadFile(cfg.SnapshotFile); err != nil || !json.Valid(got) {
		t.Errorf("the file holds %s, %v; want a new copy", got, err)
	}
}

func TestMetrics(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	metrics := prometheus.NewPedanticRegistry()
	cfg := s.config("a")
	cfg.Metrics = metrics
	a := registrytest.Start(t, mustNew(t, cfg))
	a.Register(t, registrytest.Endpoint("web", "a"))
	s.Put("services/db", []byte("?"))
	a.Register(t, registrytest.Endpoint("web", "a"), registrytest.Endpoint("mail", "a"))
	last := awaitAddresses(t, a, "web", "mail")

	problems, err := testutil.GatherAndLint(metrics)
	if err != nil || len(problems) > 0 {
		t.Errorf("lint: %v, %v", problems, err)
	}
	want := fmt.Sprintf(`
# HELP headroom_registry_bad_records_total Records that could not be understood and were skipped.
# TYPE headroom_registry_bad_records_total counter
headroom_registry_bad_records_total{kind="services"} 1
# HELP headroom_registry_connected Whether the registry answered last time.
# TYPE headroom_registry_connected gauge
headroom_registry_connected 1
# HELP headroom_registry_leases_total Leases taken by this agent; more than one means that one was lost.
# TYPE headroom_registry_leases_total counter
headroom_registry_leases_total 1
# HELP headroom_registry_revision Revision of the registry that was read last.
# TYPE headroom_registry_revision gauge
headroom_registry_revision %d
# HELP headroom_registry_virtual_addresses Services that have virtual addresses, and those that had and may come back for theirs within a day.
# TYPE headroom_registry_virtual_addresses gauge
headroom_registry_virtual_addresses 2
# HELP headroom_registry_virtual_addresses_limit Services that can have virtual addresses at once, in the ranges of this agent.
# TYPE headroom_registry_virtual_addresses_limit gauge
headroom_registry_virtual_addresses_limit 1.048559e+06
# HELP headroom_registry_watch_restarts_total How often the watch ended and everything was read anew.
# TYPE headroom_registry_watch_restarts_total counter
headroom_registry_watch_restarts_total 0
`, last.Revision)
	if err := testutil.GatherAndCompare(metrics, strings.NewReader(want), "headroom_registry_bad_records_total",
		"headroom_registry_connected", "headroom_registry_leases_total", "headroom_registry_revision",
		"headroom_registry_virtual_addresses", "headroom_registry_virtual_addresses_limit", "headroom_registry_watch_restarts_total"); err != nil {
		t.Error(err)
	}
}
