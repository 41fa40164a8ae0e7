//go:build linux

package meshtest_test

import (
	"os"
	"strings"
	"testing"

	"github.com/headroom-mesh/headroom/agent/meshtest"
	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
)

// TestCaptureReal has a caller call one replica at its own address: requests are balanced.
func TestCaptureReal(t *testing.T) {
	m, agents := captured(t, meshtest.Config{Nodes: []string{"a", "b"}, Open: true})
	a := agents["a"]
	called := replicasOf(m, "b")[0]
	a.MustMeshctl("policy", "set", meshtest.Service, "--capture-real", "--balancer", "round_robin")
	meshtest.Eventually(t, patience, "real addresses are captured", func() bool {
		return captures(t, a, "real4") == len(m.Replicas) && captures(t, agents["b"], "real4") == len(m.Replicas)
	})
	picks := map[string]int{}
	for range 5 * len(m.Replicas) {
		picks[answeredBy(t, a.Node, called)]++
	}
	for _, r := range m.Replicas {
		if got := picks[r.String()]; got < 4 || got > 6 {
			t.Errorf("replica %s got %d of %d requests, want a fair share of 5", r, got, 5*len(m.Replicas))
		}
	}
	called.SetHealthy(false)
	meshtest.Eventually(t, patience, "the replica that fails its checks is out", func() bool { return len(a.Usable()) == len(m.Replicas)-1 })
	for range 2 * len(m.Replicas) {
		if got := answeredBy(t, a.Node, called); got == called.String() {
			t.Errorf("replica %s answered though it fails its checks", got)
		}
	}
}

// TestCaptureInbound has callers that know of no mesh call a replica at its own address: it is the one that answers, and its
// requests are counted.
func TestCaptureInbound(t *testing.T) {
	m, agents := captured(t, meshtest.Config{Nodes: []string{"a", "b"}, Open: true})
	b, outside := agents["b"], m.Outside("outside")
	ours := replicasOf(m, "b")
	b.MustMeshctl("policy", "set", meshtest.Service, "--capture-inbound")
	meshtest.Eventually(t, patience, "real addresses are captured", func() bool { return captures(t, b, "real4") == len(ours) })
	const requests = 20
	for range requests {
		out, code := curl(t, outside, "-i", "http://"+ours[0].Address.String()+"/")
		if code != 0 || !strings.Contains(out, "X-Replica: "+ours[0].String()+"\r\n") {
			t.Fatalf("exit code %d, want the answer of %s: %s", code, ours[0], out)
		}
		if strings.Contains(strings.ToLower(out), "headroom-") {
			t.Fatalf("a caller outside is told of the mesh: %s", out)
		}
	}
	counted := inboundRequests(t, b)
	for i, r := range ours {
		want := 0
		if i == 0 {
			want = requests
		}
		if got := counted[r.Address.String()]; got != want {
			t.Errorf("replica %s: %d requests counted, want %d", r, got, want)
		}
	}
	ours[1].SetHealthy(false)
	meshtest.Eventually(t, patience, "the replica that fails its checks is out", func() bool { return len(b.Usable()) == len(m.Replicas)-1 })
}

// TestCaptureBorder has a machine outside send virtual addresses to a node, which drops them as the documentation says.
func TestCaptureBorder(t *testing.T) {
	m, agents := captured(t, meshtest.Config{Nodes: []string{"a", "b"}, Replicas: 1, Open: true})
	b, outside := agents["b"], m.Outside("outside")
	b.MustMeshctl("policy", "set", meshtest.Service, "--capture-inbound")
	meshtest.Eventually(t, patience, "real addresses are captured", func() bool { return captures(t, b, "real4") == 1 })
	ipv4, _ := virtual(t, b)
	outside.IP("route", "add", "240.64.0.0/12", "via", b.Node.Addr.String())
	if out, code := curl(t, outside, "http://"+ipv4+"/"); code != 0 {
		t.Errorf("a virtual address from outside: exit code %d: %s", code, out)
	}
	doc, err := os.ReadFile("../../docs/capture.md")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(doc)) {
		if strings.HasPrefix(line, "nft add ") {
			run(t, b.Node, "sh", "-c", line)
		}
	}
	if out, code := curl(t, outside, "--max-time", "2", "http://"+ipv4+"/"); code != 28 {
		t.Errorf("a virtual address from outside, which is dropped: exit code %d, want a timeout (28): %s", code, out)
	}
	if out, code := curl(t, outside, "http://"+replicasOf(m, "b")[0].Address.String()+"/"); code != 0 {
		t.Errorf("a real address from outside: exit code %d: %s", code, out)
	}
	if out, code := curl(t, b.Node, "http://"+ipv4+"/"); code != 0 {
		t.Errorf("a virtual address from the node: exit code %d: %s", code, out)
	}
}

func replicasOf(m *meshtest.Mesh, node string) (all []*meshtest.Replica) {
	for _, r := range m.Replicas {
		if r.Node == node {
			all = append(all, r)
		}
	}
	return all
}

// answeredBy calls a replica by its address, and returns who answered.
func answeredBy(t *testing.T, n *meshtest.Node, called *meshtest.Replica) string {
	t.Helper()
	out, code := curl(t, n, "-i", "http://"+called.Address.String()+"/")
	if code != 0 || !strings.Contains(out, " 200 ") {
		t.Fatalf("exit code %d: %s", code, out)
	}
	_, rest, _ := strings.Cut(out, "X-Replica: ")
	replica, _, _ := strings.Cut(rest, "\r\n")
	return replica
}

// inboundRequests returns how many requests an agent has counted for each replica on its node, by address.
func inboundRequests(t *testing.T, a *meshtest.Agent) map[string]int {
	t.Helper()
	top, err := a.Admin.Top(t.Context(), &meshv1.TopRequest{Service: meshtest.Service})
	if err != nil {
		t.Fatal(err)
	}
	counted := map[string]int{}
	for _, o := range top.Agents {
		for _, view := range o.Inbound {
			if o.Node == a.Node.Name {
				counted[view.Id[strings.LastIndex(view.Id, "/")+1:]] = int(view.Requests)
			}
		}
	}
	return counted
}
