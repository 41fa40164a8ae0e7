package dataplane_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/dataplane"
	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/headroom-mesh/headroom/dataplane/transport"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
)

// patience is how long a test waits for what must happen.
const patience = 10 * time.Second

// mesh is a few agents in one process, over loopback, that a test tells what the registry would.
type mesh struct {
	t     testing.TB
	nodes map[registry.NodeName]*node

	mu        sync.Mutex
	endpoints []registry.Endpoint
	policies  map[registry.ServiceName]policy.Policy
}

// node is one agent.
type node struct {
	*dataplane.Dataplane
	name    registry.NodeName
	proxy   string         // host:port
	agent   netip.AddrPort // where other agents connect to
	metrics *prometheus.Registry
	dialed  atomic.Int64                    // HTTP connections to other agents
	silent  atomic.Bool                     // answers nothing
	ports   map[registry.ServiceName]string // host:port, each of which leads to one service
	client  *http.Client                    // through the proxy
	stop    func() error
}

type meshConfig struct {
	drain  time.Duration
	access *slog.Logger
	log    io.Writer // gets all other logs
	zones  map[registry.NodeName]string
	ports  []registry.ServiceName // that have ports of their own at each agent
}

func newMesh(t testing.TB, names ...registry.NodeName) *mesh {
	return meshConfig{}.newMesh(t, names...)
}

func (cfg meshConfig) newMesh(t testing.TB, names ...registry.NodeName) *mesh {
	m := &mesh{t: t, nodes: map[registry.NodeName]*node{}, policies: map[registry.ServiceName]policy.Policy{}}
	for _, name := range names {
		m.start(name, cfg, "127.0.0.1:0")
	}
	return m
}

// start starts an agent, whose other agents reach it at an address.
func (m *mesh) start(name registry.NodeName, cfg meshConfig, at string) *node {
	t := m.t
	n := &node{name: name, metrics: prometheus.NewRegistry()}
	var log io.Writer = panics{t}
	if cfg.log != nil {
		log = io.MultiWriter(log, cfg.log)
	}
	var err error
	n.Dataplane, err = dataplane.New(dataplane.Config{
		Node: name, Zone: cfg.zones[name], Transport: &testTransport{node: n}, DrainTimeout: cfg.drain, AccessLog: cfg.access, Log: slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug})), Metrics: n.metrics,
	})
	if err != nil {
		t.Fatal(err)
	}
	proxy, mesh := listen(t, "127.0.0.1:0"), listen(t, at)
	n.proxy, n.agent = proxy.Addr().String(), netip.MustParseAddrPort(mesh.Addr().String())
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	n.ports = map[registry.ServiceName]string{}
	var services []dataplane.Listener
	for _, service := range cfg.ports {
		l := listen(t, "127.0.0.1:0")
		n.ports[service] = l.Addr().String()
		services = append(services, dataplane.Listener{Service: service, Listener: l})
	}
	go func() { done <- n.Run(ctx, proxy, mesh, services...) }()
	peers := grpc.NewServer()
	meshv1.RegisterPeerServer(peers, &peerServer{lines: n.Dataplane})
	go peers.Serve(n.PeerListener())
	t.Cleanup(peers.Stop)
	n.stop = sync.OnceValue(func() error {
		cancel()
		return <-done
	})
	via := &http.Transport{Proxy: http.ProxyURL(&url.URL{Scheme: "http", Host: n.proxy}), MaxIdleConnsPerHost: 100, DisableCompression: true}
	n.client = &http.Client{Transport: via}
	m.nodes[name] = n
	t.Cleanup(func() {
		via.CloseIdleConnections()
		if err := n.stop(); err != nil {
			t.Errorf("node %s: %v", name, err)
		}
	})
	return n
}

// peerServer is the part of an agent that answers other agents.
type peerServer struct {
	meshv1.UnimplementedPeerServer
	lines *dataplane.Dataplane
}

func (s *peerServer) Reserve(r *meshv1.ReserveRequest, stream grpc.ServerStreamingServer[meshv1.Grant]) error {
	return s.lines.Reserve(r, stream)
}

