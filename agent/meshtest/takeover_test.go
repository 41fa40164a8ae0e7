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
			return []string{"--take-over"}
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

// next starts one more agent on b, and returns once it stands by.
func (h *house) next() (next *meshtest.Agent, folder string) {
	h.t.Helper()
	folder = h.t.TempDir()
	copyFile(h.t, filepath.Join(folder, "identity"), filepath.Join(h.folder, "identity")) // as those of a node of Kubernetes have the same
	next = h.StartAgent(h.Node("b"), "--data-dir", folder)
	meshtest.Eventually(h.t, patience, "the next agent is ready", func() bool {
		out, _, code := h.b.Meshctl("--agent", "unix://"+filepath.Join(folder, "admin.sock"), "ready")
		return code == 0 && strings.Contains(out, "standing by")
	})
	return next, folder
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
