//go:build linux

package meshtest_test

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/agent/meshtest"
)

// house is a mesh of two nodes, one of which gets one agent after the other.
type house struct {
	*meshtest.Mesh
	t      *testing.T
	a, b   *meshtest.Agent
	folder string // of the agent that is on b now
}

func newHouse(t *testing.T) *house {
	cfg := config(t)
	cfg.Nodes, cfg.EtcdApart = []string{"a", "b"}, true
	cfg.Flags = func(node string) []string {
		if node == "b" {
			return []string{"--take-over", "house"}
		}
		return nil
	}
	h := &house{t: t, folder: t.TempDir()}
	h.Mesh = meshtest.New(t, cfg)
	h.StartEtcd()
	h.a, h.b = h.StartAgent(h.Node("a")), h.StartAgent(h.Node("b"), "--data-dir", h.folder)
	h.AwaitAll(h.a)
	return h
}

// start starts one more agent on b.
func (h *house) start(flags ...string) (next *meshtest.Agent, folder string) {
	h.t.Helper()
	folder = h.t.TempDir()
	copyFile(h.t, filepath.Join(folder, "identity"), filepath.Join(h.folder, "identity")) // as those of a node of Kubernetes have the same
	return h.StartAgent(h.Node("b"), append([]string{"--data-dir", folder}, flags...)...), folder
}

// next does so, and returns once it stands by.
func (h *house) next() (next *meshtest.Agent, folder string) {
	h.t.Helper()
	next, folder = h.start()
	h.awaitReadiness(folder, 0, "standing by")
	return next, folder
}

// awaitReadiness waits until meshctl says so of an agent on b, with that exit code.
func (h *house) awaitReadiness(folder string, code int, words string) {
	h.t.Helper()
	meshtest.Eventually(h.t, patience, "the agent says of its readiness: "+words, func() bool {
		out, _, got := h.b.Meshctl("--agent", "unix://"+filepath.Join(folder, "admin.sock"), "ready")
		return got == code && strings.Contains(out, words)
	})
}