func (s *peerServer) ListenIdle(r *meshv1.ListenIdleRequest, stream grpc.ServerStreamingServer[meshv1.IdleReplica]) error {
	return s.lines.ListenIdle(r, stream)
}

// panics is a log that fails the test if a handler panicked, which net/http hides.
type panics struct{ t testing.TB }

func (p panics) Write(line []byte) (int, error) {
	if bytes.Contains(line, []byte("panic")) {
		p.t.Errorf("%s", line)
	}
	return len(line), nil
}

func listen(t testing.TB, at string) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// testTransport counts connections, and can fall silent.
type testTransport struct {
	transport.Plain
	node *node
}

func (tt *testTransport) Dial(ctx context.Context, agent netip.AddrPort, p transport.Protocol) (net.Conn, error) {
	if p == transport.HTTP {
		tt.node.dialed.Add(1)
	}
	return tt.Plain.Dial(ctx, agent, p)
}

func (tt *testTransport) Accept(ctx context.Context, c net.Conn) (net.Conn, transport.Protocol, error) {
	c, p, err := tt.Plain.Accept(ctx, c)
	if err != nil {
		return nil, "", err
	}
	return &silenceableConn{c, tt.node}, p, nil
}

// silenceableConn swallows what its node says while that is silent.
type silenceableConn struct {
	net.Conn
	node *node
}

// NetConn returns the connection below.
func (c *silenceableConn) NetConn() net.Conn { return c.Conn }

// CloseWrite ends one direction.
func (c *silenceableConn) CloseWrite() error {
	return c.Conn.(interface{ CloseWrite() error }).CloseWrite()
}

func (c *silenceableConn) Write(p []byte) (int, error) {
	if c.node.silent.Load() {
		return len(p), nil
	}
	return c.Conn.Write(p)
}

// serve starts a replica of a service on a node.
func (m *mesh) serve(service registry.ServiceName, at registry.NodeName, h http.HandlerFunc) (*httptest.Server, registry.Endpoint) {
	m.t.Helper()
	s := httptest.NewUnstartedServer(h)
	s.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	s.Start()
	m.t.Cleanup(s.Close)
	return s, m.register(service, at, s.Listener.Addr().String())
}

// register adds an endpoint.
func (m *mesh) register(service registry.ServiceName, at registry.NodeName, address string) registry.Endpoint {
	return m.registerAs(registry.Endpoint{Service: service, Node: at, Address: netip.MustParseAddrPort(address)})
}

func (m *mesh) registerAs(e registry.Endpoint) registry.Endpoint {
	e.Agent = m.nodes[e.Node].agent
	m.endpoints = append(m.endpoints, e)
	m.publish()
	return e
}

// setPolicy changes the policy of a service.
func (m *mesh) setPolicy(service registry.ServiceName, change func(*policy.Policy)) {
	p := policy.Default()
	change(&p)
	m.mu.Lock()
	m.policies[service] = p
	m.mu.Unlock()
	m.publish()
}

// setState changes the state of an endpoint.
func (m *mesh) setState(id registry.EndpointID, s registry.State) {
	for i := range m.endpoints {
		if m.endpoints[i].ID() == id {
			m.endpoints[i].State = s
		}
	}
	m.publish()
}

// publish tells all agents what there is.
func (m *mesh) publish() {
	s := m.snapshot()
	for name, n := range m.nodes {
		n.UpdateLocal(m.local(name))
		n.Update(s)
	}
}

func (m *mesh) local(name registry.NodeName) []registry.Endpoint {
	return slices.DeleteFunc(slices.Clone(m.endpoints), func(e registry.Endpoint) bool { return e.Node != name })
}

func (m *mesh) snapshot() *registry.Snapshot {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := &registry.Snapshot{Revision: 1, Services: map[registry.ServiceName]*registry.Service{}}
	service := func(name registry.ServiceName) *registry.Service {
		if s.Services[name] == nil {
			s.Services[name] = &registry.Service{Name: name, Policy: policy.Default()}
		}
		return s.Services[name]
	}
	for name, p := range m.policies {
		service(name).Policy = p
	}
	for _, e := range m.endpoints {
		service(e.Service).Endpoints = append(service(e.Service).Endpoints, e)
	}
	return s
}

