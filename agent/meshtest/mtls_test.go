//go:build linux

package meshtest_test

import (
	"bytes"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/agent/meshtest"
	"github.com/headroom-mesh/headroom/dataplane/identity"
	"github.com/headroom-mesh/headroom/dataplane/identity/ca"
	"github.com/headroom-mesh/headroom/registry"
)

// makeCA makes a CA that is a week old.
func makeCA(t *testing.T, dir string) *ca.CA {
	t.Helper()
	domain, err := identity.ParseDomain(identity.DefaultDomain)
	if err != nil {
		t.Fatal(err)
	}
	authority, err := ca.Init(dir, ca.Options{Domain: domain}, time.Now().Add(-7*24*time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	return authority
}

// certify writes a certificate of a node, for an hour from a moment on, into a folder.
func certify(t *testing.T, authority *ca.CA, roots []byte, node, dir string, from time.Time) {
	t.Helper()
	id, err := identity.NodeID(authority.Domain, registry.NodeName(node))
	if err != nil {
		t.Fatal(err)
	}
	files, err := authority.Issue(id, time.Hour, from)
	if err != nil {
		t.Fatal(err)
	}
	files.Roots = roots
	if err := files.Write(dir); err != nil {
		t.Fatal(err)
	}
}

// withFiles replaces --ca by --tls on some nodes.
func withFiles(dirs map[string]string) func(node string) []string {
	return func(node string) []string {
		if dir, ok := dirs[node]; ok {
			return []string{"--ca", "", "--tls", dir}
		}
		return nil
	}
}

// lonely declares a service that only one node has, and waits until agents know it.
func lonely(t *testing.T, m *meshtest.Mesh, node string, known ...*meshtest.Agent) {
	t.Helper()
	for _, r := range m.Replicas {
		if r.Node == node {
			m.WriteService(m.Node(node), "lonely.yaml", "apiVersion: headroom.dev/v1\nkind: LocalService\nmetadata: {name: lonely}\nspec: {endpoints: [{address: "+r.Address.String()+"}]}\n")
			break
		}
	}
	for _, agent := range known {
		meshtest.Eventually(t, patience, "the service is known", func() bool {
			services, _, _ := agent.Meshctl("services")
			return strings.Contains(services, "lonely")
		})
	}
}

// TestRefusedAgents has agents whose certificates the others don't take: everybody is told why.
func TestRefusedAgents(t *testing.T) {
	authority := makeCA(t, t.TempDir())
	foreign := makeCA(t, t.TempDir())
	for _, tt := range []struct {
		name    string
		certify func(dir string)
		told    []string // to callers of others
		warned  []string // in the log of the agent in question
	}{
		{
			name:    "foreign",
			certify: func(dir string) { certify(t, foreign, foreign.Roots, "b", dir, time.Now()) },
			told:    []string{"the certificate of spiffe://headroom.local/node/b is not signed by our roots", foreign.Certificate.Subject.CommonName},
			warned:  []string{"level=WARN", "refused a connection", "it does not take our certificate"},
		}, {
			name:    "expired",
			certify: func(dir string) { certify(t, authority, authority.Roots, "b", dir, time.Now().Add(-3*time.Hour)) },
			told:    []string{"the certificate of spiffe://headroom.local/node/b expired at 20", " ago"},
			warned:  []string{"level=ERROR", "this agent's certificate has expired"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cfg := config(t)
			cfg.Nodes, cfg.Replicas = []string{"a", "b"}, 1
			dirs := map[string]string{"a": t.TempDir(), "b": t.TempDir()}
			certify(t, authority, authority.Roots, "a", dirs["a"], time.Now())
			tt.certify(dirs["b"])
			cfg.Flags = withFiles(dirs)
			m := meshtest.New(t, cfg)
			a, b := m.StartAgent(m.Node("a")), m.StartAgent(m.Node("b"))
			lonely(t, m, "b", a, b)
			_, err := a.Caller().Get(t.Context(), "http://lonely.mesh/")
			for _, word := range append(tt.told, "503 ", "agent "+m.Node("b").Addr.String()+":15008") {
				if err == nil || !strings.Contains(err.Error(), word) {
					t.Errorf("the caller is told %v\nwant %q in it", err, word)
				}
			}
			a.AwaitLog("agent does not answer probes", tt.told[0])
			b.AwaitLog(tt.warned...)
			// What is of its own node, an agent still serves.
			if _, err := b.Caller().Get(t.Context(), "http://lonely.mesh/"); err != nil {
				t.Error(err)
			}
			if status, text := b.Page("/readyz"); tt.name == "expired" && (status != http.StatusServiceUnavailable || !strings.Contains(text, "[-]identity: the certificate of spiffe://headroom.local/node/b expired")) {
				t.Errorf("/readyz: %d %s", status, text)
			}
			// A good certificate mends it without a restart.
			certify(t, authority, authority.Roots, "b", dirs["b"], time.Now())
			caller := a.Caller()
			meshtest.Eventually(t, patience, "the agents take one another", func() bool {
				_, err := caller.Get(t.Context(), "http://lonely.mesh/")
				return err == nil
			})
		})
	}
}

// TestReplicasLearnWhoCalls has replicas that ask who calls, each of them of both agents.
func TestReplicasLearnWhoCalls(t *testing.T) {
	cfg := config(t)
	cfg.Nodes, cfg.Replicas = []string{"a", "b"}, 1
	m, agents := meshtest.Start(t, cfg)
	for _, at := range cfg.Nodes {
		l := listen(t, m.Node(at))
		replica := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("X-Replica", r.Header.Get("X-Forwarded-Client-Cert"))
			io.WriteString(w, "ok\n")
		})}
		var serving sync.WaitGroup
		serving.Go(func() { replica.Serve(l) })
		t.Cleanup(serving.Wait)
		t.Cleanup(func() { replica.Close() })
		service := "at-" + at
		m.WriteService(m.Node(at), service+".yaml", localService(service, "http1", l.Addr().String()))
		agents[at].MustMeshctl("policy", "set", service, "--forwarded", "x_forwarded_for")
		for from, agent := range agents {
			want, got := "By=spiffe://headroom.local/node/"+at+";URI=spiffe://headroom.local/node/"+from, ""
			caller := agent.Caller()
			meshtest.Eventually(t, patience, "a replica on "+at+" learns that "+from+" calls", func() bool {
				var err error
				got, err = caller.Get(t.Context(), "http://"+service+".mesh/")
				return err == nil && got == want
			})
		}
	}
}

