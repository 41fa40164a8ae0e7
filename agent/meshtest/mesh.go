//go:build linux

package meshtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// Service is what the replicas of a mesh serve.
const Service = "web"

// Programs are the files of the programs under test.
type Programs struct {
	Agent, Meshctl string
	// Etcd starts a process that runs the embedded etcd: see ServeEtcd.
	Etcd string
}

// Config describes a mesh. The zero value is three nodes named a, b and c with three replicas each.
type Config struct {
	Programs Programs
	Nodes    []string // default a, b, c
	Replicas int      // on each node; default 3, negative: none
	// IPv6 uses fd00::/64 instead of 10.77.0.0/24.
	IPv6 bool
	// Open has replicas listen at the address of their node. Default: at the loopback address.
	Open bool
	// EtcdApart has etcd on a node of its own. Default: it is embedded in the agent of the first node.
	EtcdApart bool
	// Plain has connections between agents in the clear. Default: TLS only, with certificates of one CA.
	Plain bool
	// Under is a program, and its arguments, that starts agents with other rights. Default: none.
	Under []string
	// Flags are more flags for the agent on a node. Default: none.
	Flags func(node string) []string
}

// Mesh is a network with an agent on each node.
type Mesh struct {
	Nodes    []*Node
	Replicas []*Replica
	EtcdNode *Node    // where etcd is
	Etcd     *Process // nil if embedded

	t       testing.TB
	cfg     Config
	dir     string
	network *Network
	journal *journal
	loads   atomic.Int64
}

// New makes the network and the replicas, and starts nothing else.
func New(t testing.TB, cfg Config) *Mesh {
	t.Helper()
	if len(cfg.Nodes) == 0 {
		cfg.Nodes = []string{"a", "b", "c"}
	}
	if cfg.Replicas == 0 {
		cfg.Replicas = 3
	}
	m := &Mesh{t: t, cfg: cfg, dir: t.TempDir(), network: NewNetwork(t), journal: &journal{arrivals: map[int][]arrival{}}}
	for i, name := range cfg.Nodes {
		n := m.network.Node(name, m.prefix(i+1))
		m.Nodes = append(m.Nodes, n)
		m.startReplicas(n)
	}
	m.EtcdNode = m.Nodes[0]
	if cfg.EtcdApart {
		m.EtcdNode = m.network.Node("etcd", m.prefix(100))
	}
	return m
}

// Start makes a mesh and waits until every agent knows every replica.
func Start(t testing.TB, cfg Config) (m *Mesh, agents map[string]*Agent) {
	t.Helper()
	m = New(t, cfg)
	if cfg.EtcdApart {
		m.StartEtcd()
	}
	agents = map[string]*Agent{}
	for _, n := range m.Nodes {
		agents[n.Name] = m.StartAgent(n)
	}
	m.AwaitAll(agents[m.Nodes[0].Name])
	return m, agents
}

// prefix returns the i-th address.
func (m *Mesh) prefix(i int) netip.Prefix {
	if m.cfg.IPv6 {
		return netip.MustParsePrefix(fmt.Sprintf("fd00::%x/64", i))
	}
	return netip.MustParsePrefix(fmt.Sprintf("10.77.0.%d/24", i))
}

// Node returns a node by its name.
func (m *Mesh) Node(name string) *Node {
	for _, n := range m.Nodes {
		if n.Name == name {
			return n
		}
	}
	m.t.Fatalf("no node %s", name)
	return nil
}

// Outside adds a machine to the network that is not of the mesh.
func (m *Mesh) Outside(name string) *Node { return m.network.Node(name, m.prefix(150)) }

// Move gives a node another address.
func (m *Mesh) Move(n *Node) { n.Readdress(m.prefix(200 + slices.Index(m.Nodes, n))) }

func (m *Mesh) loopback() string {
	if m.cfg.IPv6 {
		return "::1"
	}
	return "127.0.0.1"
}

// startReplicas starts the replicas of a node and declares them to its agent.
func (m *Mesh) startReplicas(n *Node) {
	m.t.Helper()
	if m.cfg.Replicas < 0 {
		if err := os.MkdirAll(m.folder(n, "services"), 0o755); err != nil {
			m.t.Fatal(err)
		}
		return
	}
	var file strings.Builder
	fmt.Fprintf(&file, "apiVersion: headroom.dev/v1\nkind: LocalService\nmetadata: {name: %s}\nspec:\n  endpoints:\n", Service)
	for range m.cfg.Replicas {
		r := m.startReplica(n)
		fmt.Fprintf(&file, "  - address: %q\n", r.Address)
	}
	file.WriteString("  check: {http: /healthz, interval: 500ms, fall: 1}\n")
	m.WriteService(n, Service+".yaml", file.String())
}

