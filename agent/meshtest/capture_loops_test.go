//go:build linux

package meshtest_test

import (
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/agent/meshtest"
	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
)

// TestCaptureLoops has an agent's own connections be much like those that it captures: the same user, the same node, even to
// the port of captured connections. None comes around.
func TestCaptureLoops(t *testing.T) {
	m, agents := captured(t, meshtest.Config{Nodes: []string{"a", "b"}, Open: true})
	a := agents["a"]
	ipv4, ipv6 := virtual(t, a)
	a.MustMeshctl("policy", "set", meshtest.Service, "--capture-real", "--capture-inbound", "--balancer", "round_robin")
	meshtest.Eventually(t, patience, "real addresses are captured", func() bool {
		return captures(t, a, "real4") == len(m.Replicas) && captures(t, agents["b"], "real4") == len(m.Replicas)
	})
	const rounds = 6
	ours := replicasOf(m, "a")[0].Address.String()
	hosts := []string{ipv4, "[" + ipv6 + "]", ours}
	for range rounds {
		for _, host := range hosts {
			if out, code := curl(t, a.Node, "-i", "http://"+host+"/"); code != 0 || !strings.Contains(out, " 200 ") {
				t.Errorf("the node of the service calls %s: exit code %d: %s", host, code, out)
			}
		}
	}
	counted := 0
	for _, agent := range agents {
		for _, n := range inboundRequests(t, agent) {
			counted += n
		}
	}
	if want := rounds * len(hosts); counted != want {
		t.Errorf("%d requests counted at replicas, want each of %d once", counted, want)
	}
	for _, host := range []string{"127.0.0.1", "::1", a.Node.Addr.String()} {
		wantReset(t, a.Node, net.JoinHostPort(host, "15006"))
	}
	wantReset(t, m.Node("b"), net.JoinHostPort(a.Node.Addr.String(), "15006"))
	wantQuiet(t, a)
}

// TestCaptureTwice starts a second agent on a node where one captures.
func TestCaptureTwice(t *testing.T) {
	m, agents := captured(t, meshtest.Config{Nodes: []string{"a", "b"}})
	a := agents["a"]
	dir, addr := t.TempDir(), a.Node.Addr.String()
	second := a.Node.Start("second agent", nil, agentProgram(t), "--node", "second", "--bind", addr, "--capture", "--capture-port", "25006",
		"--data-dir", filepath.Join(dir, "data"), "--dns-listen", "127.0.0.1:25053", "--proxy", "127.0.0.1:25001", "--mesh", addr+":25008",
		"--gossip", addr+":27946", "--admin", "127.0.0.1:25010", "--admin-http", "127.0.0.1:25000", "--join", addr+":7946",
		"--etcd", addr+":2379", "--ca", m.CA())
	second.AwaitLog("level=ERROR", "another agent captures in this network namespace", strconv.Itoa(a.PID()))
	caller := a.Node.Caller("127.0.0.1:25001")
	meshtest.Eventually(t, patience, "the proxy of the second agent works", func() bool {
		_, err := caller.Get(t.Context(), "http://web.mesh/")
		return err == nil
	})
	for range 20 {
		if _, err := caller.Get(t.Context(), "http://web.mesh/"); err != nil {
			t.Errorf("the proxy of the second agent: %v", err)
		}
	}
	second.Kill()
	ipv4, _ := virtual(t, a)
	if out, code := curl(t, a.Node, "http://"+ipv4+"/"); code != 0 {
		t.Errorf("the first agent no longer captures: exit code %d: %s", code, out)
	}
}

func agentProgram(t *testing.T) string {
	t.Helper()
	built, err := programs()
	if err != nil {
		t.Fatal(err)
	}
	return built.Agent
}

// wantReset connects to where only captured connections belong.
func wantReset(t *testing.T, n *meshtest.Node, address string) {
	t.Helper()
	began := time.Now()
	out, code := curl(t, n, "http://"+address+"/")
	if took := time.Since(began); (code != 7 && code != 52 && code != 56) || took > 2*time.Second {
		t.Errorf("%s: exit code %d after %v, want that the connection ends at once: %s", address, code, took, out)
	}
}

// wantQuiet wants an agent whose replicas are idle, and which takes little of a processor.
func wantQuiet(t *testing.T, a *meshtest.Agent) {
	t.Helper()
	meshtest.Eventually(t, patience, "no request is in flight", func() bool {
		top, err := a.Admin.Top(t.Context(), &meshv1.TopRequest{Service: meshtest.Service})
		if err != nil {
			return false
		}
		inFlight := int32(0)
		for _, o := range top.Agents {
			for _, view := range o.Inbound {
				inFlight += view.Rif
			}
		}
		return inFlight == 0
	})
	began, before := time.Now(), processorTime(t, a.PID())
	<-time.After(2 * time.Second)
	if share := float64(processorTime(t, a.PID())-before) / float64(time.Since(began)); share > 0.5 {
		t.Errorf("the agent takes %.0f%% of a processor, with nothing to do", 100*share)
	}
}

// processorTime returns how long a process has run.
func processorTime(t *testing.T, pid int) time.Duration {
	t.Helper()
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		t.Fatal(err)
	}
	const user, system, tick = 11, 12, 10 * time.Millisecond // fields after the name
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	total := 0
	for _, i := range []int{user, system} {
		n, err := strconv.Atoi(fields[i])
		if err != nil {
			t.Fatal(err)
		}
		total += n
	}
	return time.Duration(total) * tick
}
