//go:build linux

package conformance

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/agent/meshtest"
	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
)

// patience bounds every wait for something that must happen soon.
const patience = 20 * time.Second

// target is where a suite finds what it calls.
type target struct {
	node     *meshtest.Node    // where callers are
	services map[string]string // HOST:PORT of each
	proxy    string            // HOST:PORT of the agent's proxy; empty if there is no agent
	programs meshtest.Programs
}

// suite is run with the agents to itself, which it has to leave as it found them.
type suite struct {
	name string
	run  func(*testing.T, target)
}

func suites(names ...string) []suite {
	all := []suite{
		{"curl", testCurl},
		{"curl by proxy", testCurlByProxy},
		{"go", testGo},
		{"converted", testConverted},
		{"websocket", testWebSocket},
		{"tcp", testTCP},
		{"tls", testTLS},
		{"h2spec", testH2spec},
		{"grpc", testGRPC},
		{"nghttp2", testNghttp2},
	}
	return slices.DeleteFunc(all, func(s suite) bool { return len(names) > 0 && !slices.Contains(names, s.name) })
}

// TestTwoAgents has the agents of the caller and of the replica in between, which connect with mutual TLS.
func TestTwoAgents(t *testing.T) {
	m := newMesh(t, false)
	at, agents := m.target(t, "a")
	conform(t, at, suites(), agents...)
}

// TestOneAgent has callers on the node of the replicas.
func TestOneAgent(t *testing.T) {
	m := newMesh(t, false)
	at, agents := m.target(t, "b")
	conform(t, at, suites("curl", "curl by proxy", "go", "converted", "tcp", "tls", "grpc"), agents...)
}

// TestPlain has two agents that connect in the clear: bytes are moved in another way then.
func TestPlain(t *testing.T) {
	m := newMesh(t, true)
	at, agents := m.target(t, "a")
	conform(t, at, suites("curl", "websocket", "tcp", "tls"), agents...)
}

var direct = flag.Bool("direct", false, "run the suites against the replicas themselves, too: are the suites right?")

// TestDirect has no agent in between.
func TestDirect(t *testing.T) {
	if !*direct {
		t.Skip("run with -direct to test the suites")
	}
	conform(t, newMesh(t, false).direct(), suites())
}

func conform(t *testing.T, at target, suites []suite, agents ...*meshtest.Agent) {
	settled := settles(t, agents...)
	for _, s := range suites {
		t.Run(s.name, func(t *testing.T) {
			defer settled(t)
			s.run(t, at)
		})
	}
}

// mesh has callers on node a, and all replicas on node b.
type mesh struct {
	*meshtest.Mesh
	t        *testing.T
	programs meshtest.Programs
	agents   map[string]*meshtest.Agent
	replicas map[string][]netip.AddrPort // by service
	ports    map[string]uint16           // by service: where agents listen for callers
}

func newMesh(t *testing.T, plain bool) *mesh {
	t.Helper()
	if testing.Short() {
		t.Skip("whole meshes take long")
	}
	built, err := programs()
	if err != nil {
		t.Fatal(err)
	}
	m := &mesh{t: t, programs: built, agents: map[string]*meshtest.Agent{}, replicas: map[string][]netip.AddrPort{}, ports: map[string]uint16{}}
	for i, s := range services() {
		m.ports[s.name] = uint16(20001 + i)
	}
	m.Mesh = meshtest.New(t, meshtest.Config{
		Programs: built, Nodes: []string{"a", "b"}, Replicas: -1, EtcdApart: true, Plain: plain,
		Flags: func(string) []string { return m.listenFlags() },
	})
	for _, s := range services() {
		m.start(s)
	}
	m.StartEtcd()
	for _, n := range m.Nodes {
		m.agents[n.Name] = m.StartAgent(n)
	}
	return m
}

func (m *mesh) listenFlags() []string {
	var flags []string
	for _, name := range slices.Sorted(maps.Keys(m.ports)) {
		flags = append(flags, "--listen", fmt.Sprintf("%s=127.0.0.1:%d", name, m.ports[name]))
	}
	return flags
}

