package admin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/headroom-mesh/headroom/agent/gossip"
	"github.com/headroom-mesh/headroom/agent/local"
	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/policy/document"
	"github.com/headroom-mesh/headroom/policy/localservice"
	"github.com/headroom-mesh/headroom/registry"
	"github.com/headroom-mesh/headroom/registry/registrytest"
)

// world is what an agent is told about itself and the others.
type world struct {
	store    *registrytest.Memory
	snapshot atomic.Pointer[registry.Snapshot]
	local    fakeLocal

	mu      sync.Mutex
	members []gossip.Member
	dials   map[netip.AddrPort]func(context.Context) (net.Conn, error)
}

func newWorld() *world {
	w := &world{store: registrytest.NewMemory(), dials: map[netip.AddrPort]func(context.Context) (net.Conn, error){}}
	w.snapshot.Store(&registry.Snapshot{Revision: 7, Services: map[registry.ServiceName]*registry.Service{
		"web": {Name: "web", Policy: policy.Default(), Endpoints: []registry.Endpoint{
			{Service: "web", Node: "a", Zone: "z", Address: netip.MustParseAddrPort("127.0.0.1:1"), State: registry.Ready},
			{Service: "web", Node: "b", Address: netip.MustParseAddrPort("127.0.0.1:2"), State: registry.Unhealthy},
			{Service: "web", Node: "c", Address: netip.MustParseAddrPort("127.0.0.1:3"), State: registry.Draining},
		}},
		"idle": {Name: "idle", Policy: policy.Default(), PolicyRevision: 5, Document: storedPolicy("idle", "random", "5"),
			IPv4: netip.MustParseAddr("240.64.0.17"), IPv6: netip.MustParseAddr("fd68:6561:6472::11")},
	}})
	w.members = []gossip.Member{{Node: "a", Zone: "z", Version: "v1", Gossip: mesh(1), Mesh: mesh(1)}}
	return w
}

func mesh(i int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 15008)
}

func storedPolicy(service, balancer, revision string) *meshv1.ServicePolicy {
	return &meshv1.ServicePolicy{
		ApiVersion: policy.APIVersion, Kind: policy.Kind,
		Metadata: &meshv1.Metadata{Name: service, ResourceVersion: revision},
		Spec:     &meshv1.ServicePolicySpec{Balancer: balancer},
	}
}

func (w *world) config() Config {
	loopback := netip.MustParseAddrPort("127.0.0.1:0")
	return Config{
		Node: "a", Version: "v1", Addr: loopback, HTTP: loopback,
		Registry:        w.store.Connect("a"),
		Snapshot:        w.snapshot.Load,
		AppliedRevision: func() int64 { return w.snapshot.Load().Revision },
		Connected:       func() bool { return true },
		Members:         w.all,
		Local:           &w.local,
		Observe: func(s registry.ServiceName) *meshv1.Observation {
			return &meshv1.Observation{Node: "a", Outbound: []*meshv1.OutboundView{{Service: string(s)}}}
		},
		DialPeer: w.dial,
	}
}

func (w *world) all() []gossip.Member {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.members
}

func (w *world) dial(ctx context.Context, mesh netip.AddrPort) (net.Conn, error) {
	w.mu.Lock()
	dial := w.dials[mesh]
	w.mu.Unlock()
	if dial == nil {
		return nil, errors.New("connection refused")
	}
	return dial(ctx)
}

func (w *world) join(m gossip.Member, dial func(context.Context) (net.Conn, error)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.members = append(w.members, m)
	w.dials[m.Mesh] = dial
}

// fakePeer is another agent.
type fakePeer struct {
	meshv1.UnimplementedPeerServer
	node     string
	revision atomic.Int64
	away     atomic.Bool // no registry
}

func (p *fakePeer) Status(context.Context, *meshv1.StatusRequest) (*meshv1.StatusResponse, error) {
	return &meshv1.StatusResponse{Node: p.node, AppliedRevision: p.revision.Load(), RegistryConnected: !p.away.Load()}, nil
}

func (p *fakePeer) Observe(_ context.Context, r *meshv1.ObserveRequest) (*meshv1.Observation, error) {
	return &meshv1.Observation{Node: p.node, Outbound: []*meshv1.OutboundView{{Service: r.Service}}}, nil
}

