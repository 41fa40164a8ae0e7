package transport_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/identity"
	"github.com/headroom-mesh/headroom/dataplane/identity/ca"
	"github.com/headroom-mesh/headroom/dataplane/sockets"
	"github.com/headroom-mesh/headroom/dataplane/transport"
	"github.com/headroom-mesh/headroom/registry"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/prometheus/common/expfmt"
)

func newCA(t *testing.T, domain string) *ca.CA {
	t.Helper()
	d, err := identity.ParseDomain(domain)
	if err != nil {
		t.Fatal(err)
	}
	authority, err := ca.Init(t.TempDir(), ca.Options{Domain: d}, time.Now().Add(-24*time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	return authority
}

func nodeID(t *testing.T, domain, node string) identity.ID {
	t.Helper()
	d, err := identity.ParseDomain(domain)
	if err != nil {
		t.Fatal(err)
	}
	id, err := identity.NodeID(d, registry.NodeName(node))
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// issued is what a CA gave to a node, a while ago.
func issued(t *testing.T, authority *ca.CA, node string, life, ago time.Duration) ca.Files {
	t.Helper()
	files, err := authority.Issue(nodeID(t, authority.Domain.Name(), node), life, time.Now().Add(-ago))
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func sourceOf(t *testing.T, files ca.Files) *identity.Source {
	t.Helper()
	dir := t.TempDir()
	if err := files.Write(dir); err != nil {
		t.Fatal(err)
	}
	s, err := identity.New(identity.Config{Load: identity.Folder(dir)})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// end is the one that is dialled.
type end struct {
	log  *bytes.Buffer // of its Mux, to be read once that has ended
	addr netip.AddrPort
	stop func()
}

func mutual(cfg transport.MutualConfig) (transport.Transport, *prometheus.Registry) {
	metrics := prometheus.NewRegistry()
	cfg.Metrics = metrics
	return transport.NewMutual(cfg), metrics
}

// serve runs a Mux that echoes what comes by HTTP, until stop.
func serve(t *testing.T, tr transport.Transport) *end {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	e := &end{log: &bytes.Buffer{}, addr: l.Addr().(*net.TCPAddr).AddrPort()}
	mux := transport.NewMux(tr, slog.New(slog.NewTextHandler(e.log, nil)), nil)
	http := mux.Listener(transport.HTTP)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		if err := mux.Run(ctx, l); err != nil {
			t.Error(err)
		}
	})
	running.Go(func() { echoAll(http) })
	e.stop = sync.OnceFunc(func() {
		cancel()
		running.Wait()
	})
	t.Cleanup(e.stop)
	return e
}

func echoAll(l net.Listener) {
	var serving sync.WaitGroup
	defer serving.Wait()
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		serving.Go(func() {
			defer c.Close()
			io.Copy(c, c)
		})
	}
}

func wantEcho(t *testing.T, c net.Conn) {
	t.Helper()
	got := make([]byte, 4)
	if _, err := c.Write([]byte("ping")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, got); err != nil || string(got) != "ping" {
		t.Fatalf("got %q, %v", got, err)
	}
}

func dialFor(t *testing.T, tr transport.Transport, agent netip.AddrPort) (net.Conn, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	c, err := tr.Dial(ctx, agent, transport.HTTP)
	if err == nil {
		t.Cleanup(func() { c.Close() })
	}
	return c, err
}

func TestMutual(t *testing.T) {
	authority := newCA(t, "headroom.local")
	a, aMetrics := mutual(transport.MutualConfig{Identity: sourceOf(t, issued(t, authority, "a", time.Hour, 0)), NamesAt: nodes("b")})
	b, bMetrics := mutual(transport.MutualConfig{Identity: sourceOf(t, issued(t, authority, "b", time.Hour, 0))})
	server := serve(t, b)
	for i := range 3 {
		c, err := dialFor(t, a, server.addr)
		if err != nil {
			t.Fatal(err)
		}
		wantEcho(t, c)
		state := c.(*tls.Conn).ConnectionState()
		if state.Version != tls.VersionTLS13 || state.NegotiatedProtocol != string(transport.HTTP) {
			t.Errorf("version %x, protocol %s", state.Version, state.NegotiatedProtocol)
		}
		if state.DidResume != (i > 0) {
			t.Errorf("connection %d: resumed: %v", i, state.DidResume)
		}
		if _, ok := c.(*tls.Conn).NetConn().(*sockets.Wire); !ok {
			t.Errorf("below TLS is a %T", c.(*tls.Conn).NetConn())
		}
		c.Close()
	}
	server.stop()
	for direction, metrics := range map[string]*prometheus.Registry{"outbound": aMetrics, "inbound": bMetrics} {
		wantMetric(t, metrics, fmt.Sprintf(`headroom_transport_handshakes_total{direction=%q,kind="full"} 1`, direction))
		wantMetric(t, metrics, fmt.Sprintf(`headroom_transport_handshakes_total{direction=%q,kind="resumed"} 2`, direction))
	}
}

func wantMetric(t *testing.T, r *prometheus.Registry, line string) {
	t.Helper()
	name, _, _ := strings.Cut(line, "{")
	text, err := testutil.CollectAndFormat(r, expfmt.TypeTextPlain, name)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(text), line+"\n") {
		t.Errorf("metrics:\n%s\nwant %s", text, line)
	}
}

func nodes(names ...registry.NodeName) func(netip.AddrPort) identity.Names {
	return func(netip.AddrPort) identity.Names { return identity.Names{Nodes: names} }
}

// TestRefusals has one end that does not take the other: whoever dials gets to know, and whoever is dialled logs it.
func TestRefusals(t *testing.T) {
	ours, foreign, other := newCA(t, "headroom.local"), newCA(t, "headroom.local"), newCA(t, "elsewhere.example")
	fresh := func(c *ca.CA, node string) ca.Files { return issued(t, c, node, time.Hour, 0) }
	expired := func(node string) ca.Files { return issued(t, ours, node, time.Hour, 3*time.Hour) }
	// half trusts the roots of both, though only the other end's can be relied on.
	half := fresh(foreign, "a")
	half.Roots = append(bytes.Clone(half.Roots), ours.Roots...)
	tests := []struct {
		name             string
		client, server   ca.Files
		names            func(netip.AddrPort) identity.Names
		wantErr, wantLog []string
		reason           string // of the client
	}{
		{
			name: "server expired", client: fresh(ours, "a"), server: expired("b"), reason: "expired",
			wantErr: []string{"spiffe://headroom.local/node/b expired at 20", "2h0m", " ago"},
			wantLog: []string{"it does not take our certificate"},
		}, {
			name: "client expired", client: expired("a"), server: fresh(ours, "b"), reason: "refused",
			wantErr: []string{"it refuses our certificate: that of spiffe://headroom.local/node/a expired at 20"},
			wantLog: []string{"refused: the certificate of spiffe://headroom.local/node/a expired at 20"},
		}, {
			name: "server not there yet", client: fresh(ours, "a"), server: issued(t, ours, "b", time.Hour, -30*time.Minute), reason: "expired",
			wantErr: []string{"spiffe://headroom.local/node/b is valid from 20", "Z, in ", "is a clock wrong?"},
		}, {
			name: "foreign CA", client: fresh(ours, "a"), server: fresh(foreign, "b"), reason: "foreign",
			wantErr: []string{"spiffe://headroom.local/node/b is not signed by our roots: it was issued by ", foreign.Certificate.Subject.CommonName, "ours are", ours.Certificate.Subject.CommonName},
			wantLog: []string{"it does not take our certificate"},
		}, {
			name: "client of a foreign CA", client: half, server: fresh(ours, "b"), reason: "refused",
			wantErr: []string{"it refuses our certificate, that of spiffe://headroom.local/node/a, issued by", foreign.Certificate.Subject.CommonName, "its log says why"},
			wantLog: []string{"refused: the certificate of spiffe://headroom.local/node/a is not signed by our roots", foreign.Certificate.Subject.CommonName},
		}, {
			name: "another trust domain", client: fresh(ours, "a"), server: fresh(other, "b"), reason: "foreign",
			wantErr: []string{"spiffe://elsewhere.example/node/b", "from another trust domain: ours is headroom.local"},
		}, {
			name: "wrong node", client: fresh(ours, "a"), server: fresh(ours, "c"), names: nodes("b", "bb"), reason: "wrong_id",
			wantErr: []string{"that of spiffe://headroom.local/node/c, and spiffe://headroom.local/node/b or spiffe://headroom.local/node/bb is expected there"},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			a, metrics := mutual(transport.MutualConfig{Identity: sourceOf(t, tt.client), NamesAt: tt.names})
			b, _ := mutual(transport.MutualConfig{Identity: sourceOf(t, tt.server)})
			server := serve(t, b)
			for range 5 {
				_, err := dialFor(t, a, server.addr)
				for _, want := range append(tt.wantErr, "begin headroom-http/1 with agent "+server.addr.String()) {
					if err == nil || !strings.Contains(err.Error(), want) {
						t.Fatalf("error %v\nwant %q in it", err, want)
					}
				}
			}
			server.stop()
			for _, want := range append(tt.wantLog, "level=WARN", "peer=127.0.0.1:") {
				if !strings.Contains(server.log.String(), strings.ReplaceAll(want, `"`, `\"`)) {
					t.Errorf("log %s\nwant %q in it", server.log, want)
				}
			}
			if n := strings.Count(server.log.String(), "level=WARN"); n != 1 {
				t.Errorf("%d warnings, want one:\n%s", n, server.log)
			}
			wantMetric(t, metrics, fmt.Sprintf(`headroom_transport_refusals_total{direction="outbound",reason=%q} 5`, tt.reason))
		})
	}
}