// start starts two replicas of a service on node b, and declares them.
func (m *mesh) start(s service) {
	m.t.Helper()
	b := m.Node("b")
	var file strings.Builder
	fmt.Fprintf(&file, "apiVersion: headroom.dev/v1\nkind: LocalService\nmetadata: {name: %s}\nspec:\n", s.name)
	if s.protocol != "" {
		fmt.Fprintf(&file, "  protocol: %s\n", s.protocol)
	}
	file.WriteString("  endpoints:\n")
	for range 2 {
		l, err := b.Listen("127.0.0.1:0")
		if err != nil {
			m.t.Fatal(err)
		}
		s.serve(m.t, l)
		at := l.Addr().(*net.TCPAddr).AddrPort()
		m.replicas[s.name] = append(m.replicas[s.name], at)
		fmt.Fprintf(&file, "  - address: %q\n", at)
	}
	m.WriteService(b, s.name+".yaml", file.String())
}

// direct returns the replicas themselves.
func (m *mesh) direct() target {
	at := target{node: m.Node("b"), services: map[string]string{}, programs: m.programs}
	for name, replicas := range m.replicas {
		at.services[name] = replicas[0].String()
	}
	return at
}

// target returns where callers on a node find the replicas, and the agents on the way there.
func (m *mesh) target(t *testing.T, node string) (target, []*meshtest.Agent) {
	t.Helper()
	at := target{node: m.Node(node), services: map[string]string{}, proxy: "127.0.0.1:15001", programs: m.programs}
	agents := []*meshtest.Agent{m.agents["b"]}
	if node != "b" {
		agents = append(agents, m.agents[node])
	}
	for name, port := range m.ports {
		at.services[name] = fmt.Sprintf("127.0.0.1:%d", port)
	}
	meshtest.Eventually(t, patience, "the agents know every replica", m.complete)
	m.agents["b"].MustMeshctl("policy", "set", serviceGRPC, "--wait", "--balancer", "round_robin") // see pickPerCall
	at.warmUp(t)
	return at, agents
}

// complete reports whether both agents may use every replica.
func (m *mesh) complete() bool {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for name, replicas := range m.replicas {
		top, err := m.agents["a"].Admin.Top(ctx, &meshv1.TopRequest{Service: name})
		if err != nil || len(top.Agents) != len(m.agents) {
			return false
		}
		for _, o := range top.Agents {
			if len(o.Outbound) != 1 || len(o.Outbound[0].Endpoints) != len(replicas) {
				return false
			}
		}
	}
	return true
}

// warmUp lets agents make the connections among themselves that they keep.
func (at target) warmUp(t *testing.T) {
	t.Helper()
	transport := at.transport(t)
	transport.Proxy = http.ProxyURL(&url.URL{Scheme: "http", Host: at.proxy})
	defer transport.CloseIdleConnections()
	for range 20 { // to each replica
		resp, err := (&http.Client{Transport: transport}).Get("http://" + serviceWeb + ".mesh/")
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
}

// url returns the URL of a path at a service.
func (at target) url(service, path string) string { return "http://" + at.services[service] + path }

// dial connects to HOST:PORT from where callers are.
func (at target) dial(t *testing.T, address string) *net.TCPConn {
	t.Helper()
	c, err := at.node.DialContext(t.Context(), "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	return c.(*net.TCPConn)
}

// run runs a program where callers are, and returns what it wrote and its exit code.
func (at target) run(t *testing.T, stdin io.Reader, program string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	if !filepath.IsAbs(program) {
		if _, err := exec.LookPath(program); err != nil {
			t.Fatalf("%v: `make deps` installs it", err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c := exec.CommandContext(ctx, program, args...)
	var out, problems bytes.Buffer
	c.Stdin, c.Stdout, c.Stderr = stdin, &out, &problems
	if err := at.node.Do(c.Start); err != nil {
		t.Fatal(err)
	}
	if err := c.Wait(); err != nil && c.ProcessState.ExitCode() < 0 {
		t.Fatalf("%s %s: %v\n%s", program, strings.Join(args, " "), err, problems.String())
	}
	return out.String(), problems.String(), c.ProcessState.ExitCode()
}