// peer adds a live member that answers.
func (w *world) peer(t *testing.T, i int, node string, revision int64) *fakePeer {
	p := &fakePeer{node: node}
	p.revision.Store(revision)
	l, s := bufconn.Listen(1<<16), grpc.NewServer()
	meshv1.RegisterPeerServer(s, p)
	var wg sync.WaitGroup
	wg.Go(func() { _ = s.Serve(l) })
	t.Cleanup(func() { s.Stop(); wg.Wait() })
	w.join(gossip.Member{Node: registry.NodeName(node), Gossip: mesh(i), Mesh: mesh(i)}, l.DialContext)
	return p
}

type fakeLocal struct {
	registered *meshv1.LocalService
	err        error
}

func (l *fakeLocal) Register(_ context.Context, doc *meshv1.LocalService) error {
	l.registered = doc
	return l.err
}

func (l *fakeLocal) Deregister(_ context.Context, _ registry.ServiceName, _ string) ([]localservice.Address, error) {
	if l.err != nil {
		return nil, l.err
	}
	return []localservice.Address{{Port: netip.MustParseAddrPort("127.0.0.1:1")}}, nil
}

// running is an Admin that runs.
type running struct {
	meshv1.AdminClient
	conn *grpc.ClientConn
	rpc  string
	http string
	// metrics is where others read the metrics, if anywhere.
	metrics string
	stop    func()
}

func start(t *testing.T, cfg Config) running {
	t.Helper()
	a, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	l, err := a.Listen(tcp)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := a.Run(ctx, l); err != nil {
			t.Error(err)
		}
	})
	stop := sync.OnceFunc(func() { cancel(); wg.Wait() })
	t.Cleanup(stop)
	c := connect(t, l.rpc.Addr().String())
	var metrics string
	if l.metrics != nil {
		metrics = "http://" + l.metrics.Addr().String()
	}
	return running{meshv1.NewAdminClient(c), c, l.rpc.Addr().String(), "http://" + l.http.Addr().String(), metrics, stop}
}

