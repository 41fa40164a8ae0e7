package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

const (
	service    = "checkout"
	fast, slow = 14, 2
	slowHeader = "X-Slow-Replica"
)

// node is an agent, with a loopback address of its own so that all can use the usual ports.
type node struct{ name, address string }

// mesh is what the demo runs.
type mesh struct {
	bin, dir string
	nodes    []node
	agents   []*exec.Cmd
	replicas []*http.Server
	serving  sync.WaitGroup
	admin    meshv1.AdminClient
	conn     *grpc.ClientConn
	client   *http.Client
	url      string
}

func startMesh(ctx context.Context, bin string) (*mesh, error) {
	dir, err := os.MkdirTemp("", "headroom-demo-")
	if err != nil {
		return nil, err
	}
	m := &mesh{bin: bin, dir: dir, url: "http://" + service + ".mesh/"}
	m.nodes = []node{{"a", "127.77.0.1"}, {"b", "127.77.0.2"}, {"c", "127.77.0.3"}}
	if err := errors.Join(m.startReplicas(), m.startAgents(), m.connect()); err != nil {
		m.stop()
		return nil, err
	}
	if err := m.waitReady(ctx); err != nil {
		err = fmt.Errorf("%w\n%s", err, m.logs())
		m.stop()
		return nil, err
	}
	return m, nil
}

// startReplicas starts the replicas, in this process, and declares them in a services folder for each node.
func (m *mesh) startReplicas() error {
	for i := range fast + slow {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		// The slow ones are on the second and third node.
		server := &http.Server{Handler: replica(i == 1 || i == 2)}
		m.replicas = append(m.replicas, server)
		m.serving.Go(func() { server.Serve(l) })
		if err := m.declare(i, l.Addr().String()); err != nil {
			return err
		}
	}
	return nil
}

// replica answers after about 50 ms, or about 800 ms if it is a slow one: exactly that on average, half to one and a half
// times as much for single requests.
func replica(slow bool) http.Handler {
	mean := 50 * time.Millisecond
	if slow {
		mean = 800 * time.Millisecond
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		time.Sleep(time.Duration((0.5 + rand.Float64()) * float64(mean)))
		if slow {
			w.Header().Set(slowHeader, "1")
		}
		fmt.Fprintln(w, "ok")
	})
	return mux
}

func (m *mesh) declare(i int, address string) error {
	folder := m.folder(i%len(m.nodes), "services.d")
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	file := filepath.Join(folder, fmt.Sprintf("%s-%d.yaml", service, i))
	return os.WriteFile(file, fmt.Appendf(nil, `apiVersion: headroom.dev/v1
kind: LocalService
metadata:
  name: %s
spec:
  endpoints:
  - address: %s
  check:
    http: /healthz
`, service, address), 0o644)
}

func (m *mesh) folder(node int, parts ...string) string {
	return filepath.Join(append([]string{m.dir, m.nodes[node].name}, parts...)...)
}

func (m *mesh) startAgents() error {
	for i, n := range m.nodes {
		args := []string{"--node", n.name, "--bind", n.address, "--services", m.folder(i, "services.d"), "--data-dir", m.folder(i, "data"), "--ca", filepath.Join(m.dir, "ca")}
		if i == 0 {
			args = append(args, "--etcd-embedded", m.folder(i, "etcd"))
		} else {
			args = append(args, "--join", m.nodes[0].address+":7946", "--etcd", m.nodes[0].address+":2379")
		}
		log, err := os.Create(m.logFile(i))
		if err != nil {
			return err
		}
		agent := exec.Command(filepath.Join(m.bin, "agent"), args...)
		agent.Stdout, agent.Stderr = log, log
		// Ctrl-C is for the demo: it ends the agents itself, in order.
		agent.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
		err = agent.Start()
		log.Close()
		if err != nil {
			return err
		}
		m.agents = append(m.agents, agent)
	}
	return nil
}

func (m *mesh) logFile(node int) string { return filepath.Join(m.dir, m.nodes[node].name+".log") }