func copyFile(t *testing.T, to, from string) {
	t.Helper()
	in, err := os.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, err := os.Create(to)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(out, in); err != nil {
		t.Fatal(err)
	}
	if err := out.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestTakeOver has one agent after the other take over, while requests go through all of them.
func TestTakeOver(t *testing.T) {
	h := newHouse(t)
	loads := []*meshtest.Load{h.a.Load(rate / 2), h.b.Load(rate / 2)}
	loads[0].More(rate / 2)
	for range 3 {
		next, folder := h.next()
		if n := len(h.a.Usable()); n != 6 {
			t.Errorf("a may use %d replicas while an agent stands by, want 6", n)
		}
		began := time.Now()
		h.b.Signal(syscall.SIGTERM)
		fewest := 6
		meshtest.Eventually(t, patience, "the agent ends, and the next one has its addresses", func() bool {
			fewest = min(fewest, len(h.a.Usable()), h.a.Registered("b")+3)
			code, page := next.Page("/readyz")
			return h.b.Ended() && code == 200 && !strings.Contains(page, "standing by")
		})
		if code := h.b.Wait(patience); code != 0 {
			t.Errorf("exit code %d, want 0", code)
		}
		if fewest < 6 {
			t.Errorf("a knew only %d replicas for a moment, want 6", fewest)
		}
		t.Logf("the next agent had it all %v after the signal: %s", time.Since(began).Round(time.Millisecond), h.b.Logged("the next agent of this node serves"))
		h.b, h.folder = next, folder
	}
	loads[0].More(rate / 2)
	for _, l := range loads {
		o := l.Stop()
		o.WantNoLoss(t)
		t.Log(o)
	}
	if n := len(h.a.Logged("counts as dead")) + len(h.a.Logged("member left")); n > 0 {
		t.Errorf("node b was gone %d times to the gossip", n)
	}
	if n := len(h.a.Alive()); n != 2 {
		t.Errorf("%d agents are alive, want 2", n)
	}
}

// TestTakeOverFromTheDead kills an agent beside which another one stands by.
func TestTakeOverFromTheDead(t *testing.T) {
	h := newHouse(t)
	next, _ := h.next()
	killed := time.Now()
	h.b.Kill()
	meshtest.Eventually(t, patience, "the next agent serves", func() bool {
		code, _ := next.Page("/readyz")
		return code == 200 && len(h.a.Usable()) == 6
	})
	t.Logf("the next agent had it all %v later", time.Since(killed).Round(time.Millisecond))
	load := next.Load(rate / 2)
	load.More(rate / 2)
	load.Stop().WantNoLoss(t)
}

// TestTakeOverCalledOff ends agents that stand by.
func TestTakeOverCalledOff(t *testing.T) {
	h := newHouse(t)
	load := h.a.Load(rate / 2)
	next, _ := h.next()
	third, folder := h.start()
	third.AwaitLog("waiting to come next on this node")
	next.Signal(syscall.SIGTERM)
	if code := next.Wait(patience); code != 0 {
		t.Errorf("exit code %d of an agent that stands by, want 0", code)
	}
	h.awaitReadiness(folder, 0, "standing by")
	third.Signal(syscall.SIGTERM)
	third.Wait(patience)
	load.More(rate / 2)
	load.Stop().WantNoLoss(t)
	if n := h.a.Registered("b"); n != 3 {
		t.Errorf("%d replicas of b are registered, want 3", n)
	}
}

// TestTakeOverUnready ends an agent whose successor does not know what there is.
func TestTakeOverUnready(t *testing.T) {
	h := newHouse(t)
	cluster := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(cluster, []byte(nowhere), 0o600); err != nil {
		t.Fatal(err)
	}
	next, folder := h.start("--kubernetes", "--kubeconfig", cluster)
	h.awaitReadiness(folder, 1, "not all is known yet")
	h.b.Signal(syscall.SIGTERM)
	if code := h.b.Wait(patience); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	if n := h.a.Registered("b"); n != 0 {
		t.Errorf("%d replicas of b are registered, want 0", n)
	}
	next.AwaitLog("agent started") // as one that comes to a node without agents
	h.awaitReadiness(folder, 1, "127.0.0.1:9")
}

// nowhere is a cluster that nobody answers for.
const nowhere = `
apiVersion: v1
kind: Config
clusters: [{name: nowhere, cluster: {server: "https://127.0.0.1:9"}}]
contexts: [{name: nowhere, context: {cluster: nowhere, user: nobody}}]
users: [{name: nobody, user: {}}]
current-context: nowhere
`

// TestTakeOverElsewhere starts agents that can't take over.
func TestTakeOverElsewhere(t *testing.T) {
	h := newHouse(t)
	other, _ := h.start("--node", "c")
	if code := other.Wait(patience); code != 1 || !strings.Contains(other.Log(), `is of node "b" and --take-over "house", and this one of "c" and "house"`) {
		t.Errorf("exit code %d, want 1, and: %s", code, other.Log())
	}
	foreign, _ := h.start("--take-over", "other")
	if code := foreign.Wait(patience); code != 1 || !strings.Contains(foreign.Log(), `is of node "b" and --take-over "house", and this one of "b" and "other"`) {
		t.Errorf("exit code %d, want 1, and: %s", code, foreign.Log())
	}
	l, err := h.Node("b").Listen("127.0.0.1:15011")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	silent, _ := h.start("--admin", "127.0.0.1:15011")
	if code := silent.Wait(patience); code != 1 || !strings.Contains(silent.Log(), "what listens at 127.0.0.1:15011 is no agent") {
		t.Errorf("exit code %d, want 1, and: %s", code, silent.Log())
	}
}

// TestTakeOverFrozen ends an agent whose successor stands by, but does nothing when its turn comes.
func TestTakeOverFrozen(t *testing.T) {
	h := newHouse(t)
	next, _ := h.next()
	next.Signal(syscall.SIGSTOP)
	h.b.Signal(syscall.SIGTERM)
	if code := h.b.Wait(2 * patience); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	next.Signal(syscall.SIGCONT)
	meshtest.Eventually(t, patience, "the next agent serves", func() bool {
		code, _ := next.Page("/readyz")
		return code == 200 && len(h.a.Usable()) == 6
	})
}