func connect(t *testing.T, target string) *grpc.ClientConn {
	t.Helper()
	c, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func get(t *testing.T, url string) (int, string) {
	t.Helper()
	r, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r.StatusCode, string(b)
}

// wantError checks the code of err, and that its message has all the words.
func wantError(t *testing.T, err error, code codes.Code, words ...string) {
	t.Helper()
	s := status.Convert(err)
	if s.Code() != code {
		t.Errorf("error %v, want %v", err, code)
	}
	for _, word := range words {
		if !strings.Contains(s.Message(), word) {
			t.Errorf("message lacks %q: %s", word, s.Message())
		}
	}
}

func TestLists(t *testing.T) {
	w := newWorld()
	w.members = append(w.members, gossip.Member{Node: "b", Gossip: mesh(2), State: gossip.Dead})
	a := start(t, w.config())
	services, err := a.ListServices(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	var got strings.Builder
	for _, s := range services.Services {
		fmt.Fprintf(&got, "%s %s %d %d/%d/%d %s,%s\n", s.Name, s.Balancer, s.PolicyRevision, s.Ready, s.Unhealthy, s.Draining, s.Ipv4, s.Ipv6)
	}
	if want := "idle prequal 5 0/0/0 240.64.0.17,fd68:6561:6472::11\nweb prequal 0 1/1/1 ,\n"; got.String() != want {
		t.Errorf("services\n%swant\n%s", got.String(), want)
	}
	for service, want := range map[string]int{"": 3, "web": 3, "idle": 0} {
		r, err := a.ListEndpoints(t.Context(), &meshv1.ListEndpointsRequest{Service: service})
		if err != nil || len(r.Endpoints) != want {
			t.Errorf("endpoints of %q: %v, %v; want %d", service, r, err, want)
		}
	}
	_, err = a.ListEndpoints(t.Context(), &meshv1.ListEndpointsRequest{Service: "nobody"})
	wantError(t, err, codes.NotFound, `no service "nobody"`)
	members, err := a.ListMembers(t.Context(), nil)
	if err != nil || len(members.Members) != 2 {
		t.Fatalf("members %v, %v", members, err)
	}
	if m := members.Members[0]; m.Node != "a" || m.Zone != "z" || m.Version != "v1" || m.State != "alive" || m.MeshAddress != "10.0.0.1:15008" {
		t.Errorf("member %v", m)
	}
	if m := members.Members[1]; m.State != "dead" || m.MeshAddress != "" {
		t.Errorf("member %v", m)
	}
	w.snapshot.Store(&registry.Snapshot{})
	_, err = a.ListEndpoints(t.Context(), &meshv1.ListEndpointsRequest{Service: "web"})
	wantError(t, err, codes.Unavailable, "has not reached the registry")
}

func TestPolicyIsSetReadAndDeleted(t *testing.T) {
	a := start(t, newWorld().config())
	ctx := t.Context()
	r, err := a.GetPolicy(ctx, &meshv1.GetPolicyRequest{Service: "web"})
	if err != nil || r.Policy.Spec != nil || r.Policy.Metadata.ResourceVersion != "0" || r.Effective.Spec.Balancer != "prequal" {
		t.Fatalf("without a policy: %v, %v", r, err)
	}
	set, err := a.SetPolicy(ctx, &meshv1.SetPolicyRequest{Policy: storedPolicy("web", "random", "0")})
	if err != nil || fmt.Sprint(set.Revision) != set.Policy.Metadata.ResourceVersion || set.Revision == 0 {
		t.Fatalf("set: %v, %v", set, err)
	}
	r, err = a.GetPolicy(ctx, &meshv1.GetPolicyRequest{Service: "web"})
	if err != nil || r.Policy.Spec.Balancer != "random" || r.Effective.Spec.Timeout != "0s" || r.FromCopy {
		t.Errorf("get: %v, %v", r, err)
	}
	_, err = a.SetPolicy(ctx, &meshv1.SetPolicyRequest{Policy: storedPolicy("web", "p2c", "0")})
	wantError(t, err, codes.Aborted)
	d, err := a.DeletePolicy(ctx, &meshv1.DeletePolicyRequest{Service: "web"})
	if err != nil || d.Revision <= set.Revision {
		t.Errorf("delete: %v, %v", d, err)
	}
	_, err = a.DeletePolicy(ctx, &meshv1.DeletePolicyRequest{Service: "web"})
	wantError(t, err, codes.NotFound)
}

func managedPolicy(service string) *meshv1.ServicePolicy {
	doc := storedPolicy(service, "p2c", "")
	doc.Metadata.ManagedBy = document.ManagedByKubernetes
	return doc
}

func TestWhatKubernetesManagesIsChangedOnlyByForce(t *testing.T) {
	w := newWorld()
	a := start(t, w.config())
	ctx := t.Context()
	kubernetes := w.store.Connect("k")
	if _, err := kubernetes.SetPolicy(ctx, managedPolicy("grpc.checkout.shop")); err != nil {
		t.Fatal(err)
	}
	_, err := a.SetPolicy(ctx, &meshv1.SetPolicyRequest{Policy: storedPolicy("grpc.checkout.shop", "random", "")})
	wantError(t, err, codes.FailedPrecondition, "kubectl edit servicepolicy -n shop grpc.checkout", "--force")
	r, err := a.GetPolicy(ctx, &meshv1.GetPolicyRequest{Service: "grpc.checkout.shop"})
	if err != nil || r.Policy.Spec.Balancer != "p2c" || r.Policy.Metadata.ManagedBy != "kubernetes" {
		t.Errorf("the refused write left %v, %v", r, err)
	}
	r.Policy.Spec.Balancer = "random" // as after 'meshctl policy get'
	_, err = a.SetPolicy(ctx, &meshv1.SetPolicyRequest{Policy: r.Policy})
	wantError(t, err, codes.FailedPrecondition)
	_, err = a.DeletePolicy(ctx, &meshv1.DeletePolicyRequest{Service: "grpc.checkout.shop"})
	wantError(t, err, codes.FailedPrecondition, "kubectl delete servicepolicy -n shop grpc.checkout")

	set, err := a.SetPolicy(ctx, &meshv1.SetPolicyRequest{Policy: r.Policy, Force: true})
	if err != nil || set.Policy.Metadata.ManagedBy != "" || set.Policy.Spec.Balancer != "random" {
		t.Errorf("by force: %v, %v; want it to be nobody's", set, err)
	}
	if _, err := a.DeletePolicy(ctx, &meshv1.DeletePolicyRequest{Service: "grpc.checkout.shop"}); err != nil {
		t.Errorf("delete what was taken over: %v", err)
	}
	if _, err := kubernetes.SetPolicy(ctx, managedPolicy("web.shop")); err != nil {
		t.Fatal(err)
	}
	if _, err := a.DeletePolicy(ctx, &meshv1.DeletePolicyRequest{Service: "web.shop", Force: true}); err != nil {
		t.Errorf("delete by force: %v", err)
	}
}

// raced is a registry in which Kubernetes is faster, once.
type raced struct {
	registry.Policies
	once sync.Once
}

func (r *raced) SetPolicy(ctx context.Context, doc *meshv1.ServicePolicy) (*meshv1.ServicePolicy, error) {
	r.once.Do(func() { _, _ = r.Policies.SetPolicy(ctx, managedPolicy(doc.Metadata.Name)) })
	return r.Policies.SetPolicy(ctx, doc)
}

func TestAWriteDoesNotSlipInBehindKubernetes(t *testing.T) {
	w := newWorld()
	cfg := w.config()
	cfg.Registry = &raced{Policies: w.store.Connect("a")}
	_, err := start(t, cfg).SetPolicy(t.Context(), &meshv1.SetPolicyRequest{Policy: storedPolicy("web", "random", "")})
	wantError(t, err, codes.FailedPrecondition, "managed by Kubernetes")
}

func TestBadPoliciesAreRefusedWithAllProblems(t *testing.T) {
	a := start(t, newWorld().config())
	bad := storedPolicy("web", "best", "x")
	bad.Spec.Timeout = "soon"
	_, err := a.SetPolicy(t.Context(), &meshv1.SetPolicyRequest{Policy: bad})
	wantError(t, err, codes.InvalidArgument, "spec.balancer", "spec.timeout", "metadata.resourceVersion")
	_, err = a.SetPolicy(t.Context(), &meshv1.SetPolicyRequest{})
	wantError(t, err, codes.InvalidArgument)
	_, err = a.GetPolicy(t.Context(), &meshv1.GetPolicyRequest{Service: "No/Name"})
	wantError(t, err, codes.InvalidArgument, "DNS label")
	_, err = a.DeletePolicy(t.Context(), &meshv1.DeletePolicyRequest{})
	wantError(t, err, codes.InvalidArgument, "DNS label")
}

func TestPoliciesWhileTheStoreIsAway(t *testing.T) {
	w := newWorld()
	a := start(t, w.config())
	w.store.SetAway(true)
	_, err := a.SetPolicy(t.Context(), &meshv1.SetPolicyRequest{Policy: storedPolicy("web", "random", "")})
	wantError(t, err, codes.Unavailable, "the registry is unreachable", "not confirmed")
	_, err = a.DeletePolicy(t.Context(), &meshv1.DeletePolicyRequest{Service: "web"})
	wantError(t, err, codes.Unavailable, "not confirmed")
	for service, balancer := range map[string]string{"idle": "random", "web": "prequal"} {
		r, err := a.GetPolicy(t.Context(), &meshv1.GetPolicyRequest{Service: service})
		if err != nil || r.Effective.Spec.Balancer != balancer || !r.FromCopy {
			t.Errorf("policy of %s from the snapshot: %v, %v", service, r, err)
		}
	}
	w.snapshot.Store(&registry.Snapshot{})
	_, err = a.GetPolicy(t.Context(), &meshv1.GetPolicyRequest{Service: "idle"})
	wantError(t, err, codes.Unavailable)
}

func TestAPolicyThatCannotBeDecodedIsToldFromOtherFailuresAndDeleted(t *testing.T) {
	w := newWorld()
	a := start(t, w.config())
	w.store.Put(registry.ServiceName("web").PolicyKey(), []byte("garbage"))
	_, err := a.GetPolicy(t.Context(), &meshv1.GetPolicyRequest{Service: "web"})
	wantError(t, err, codes.DataLoss)
	if _, err := a.DeletePolicy(t.Context(), &meshv1.DeletePolicyRequest{Service: "web"}); err != nil {
		t.Error(err)
	}
}

// mute is a store that lets callers wait as long as they will.
type mute struct{ registry.Policies }

func (mute) Policy(ctx context.Context, _ registry.ServiceName) (*meshv1.ServicePolicy, error) {
	if until, ok := ctx.Deadline(); !ok || time.Until(until) > 2*time.Second {
		return nil, errors.New("the caller is too patient")
	}
	return nil, context.DeadlineExceeded
}

func TestAStoreThatDoesNotAnswerIsNotWaitedForLong(t *testing.T) {
	cfg := newWorld().config()
	cfg.Registry = mute{cfg.Registry}
	r, err := start(t, cfg).GetPolicy(t.Context(), &meshv1.GetPolicyRequest{Service: "idle"})
	if err != nil || !r.FromCopy || r.Policy.Spec.Balancer != "random" {
		t.Errorf("got %v, %v", r, err)
	}
}

func TestRegistrations(t *testing.T) {
	w := newWorld()
	a := start(t, w.config())
	doc := &meshv1.LocalService{
		ApiVersion: policy.APIVersion, Kind: "LocalService", Metadata: &meshv1.Metadata{Name: "web"},
		Spec: &meshv1.LocalServiceSpec{Endpoints: []*meshv1.LocalEndpoint{{Address: "127.0.0.1:1"}}},
	}
	r, err := a.Register(t.Context(), &meshv1.RegisterRequest{Service: doc})
	if err != nil || r.Node != "a" || w.local.registered.GetMetadata().GetName() != "web" {
		t.Errorf("register: %v, %v", r, err)
	}
	d, err := a.Deregister(t.Context(), &meshv1.DeregisterRequest{Service: "web"})
	if err != nil || d.Node != "a" || fmt.Sprint(d.Addresses) != "[127.0.0.1:1]" {
		t.Errorf("deregister: %v, %v", d, err)
	}
	doc.Spec.Endpoints[0].Address = "nowhere"
	doc.Kind = "Other"
	_, err = a.Register(t.Context(), &meshv1.RegisterRequest{Service: doc})
	wantError(t, err, codes.InvalidArgument, "kind", "spec.endpoints[0].address")
	_, err = a.Deregister(t.Context(), &meshv1.DeregisterRequest{Service: "web", Address: "nowhere"})
	wantError(t, err, codes.InvalidArgument, "address: want IP:PORT")
	for cause, code := range map[error]codes.Code{
		local.ErrNotRegistered: codes.NotFound, local.ErrDeclared: codes.FailedPrecondition,
		local.ErrDraining: codes.FailedPrecondition, errors.New("disk full"): codes.Internal,
	} {
		w.local.err = fmt.Errorf("web: %w", cause)
		_, err = a.Deregister(t.Context(), &meshv1.DeregisterRequest{Service: "web"})
		wantError(t, err, code, cause.Error())
	}
}

func TestRegisterWaitsForTheReplicas(t *testing.T) {
	at := func(node registry.NodeName, address string, state registry.State) registry.Endpoint {
		return registry.Endpoint{Service: "new", Node: node, Address: netip.MustParseAddrPort(address), State: state}
	}
	for _, tt := range []struct {
		name    string
		after   time.Duration
		learned []registry.Endpoint
		stop    bool // the agent then
		took    time.Duration
	}{
		{"all are known", time.Second, []registry.Endpoint{
			at("a", "127.0.0.1:1", registry.Ready), at("a", "127.0.0.1:2", registry.Unhealthy)}, false, time.Second},
		{"at once", 0, []registry.Endpoint{
			at("a", "127.0.0.1:1", registry.Ready), at("a", "127.0.0.1:2", registry.Ready)}, false, 0},
		{"one is missing", time.Second, []registry.Endpoint{at("a", "127.0.0.1:1", registry.Ready)}, false, registerTimeout},
		{"one is another node's", time.Second, []registry.Endpoint{
			at("a", "127.0.0.1:1", registry.Ready), at("b", "127.0.0.1:2", registry.Ready)}, false, registerTimeout},
		{"one is left over", time.Second, []registry.Endpoint{
			at("a", "127.0.0.1:1", registry.Ready), at("a", "127.0.0.1:2", registry.Draining)}, false, registerTimeout},
		{"the agent ends", time.Second, nil, true, time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld()
				a, err := New(w.config())
				if err != nil {
					t.Fatal(err)
				}
				learn := time.AfterFunc(tt.after, func() {
					w.snapshot.Store(&registry.Snapshot{Revision: 8, Services: map[registry.ServiceName]*registry.Service{
						"new": {Name: "new", Endpoints: tt.learned},
					}})
					if tt.stop {
						close(a.closing)
					}
				})
				defer learn.Stop()
				began := time.Now()
				_, err = (&adminServer{Admin: a}).Register(t.Context(), &meshv1.RegisterRequest{Service: &meshv1.LocalService{
					ApiVersion: policy.APIVersion, Kind: "LocalService", Metadata: &meshv1.Metadata{Name: "new"},
					Spec: &meshv1.LocalServiceSpec{Endpoints: []*meshv1.LocalEndpoint{{Address: "127.0.0.1:1"}, {Address: "127.0.0.1:2"}}},
				}})
				if took := time.Since(began); err != nil || took < tt.took || took > tt.took+registerInterval {
					t.Errorf("answer after %v, %v; want one after %v", took, err, tt.took)
				}
			})
		})
	}
}