// TestNamesOfServices dials agents that are known by a service.
func TestNamesOfServices(t *testing.T) {
	authority := newCA(t, "headroom.local")
	id, err := identity.ServiceID(authority.Domain, "default", "web")
	if err != nil {
		t.Fatal(err)
	}
	files, err := authority.Issue(id, time.Hour, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	b, _ := mutual(transport.MutualConfig{Identity: sourceOf(t, files)})
	server := serve(t, b)
	for _, tt := range []struct {
		names identity.Names
		want  string
	}{
		{identity.Names{}, ""},
		{identity.Names{Nodes: []registry.NodeName{"b"}, Services: []registry.ServiceName{"web"}}, ""},
		{identity.Names{Nodes: []registry.NodeName{"b"}}, "that of spiffe://headroom.local/ns/default/svc/web, and spiffe://headroom.local/node/b is expected"},
		{identity.Names{Services: []registry.ServiceName{"api"}}, "and spiffe://headroom.local/ns/*/svc/api is expected"},
	} {
		a, _ := mutual(transport.MutualConfig{
			Identity: sourceOf(t, issued(t, authority, "a", time.Hour, 0)),
			NamesAt:  func(netip.AddrPort) identity.Names { return tt.names },
		})
		_, err := dialFor(t, a, server.addr)
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%v: error %v, want %q", tt.names, err, tt.want)
		}
	}
}

