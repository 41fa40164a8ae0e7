package registrytest

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
)

// patience is how long a test waits for what must happen.
const patience = 20 * time.Second

// Store is a store that agents can connect to, and that fails on demand.
type Store interface {
	// Connect returns the connection of the agent on a node, whose Run is not yet called.
	Connect(node registry.NodeName) registry.Registry
	// Put writes a record that may be anything.
	Put(key string, value []byte)
	// Expire takes the lease of the agent on a node away.
	Expire(node registry.NodeName)
	// SetAway makes the store unreachable for agents, or reachable again.
	SetAway(away bool)
}

// TestRegistry checks what an implementation of registry.Registry promises. newStore returns an empty store.
func TestRegistry(t *testing.T, newStore func(t *testing.T) Store) {
	for _, test := range []struct {
		name string
		run  func(*testing.T, Store)
	}{
		{"an empty store makes an empty snapshot", testEmpty},
		{"snapshots are complete and in order", testComplete},
		{"an endpoint changes its state and leaves", testStates},
		{"a set that is replaced before it is stored", testReplaced},
		{"a lost lease is taken anew", testLostLease},
		{"leases lost together don't empty a service", testLostTogether},
		{"a node comes back without its endpoints", testGhost},
		{"endpoints stay over a restart of their agent", testRestart},
		{"a restarted agent removes what it doesn't have any more", testRestartWithLess},
		{"a policy is read, written and deleted", testPolicies},
		{"a policy with mistakes is refused", testInvalidPolicy},
		{"of two writers one wins", testRacingWriters},
		{"snapshots hold policies with their revision", testPolicySnapshots},
		{"a bad record is skipped alone", testBadRecords},
		{"the store goes away and comes back", testAway},
		{"an agent starts while the store is away", testStartAway},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, newStore(t)) })
	}
}

// Agent is a connection that runs.
type Agent struct {
	registry.Registry
	stop func()

	// mu guards the fields below
	mu      sync.Mutex
	latest  *registry.Snapshot
	changed chan struct{} // closed when latest changes
}

// Start runs a connection until Stop or the end of the test.
func Start(t *testing.T, r registry.Registry) *Agent {
	t.Helper()
	a := &Agent{Registry: r, changed: make(chan struct{})}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := r.Run(ctx, a.publish); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	a.stop = sync.OnceFunc(func() {
		cancel()
		running.Wait()
	})
	t.Cleanup(a.stop)
	return a
}

// Stop ends Run, and returns when it has.
func (a *Agent) Stop() { a.stop() }

func (a *Agent) publish(s *registry.Snapshot) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.latest = s
	close(a.changed)
	a.changed = make(chan struct{})
}

// Latest returns the last snapshot, nil if there was none, and what tells that there is another.
func (a *Agent) Latest() (*registry.Snapshot, <-chan struct{}) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.latest, a.changed
}

// Await waits for a snapshot in which endpoints are those of a service, as "NODE STATE, NODE STATE", and returns it.
func (a *Agent) Await(t *testing.T, service registry.ServiceName, endpoints string) *registry.Snapshot {
	t.Helper()
	return a.AwaitThat(t, fmt.Sprintf("%s has endpoints %q", service, endpoints), func(s *registry.Snapshot) bool {
		return describe(s, service) == endpoints
	})
}

// AwaitThat waits for a snapshot of which ok holds, and returns it.
func (a *Agent) AwaitThat(t *testing.T, what string, ok func(*registry.Snapshot) bool) *registry.Snapshot {
	t.Helper()
	timeout := time.After(patience)
	for {
		snapshot, changed := a.Latest()
		if snapshot != nil && ok(snapshot) {
			return snapshot
		}
		select {
		case <-changed:
		case <-timeout:
			t.Fatalf("want a snapshot in which %s; the last one was %s", what, describeAll(snapshot))
		}
	}
}

// AwaitConnected waits until Connected says so.
func (a *Agent) AwaitConnected(t *testing.T, want bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for a.Connected() != want {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("Connected() = %v, want %v", !want, want)
		}
	}
}

