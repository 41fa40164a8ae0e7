//go:build linux

package meshtest_test

import (
	"crypto/rand"
	"encoding/base64"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/agent/meshtest"
)

// keyFile makes a gossip key.
func keyFile(t *testing.T) string {
	t.Helper()
	key := make([]byte, 32)
	rand.Read(key)
	file := filepath.Join(t.TempDir(), "gossip.key")
	if err := os.WriteFile(file, []byte(base64.StdEncoding.EncodeToString(key)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// TestWrongGossipKey starts an agent with another key than the others have.
func TestWrongGossipKey(t *testing.T) {
	cfg := config(t)
	right, wrong := keyFile(t), keyFile(t)
	cfg.Flags = func(node string) []string {
		if node == "c" {
			return []string{"--gossip-key-file", wrong}
		}
		return []string{"--gossip-key-file", right}
	}
	m := meshtest.New(t, cfg)
	a, b := m.StartAgent(m.Node("a")), m.StartAgent(m.Node("b"))
	meshtest.Eventually(t, patience, "a and b meet", func() bool { return len(a.Alive()) == 2 && len(b.Alive()) == 2 })
	load := a.Load(rate / 3)
	c := m.StartAgent(m.Node("c"))
	c.AwaitLog("no seed answers", "wrong gossip key?")
	a.AwaitLog("gossip message refused: wrong gossip key?", "peer="+m.Node("c").Addr.String())
	load.More(rate)
	load.Stop().WantNoLoss(t)
	if got := a.Alive(); !slices.Equal(got, []string{"a", "b"}) {
		t.Errorf("a takes %v for members, want a and b", got)
	}
	if n := len(a.Logged("wrong gossip key?")); n > 3 {
		t.Errorf("%d warnings, want one a peer and minute:\n%s", n, strings.Join(a.Logged("wrong gossip key?"), "\n"))
	}
}

// TestIPv6Mesh has a mesh without IPv4.
func TestIPv6Mesh(t *testing.T) {
	cfg := config(t)
	cfg.IPv6 = true
	proxy := "[fd00::2]:15001"
	cfg.Flags = func(node string) []string {
		if node == "b" {
			return []string{"--proxy", proxy}
		}
		return nil
	}
	m, agents := meshtest.Start(t, cfg)
	load := agents["a"].Load(rate / 3) // through [::1]
	load.More(rate / 3)
	for _, n := range m.Nodes {
		if load.Arrived(n.Name, time.Time{}) == 0 {
			t.Errorf("node %s got no request", n.Name)
		}
	}
	if _, err := m.Node("a").Caller(proxy).Get(t.Context(), "http://web.mesh/"); err != nil {
		t.Errorf("through the proxy at %s: %v", proxy, err)
	}
	load.Stop().WantNoLoss(t)
	wantApplied(t, agents["a"], "3/3", "--timeout", "5s")
	if out := agents["c"].MustMeshctl("members"); !strings.Contains(out, "[fd00::1]:7946") {
		t.Errorf("members:\n%s", out)
	}
	if out := agents["c"].MustMeshctl("endpoints"); !strings.Contains(out, "[fd00::2]:15008") || !strings.Contains(out, "[::1]:") {
		t.Errorf("endpoints:\n%s", out)
	}
}

// TestPortInUse starts a second agent on a node, and agents whose ports others have.
func TestPortInUse(t *testing.T) {
	cfg := config(t)
	cfg.Nodes = []string{"a", "b"}
	m := meshtest.New(t, cfg)
	first := m.StartAgent(m.Node("a"))
	meshtest.Eventually(t, patience, "the first agent serves", func() bool { return len(first.Usable()) == 3 })
	load := first.Load(rate / 3)
	second := m.StartAgent(m.Node("a"), "--data-dir", t.TempDir())
	wantRefused(t, second, "127.0.0.1:15001", "--proxy", "--bind")

	b := m.Node("b")
	for _, port := range []struct{ at, flag string }{
		{"127.0.0.1:15001", "--proxy"},
		{b.Addr.String() + ":15008", "--mesh"},
		{b.Addr.String() + ":7946", "--gossip"},
		{"127.0.0.1:15010", "--admin"},
		{"127.0.0.1:15000", "--admin-http"},
	} {
		l, err := b.Listen(port.at)
		if err != nil {
			t.Fatal(err)
		}
		wantRefused(t, m.StartAgent(b), port.at, port.flag)
		l.Close()
	}
	l, err := b.Listen(b.Addr.String() + ":2379")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	wantRefused(t, m.StartAgent(b, "--etcd-embedded", t.TempDir()), b.Addr.String()+":2379", "--etcd-listen")

	load.More(rate / 3)
	load.Stop().WantNoLoss(t)
}

// wantRefused wants an agent to end with a last line that says what is wrong and what to do.
func wantRefused(t *testing.T, a *meshtest.Agent, words ...string) {
	t.Helper()
	if code := a.Wait(patience); code != 1 {
		t.Errorf("exit code %d, want 1", code)
	}
	lines := strings.Split(strings.TrimSpace(a.Log()), "\n")
	last := lines[len(lines)-1]
	for _, word := range append(words, "agent: ", "address already in use") {
		if !strings.Contains(last, word) {
			t.Errorf("last words %q, want %q in them", last, word)
		}
	}
	t.Log(last)
}

// TestUnreachableEtcdAtStart starts agents before etcd.
func TestUnreachableEtcdAtStart(t *testing.T) {
	cfg := config(t)
	cfg.EtcdApart = true
	m := meshtest.New(t, cfg)
	var agents []*meshtest.Agent
	for _, n := range m.Nodes {
		agents = append(agents, m.StartAgent(n))
	}
	a := agents[0]
	a.AwaitLog("registry is away; will try again", m.EtcdNode.Addr.String())
	meshtest.Eventually(t, patience, "agents meet without etcd", func() bool { return len(a.Alive()) == 3 })
	if status, text := a.Page("/livez"); status != http.StatusOK {
		t.Errorf("/livez: %d %s", status, text)
	}
	if status, text := a.Page("/readyz"); status != http.StatusServiceUnavailable || !strings.Contains(text, "registry: no snapshot") {
		t.Errorf("/readyz: %d %s", status, text)
	}
	if _, stderr, code := a.Meshctl("policy", "get", "web"); code != 1 || !strings.Contains(stderr, "the registry is unreachable") {
		t.Errorf("policy get: exit code %d, %q", code, stderr)
	}
	if n := len(a.Logged("registry is away")); n > 3 {
		t.Errorf("the log says %d times that the registry is away:\n%s", n, a.Log())
	}
	m.StartEtcd()
	took := m.AwaitAll(a)
	if status, text := a.Page("/readyz"); status != http.StatusOK {
		t.Errorf("/readyz: %d %s", status, text)
	}
	if _, err := a.Caller().Get(t.Context(), "http://web.mesh/"); err != nil {
		t.Error(err)
	}
	t.Logf("all serve %v after etcd", took)
}

// TestBadServicesFile has a file that can't be understood beside a good one.
func TestBadServicesFile(t *testing.T) {
	cfg := config(t)
	cfg.Nodes = []string{"a"}
	m := meshtest.New(t, cfg)
	a := m.Node("a")
	bad := "apiVersion: headroom.dev/v1\nkind: LocalService\nmetadata: {name: Web_2}\nspec:\n  endpoints:\n  - address: nowhere\n  chek: {}\n"
	m.WriteService(a, "bad.yaml", bad)
	agent := m.StartAgent(a)
	meshtest.Eventually(t, patience, "the good file is served", func() bool { return len(agent.Usable()) == 3 })
	agent.AwaitLog("file of services refused", "bad.yaml", "chek")
	load := agent.Load(rate / 3)

	// While the agent runs: a good file goes bad, and the bad one gets good.
	m.WriteService(a, meshtest.Service+".yaml", "kind: [")
	agent.AwaitLog("file of services refused; what it declared before stays", meshtest.Service+".yaml")
	good := strings.NewReplacer("Web_2", "other", "nowhere", m.Replicas[0].Address.String(), "chek: {}", "check: {tcp: true}").Replace(bad)
	m.WriteService(a, "bad.yaml", good)
	caller := agent.Caller()
	meshtest.Eventually(t, patience, "the mended file is served", func() bool {
		_, err := caller.Get(t.Context(), "http://other.mesh/")
		return err == nil
	})
	load.Stop().WantNoLoss(t)
}

// TestNameInUse starts an agent under the name of another one.
func TestNameInUse(t *testing.T) {
	cfg := config(t)
	cfg.Nodes = []string{"a", "b"}
	m := meshtest.New(t, cfg)
	a := m.StartAgent(m.Node("a"))
	meshtest.Eventually(t, patience, "a is ready", func() bool { status, _ := a.Page("/readyz"); return status == http.StatusOK })
	rival := m.StartAgent(m.Node("b"), "--node", "a")
	rival.AwaitLog("another agent holds this node's name", m.Node("a").Addr.String())
	if status, text := rival.Page("/readyz"); status != http.StatusServiceUnavailable || !strings.Contains(text, `[-]node: `) {
		t.Errorf("/readyz of the second agent: %d %s", status, text)
	}
	if status, text := a.Page("/readyz"); status != http.StatusOK {
		t.Errorf("/readyz of the first agent: %d %s", status, text)
	}
	rival.Kill()
	b := m.StartAgent(m.Node("b"))
	m.AwaitAll(b)
}

// TestDataFolderInUse starts a second agent on the data of another one.
func TestDataFolderInUse(t *testing.T) {
	cfg := config(t)
	cfg.Nodes = []string{"a"}
	m, agents := meshtest.Start(t, cfg)
	second := m.StartAgent(m.Node("a"), "--bind", "127.0.0.5", "--node", "second")
	if code := second.Wait(patience); code != 1 || !strings.Contains(second.Log(), "is in use by another agent: ") {
		t.Errorf("exit code %d, log:\n%s", code, second.Log())
	}
	if n := len(strings.Split(strings.TrimSpace(second.Log()), "\n")); n != 1 {
		t.Errorf("more than one line said what is wrong:\n%s", second.Log())
	}
	if _, err := agents["a"].Caller().Get(t.Context(), "http://web.mesh/"); err != nil {
		t.Error(err)
	}
}

// TestRegisteredIsServed sends a request as soon as a replica is registered.
func TestRegisteredIsServed(t *testing.T) {
	cfg := config(t)
	cfg.Nodes = []string{"a"}
	m, agents := meshtest.Start(t, cfg)
	for _, name := range []string{"plain", "checked"} {
		args := []string{"register", name, "--address", m.Replicas[0].Address.String()}
		if name == "checked" {
			args = append(args, "--check", "http:/healthz")
		}
		agents["a"].MustMeshctl(args...)
		if _, err := agents["a"].Caller().Get(t.Context(), "http://"+name+".mesh/"); err != nil {
			t.Errorf("right after %v: %v", args, err)
		}
	}
}