func (m *Mesh) startReplica(n *Node) *Replica {
	m.t.Helper()
	host := m.loopback()
	if m.cfg.Open {
		host = n.Addr.String()
	}
	l, err := n.Listen(net.JoinHostPort(host, "0"))
	if err != nil {
		m.t.Fatal(err)
	}
	r := &Replica{Node: n.Name, Address: l.Addr().(*net.TCPAddr).AddrPort(), journal: m.journal}
	r.SetHealthy(true)
	r.server = &http.Server{Handler: r.handler()}
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := r.server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			m.t.Errorf("replica %s: %v", r, err)
		}
	})
	m.t.Cleanup(func() {
		r.Kill()
		serving.Wait()
	})
	m.Replicas = append(m.Replicas, r)
	return r
}

// WriteService writes a file into the folder of services of a node.
func (m *Mesh) WriteService(n *Node, name, text string) {
	m.t.Helper()
	dir := m.folder(n, "services")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		m.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
		m.t.Fatal(err)
	}
}

func (m *Mesh) folder(n *Node, name string) string { return filepath.Join(m.dir, n.Name, name) }

// CA is the folder of the CA of all agents.
func (m *Mesh) CA() string { return filepath.Join(m.dir, "ca") }

// StartEtcd starts etcd on its own node, with the data that it had there, and waits until it answers.
func (m *Mesh) StartEtcd() {
	m.t.Helper()
	m.Etcd = m.EtcdNode.Start("etcd", etcdEnv(filepath.Join(m.dir, "etcd"), m.EtcdNode.Addr), m.cfg.Programs.Etcd)
	Eventually(m.t, patience, "etcd answers", func() bool { return m.Etcd.Output() != "" })
}

// LoseEtcd removes the data of etcd, which must not run.
func (m *Mesh) LoseEtcd() {
	m.t.Helper()
	if err := os.RemoveAll(filepath.Join(m.dir, "etcd")); err != nil {
		m.t.Fatal(err)
	}
}

// Agent is an agent on its node.
type Agent struct {
	*Process
	Node  *Node
	Admin meshv1.AdminClient

	mesh *Mesh
}

// StartAgent starts the agent of a node and waits for nothing.
func (m *Mesh) StartAgent(n *Node, flags ...string) *Agent {
	m.t.Helper()
	command := slices.Concat(m.cfg.Under, []string{m.cfg.Programs.Agent}, m.flags(n), flags)
	p := n.Start("agent "+n.Name, nil, command[0], command[1:]...)
	conn, err := grpc.NewClient("unix://"+m.folder(n, "data/admin.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		m.t.Fatal(err)
	}
	m.t.Cleanup(func() { conn.Close() })
	return &Agent{Process: p, Node: n, Admin: meshv1.NewAdminClient(conn), mesh: m}
}

// flags returns the usual flags of the agent on a node.
func (m *Mesh) flags(n *Node) []string {
	flags := []string{
		"--node", n.Name, "--bind", n.Addr.String(), "--access-log", "--log-level", "debug",
		"--services", m.folder(n, "services"), "--data-dir", m.folder(n, "data"),
	}
	for _, other := range m.Nodes {
		if other != n {
			flags = append(flags, "--join", netip.AddrPortFrom(other.Addr, 7946).String())
		}
	}
	if m.EtcdNode == n {
		flags = append(flags, "--etcd-embedded", filepath.Join(m.dir, "etcd"))
	} else {
		flags = append(flags, "--etcd", netip.AddrPortFrom(m.EtcdNode.Addr, 2379).String())
	}
	if m.cfg.Plain {
		flags = append(flags, "--mtls", "off")
	} else {
		flags = append(flags, "--ca", m.CA())
	}
	if m.cfg.Flags != nil {
		flags = append(flags, m.cfg.Flags(n.Name)...)
	}
	return flags
}

// Caller returns an application on the agent's node.
func (a *Agent) Caller() *Caller { return a.Node.Caller(net.JoinHostPort(a.mesh.loopback(), "15001")) }

// Meshctl runs meshctl on the agent's node, and returns what it wrote and its exit code, -1 if it did not run.
func (a *Agent) Meshctl(args ...string) (stdout, stderr string, code int) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var out, problems bytes.Buffer
	args = append([]string{"--agent", net.JoinHostPort(a.mesh.loopback(), "15010")}, args...)
	c := exec.CommandContext(ctx, a.mesh.cfg.Programs.Meshctl, args...)
	c.Stdout, c.Stderr = &out, &problems
	if err := a.Node.Do(c.Start); err != nil {
		return "", err.Error(), -1
	}
	err := c.Wait()
	if _, exited := errors.AsType[*exec.ExitError](err); err != nil && !exited {
		return "", err.Error(), -1
	}
	return out.String(), problems.String(), c.ProcessState.ExitCode()
}