// Register advertises endpoints and waits until they are stored.
func (a *Agent) Register(t *testing.T, endpoints ...registry.Endpoint) {
	t.Helper()
	a.Advertise(endpoints)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := a.Flush(ctx); err != nil {
		t.Fatalf("Flush: %v", err)
	}
}

func describe(s *registry.Snapshot, service registry.ServiceName) string {
	if s == nil || s.Services[service] == nil {
		return "unknown"
	}
	var list []string
	for _, e := range s.Services[service].Endpoints {
		list = append(list, string(e.Node)+" "+e.State.String())
	}
	return strings.Join(list, ", ")
}

func describeAll(s *registry.Snapshot) string {
	if s == nil {
		return "none"
	}
	var lines []string
	for name := range s.Services {
		lines = append(lines, fmt.Sprintf("%s: %s", name, describe(s, name)))
	}
	slices.Sort(lines)
	return fmt.Sprintf("revision %d: %s", s.Revision, strings.Join(lines, "; "))
}

// Endpoint returns an endpoint of a service on a node.
func Endpoint(service registry.ServiceName, node registry.NodeName) registry.Endpoint {
	return registry.Endpoint{
		Service: service,
		Node:    node,
		Zone:    "z1",
		Address: netip.MustParseAddrPort("127.0.0.1:8080"),
		Agent:   netip.MustParseAddrPort("127.0.0.1:15008"),
	}
}

// Policy returns a policy of a service with a timeout, to be written over the version that it says.
func Policy(service registry.ServiceName, timeout, version string) *meshv1.ServicePolicy {
	return &meshv1.ServicePolicy{
		ApiVersion: policy.APIVersion,
		Kind:       policy.Kind,
		Metadata:   &meshv1.Metadata{Name: string(service), ResourceVersion: version},
		Spec:       &meshv1.ServicePolicySpec{Timeout: timeout},
	}
}

func in(e registry.Endpoint, s registry.State) registry.Endpoint {
	e.State = s
	return e
}

func testEmpty(t *testing.T, store Store) {
	a := Start(t, store.Connect("a"))
	s := a.AwaitThat(t, "there is nothing", func(s *registry.Snapshot) bool { return len(s.Services) == 0 })
	if s.Revision == 0 {
		t.Error("the snapshot has no revision")
	}
	a.AwaitConnected(t, true)
	if err := a.Flush(t.Context()); err != nil {
		t.Errorf("Flush without Advertise: %v", err)
	}
}

func testComplete(t *testing.T, store Store) {
	a, b := Start(t, store.Connect("a")), Start(t, store.Connect("b"))
	second := Endpoint("web", "a")
	second.Address = netip.MustParseAddrPort("[::1]:80")
	outside := Endpoint("db", "b")
	outside.Agent = netip.AddrPort{}
	outside.Address, outside.Socket, outside.Protocol = netip.AddrPort{}, "/run/db.sock", policy.ProtocolTCP
	a.Register(t, second, Endpoint("web", "a"))
	b.Register(t, Endpoint("web", "b"), outside)

	want := &registry.Snapshot{Services: map[registry.ServiceName]*registry.Service{
		"web": {
			Name:      "web",
			Endpoints: []registry.Endpoint{Endpoint("web", "a"), second, Endpoint("web", "b")},
			Policy:    policy.Default(),
		},
		"db": {Name: "db", Endpoints: []registry.Endpoint{outside}, Policy: policy.Default()},
	}}
	late := Start(t, store.Connect("c"))
	for _, agent := range []*Agent{a, b, late} {
		agent.Await(t, "web", "a ready, a ready, b ready")
		got := agent.Await(t, "db", "b ready")
		want.Revision = got.Revision
		if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b }),
			cmpopts.IgnoreFields(registry.Service{}, "IPv4", "IPv6"), cmpopts.IgnoreUnexported(registry.Snapshot{})); diff != "" {
			t.Errorf("snapshot (-want +got):\n%s", diff)
		}
	}
}