func TestWaitApplied(t *testing.T) {
	w := newWorld()
	w.peer(t, 2, "b", 9)
	lagging := w.peer(t, 3, "c", 6)
	away := w.peer(t, 4, "d", 8)
	away.away.Store(true)
	w.members = append(w.members, gossip.Member{Node: "gone", Mesh: mesh(9), State: gossip.Left})
	a := start(t, w.config())

	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	stream, err := a.WaitApplied(ctx, &meshv1.WaitAppliedRequest{Revision: 9})
	if err != nil {
		t.Fatal(err)
	}
	var seen []string
	for {
		p, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("after %q: %v", seen, err)
		}
		seen = append(seen, fmt.Sprintf("%d/%d %v", p.Applied, p.Members, p.Waiting))
		switch len(seen) {
		case 1:
			w.snapshot.Store(&registry.Snapshot{Revision: 9})
			away.revision.Store(10)
		case 2:
			lagging.revision.Store(9)
		}
	}
	want := []string{
		"1/4 [a: at revision 7 c: at revision 6 d: at revision 8, without connection to the registry]",
		"3/4 [c: at revision 6]",
		"4/4 []",
	}
	if fmt.Sprint(seen) != fmt.Sprint(want) {
		t.Errorf("progress %q\nwant %q", seen, want)
	}
}