// MustMeshctl is Meshctl for what must succeed.
func (a *Agent) MustMeshctl(args ...string) (stdout string) {
	a.t.Helper()
	stdout, stderr, code := a.Meshctl(args...)
	if code != 0 {
		a.t.Fatalf("meshctl %s on node %s: exit code %d: %s", strings.Join(args, " "), a.Node.Name, code, stderr)
	}
	return stdout
}

// Page returns what the agent serves to monitoring at a path.
func (a *Agent) Page(path string) (status int, text string) {
	transport := &http.Transport{DialContext: a.Node.DialContext, DisableKeepAlives: true}
	client := &http.Client{Transport: transport, Timeout: giveUp}
	resp, err := client.Get("http://" + net.JoinHostPort(a.mesh.loopback(), "15000") + path)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err.Error()
	}
	return resp.StatusCode, string(body)
}

// Connected reports whether the agent is connected to the registry.
func (a *Agent) Connected() bool {
	_, page := a.Page("/metrics")
	return strings.Contains(page, "headroom_registry_connected 1\n")
}

// Usable returns the IDs of the replicas that the agent may send requests to now.
func (a *Agent) Usable() []string {
	ctx, cancel := context.WithTimeout(context.Background(), giveUp)
	defer cancel()
	top, err := a.Admin.Top(ctx, &meshv1.TopRequest{Service: Service})
	if err != nil || len(top.Agents) == 0 {
		return nil
	}
	return usable(top.Agents[0])
}

func usable(o *meshv1.Observation) []string {
	var ids []string
	for _, view := range o.Outbound {
		for _, e := range view.Endpoints {
			if e.State == meshv1.EndpointRecord_READY && e.Avoided == "" {
				ids = append(ids, e.Id)
			}
		}
	}
	return ids
}

// Alive returns the names of the members that the agent takes to be alive.
func (a *Agent) Alive() []string {
	ctx, cancel := context.WithTimeout(context.Background(), giveUp)
	defer cancel()
	answer, err := a.Admin.ListMembers(ctx, &meshv1.ListMembersRequest{})
	if err != nil {
		return nil
	}
	var alive []string
	for _, m := range answer.Members {
		if m.State == "alive" {
			alive = append(alive, m.Node)
		}
	}
	return alive
}

// Registered counts the endpoints of a node that the agent has from the registry.
func (a *Agent) Registered(node string) int {
	ctx, cancel := context.WithTimeout(context.Background(), giveUp)
	defer cancel()
	answer, err := a.Admin.ListEndpoints(ctx, &meshv1.ListEndpointsRequest{})
	if err != nil {
		a.t.Errorf("list the endpoints that agent %s knows: %v", a.Node.Name, err)
	}
	n := 0
	for _, e := range answer.GetEndpoints() {
		if e.Node == node {
			n++
		}
	}
	return n
}

// AwaitAll waits until every agent of the mesh, as this one knows them, may use every replica.
func (m *Mesh) AwaitAll(a *Agent) time.Duration {
	m.t.Helper()
	return Eventually(m.t, patience, "every agent knows every replica", func() bool {
		ctx, cancel := context.WithTimeout(context.Background(), giveUp)
		defer cancel()
		top, err := a.Admin.Top(ctx, &meshv1.TopRequest{Service: Service})
		if err != nil || len(top.Agents) != len(m.Nodes) {
			return false
		}
		return !slices.ContainsFunc(top.Agents, func(o *meshv1.Observation) bool { return len(usable(o)) != len(m.Replicas) })
	})
}

// AwaitInFlight waits until so many requests are at replicas.
func (m *Mesh) AwaitInFlight(n int64) {
	m.t.Helper()
	Eventually(m.t, patience, fmt.Sprintf("%d requests are in flight", n), func() bool { return m.journal.inFlight.Load() >= n })
}