// TestWithoutSPIFFE has a server whose certificate is for a host, signed by the same CA.
func TestWithoutSPIFFE(t *testing.T) {
	authority := newCA(t, "headroom.local")
	plain := tlsOf(t, issued(t, authority, "x", time.Hour, 0), func(c *tls.Config) { c.Certificates[0] = selfSigned(t) })
	a, _ := mutual(transport.MutualConfig{Identity: sourceOf(t, issued(t, authority, "a", time.Hour, 0))})
	l, err := tls.Listen("tcp", "127.0.0.1:0", plain)
	if err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	serving.Go(func() {
		c, err := l.Accept()
		if err == nil {
			c.(*tls.Conn).Handshake()
			c.Close()
		}
	})
	_, err = dialFor(t, a, l.Addr().(*net.TCPAddr).AddrPort())
	if err == nil || !strings.Contains(err.Error(), `the certificate of "CN=example.com", issued by "CN=example.com", has no SPIFFE ID`) {
		t.Error(err)
	}
	l.Close()
	serving.Wait()

	// The other way round, by hand: with no certificate, with the one above, and for an unknown protocol.
	b, metrics := mutual(transport.MutualConfig{Identity: sourceOf(t, issued(t, authority, "b", time.Hour, 0))})
	server := serve(t, b)
	for _, change := range []func(*tls.Config){
		func(c *tls.Config) { c.Certificates = nil },
		func(c *tls.Config) { c.Certificates[0] = selfSigned(t) },
		func(c *tls.Config) { c.NextProtos = []string{"headroom-http/9"} },
		func(c *tls.Config) { c.MaxVersion = tls.VersionTLS12 },
	} {
		c, err := tls.Dial("tcp", server.addr.String(), tlsOf(t, issued(t, authority, "x", time.Hour, 0), change))
		if err == nil {
			_, err = c.Read(make([]byte, 1))
			c.Close()
		}
		if err == nil || !strings.Contains(err.Error(), "remote error") {
			t.Errorf("error %v", err)
		}
	}
	server.stop()
	for _, want := range []string{"no certificate was shown", "has no SPIFFE ID", "a protocol that this agent does not know"} {
		if !strings.Contains(server.log.String(), want) {
			t.Errorf("log:\n%s\nwant %q", server.log, want)
		}
	}
	wantMetric(t, metrics, `headroom_transport_refusals_total{direction="inbound",reason="missing"} 1`)
	wantMetric(t, metrics, `headroom_transport_refusals_total{direction="inbound",reason="no_id"} 1`)
}

