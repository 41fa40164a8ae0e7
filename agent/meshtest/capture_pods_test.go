//go:build linux

package meshtest_test

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/agent/meshtest"
)

// TestCapturePods has applications in network namespaces of their own call services: one is captured on its node, one where
// it is.
func TestCapturePods(t *testing.T) {
	m := capturable(t, meshtest.Config{Nodes: []string{"a", "b"}})
	node := m.Node("a")
	outer := node.Pod("outer", netip.MustParsePrefix("10.244.1.2/24"), netip.MustParsePrefix("fd01:1::2/64"))
	inner := node.Pod("inner", netip.MustParsePrefix("10.244.2.2/24"), netip.MustParsePrefix("fd01:2::2/64"))
	agents := startCapturing(m, map[string][]string{
		"a": {"--dns-listen", "0.0.0.0:15053", "--capture-netns", inner.Netns()},
	})
	a := agents["a"]
	ipv4, ipv6 := virtual(t, a)
	for _, pod := range []*meshtest.Node{outer, inner} {
		for _, host := range []string{ipv4, "[" + ipv6 + "]", "web.mesh"} {
			if out, code := curlInPod(t, pod, "http://"+host+"/"); code != 0 || !strings.Contains(out, "\nok") {
				t.Errorf("pod %s calls %s: exit code %d: %s", pod.Name, host, code, out)
			}
		}
	}
	status, problems, code := a.Meshctl("capture", "status")
	if code != 0 || !strings.Contains(status, inner.Netns()) {
		t.Errorf("capture status: exit code %d, want it to tell of %s\n%s%s", code, inner.Netns(), status, problems)
	}
	a.Kill()
	for _, pod := range []*meshtest.Node{outer, inner} {
		if out, code := curlInPod(t, pod, "http://"+ipv4+"/"); code != 7 {
			t.Errorf("pod %s calls after the agent was killed: exit code %d, want a refusal (7): %s", pod.Name, code, out)
		}
	}
}

// curlInPod calls curl where the resolver is at an address that nobody has.
func curlInPod(t *testing.T, pod *meshtest.Node, url string) (out string, code int) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "resolv.conf")
	if err := os.WriteFile(file, []byte("nameserver 10.77.0.53\noptions timeout:2 attempts:1\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	p := pod.Start("curl", nil, "unshare", "-m", "sh", "-c", `mount --bind "$0" /etc/resolv.conf && exec curl -q -sS -i --max-time 5 "$1"`, file, url)
	code = p.Wait(10 * time.Second)
	return p.Output() + p.Log(), code
}
