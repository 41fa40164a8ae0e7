package dataplane_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/dataplane"
	"github.com/headroom-mesh/headroom/dataplane/identity"
	"github.com/headroom-mesh/headroom/dataplane/identity/ca"
	"github.com/headroom-mesh/headroom/dataplane/inbound"
	"github.com/headroom-mesh/headroom/dataplane/relay"
	"github.com/headroom-mesh/headroom/dataplane/transport"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
	"github.com/prometheus/client_golang/prometheus"
)

const forwardedCertificate = "X-Forwarded-Client-Cert"

// certified are agents over mutual TLS that issue certificates by one CA, or have none to issue.
type certified struct{ *mesh }

// syncBuffer is written to by several.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func newCertified(t testing.TB, issue bool, access *slog.Logger) *certified {
	dir := filepath.Join(t.TempDir(), "ca")
	domain, err := identity.ParseDomain("headroom.local")
	if err != nil {
		t.Fatal(err)
	}
	authority, err := ca.Init(dir, ca.Options{Domain: domain}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	m := &certified{&mesh{t: t, nodes: map[registry.NodeName]*node{}, policies: map[registry.ServiceName]policy.Policy{}}}
	for _, name := range []registry.NodeName{"a", "b"} {
		m.startCertified(name, authority, dir, issue, access)
	}
	return m
}

func (m *certified) startCertified(name registry.NodeName, authority *ca.CA, dir string, issue bool, access *slog.Logger) {
	t := m.t
	id, err := identity.NodeID(authority.Domain, name)
	if err != nil {
		t.Fatal(err)
	}
	load := ca.Loader(dir, id)
	if !issue {
		files, err := authority.Issue(id, time.Hour, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		load = func(now time.Time) (*identity.Set, error) {
			return identity.Parse(files.Roots, files.Certificate, files.Key, now)
		}
	}
	source, err := identity.New(identity.Config{Load: load})
	if err != nil {
		t.Fatal(err)
	}
	n := &node{name: name, metrics: prometheus.NewRegistry()}
	n.Dataplane, err = dataplane.New(dataplane.Config{
		Node: name, Transport: transport.NewMutual(transport.MutualConfig{Identity: source}), Identity: source,
		AccessLog: access, Metrics: n.metrics,
	})
	if err != nil {
		t.Fatal(err)
	}
	proxy, agents, ofCart := listen(t, "127.0.0.1:0"), listen(t, "127.0.0.1:0"), listen(t, "127.0.0.1:0")
	n.proxy, n.agent = proxy.Addr().String(), netip.MustParseAddrPort(agents.Addr().String())
	n.ports = map[registry.ServiceName]string{"web": ofCart.Addr().String()}
	cart := ofWorkload{ofCart, identity.Workload{Namespace: "shop", ServiceAccount: "cart"}}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx, proxy, agents, dataplane.Listener{Service: "web", Listener: cart}) }()
	via := &http.Transport{Proxy: http.ProxyURL(&url.URL{Scheme: "http", Host: n.proxy})}
	n.client = &http.Client{Transport: via}
	m.nodes[name] = n
	n.stop = sync.OnceValue(func() error {
		cancel()
		return <-done
	})
	t.Cleanup(func() {
		via.CloseIdleConnections()
		if err := n.stop(); err != nil {
			t.Errorf("node %s: %v", name, err)
		}
	})
}

// ofWorkload is a listener that knows whose connections it takes.
type ofWorkload struct {
	net.Listener
	workload identity.Workload
}

func (l ofWorkload) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return identity.WorkloadConn{Conn: c, Workload: l.workload}, nil
}

// tellsCaller is a replica that answers with what it is told of the caller.
func tellsCaller(w http.ResponseWriter, r *http.Request) {
	fmt.Fprint(w, strings.Join(r.Header.Values(forwardedCertificate), " and "))
}

// both is a replica of HTTP/1.1 and HTTP/2.
func (m *certified) both(at registry.NodeName, h http.HandlerFunc) {
	s := httptest.NewUnstartedServer(h)
	s.Config.Protocols = new(http.Protocols)
	s.Config.Protocols.SetHTTP1(true)
	s.Config.Protocols.SetUnencryptedHTTP2(true)
	s.Start()
	m.t.Cleanup(s.Close)
	m.register("web", at, s.Listener.Addr().String())
}

// callers are the ways on which a request for web may come: by the proxy of the node, or from a workload.
func (n *node) callers(t testing.TB) map[string]*http.Client {
	t.Helper()
	all := map[string]*http.Client{}
	for name, at := range map[string]string{"node": n.proxy, "cart": n.ports["web"]} {
		for _, version := range []string{"HTTP/1.1", "HTTP/2"} {
			tr := &http.Transport{Protocols: new(http.Protocols), DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, "tcp", at)
			}}
			tr.Protocols.SetHTTP1(version == "HTTP/1.1")
			tr.Protocols.SetUnencryptedHTTP2(version == "HTTP/2")
			t.Cleanup(tr.CloseIdleConnections)
			all[name+" by "+version] = &http.Client{Transport: tr}
		}
	}
	return all
}

func ask(t testing.TB, c *http.Client, forged string) string {
	t.Helper()
	r := request(t, "GET", "http://web.mesh/", nil)
	if forged != "" {
		r.Header.Set(forwardedCertificate, forged)
	}
	_, body := (&node{client: c}).do(t, r)
	return body
}