// tlsOf is a configuration of somebody else's.
func tlsOf(t *testing.T, files ca.Files, change func(*tls.Config)) *tls.Config {
	t.Helper()
	certificate, err := tls.X509KeyPair(files.Certificate, files.Key)
	if err != nil {
		t.Fatal(err)
	}
	c := &tls.Config{Certificates: []tls.Certificate{certificate}, NextProtos: []string{string(transport.HTTP)}, InsecureSkipVerify: true}
	change(c)
	return c
}

func TestStrictAndPlain(t *testing.T) {
	authority := newCA(t, "headroom.local")
	a, metrics := mutual(transport.MutualConfig{Identity: sourceOf(t, issued(t, authority, "a", time.Hour, 0))})
	server := serve(t, a)
	for range 3 {
		c, err := dialFor(t, transport.Plain{}, server.addr)
		if err != nil {
			t.Fatal(err) // nothing is answered
		}
		c.Write([]byte("GET / HTTP/1.1\r\n"))
		if _, err := c.Read(make([]byte, 1)); err == nil {
			t.Error("the strict agent answered in the clear")
		}
	}
	server.stop()
	if log := server.log.String(); !strings.Contains(log, "--mtls permissive") || strings.Count(log, "WARN") != 1 {
		t.Errorf("log:\n%s", log)
	}
	wantMetric(t, metrics, `headroom_transport_refusals_total{direction="inbound",reason="plain"} 3`)

	server = serve(t, transport.Plain{})
	_, err := dialFor(t, a, server.addr)
	if err == nil || !strings.Contains(err.Error(), "it does not answer in TLS") || !strings.Contains(err.Error(), "--mtls off") {
		t.Error(err)
	}
	server.stop()
	if log := server.log.String(); !strings.Contains(log, "this agent has no certificate: start it with --tls or --ca") {
		t.Errorf("log:\n%s", log)
	}
}