func testStates(t *testing.T, store Store) {
	a, b := Start(t, store.Connect("a")), Start(t, store.Connect("b"))
	web := Endpoint("web", "a")
	a.Register(t, web)
	b.Await(t, "web", "a ready")
	a.Register(t, in(web, registry.Unhealthy))
	b.Await(t, "web", "a unhealthy")
	a.Register(t, in(web, registry.Draining))
	b.Await(t, "web", "a draining")
	a.Register(t)
	b.Await(t, "web", "")
	a.Register(t, web)
	b.Await(t, "web", "a ready")
	a.Register(t) // without draining first
	b.Await(t, "web", "")
}

func testReplaced(t *testing.T, store Store) {
	a, b := Start(t, store.Connect("a")), Start(t, store.Connect("b"))
	for range 20 {
		a.Advertise([]registry.Endpoint{Endpoint("web", "a")})
		a.Advertise(nil)
		a.Advertise([]registry.Endpoint{Endpoint("db", "a")})
	}
	a.Register(t, Endpoint("db", "a"), Endpoint("mail", "a"))
	b.Await(t, "mail", "a ready")
	s := b.Await(t, "db", "a ready")
	if got := describe(s, "web"); got != "unknown" && got != "" {
		t.Errorf("web has endpoints %q, want none", got)
	}
}

func testLostLease(t *testing.T, store Store) {
	a, b := Start(t, store.Connect("a")), Start(t, store.Connect("b"))
	a.Register(t, Endpoint("web", "a"), Endpoint("db", "a"))
	b.Register(t, Endpoint("web", "b"))
	b.Await(t, "web", "a ready, b ready")
	before, _ := b.Latest()
	store.Expire("a")
	b.AwaitThat(t, "a is registered anew", func(s *registry.Snapshot) bool {
		return s.Revision >= before.Revision+2 && describe(s, "web") == "a ready, b ready" && describe(s, "db") == "a ready"
	})
	a.Register(t, in(Endpoint("web", "a"), registry.Draining))
	b.Await(t, "web", "a draining, b ready")
}

func testLostTogether(t *testing.T, store Store) {
	a, b, c := Start(t, store.Connect("a")), Start(t, store.Connect("b")), Start(t, store.Connect("c"))
	a.Register(t, Endpoint("web", "a"))
	b.Register(t, Endpoint("web", "b"))
	c.Await(t, "web", "a ready, b ready")
	a.Stop()
	b.Stop()
	store.Expire("a")
	c.Await(t, "web", "b ready")
	store.Expire("b")
	c.Await(t, "web", "a ready, b ready")
	// The first one back does not get the requests of all.
	b = Start(t, store.Connect("b"))
	b.Register(t, Endpoint("web", "b"), Endpoint("db", "b"))
	s := c.Await(t, "db", "b ready")
	if got, want := describe(s, "web"), "a ready, b ready"; got != want {
		t.Errorf("web has endpoints %q as soon as b is back, want %q", got, want)
	}
	Start(t, store.Connect("a")).Register(t)
	c.Await(t, "web", "b ready")
}

// testGhost has a node come back without what it had.
func testGhost(t *testing.T, store Store) {
	a, b := Start(t, store.Connect("a")), Start(t, store.Connect("b"))
	a.Register(t, Endpoint("web", "a"))
	b.Await(t, "web", "a ready")
	a.Stop()
	before, _ := b.Latest()
	store.Expire("a")
	b.AwaitThat(t, "a has lapsed", func(s *registry.Snapshot) bool { return s.Revision > before.Revision })
	b.Await(t, "web", "a ready")
	Start(t, store.Connect("a")).Register(t)
	b.Await(t, "web", "")
}

func testRestart(t *testing.T, store Store) {
	b := Start(t, store.Connect("b"))
	a := Start(t, store.Connect("a"))
	a.Register(t, Endpoint("web", "a"))
	b.Await(t, "web", "a ready")
	a.Stop()
	a = Start(t, store.Connect("a"))
	a.Register(t, Endpoint("web", "a"), Endpoint("db", "a"))
	s := b.Await(t, "db", "a ready")
	if got := describe(s, "web"); got != "a ready" {
		t.Errorf("web has endpoints %q, want them as before the restart", got)
	}
}