// TestRotationOfCertificatesAndRoots goes from one CA to another under load.
func TestRotationOfCertificatesAndRoots(t *testing.T) {
	cfg := config(t)
	cfg.Nodes, cfg.Replicas = []string{"a", "b"}, 1
	old, young := makeCA(t, t.TempDir()), makeCA(t, t.TempDir())
	both := append(bytes.Clone(old.Roots), young.Roots...)
	dirs := map[string]string{"a": filepath.Join(t.TempDir(), "tls"), "b": filepath.Join(t.TempDir(), "tls")}
	cfg.Flags = withFiles(dirs)
	put := func(authority *ca.CA, roots []byte) {
		for node, dir := range dirs {
			certify(t, authority, roots, node, dir, time.Now())
		}
	}
	put(old, old.Roots)
	_, agents := meshtest.Start(t, cfg)
	load := agents["a"].Load(rate / 3)
	for step, next := range []struct {
		authority *ca.CA
		roots     []byte
	}{{old, both}, {young, both}, {young, young.Roots}} {
		load.More(rate / 6)
		put(next.authority, next.roots)
		for _, a := range agents {
			meshtest.Eventually(t, patience, "the new certificate is in force", func() bool {
				return strings.Count(a.Log(), "new certificate in force") >= step+1 && len(a.Logged("new certificate in force", next.authority.Certificate.Subject.CommonName)) > 0
			})
		}
	}
	load.More(rate / 6)
	load.Stop().WantNoLoss(t)
	for _, a := range agents {
		if lines := a.Logged("agent does not answer probes"); len(lines) > 0 {
			t.Errorf("an agent was lost meanwhile:\n%s", strings.Join(lines, "\n"))
		}
	}
}

// TestPermissiveMesh has an agent without certificates among those that have some.
func TestPermissiveMesh(t *testing.T) {
	cfg := config(t)
	cfg.Replicas = 1
	cfg.Flags = func(node string) []string {
		if node == "a" {
			return []string{"--ca", "", "--mtls", "off"}
		}
		return []string{"--mtls", "permissive"}
	}
	_, agents := meshtest.Start(t, cfg)
	for _, a := range agents {
		load := a.Load(rate / 6)
		load.More(rate / 3)
		load.Stop().WantNoLoss(t)
	}
	_, page := agents["b"].Page("/metrics")
	for _, kind := range []string{`direction="outbound",kind="full"`, `direction="outbound",kind="plain"`, `direction="inbound",kind="plain"`} {
		if !strings.Contains(page, "headroom_transport_handshakes_total{"+kind+"}") {
			t.Errorf("no connection with %s", kind)
		}
	}
}

// TestFromPlainToStrict restarts agents one by one, until a mesh without certificates takes nothing in the clear.
func TestFromPlainToStrict(t *testing.T) {
	cfg := config(t)
	cfg.Replicas, cfg.Plain, cfg.EtcdApart = 1, true, true
	m, agents := meshtest.Start(t, cfg)
	restart := func(node, mode string) {
		t.Helper()
		agents[node].Signal(syscall.SIGTERM)
		if code := agents[node].Wait(patience); code != 0 {
			t.Errorf("agent %s: exit code %d", node, code)
		}
		agents[node] = m.StartAgent(m.Node(node), "--stay", "--ca", m.CA(), "--mtls", mode)
		m.AwaitAll(agents[node])
	}
	for _, mode := range []string{"permissive", "strict"} {
		load := agents["a"].Load(rate / 3)
		restart("b", mode)
		restart("c", mode)
		load.More(rate / 3)
		load.Stop().WantNoLoss(t)
		restart("a", mode)
	}
	load := agents["a"].Load(rate / 3)
	load.More(rate)
	load.Stop().WantNoLoss(t)
	for _, a := range agents {
		if _, page := a.Page("/metrics"); strings.Contains(page, `kind="plain"`) {
			t.Errorf("a strict agent has a connection in the clear:\n%s", page)
		}
	}
}