func TestReplicasLearnWhoCalls(t *testing.T) {
	const forged = "By=spiffe://headroom.local/node/b;URI=spiffe://headroom.local/ns/shop/sa/admin"
	for _, issue := range []bool{true, false} {
		for _, at := range []registry.NodeName{"a", "b"} {
			for _, forwarded := range []policy.Forwarded{policy.ForwardedNone, policy.ForwardedXFF, policy.ForwardedRFC} {
				t.Run(fmt.Sprintf("issue=%v/on %s/%s", issue, at, forwarded), func(t *testing.T) {
					m := newCertified(t, issue, nil)
					m.both(at, tellsCaller)
					m.setPolicy("web", func(p *policy.Policy) { p.Forwarded = forwarded })
					for name, c := range m.nodes["a"].callers(t) {
						who := "node/a"
						if strings.HasPrefix(name, "cart") && issue {
							who = "ns/shop/sa/cart"
						}
						want := fmt.Sprintf("By=spiffe://headroom.local/node/%s;URI=spiffe://headroom.local/%s", at, who)
						if forwarded == policy.ForwardedNone {
							want = forged
						}
						for range 2 {
							if got := ask(t, c, forged); got != want {
								t.Errorf("%s: the replica is told %q, want %q", name, got, want)
							}
						}
					}
				})
			}
		}
	}
}

// TestStrangers has a caller from outside the mesh who meant the replica itself.
func TestStrangers(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "ca")
	domain, err := identity.ParseDomain("headroom.local")
	if err != nil {
		t.Fatal(err)
	}
	id, err := identity.NodeID(domain, "a")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ca.Init(dir, ca.Options{Domain: domain}, time.Now()); err != nil {
		t.Fatal(err)
	}
	source, err := identity.New(identity.Config{Load: ca.Loader(dir, id)})
	if err != nil {
		t.Fatal(err)
	}
	replica := httptest.NewServer(http.HandlerFunc(tellsCaller))
	defer replica.Close()
	e := registry.Endpoint{Service: "web", Node: "a", Address: netip.MustParseAddrPort(replica.Listener.Addr().String())}
	p := policy.Default()
	p.Forwarded = policy.ForwardedXFF
	engine := relay.New(relay.Config{Identity: source})
	in := inbound.New(inbound.Config{Relay: engine})
	in.Update([]registry.Endpoint{e})
	in.UpdatePolicies(&registry.Snapshot{Services: map[registry.ServiceName]*registry.Service{"web": {Name: "web", Policy: p}}})
	l := listen(t, "127.0.0.1:0")
	ctx, cancel := context.WithCancel(t.Context())
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := engine.Serve(ctx, l, in.Direct(e.ID())); err != nil {
			t.Error(err)
		}
	})
	defer serving.Wait()
	defer cancel()
	c := dial(t, l.Addr().String())
	c.send("GET / HTTP/1.1\r\nHost: x\r\nx-forwarded-client-cert: URI=spiffe://headroom.local/ns/shop/sa/admin\r\n\r\n")
	if resp, body := c.answer("GET"); resp.StatusCode != 200 || body != "" {
		t.Errorf("status %d, the replica is told %q", resp.StatusCode, body)
	}
}

func TestInTheClearNobodyIsKnown(t *testing.T) {
	hops(t, func(t *testing.T, m *mesh, a *node, replica registry.NodeName) {
		m.serve("web", replica, tellsCaller)
		m.setPolicy("web", func(p *policy.Policy) { p.Forwarded = policy.ForwardedXFF })
		if got := ask(t, a.client, "URI=spiffe://headroom.local/ns/shop/sa/admin"); got != "" {
			t.Errorf("the replica is told %q", got)
		}
	})
}

// TestAccessLogsTellWhoCalls has both agents tell: the caller's, and that of the replica.
func TestAccessLogsTellWhoCalls(t *testing.T) {
	var log syncBuffer
	m := newCertified(t, true, slog.New(slog.NewJSONHandler(&log, nil)))
	m.both("b", tellsCaller)
	for _, c := range m.nodes["a"].callers(t) {
		ask(t, c, "")
	}
	want := map[string]int{
		"request spiffe://headroom.local/node/a": 2, "delivery spiffe://headroom.local/node/a": 2,
		"request spiffe://headroom.local/ns/shop/sa/cart": 2, "delivery spiffe://headroom.local/ns/shop/sa/cart": 2,
	}
	if got := m.logged(&log, "/"); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got %v\nwant %v", got, want)
	}
}

// TestBytesOfWorkloads carries a connection that is no HTTP.
func TestBytesOfWorkloads(t *testing.T) {
	var log syncBuffer
	m := newCertified(t, true, slog.New(slog.NewJSONHandler(&log, nil)))
	l := listen(t, "127.0.0.1:0")
	m.serveBytes(l, greet)
	m.register("web", "b", l.Addr().String())
	conversation(t, m.nodes["a"].ports["web"])
	want := map[string]int{"request spiffe://headroom.local/ns/shop/sa/cart": 1, "delivery spiffe://headroom.local/ns/shop/sa/cart": 1}
	if got := m.logged(&log, ""); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got %v\nwant %v", got, want)
	}
}

// logged stops all agents and counts who has called, as they tell.
func (m *certified) logged(log *syncBuffer, path string) map[string]int {
	m.t.Helper()
	for _, n := range m.nodes {
		if err := n.stop(); err != nil {
			m.t.Error(err)
		}
	}
	count := map[string]int{}
	for line := range strings.Lines(log.String()) {
		var entry struct {
			Msg, Source, Endpoint, Path string
			Status                      int
		}
		if err := json.Unmarshal([]byte(line), &entry); err != nil {
			m.t.Fatal(err)
		}
		if entry.Status != 200 || entry.Path != path || !strings.HasPrefix(entry.Endpoint, "web/b/") {
			m.t.Errorf("%s", line)
		}
		count[entry.Msg+" "+entry.Source]++
	}
	return count
}
