//go:build linux

package meshtest_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/headroom-mesh/headroom/agent/meshtest"
)

// TestCaptureCheck has rules of others in the way of capture, or beside it: `meshctl check` tells one from the other.
func TestCaptureCheck(t *testing.T) {
	_, agents := captured(t, meshtest.Config{Nodes: []string{"a", "b"}, Replicas: 1})
	a := agents["a"]
	virtual(t, a)
	tests := []struct {
		name  string
		chain string // of a table of others
		works bool
		tells []string
	}{
		{"nothing", "", true, []string{"comes to the agent", "is left alone", "no rules of others come first"}},
		{"elsewhere", "type nat hook output priority -110; ip daddr 240.64.0.0/12 tcp dport 80 redirect to :15000", false,
			[]string{"went elsewhere", "inet others first (priority -110)", "nft list ruleset"}},
		{"elsewhere, at the same priority", "type nat hook output priority -101; ip daddr 240.64.0.0/12 tcp dport 80 redirect to :15000", false,
			[]string{"went elsewhere", "inet others first (priority -101)"}},
		{"IPv6 to where nobody is", "type nat hook output priority -110; meta nfproto ipv6 tcp dport 80 redirect to :1", false,
			[]string{"]:80): dial tcp", "connection refused", "inet others first (priority -110)"}},
		{"other addresses", "type nat hook output priority -110; ip daddr 10.96.0.0/12 dnat ip to 10.77.0.2", true,
			[]string{"let connections through: inet others first"}},
		{"other addresses at the same priority", "type nat hook output priority -101; ip daddr 10.96.0.0/12 dnat ip to 10.77.0.2", true,
			[]string{"no rules of others come first"}},
		{"refused", "type filter hook output priority -200; tcp dport 80 reject with tcp reset", false, []string{"connection refused"}},
		{"dropped", "type filter hook input priority 0; ct state new tcp dport 15006 drop", false, []string{"timeout"}},
		{"marks taken away", "type route hook output priority -150; meta mark set 0", false,
			[]string{"the agent's own connection", "is not left alone"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if tt.chain != "" {
				nft(t, a.Node, "table inet others { chain first { "+tt.chain+"; }; }")
				defer nft(t, a.Node, "delete table inet others")
			}
			out, problems, code := a.Meshctl("check")
			if (code == 0) != tt.works {
				t.Errorf("exit code %d", code)
			}
			for _, word := range tt.tells {
				if !strings.Contains(out, word) {
					t.Errorf("want that it tells %q", word)
				}
			}
			if t.Failed() {
				t.Log(out + problems)
			}
		})
	}
}

// TestCaptureCheckWithoutRoute has names that can't be redirected, as there is no way to a resolver.
func TestCaptureCheckWithoutRoute(t *testing.T) {
	m := capturable(t, meshtest.Config{Nodes: []string{"a", "b"}, Replicas: 1})
	m.Node("a").IP("route", "delete", "default")
	a := startCapturing(m, nil)["a"]
	virtual(t, a)
	out, problems, code := a.Meshctl("check")
	if code == 0 || !strings.Contains(out, "network is unreachable: redirected names take a route") || !strings.Contains(out, "--dns resolv.conf") {
		t.Errorf("exit code %d, want that it tells what is missing: %s%s", code, out, problems)
	}
}

// nft runs commands of nft on a node.
func nft(t *testing.T, n *meshtest.Node, commands string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "rules")
	if err := os.WriteFile(file, []byte(commands+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	run(t, n, "nft", "-f", file)
}

// run runs a command on a node that must succeed, and returns what it says.
func run(t *testing.T, n *meshtest.Node, command ...string) string {
	t.Helper()
	p := n.Start(command[0], nil, command[0], command[1:]...)
	if code := p.Wait(patience); code != 0 {
		t.Fatalf("%q: exit code %d: %s", command, code, p.Log())
	}
	return p.Output()
}
