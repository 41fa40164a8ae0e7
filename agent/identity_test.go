package agent

import (
	"bytes"
	"log/slog"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/headroom-mesh/headroom/dataplane/identity"
	"github.com/headroom-mesh/headroom/dataplane/identity/ca"
	"github.com/headroom-mesh/headroom/dataplane/transport"
	"github.com/headroom-mesh/headroom/registry"
)

func TestWhoIsStrictByDefault(t *testing.T) {
	for _, tt := range []struct {
		cfg      Config
		mtls, ca string
	}{
		{Config{Etcd: []string{"h:1"}}, MTLSOff, ""},
		{Config{Etcd: []string{"h:1"}, TLS: "certs"}, MTLSStrict, ""},
		{Config{Etcd: []string{"h:1"}, CA: "ca"}, MTLSStrict, "ca"},
		{Config{Etcd: []string{"h:1"}, CA: "ca", MTLS: MTLSPermissive}, MTLSPermissive, "ca"},
		{Config{EtcdEmbedded: "etcd", DataDir: "data"}, MTLSStrict, "data/ca"},
		{Config{EtcdEmbedded: "etcd", DataDir: "data", MTLS: MTLSPermissive}, MTLSPermissive, "data/ca"},
		{Config{EtcdEmbedded: "etcd", DataDir: "data", MTLS: MTLSOff}, MTLSOff, ""},
		{Config{EtcdEmbedded: "etcd", DataDir: "data", TLS: "certs"}, MTLSStrict, ""},
	} {
		if err := tt.cfg.Validate(); err != nil {
			t.Errorf("%+v: %v", tt.cfg, err)
		}
		if got := tt.cfg.withDefaults(); got.MTLS != tt.mtls || got.CA != tt.ca {
			t.Errorf("%+v: --mtls %s --ca %q, want %s, %q", tt.cfg, got.MTLS, got.CA, tt.mtls, tt.ca)
		}
	}
}

// withCertificate returns a folder with a certificate of a node.
func withCertificate(t *testing.T, domain string, node registry.NodeName) string {
	t.Helper()
	d, err := identity.ParseDomain(domain)
	if err != nil {
		t.Fatal(err)
	}
	authority, err := ca.Init(t.TempDir(), ca.Options{Domain: d}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	id, err := identity.NodeID(d, node)
	if err != nil {
		t.Fatal(err)
	}
	files, err := authority.Issue(id, time.Hour, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := files.Write(dir); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestCertificatesThatDoNotFit(t *testing.T) {
	dir := withCertificate(t, "headroom.local", "n1")
	for _, tt := range []struct {
		change func(*Config)
		want   string
	}{
		{func(c *Config) { c.TLS = dir }, ""},
		{func(c *Config) { c.CA = filepath.Join(t.TempDir(), "new") }, ""},
		{func(c *Config) { c.TLS, c.Node = dir, "n2" }, "--tls: the certificate is that of spiffe://headroom.local/node/n1: want spiffe://headroom.local/node/n2, or "},
		{func(c *Config) { c.TLS, c.TrustDomain = dir, "prod" }, "--tls: the certificate is that of spiffe://headroom.local/node/n1: want one of --trust-domain prod"},
		{func(c *Config) { c.TLS = t.TempDir() }, "--tls: open "},
		{func(c *Config) { c.CA = dir }, "--ca: read the key of the CA: "},
		{func(c *Config) { c.CA, c.Node = t.TempDir(), "n:1" }, `--node: node name "n:1" can't be part of a SPIFFE ID`},
	} {
		cfg := configOf(t, "n1", t.TempDir())
		tt.change(&cfg)
		a, err := New(cfg)
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("error %v, want %q", err, tt.want)
		}
		if err != nil {
			continue
		}
		if _, ok := a.transport.(*transport.Mutual); !ok {
			t.Errorf("the agent has a %T", a.transport)
		}
	}
}

// TestOwnCA makes one, tells of it, and has the same one after a restart.
func TestOwnCA(t *testing.T) {
	var log bytes.Buffer
	cfg := configOf(t, "n1", t.TempDir())
	cfg.EtcdEmbedded, cfg.TrustDomain = t.TempDir(), "prod"
	cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
	first, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	first.introduce()
	dir := filepath.Join(cfg.DataDir, "ca")
	for _, want := range []string{"made a CA", "ca=" + dir, "connections between agents use TLS", "mtls=strict", "identity=spiffe://prod/node/n1", "until=20"} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("log:\n%s\nwant %q in it", log.String(), want)
		}
	}
	log.Reset()
	second, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if a, b := first.identity.Current(), second.identity.Current(); a.Issuer != b.Issuer || log.Len() > 0 {
		t.Errorf("issuers %s and %s, log:\n%s", a.Issuer, b.Issuer, log.String())
	}
}

func TestNamesAt(t *testing.T) {
	a := newTestAgent(t)
	at := netip.MustParseAddrPort("10.0.0.1:15008")
	endpoint := func(service registry.ServiceName, node registry.NodeName, agent netip.AddrPort) registry.Endpoint {
		return registry.Endpoint{Service: service, Node: node, Agent: agent}
	}
	other := netip.MustParseAddrPort("10.0.0.2:15008")
	a.snapshot.Store(&registry.Snapshot{Services: map[registry.ServiceName]*registry.Service{
		"web": {Endpoints: []registry.Endpoint{endpoint("web", "n1", at), endpoint("web", "n1", at), endpoint("web", "n2", other)}},
		"api": {Endpoints: []registry.Endpoint{endpoint("api", "n2", other)}},
	}})
	want := identity.Names{Nodes: []registry.NodeName{"n1"}, Services: []registry.ServiceName{"web"}}
	if diff := cmp.Diff(want, a.namesAt(at)); diff != "" {
		t.Error(diff)
	}
	if got := a.namesAt(netip.MustParseAddrPort("10.0.0.9:15008")); len(got.Nodes)+len(got.Services) > 0 {
		t.Errorf("a stranger has %v", got)
	}
}
