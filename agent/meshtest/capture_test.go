//go:build linux

package meshtest_test

import (
	"context"
	"encoding/json"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/agent/meshtest"
)

// captured starts a mesh whose agents capture, on nodes that have a way out for all that is not theirs.
func captured(t *testing.T, cfg meshtest.Config) (*meshtest.Mesh, map[string]*meshtest.Agent) {
	t.Helper()
	m := capturable(t, cfg)
	return m, startCapturing(m, nil)
}

// capturable makes the mesh without its agents.
func capturable(t *testing.T, cfg meshtest.Config) *meshtest.Mesh {
	t.Helper()
	built, err := programs()
	if err != nil {
		t.Fatal(err)
	}
	cfg.Programs = built
	m := meshtest.New(t, cfg)
	for _, n := range m.Nodes {
		n.IP("route", "add", "default", "dev", "eth0")
	}
	return m
}

// startCapturing starts the agents, with more flags for those of some nodes.
func startCapturing(m *meshtest.Mesh, flags map[string][]string) map[string]*meshtest.Agent {
	agents := map[string]*meshtest.Agent{}
	for _, n := range m.Nodes {
		agents[n.Name] = m.StartAgent(n, append([]string{"--capture"}, flags[n.Name]...)...)
	}
	m.AwaitAll(agents[m.Nodes[0].Name])
	return agents
}

// virtual returns the virtual addresses of the service that every mesh has, as an agent knows them.
func virtual(t *testing.T, a *meshtest.Agent) (ipv4, ipv6 string) {
	t.Helper()
	return virtualOf(t, a, meshtest.Service)
}

// virtualOf returns those of any service.
func virtualOf(t *testing.T, a *meshtest.Agent, service string) (ipv4, ipv6 string) {
	t.Helper()
	meshtest.Eventually(t, patience, "the service has virtual addresses", func() bool {
		var answer struct {
			Services []struct{ Name, Ipv4, Ipv6 string }
		}
		out, _, _ := a.Meshctl("services", "-o", "json")
		if json.Unmarshal([]byte(out), &answer) != nil {
			return false
		}
		for _, s := range answer.Services {
			if s.Name == service {
				ipv4, ipv6 = s.Ipv4, s.Ipv6
			}
		}
		return ipv4 != "" && ipv6 != ""
	})
	return ipv4, ipv6
}

// curl calls curl on a node, as an application does that knows nothing of the mesh.
func curl(t *testing.T, n *meshtest.Node, args ...string) (out string, code int) {
	t.Helper()
	p := n.Start("curl", nil, "curl", append([]string{"-q", "-sS", "--max-time", "5"}, args...)...)
	code = p.Wait(10 * time.Second)
	return p.Output() + p.Log(), code
}

// resolverAt returns a resolver that asks a server, as a program on a node does.
func resolverAt(n *meshtest.Node, server string) *net.Resolver {
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return n.DialContext(ctx, network, server)
	}}
}

// byName returns what connects as a program on a node does, which asks a resolver for addresses of a kind, ip4 or ip6.
func byName(n *meshtest.Node, r *net.Resolver, kind string) func(ctx context.Context, network, address string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		host, port, err := net.SplitHostPort(address)
		if err != nil {
			return nil, err
		}
		addrs, err := r.LookupNetIP(ctx, kind, host)
		if err != nil {
			return nil, err
		}
		return n.DialContext(ctx, network, net.JoinHostPort(addrs[0].String(), port))
	}
}

// TestCapture has applications that connect as if there were no mesh: by a service's name, and by its addresses.
func TestCapture(t *testing.T) {
	_, agents := captured(t, meshtest.Config{})
	a := agents["a"]
	ipv4, ipv6 := virtual(t, a)
	a.MustMeshctl("policy", "set", meshtest.Service, "--balancer", "round_robin")
	for _, host := range []string{"web.mesh", ipv4, "[" + ipv6 + "]", ipv4 + ":8443"} {
		replicas := map[string]bool{}
		for range 30 {
			out, code := curl(t, a.Node, "-o", "/dev/null", "-D", "-", "http://"+host+"/")
			if code != 0 || !strings.Contains(out, " 200 ") {
				t.Fatalf("curl http://%s/: exit code %d: %s", host, code, out)
			}
			_, rest, _ := strings.Cut(out, "X-Replica: ")
			replica, _, _ := strings.Cut(rest, "\r\n")
			replicas[replica] = true
		}
		if len(replicas) < 3 {
			t.Errorf("%s: requests only came to %v", host, replicas)
		}
	}
	if out, problems, code := a.Meshctl("check"); code != 0 || !strings.Contains(out, "names") {
		t.Errorf("meshctl check: exit code %d\n%s%s", code, out, problems)
	}
	if out, code := curl(t, a.Node, "http://nothing.mesh/"); code != 6 {
		t.Errorf("a name that no service has: exit code %d, want 6 (could not resolve): %s", code, out)
	}
	if out, code := curl(t, a.Node, "http://240.79.255.1/"); code == 0 || code == 28 {
		t.Errorf("a virtual address of no service: exit code %d, want a refusal: %s", code, out)
	}
}

// TestCaptureOff ends capture, once by the agent, and once for an agent that was killed: nothing is left behind, and nothing of
// others is touched.
func TestCaptureOff(t *testing.T) {
	m := capturable(t, meshtest.Config{Nodes: []string{"a", "b"}, Replicas: 1})
	b := m.Node("b")
	nft(t, b, "table inet others { chain first { type nat hook output priority -100; ip daddr 10.96.0.10 tcp dport 80 counter dnat ip to 10.77.0.1:80; }; }")
	meshtest.Eventually(t, patience, "the addresses of IPv6 are settled", func() bool {
		return run(t, b, "ip", "-6", "addr", "show", "tentative") == ""
	})
	before := allRules(t, b)
	agents := startCapturing(m, nil)
	virtual(t, agents["b"])
	wantOff(t, agents["b"], before, "removed table inet headroom\n", "removed table inet headroom-guard\n", "removed route 240.64.0.0/12\n")
	agents["b"].Kill()
	agents["b"] = m.StartAgent(b, "--capture")
	agents["b"].AwaitLog("connections are captured")
	agents["b"].Kill()
	wantOff(t, agents["b"], before, "removed table inet headroom-guard\n", "removed route local 240.64.0.0/12 dev lo\n")
}

// allRules is all that capture may change.
func allRules(t *testing.T, n *meshtest.Node) string {
	t.Helper()
	return run(t, n, "nft", "list", "ruleset") + run(t, n, "ip", "route", "show", "table", "all") +
		run(t, n, "ip", "-6", "route", "show", "table", "all") + run(t, n, "ip", "rule") + run(t, n, "ip", "-6", "rule")
}

func wantOff(t *testing.T, a *meshtest.Agent, before string, tells ...string) {
	t.Helper()
	out, problems, code := a.Meshctl("capture", "off")
	if code != 0 {
		t.Errorf("capture off: exit code %d: %s%s", code, out, problems)
	}
	for _, line := range tells {
		if !strings.Contains(out, line) {
			t.Errorf("capture off: want that it tells %q: %s", line, out)
		}
	}
	if after := allRules(t, a.Node); after != before {
		t.Errorf("before, there was\n%s\nafterwards\n%s", before, after)
	}
}