// logs returns the ends of the agents' logs.
func (m *mesh) logs() string {
	var b strings.Builder
	for i, n := range m.nodes {
		text, _ := os.ReadFile(m.logFile(i))
		lines := strings.Split(strings.TrimSpace(string(text)), "\n")
		fmt.Fprintf(&b, "--- log of agent %s\n%s\n", n.name, strings.Join(lines[max(0, len(lines)-8):], "\n"))
	}
	return b.String()
}

func (m *mesh) connect() error {
	var err error
	m.conn, err = grpc.NewClient(m.nodes[0].address+":15010", grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	m.admin = meshv1.NewAdminClient(m.conn)
	proxy := &url.URL{Scheme: "http", Host: m.nodes[0].address + ":15001"}
	m.client = &http.Client{Transport: &http.Transport{Proxy: http.ProxyURL(proxy), MaxIdleConnsPerHost: 1000}}
	return nil
}

// waitReady waits until every agent knows every replica.
func (m *mesh) waitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	for wait(ctx, 100*time.Millisecond) {
		top, err := m.admin.Top(ctx, &meshv1.TopRequest{Service: service})
		if err == nil && len(top.Agents) == len(m.nodes) && allKnow(top.Agents) {
			return nil
		}
	}
	return errors.New("the mesh did not come up within 20 s")
}

func allKnow(agents []*meshv1.Observation) bool {
	for _, a := range agents {
		if len(a.Outbound) != 1 || len(a.Outbound[0].Endpoints) != fast+slow {
			return false
		}
	}
	return true
}

// setBalancer switches the rule, as an operator would.
func (m *mesh) setBalancer(ctx context.Context, rule string) error {
	_, err := m.meshctl(ctx, "policy", "set", service, "--balancer", rule, "--wait")
	return err
}

func (m *mesh) meshctl(ctx context.Context, args ...string) ([]byte, error) {
	args = append([]string{"--agent", m.nodes[0].address + ":15010"}, args...)
	var stdout, stderr bytes.Buffer
	c := exec.CommandContext(ctx, filepath.Join(m.bin, "meshctl"), args...)
	c.Stdout, c.Stderr = &stdout, &stderr
	if err := c.Run(); err != nil {
		return nil, fmt.Errorf("meshctl %s: %w: %s", strings.Join(args, " "), err, stderr.String())
	}
	return stdout.Bytes(), nil
}

// counters are what the client's agent has counted for the service.
type counters struct{ probes, requests uint64 }

func (m *mesh) counters(ctx context.Context) (counters, error) {
	top, err := m.admin.Top(ctx, &meshv1.TopRequest{Service: service})
	if err != nil {
		return counters{}, err
	}
	if len(top.Agents) == 0 || len(top.Agents[0].Outbound) == 0 {
		return counters{}, errors.New("the agent does not know the service")
	}
	v := top.Agents[0].Outbound[0]
	return counters{probes: v.Probes, requests: v.Requests}, nil
}

// commands returns what to type to look at the mesh.
func (m *mesh) commands() string {
	ctl := filepath.Join(m.bin, "meshctl") + " --agent " + m.nodes[0].address + ":15010"
	return fmt.Sprintf(`
  %[1]s top
  %[1]s members
  %[1]s endpoints
  %[1]s policy get %[2]s --effective
  curl -x http://%[3]s:15001 http://%[2]s.mesh/
  curl http://%[3]s:15000/metrics
`, ctl, service, m.nodes[0].address)
}

func (m *mesh) stop() {
	for i := len(m.agents) - 1; i >= 0; i-- {
		m.agents[i].Process.Signal(syscall.SIGTERM)
	}
	for i := len(m.agents) - 1; i >= 0; i-- {
		a := m.agents[i]
		force := time.AfterFunc(10*time.Second, func() { a.Process.Kill() })
		a.Wait()
		force.Stop()
	}
	for _, r := range m.replicas {
		r.Close()
	}
	m.serving.Wait()
	if m.conn != nil {
		m.conn.Close()
	}
	os.RemoveAll(m.dir)
}

func writeJSON(file string, results map[string]*result) error {
	rules := map[string]figures{}
	for rule, r := range results {
		rules[rule] = r.figures()
	}
	b, err := json.MarshalIndent(map[string]any{"rules": rules}, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(file, append(b, '\n'), 0o644)
}