func testRestartWithLess(t *testing.T, store Store) {
	b := Start(t, store.Connect("b"))
	a := Start(t, store.Connect("a"))
	socket := Endpoint("web", "a")
	socket.Address, socket.Socket = netip.AddrPort{}, "/run/web.sock"
	a.Register(t, Endpoint("web", "a"), socket, Endpoint("db", "a"))
	b.Await(t, "web", "a ready, a ready")
	a.Stop()
	a = Start(t, store.Connect("a"))
	a.Await(t, "web", "a ready, a ready")
	a.Register(t, Endpoint("db", "a"))
	b.Await(t, "web", "")
	b.Await(t, "db", "a ready")
}

func testPolicies(t *testing.T, store Store) {
	a := Start(t, store.Connect("a"))
	ctx := t.Context()
	a.AwaitConnected(t, true)

	_, err := a.Policy(ctx, "web")
	wantErr(t, "read before it exists", err, registry.ErrNotFound)
	_, err = a.DeletePolicy(ctx, "web")
	wantErr(t, "delete before it exists", err, registry.ErrNotFound)
	_, err = a.SetPolicy(ctx, Policy("web", "1s", "1"))
	wantErr(t, "replace before it exists", err, registry.ErrConflict)

	first := mustSet(t, a, Policy("web", "1s", "0"))
	_, err = a.SetPolicy(ctx, Policy("web", "2s", "0"))
	wantErr(t, "create once more", err, registry.ErrConflict)
	second := mustSet(t, a, Policy("web", "2s", first.Metadata.ResourceVersion))
	_, err = a.SetPolicy(ctx, Policy("web", "3s", first.Metadata.ResourceVersion))
	wantErr(t, "replace an old version", err, registry.ErrConflict)
	third := mustSet(t, a, Policy("web", "3s", ""))
	if revision(t, first) >= revision(t, second) || revision(t, second) >= revision(t, third) {
		t.Errorf("revisions don't grow: %v, %v, %v", first.Metadata, second.Metadata, third.Metadata)
	}
	got, err := a.Policy(ctx, "web")
	if err != nil || got.Spec.Timeout != "3s" || got.Metadata.ResourceVersion != third.Metadata.ResourceVersion {
		t.Errorf("Policy = %v, %v; want %v", got, err, third)
	}
	deleted, err := a.DeletePolicy(ctx, "web")
	if err != nil || deleted <= revision(t, third) {
		t.Errorf("DeletePolicy = %d, %v; want a revision above %s", deleted, err, third.Metadata.ResourceVersion)
	}
	_, err = a.Policy(ctx, "web")
	wantErr(t, "read after it was deleted", err, registry.ErrNotFound)
}

func testInvalidPolicy(t *testing.T, store Store) {
	a := Start(t, store.Connect("a"))
	a.AwaitConnected(t, true)
	_, err := a.SetPolicy(t.Context(), Policy("web", "soon", "0"))
	if err == nil || !strings.Contains(err.Error(), "spec.timeout") {
		t.Errorf("SetPolicy = %v, want the field that is wrong", err)
	}
	_, err = a.Policy(t.Context(), "web")
	wantErr(t, "read after a refused write", err, registry.ErrNotFound)
}

// testRacingWriters counts up a number of which no increment may get lost.
func testRacingWriters(t *testing.T, store Store) {
	const rounds = 25
	agents := []*Agent{Start(t, store.Connect("a")), Start(t, store.Connect("b"))}
	for _, a := range agents {
		a.AwaitConnected(t, true)
	}
	first := mustSet(t, agents[0], Policy("web", "0s", "0"))
	wins := make([]map[string]bool, len(agents)) // by the version that was replaced
	var writers sync.WaitGroup
	for i, a := range agents {
		wins[i] = map[string]bool{}
		writers.Go(func() {
			for len(wins[i]) < rounds {
				increment(t, a, wins[i])
			}
		})
	}
	writers.Wait()
	for version := range wins[0] {
		if wins[1][version] {
			t.Errorf("version %s was replaced by both writers", version)
		}
	}
	got, err := agents[0].Policy(t.Context(), "web")
	if err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf("%ds", 2*rounds); got.Spec.Timeout != want {
		t.Errorf("after %d writes that succeeded: %s, want %s", 2*rounds, got.Spec.Timeout, want)
	}
	if revision(t, got) <= revision(t, first) {
		t.Errorf("revision %v, want one above %v", got.Metadata, first.Metadata)
	}
}