func TestPermissive(t *testing.T) {
	authority := newCA(t, "headroom.local")
	permissive := func(node string) (transport.Transport, *prometheus.Registry) {
		return mutual(transport.MutualConfig{Identity: sourceOf(t, issued(t, authority, node, time.Hour, 0)), Permissive: true})
	}
	strict, _ := mutual(transport.MutualConfig{Identity: sourceOf(t, issued(t, authority, "s", time.Hour, 0))})
	a, metrics := permissive("a")
	b, _ := permissive("b")
	for _, tt := range []struct {
		name         string
		dial, accept transport.Transport
		tls          bool
	}{
		{"permissive to permissive", a, b, true},
		{"permissive to strict", a, strict, true},
		{"strict to permissive", strict, a, true},
		{"permissive to plain", a, transport.Plain{}, false},
		{"plain to permissive", transport.Plain{}, a, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			server := serve(t, tt.accept)
			for range 3 {
				c, err := dialFor(t, tt.dial, server.addr)
				if err != nil {
					t.Fatal(err)
				}
				wantEcho(t, c)
				if _, ok := c.(*tls.Conn); ok != tt.tls {
					t.Errorf("TLS: %v", ok)
				}
				c.Close()
			}
			server.stop()
			// It is asked for TLS once, then remembered.
			if n := strings.Count(server.log.String(), "no certificate"); tt.name == "permissive to plain" && n != 1 {
				t.Errorf("log:\n%s", server.log)
			}
		})
	}
	wantMetric(t, metrics, `headroom_transport_handshakes_total{direction="outbound",kind="plain"} 3`)
	wantMetric(t, metrics, `headroom_transport_handshakes_total{direction="inbound",kind="plain"} 3`)

	// Who has TLS and is not taken is not spoken to in the clear.
	foreign, _ := mutual(transport.MutualConfig{Identity: sourceOf(t, issued(t, newCA(t, "headroom.local"), "f", time.Hour, 0)), Permissive: true})
	if _, err := dialFor(t, a, serve(t, foreign).addr); err == nil || !strings.Contains(err.Error(), "not signed by our roots") {
		t.Error(err)
	}
}

func eventually(t *testing.T, what string, done func() bool) {
	t.Helper()
	for began := time.Now(); !done(); <-time.After(time.Millisecond) {
		if time.Since(began) > 10*time.Second {
			t.Fatalf("not within 10 s: %s", what)
		}
	}
}

// TestRotation changes certificates, then roots, while connections come and go: none fails, and none is dropped.
func TestRotation(t *testing.T) {
	old, young := newCA(t, "headroom.local"), newCA(t, "headroom.local")
	both := append(bytes.Clone(old.Roots), young.Roots...)
	dirs := map[string]string{"a": t.TempDir(), "b": t.TempDir()}
	put := func(authority *ca.CA, roots []byte) {
		for node, dir := range dirs {
			files := issued(t, authority, node, time.Hour, 0)
			files.Roots = roots
			if err := files.Write(dir); err != nil {
				t.Fatal(err)
			}
		}
	}
	put(old, old.Roots)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	ends := map[string]transport.Transport{}
	sources := map[string]*identity.Source{}
	for node, dir := range dirs {
		s, err := identity.New(identity.Config{Load: identity.Folder(dir), Poll: 5 * time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		running.Go(func() { s.Run(ctx) })
		sources[node] = s
		ends[node], _ = mutual(transport.MutualConfig{Identity: s})
	}
	server := serve(t, ends["b"])
	lasting, err := dialFor(t, ends["a"], server.addr)
	if err != nil {
		t.Fatal(err)
	}
	var dialled, resumed atomic.Int64
	running.Go(func() {
		for ctx.Err() == nil {
			c, err := ends["a"].Dial(ctx, server.addr, transport.HTTP)
			if ctx.Err() != nil {
				return
			}
			if err != nil {
				t.Error(err)
				return
			}
			dialled.Add(1)
			if c.(*tls.Conn).ConnectionState().DidResume {
				resumed.Add(1)
			}
			c.Close()
		}
	})
	await := func() {
		t.Helper()
		for node, s := range sources {
			want, err := os.ReadFile(filepath.Join(dirs[node], identity.CertificateFile))
			if err != nil {
				t.Fatal(err)
			}
			eventually(t, "the new certificate is in force", func() bool {
				got := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Current().Leaf().Raw})
				return bytes.Equal(got, want)
			})
		}
		before := dialled.Load()
		eventually(t, "connections are made", func() bool { return dialled.Load() >= before+10 || t.Failed() })
		wantEcho(t, lasting)
	}
	put(old, old.Roots) // renewed
	await()
	put(old, both) // both roots are trusted everywhere
	await()
	put(young, both) // the young CA's certificates
	await()
	put(young, young.Roots) // the old CA is gone
	await()
	cancel()
	running.Wait()
	if resumed.Load() == 0 || resumed.Load() == dialled.Load() {
		t.Errorf("%d connections, %d resumed: want some new sessions, and some that are not", dialled.Load(), resumed.Load())
	}
}