func TestStatusesTellHowFarEveryAgentIsAndWhoIsSilent(t *testing.T) {
	w := newWorld()
	w.peer(t, 2, "b", 9)
	w.members = append(w.members, gossip.Member{Node: "c", Mesh: mesh(3)}, gossip.Member{Node: "gone", Mesh: mesh(9), State: gossip.Left})
	a, err := New(w.config())
	if err != nil {
		t.Fatal(err)
	}
	defer a.peers.close()
	answers, missing := a.Statuses(t.Context())
	applied := map[string]int64{}
	for _, answer := range answers {
		applied[answer.Node] = answer.AppliedRevision
	}
	if want := map[string]int64{"a": 7, "b": 9}; !maps.Equal(applied, want) {
		t.Errorf("applied %v, want %v", applied, want)
	}
	if len(missing) != 1 || !strings.HasPrefix(missing[0], "c: ") {
		t.Errorf("missing %v, want c and why", missing)
	}
}

func TestWaitAppliedNamesTheUnreachableAndEndsWithTheCaller(t *testing.T) {
	w := newWorld()
	w.join(gossip.Member{Node: "b", Mesh: mesh(2)}, nil)
	w.join(gossip.Member{Node: "c", Mesh: mesh(3)}, func(ctx context.Context) (net.Conn, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	})
	w.join(gossip.Member{Node: "d"}, nil)
	a := start(t, w.config())
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream, err := a.WaitApplied(ctx, &meshv1.WaitAppliedRequest{Revision: 7})
	if err != nil {
		t.Fatal(err)
	}
	p, err := stream.Recv()
	want := "[b: connection refused c: no answer within 500ms d: its mesh address is unknown]"
	if err != nil || p.Applied != 1 || fmt.Sprint(p.Waiting) != want {
		t.Errorf("progress %v, %v; want %s", p, err, want)
	}
	cancel()
	_, err = stream.Recv()
	wantError(t, err, codes.Canceled)
}