func increment(t *testing.T, a *Agent, wins map[string]bool) {
	doc, err := a.Policy(t.Context(), "web")
	if err != nil {
		t.Error(err)
		wins["error "+strconv.Itoa(len(wins))] = true
		return
	}
	n, _ := time.ParseDuration(doc.Spec.Timeout)
	version := doc.Metadata.ResourceVersion
	_, err = a.SetPolicy(t.Context(), Policy("web", fmt.Sprintf("%ds", int(n.Seconds())+1), version))
	if err == nil {
		wins[version] = true
	} else if !errors.Is(err, registry.ErrConflict) {
		t.Errorf("SetPolicy = %v, want ErrConflict", err)
	}
}

func testPolicySnapshots(t *testing.T, store Store) {
	a, b := Start(t, store.Connect("a")), Start(t, store.Connect("b"))
	a.Register(t, Endpoint("web", "a"))
	a.AwaitConnected(t, true)
	set := mustSet(t, a, Policy("web", "3s", ""))
	s := b.AwaitThat(t, "the policy is there", func(s *registry.Snapshot) bool { return s.Revision >= revision(t, set) })
	web := s.Services["web"]
	if web.Policy.Timeout != 3*time.Second || web.PolicyRevision != revision(t, set) {
		t.Errorf("timeout %v at revision %d, want 3s at %s", web.Policy.Timeout, web.PolicyRevision, set.Metadata)
	}
	if got := web.Document.GetMetadata().GetResourceVersion(); got != set.Metadata.ResourceVersion {
		t.Errorf("the document has version %q, want %q", got, set.Metadata.ResourceVersion)
	}

	alone := mustSet(t, a, Policy("no-endpoints-yet", "1s", ""))
	b.AwaitThat(t, "a service has only a policy", func(s *registry.Snapshot) bool {
		service := s.Services["no-endpoints-yet"]
		return service != nil && service.PolicyRevision == revision(t, alone)
	})

	deleted, err := a.DeletePolicy(t.Context(), "web")
	if err != nil {
		t.Fatal(err)
	}
	s = b.AwaitThat(t, "the policy is gone", func(s *registry.Snapshot) bool { return s.Revision >= deleted })
	web = s.Services["web"]
	if web.Policy != policy.Default() || web.Document != nil || web.PolicyRevision != 0 {
		t.Errorf("after the deletion: %+v, want the defaults", web)
	}
}

func testBadRecords(t *testing.T, store Store) {
	a := Start(t, store.Connect("a"))
	a.Register(t, Endpoint("web", "a"))
	mustSet(t, a, Policy("web", "3s", ""))
	a.AwaitThat(t, "the policy is there", func(s *registry.Snapshot) bool {
		return s.Services["web"] != nil && s.Services["web"].Policy.Timeout == 3*time.Second
	})
	for key, value := range map[string]string{
		"services/db":                        `{"name":`,
		"services/cache":                     `{"name":"db"}`,
		"services/Not_A_Label":               `{"name":"Not_A_Label"}`,
		"endpoints/web/x/10.0.0.1:80":        `nonsense`,
		"endpoints/web/x/10.0.0.2:80":        `{"service":"web","node":"x","address":"10.0.0.3:80","state":"READY"}`,
		"endpoints/web/x/somewhere":          `{"service":"web","node":"x","address":"somewhere","state":"READY"}`,
		"endpoints/web/x/10.0.0.4:80":        `{"service":"web","node":"x","address":"10.0.0.4:80"}`,
		"policies/web":                       `{"apiVersion":"headroom.dev/v1","kind":"ServicePolicy","metadata":{"name":"web"},"spec":{"timeout":"soon"}}`,
		"policies/mail":                      `{"apiVersion":"headroom.dev/v1","kind":"ServicePolicy","metadata":{"name":"web"}}`,
		"addresses/web":                      `{"service":"web","ipv4":"127.0.0.1","ipv6":"::1"}`,
		"addresses/cache":                    `{"service":"mail","ipv4":"240.64.0.17","ipv6":"fd68:6561:6472::11"}`,
		"slots/seventeen":                    `?`,
		"a-kind-of-a-later-version/whatever": `?`,
	} {
		store.Put(key, []byte(value))
	}
	a.Register(t, Endpoint("web", "a"), Endpoint("good", "a"))
	old := a.Await(t, "good", "a ready")
	late := Start(t, store.Connect("b")).Await(t, "good", "a ready")
	for name, s := range map[string]*registry.Snapshot{"of the running agent": old, "of a new agent": late} {
		if got, want := describeServices(s), "good: a ready; web: a ready"; got != want {
			t.Errorf("the snapshot %s has %s, want %s", name, got, want)
		}
	}
	if got := old.Services["web"].Policy.Timeout; got != 3*time.Second {
		t.Errorf("timeout %v, want the 3s of the policy before", got)
	}
	store.Put("policies/garbled", []byte("?"))
	const remedy = "`meshctl policy delete garbled`"
	if _, err := a.Policy(t.Context(), "garbled"); err == nil || !strings.Contains(err.Error(), remedy) {
		t.Errorf("Policy of a record that can't be read: %v, want %s in it", err, remedy)
	}
	if got := late.Services["web"]; got.Policy != policy.Default() || got.Document != nil {
		t.Errorf("a new agent has %v, want the defaults", got.Document)
	}
}