// TestResumedIsVerified wants a session to end with the certificate that it began with.
func TestResumedIsVerified(t *testing.T) {
	authority := newCA(t, "headroom.local")
	dir := t.TempDir()
	if err := issued(t, authority, "b", time.Hour, 0).Write(dir); err != nil {
		t.Fatal(err)
	}
	load := identity.Folder(dir)
	swap := &swapped{load: load}
	s, err := identity.New(identity.Config{Load: swap.next, Poll: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	var running sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	running.Go(func() { s.Run(ctx) })
	a, _ := mutual(transport.MutualConfig{Identity: sourceOf(t, issued(t, authority, "a", time.Hour, 0))})
	b, _ := mutual(transport.MutualConfig{Identity: s})
	server := serve(t, b)
	for range 2 {
		c, err := dialFor(t, a, server.addr)
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
	}
	// The server trusts others from now on, but the client holds a session.
	young := newCA(t, "headroom.local")
	files := issued(t, young, "b", time.Hour, 0)
	set, err := identity.Parse(files.Roots, files.Certificate, files.Key, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	swap.to(set)
	eventually(t, "the new roots are in force", func() bool { return s.Current() == set })
	_, err = dialFor(t, a, server.addr)
	if err == nil || !strings.Contains(err.Error(), "it refuses our certificate") {
		t.Errorf("error %v", err)
	}
	cancel()
	running.Wait()
	server.stop()
	if !strings.Contains(server.log.String(), "not signed by our roots") {
		t.Errorf("log:\n%s", server.log)
	}
}

type swapped struct {
	mu   sync.Mutex
	load identity.Loader
	set  *identity.Set
}

func (s *swapped) to(set *identity.Set) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.set = set
}

func (s *swapped) next(now time.Time) (*identity.Set, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.set != nil {
		return s.set, nil
	}
	return s.load(now)
}

// TestMutualInMemory has connections that are no sockets, whose first byte can't be peeked at.
func TestMutualInMemory(t *testing.T) {
	authority := newCA(t, "headroom.local")
	b, _ := mutual(transport.MutualConfig{Identity: sourceOf(t, issued(t, authority, "b", time.Hour, 0)), Permissive: true})
	client, server := pair(t)
	var dialling sync.WaitGroup
	dialling.Go(func() {
		c := tls.Client(client, tlsOf(t, issued(t, authority, "a", time.Hour, 0), func(*tls.Config) {}))
		if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
			t.Error(err)
		}
	})
	c, p, err := b.Accept(t.Context(), server)
	if err != nil || p != transport.HTTP {
		t.Errorf("%s, %v", p, err)
	}
	dialling.Wait()
	c.Close()

	client, server = pair(t)
	io.WriteString(client, "HEADROOM headroom-rpc/1\nrest")
	c, p, err = b.Accept(t.Context(), server)
	if err != nil || p != transport.RPC {
		t.Fatalf("%s, %v", p, err)
	}
	rest := make([]byte, 4)
	if _, err := io.ReadFull(c, rest); err != nil || string(rest) != "rest" {
		t.Errorf("%q, %v", rest, err)
	}
	c.Close()
}

// TestMutualEndsWithItsContext dials somebody who never answers.
func TestMutualEndsWithItsContext(t *testing.T) {
	authority := newCA(t, "headroom.local")
	for _, permissive := range []bool{false, true} {
		a, _ := mutual(transport.MutualConfig{Identity: sourceOf(t, issued(t, authority, "a", time.Hour, 0)), Permissive: permissive})
		_, addr := listen(t)
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		if _, err := a.Dial(ctx, addr, transport.HTTP); !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("dial: %v", err)
		}
		cancel()
	}
}

func selfSigned(t *testing.T) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "example.com"}, DNSNames: []string{"example.com"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}