func TestWaitAppliedEndsWithTheAgent(t *testing.T) {
	a := start(t, newWorld().config())
	stream, err := a.WaitApplied(t.Context(), &meshv1.WaitAppliedRequest{Revision: 99})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	a.stop()
	if took := time.Since(begin); took > stopTimeout {
		t.Errorf("the agent took %v to stop", took)
	}
	_, err = stream.Recv()
	wantError(t, err, codes.Unavailable, "stopping")
}

func TestTop(t *testing.T) {
	w := newWorld()
	w.peer(t, 3, "c", 1)
	w.peer(t, 2, "b", 1)
	w.join(gossip.Member{Node: "missing", Mesh: mesh(8)}, nil)
	a := start(t, w.config())
	top, err := a.Top(t.Context(), &meshv1.TopRequest{Service: "web"})
	if err != nil {
		t.Fatal(err)
	}
	var nodes []string
	for _, o := range top.Agents {
		nodes = append(nodes, o.Node+" "+o.Outbound[0].Service)
	}
	if got, want := fmt.Sprint(nodes, top.Missing), "[a web c web b web] [missing: connection refused]"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	_, err = a.Top(t.Context(), &meshv1.TopRequest{Service: "nobody"})
	wantError(t, err, codes.NotFound)
}

func TestConnectionsOfMembersThatVanishAreClosed(t *testing.T) {
	w := newWorld()
	w.peer(t, 2, "b", 1)
	admin, err := New(w.config())
	if err != nil {
		t.Fatal(err)
	}
	s := &adminServer{Admin: admin}
	ask := func() *meshv1.TopResponse {
		top, err := s.Top(t.Context(), &meshv1.TopRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return top
	}
	if top := ask(); len(top.Agents) != 2 {
		t.Fatalf("top %v", top)
	}
	conn := admin.peers.conns[mesh(2)]
	ask()
	if admin.peers.conns[mesh(2)] != conn {
		t.Error("the connection was not kept")
	}
	w.members = w.members[:1]
	ask()
	if len(admin.peers.conns) != 0 {
		t.Error("the connection to a member that is gone was kept")
	}
}

func TestPeerService(t *testing.T) {
	l := bufconn.Listen(1 << 16)
	cfg := newWorld().config()
	cfg.PeerListener = l
	start(t, cfg)
	c, err := grpc.NewClient("passthrough:///x", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s, err := meshv1.NewPeerClient(c).Status(t.Context(), &meshv1.StatusRequest{})
	if err != nil || s.Node != "a" || s.Version != "v1" || s.AppliedRevision != 7 || !s.RegistryConnected {
		t.Errorf("status %v, %v", s, err)
	}
	o, err := meshv1.NewPeerClient(c).Observe(t.Context(), &meshv1.ObserveRequest{Service: "web"})
	if err != nil || o.Outbound[0].Service != "web" {
		t.Errorf("observation %v, %v", o, err)
	}
	_, err = meshv1.NewAdminClient(c).ListServices(t.Context(), &meshv1.ListServicesRequest{})
	wantError(t, err, codes.Unimplemented) // agents may not do what operators may
}

func TestReflection(t *testing.T) {
	a := start(t, newWorld().config())
	stream, err := reflectionv1.NewServerReflectionClient(a.conn).ServerReflectionInfo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	err = stream.Send(&reflectionv1.ServerReflectionRequest{MessageRequest: &reflectionv1.ServerReflectionRequest_ListServices{}})
	if err != nil {
		t.Fatal(err)
	}
	r, err := stream.Recv()
	if err != nil || !strings.Contains(r.String(), "headroom.mesh.v1.Admin") {
		t.Errorf("%v, %v", r, err)
	}
}

func TestSocketIsForItsUserOnly(t *testing.T) {
	cfg := newWorld().config()
	cfg.Socket = filepath.Join(t.TempDir(), "run", "admin.sock")
	a := start(t, cfg)
	for path, want := range map[string]fs.FileMode{cfg.Socket: 0o600, filepath.Dir(cfg.Socket): 0o700} {
		info, err := os.Stat(path)
		if err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: mode %v, %v; want %v", path, info.Mode().Perm(), err, want)
		}
	}
	c := meshv1.NewAdminClient(connect(t, "unix:"+cfg.Socket))
	if _, err := c.ListServices(t.Context(), &meshv1.ListServicesRequest{}); err != nil {
		t.Error(err)
	}
	second, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := second.Listen(tcp); err == nil || !strings.Contains(err.Error(), "another agent answers there") {
		t.Errorf("second agent on the socket: %v", err)
	}
	a.stop()
	if _, err := os.Lstat(cfg.Socket); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the socket is still there: %v", err)
	}
}