// quiet fails the test unless soon nothing is in flight any more, as each agent sees it.
func (m *mesh) quiet() {
	m.t.Helper()
	eventually(m.t, "requests in flight", func() any {
		var left []string
		for _, n := range m.nodes {
			left = append(left, inFlight(n.Observe(""))...)
		}
		return left
	}, func(v any) bool { return len(v.([]string)) == 0 })
}

func inFlight(o *meshv1.Observation) []string {
	var left []string
	for _, i := range o.Inbound {
		if i.Rif != 0 {
			left = append(left, fmt.Sprintf("%s counts %d in flight at %s", o.Node, i.Rif, i.Id))
		}
	}
	for _, s := range o.Outbound {
		for _, e := range s.Endpoints {
			if e.OwnRif != 0 {
				left = append(left, fmt.Sprintf("%s has %d in flight to %s", o.Node, e.OwnRif, e.Id))
			}
		}
	}
	return left
}

// rif returns the requests in flight that the agent of a replica counts.
func (m *mesh) rif(e registry.Endpoint) int {
	for _, i := range m.nodes[e.Node].Observe("").Inbound {
		if i.Id == string(e.ID()) {
			return int(i.Rif)
		}
	}
	m.t.Fatalf("node %s knows no replica %s", e.Node, e.ID())
	return 0
}

// eventually looks again and again until done says that all is well.
func eventually(t testing.TB, what string, look func() any, done func(any) bool) {
	t.Helper()
	deadline := time.After(patience)
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		seen := look()
		if done(seen) {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("%s: still %v after %v", what, seen, patience)
		}
	}
}

// within waits for a channel to be closed or to have something.
func within[T any](t testing.TB, what string, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(patience):
		t.Fatalf("%s: not within %v", what, patience)
		panic("unreachable")
	}
}

// get requests a URL through the node's proxy.
func (n *node) get(t testing.TB, target string) (*http.Response, string) {
	t.Helper()
	return n.do(t, request(t, http.MethodGet, target, nil))
}

func request(t testing.TB, method, target string, body io.Reader) *http.Request {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, target, body)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func (n *node) do(t testing.TB, r *http.Request) (*http.Response, string) {
	t.Helper()
	resp, err := n.client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(body)
}

// raw is a connection to the node's proxy, without a client's care.
type raw struct {
	net.Conn
	t  testing.TB
	in *bufio.Reader
}

func (n *node) dial(t testing.TB) *raw {
	t.Helper()
	return dial(t, n.proxy)
}

func dial(t testing.TB, to string) *raw {
	t.Helper()
	c, err := net.Dial("tcp", to)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(patience))
	return &raw{c, t, bufio.NewReader(c)}
}

func (r *raw) send(s string) {
	r.t.Helper()
	if _, err := io.WriteString(r, s); err != nil {
		r.t.Fatal(err)
	}
}

// answer reads a response with its body.
func (r *raw) answer(method string) (*http.Response, string) {
	r.t.Helper()
	resp := r.header(method)
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	return resp, string(body)
}

// header reads a response up to its body.
func (r *raw) header(method string) *http.Response {
	r.t.Helper()
	resp, err := http.ReadResponse(r.in, &http.Request{Method: method})
	if err != nil {
		r.t.Fatal(err)
	}
	return resp
}

// wantFault checks that an answer is the mesh's own.
func wantFault(t testing.TB, resp *http.Response, body string, reason fault.Reason) {
	t.Helper()
	if got := fault.Reason(resp.Header.Get(fault.Header)); got != reason || resp.StatusCode != reason.Status() {
		t.Errorf("got status %d, reason %q, want %d, %q; body %q", resp.StatusCode, got, reason.Status(), reason, body)
	}
	if !strings.HasPrefix(body, "headroom: ") || !strings.HasSuffix(body, "\n") || strings.Count(body, "\n") != 1 || len(body) < 20 {
		t.Errorf("want one clear sentence from headroom, got %q", body)
	}
}
