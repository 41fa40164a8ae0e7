//go:build linux

package meshtest_test

import (
	"strings"
	"testing"

	"github.com/headroom-mesh/headroom/agent/meshtest"
)

// TestCaptureWithoutRights has an agent that may not capture, nor mark its connections, for which either capability is enough:
// it says so, once, and its proxy works.
func TestCaptureWithoutRights(t *testing.T) {
	const without = "-net_admin,-net_raw"
	m := capturable(t, meshtest.Config{Nodes: []string{"a", "b"}, Under: []string{"setpriv", "--bounding-set", without, "--inh-caps", without}})
	a := startCapturing(m, nil)["a"]
	wantNotCaptured(t, a, "CAP_NET_ADMIN")
}

// TestCaptureRangeTaken has virtual addresses that somebody on the node has already.
func TestCaptureRangeTaken(t *testing.T) {
	m := capturable(t, meshtest.Config{Nodes: []string{"a", "b"}})
	m.Node("a").IP("link", "add", "dummy", "type", "veth", "peer", "name", "dummier")
	m.Node("a").IP("address", "add", "240.64.0.1/16", "dev", "dummy")
	a := startCapturing(m, nil)["a"]
	wantNotCaptured(t, a, "overlaps 240.64.0.0/16, the network of interface dummy", "--virtual-ipv4")
}

// wantNotCaptured wants an agent that tells in these words why it doesn't capture, and whose proxy works all the same.
func wantNotCaptured(t *testing.T, a *meshtest.Agent, words ...string) {
	t.Helper()
	a.AwaitLog("level=ERROR")
	if lines := a.Logged("level=ERROR"); len(lines) != 1 || len(a.Logged(words...)) == 0 {
		t.Errorf("want one error with %q, got %q", words, lines)
	}
	status, problems, code := a.Meshctl("capture", "status")
	for _, word := range words {
		if code != 0 || !strings.Contains(status+problems, word) {
			t.Errorf("capture status: exit code %d, want 0 and %q: %s%s", code, word, status, problems)
		}
	}
	caller := a.Caller()
	for range 20 {
		if _, err := caller.Get(t.Context(), "http://web.mesh/"); err != nil {
			t.Errorf("the proxy: %v", err)
		}
	}
	if out, code := curl(t, a.Node, "-i", "--proxy", "http://127.0.0.1:15001", "http://web.mesh/"); code != 0 || !strings.Contains(out, " 200 ") {
		t.Errorf("curl by the proxy: exit code %d: %s", code, out)
	}
}