func TestStaleSocketIsReplacedAndNothingElse(t *testing.T) {
	cfg := newWorld().config()
	cfg.Socket = filepath.Join(t.TempDir(), "admin.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: cfg.Socket})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false) // as after a crash
	_ = l.Close()
	start(t, cfg).stop()

	if err := os.WriteFile(cfg.Socket, []byte("dear"), 0o600); err != nil {
		t.Fatal(err)
	}
	a, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := a.Listen(tcp); err == nil || !strings.Contains(err.Error(), "no socket") {
		t.Errorf("a file where the socket should be: %v", err)
	}
	if b, _ := os.ReadFile(cfg.Socket); string(b) != "dear" {
		t.Error("the file was removed")
	}
}

func TestPortInUseFailsTheStart(t *testing.T) {
	w := newWorld()
	a := start(t, w.config())
	cfg := w.config()
	cfg.HTTP = netip.MustParseAddrPort(strings.TrimPrefix(a.http, "http://"))
	second, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := second.Listen(tcp); err == nil || !strings.Contains(err.Error(), cfg.HTTP.String()) {
		t.Errorf("error %v, want one that names %s", err, cfg.HTTP)
	}
}

func TestValidate(t *testing.T) {
	err := Config{
		Addr: netip.MustParseAddrPort("0.0.0.0:15010"), HTTP: netip.MustParseAddrPort("10.0.0.1:15000"),
		Socket: "/" + strings.Repeat("x", 200),
	}.Validate()
	for _, want := range []string{"node", "addr: 0.0.0.0:15010", "http: 10.0.0.1:15000", "loopback", "socket: ", "registry: required", "observe: required"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error lacks %q: %v", want, err)
		}
	}
	cfg := newWorld().config()
	cfg.Addr, cfg.HTTP = netip.MustParseAddrPort("[::1]:0"), netip.AddrPort{}
	if err := cfg.Validate(); err != nil {
		t.Error(err)
	}
}