func describeServices(s *registry.Snapshot) string {
	_, services, _ := strings.Cut(describeAll(s), ": ")
	return services
}

func testAway(t *testing.T, store Store) {
	a, b := Start(t, store.Connect("a")), Start(t, store.Connect("b"))
	a.Register(t, Endpoint("web", "a"))
	b.Await(t, "web", "a ready")
	mustSet(t, a, Policy("web", "3s", ""))
	store.SetAway(true)
	a.AwaitConnected(t, false)
	b.AwaitConnected(t, false)
	_, err := a.Policy(t.Context(), "web")
	wantErr(t, "read while the store is away", err, registry.ErrUnavailable)
	_, err = a.SetPolicy(t.Context(), Policy("web", "4s", ""))
	wantErr(t, "write while the store is away", err, registry.ErrUnavailable)
	_, err = a.DeletePolicy(t.Context(), "web")
	wantErr(t, "delete while the store is away", err, registry.ErrUnavailable)
	b.Await(t, "web", "a ready")

	a.Advertise([]registry.Endpoint{in(Endpoint("web", "a"), registry.Unhealthy), Endpoint("db", "a")})
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	wantErr(t, "flush while the store is away", a.Flush(short), registry.ErrUnavailable)
	store.SetAway(false)
	b.Await(t, "web", "a unhealthy")
	b.Await(t, "db", "a ready")
	if err := a.Flush(t.Context()); err != nil {
		t.Errorf("Flush: %v", err)
	}
	a.AwaitConnected(t, true)
	mustSet(t, a, Policy("web", "5s", ""))
}

func testStartAway(t *testing.T, store Store) {
	store.SetAway(true)
	a := Start(t, store.Connect("a"))
	a.Advertise([]registry.Endpoint{Endpoint("web", "a")})
	if a.Connected() {
		t.Error("Connected() = true before the store answered")
	}
	_, err := a.Policy(t.Context(), "web")
	wantErr(t, "read before the store answered", err, registry.ErrUnavailable)
	store.SetAway(false)
	a.Await(t, "web", "a ready")
	a.AwaitConnected(t, true)
}

func wantErr(t *testing.T, what string, got, want error) {
	t.Helper()
	if !errors.Is(got, want) {
		t.Errorf("%s: %v, want %q", what, got, want)
	}
}

func mustSet(t *testing.T, a *Agent, doc *meshv1.ServicePolicy) *meshv1.ServicePolicy {
	t.Helper()
	stored, err := a.SetPolicy(t.Context(), doc)
	if err != nil {
		t.Fatalf("SetPolicy: %v", err)
	}
	return stored
}

func revision(t *testing.T, doc *meshv1.ServicePolicy) int64 {
	t.Helper()
	n, err := strconv.ParseInt(doc.GetMetadata().GetResourceVersion(), 10, 64)
	if err != nil {
		t.Errorf("resource version: %v", err)
	}
	return n
}