// TestOthersSeeMetricsOnly wants nothing else at the address that others can reach: profiles tell too much.
func TestOthersSeeMetricsOnly(t *testing.T) {
	cfg := newWorld().config()
	cfg.MetricsAddr = netip.MustParseAddrPort("127.0.0.1:0")
	a := start(t, cfg)
	if _, err := a.ListServices(t.Context(), &meshv1.ListServicesRequest{}); err != nil {
		t.Fatal(err)
	}
	if code, text := get(t, a.metrics+"/metrics"); code != 200 || !strings.Contains(text, "headroom_admin_calls_total") {
		t.Errorf("metrics: %d %q", code, text)
	}
	for _, page := range []string{"/", "/readyz", "/debug/pprof/"} {
		if code, _ := get(t, a.metrics+page); code != 404 {
			t.Errorf("%s: %d, want none", page, code)
		}
	}
}

func TestPages(t *testing.T) {
	var down atomic.Bool
	down.Store(true)
	cfg := newWorld().config()
	cfg.Ready = []Check{
		{"registry", func() (string, error) {
			if down.Load() {
				return "", errors.New("no snapshot yet")
			}
			return "an old one", nil
		}},
		{"gossip", func() (string, error) { return "", nil }},
	}
	a := start(t, cfg)
	if code, text := get(t, a.http+"/readyz"); code != 503 || text != "[-]registry: no snapshot yet\n[+]gossip ok\nnot ready\n" {
		t.Errorf("readyz %d %q", code, text)
	}
	down.Store(false)
	if code, text := get(t, a.http+"/readyz"); code != 200 || text != "[+]registry ok (an old one)\n[+]gossip ok\nready\n" {
		t.Errorf("readyz %d %q", code, text)
	}
	if _, err := a.ListServices(t.Context(), &meshv1.ListServicesRequest{}); err != nil {
		t.Fatal(err)
	}
	for page, want := range map[string]string{
		"/":                         "/debug/pprof/",
		"/livez":                    "ok",
		"/metrics":                  `headroom_admin_calls_total{code="OK",method="ListServices"} 1`,
		"/debug/pprof/":             "goroutine",
		"/debug/pprof/heap?debug=1": "heap profile",
	} {
		if code, text := get(t, a.http+page); code != 200 || !strings.Contains(text, want) {
			t.Errorf("%s: %d, and no %q in it", page, code, want)
		}
	}
	if code, _ := get(t, a.http+"/nothing"); code != 404 {
		t.Errorf("unknown page: %d", code)
	}
}

func TestMetrics(t *testing.T) {
	r := prometheus.NewPedanticRegistry()
	m := newMetrics(r)
	m.ended("/headroom.mesh.v1.Admin/Top", nil)
	if problems, err := testutil.GatherAndLint(r); err != nil || len(problems) > 0 {
		t.Errorf("%v %v", problems, err)
	}
}

func tcp(at netip.AddrPort) (net.Listener, error) { return net.Listen("tcp", at.String()) }
