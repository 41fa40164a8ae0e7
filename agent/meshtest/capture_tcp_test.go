//go:build linux

package meshtest_test

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/headroom-mesh/headroom/agent/meshtest"
	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
)

// TestCaptureTCP calls a server that speaks first, and keeps the connection while services come and go.
func TestCaptureTCP(t *testing.T) {
	m := capturable(t, meshtest.Config{Nodes: []string{"a", "b"}, Replicas: 1})
	greeter := startGreeter(t, m.Node("b"))
	m.WriteService(m.Node("b"), "accounts.yaml", localService("accounts", "tcp", greeter))
	a := startCapturing(m, nil)["a"]
	ipv4, ipv6 := virtualOf(t, a, "accounts")
	var lasting *line
	for _, host := range []string{ipv6, ipv4} {
		began := time.Now()
		lasting = dialLine(t, a.Node, net.JoinHostPort(host, "3306"))
		if got := lasting.read(t); got != "welcome" {
			t.Fatalf("%s greets with %q", host, got)
		}
		if took := time.Since(began); took > time.Second {
			t.Errorf("the greeting of %s took %v", host, took)
		}
	}
	a.MustMeshctl("policy", "set", "other", "--capture-real")
	for i := range 50 {
		n := 1 + i%2
		m.WriteService(a.Node, "other.yaml", localService("other", "tcp", []string{a.Node.Addr.String() + ":1000", a.Node.Addr.String() + ":1001"}[:n]...))
		meshtest.Eventually(t, patience, fmt.Sprintf("%d real addresses are captured", n), func() bool { return captures(t, a, "real4") == n })
		if got := lasting.say(t, fmt.Sprint("round ", i)); got != fmt.Sprint("round ", i) {
			t.Fatalf("round %d: the answer is %q", i, got)
		}
	}
}

// TestCaptureGRPC has a client of gRPC connect to a virtual address.
func TestCaptureGRPC(t *testing.T) {
	m := capturable(t, meshtest.Config{Nodes: []string{"a", "b"}, Replicas: 1})
	m.WriteService(m.Node("b"), "ledger.yaml", localService("ledger", "grpc", startHealth(t, m.Node("b"))))
	a := startCapturing(m, nil)["a"]
	ipv4, ipv6 := virtualOf(t, a, "ledger")
	for _, host := range []string{ipv4, ipv6} {
		wantHealthy(t, a.Node.DialContext, net.JoinHostPort(host, "50051"))
	}
}

// startHealth starts a server of gRPC that is healthy, on a node's loopback address.
func startHealth(t *testing.T, n *meshtest.Node) (address string) {
	t.Helper()
	l := listen(t, n)
	server := grpc.NewServer()
	grpc_health_v1.RegisterHealthServer(server, health.NewServer())
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := server.Serve(l); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		server.Stop()
		serving.Wait()
	})
	return l.Addr().String()
}

// wantHealthy asks a server of gRPC how it is, several times by one connection.
func wantHealthy(t *testing.T, dial func(ctx context.Context, network, address string) (net.Conn, error), address string) {
	t.Helper()
	dialer := grpc.WithContextDialer(func(ctx context.Context, at string) (net.Conn, error) { return dial(ctx, "tcp", at) })
	conn, err := grpc.NewClient("passthrough:///"+address, dialer, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for range 5 {
		answer, err := grpc_health_v1.NewHealthClient(conn).Check(t.Context(), &grpc_health_v1.HealthCheckRequest{})
		if err != nil || answer.Status != grpc_health_v1.HealthCheckResponse_SERVING {
			t.Errorf("health of %s: %v, %v", address, answer, err)
		}
	}
}

// localService describes replicas on a node to its agent.
func localService(name, protocol string, addresses ...string) string {
	var text strings.Builder
	fmt.Fprintf(&text, "apiVersion: headroom.dev/v1\nkind: LocalService\nmetadata: {name: %s}\nspec:\n  protocol: %s\n  endpoints:\n", name, protocol)
	for _, address := range addresses {
		fmt.Fprintf(&text, "  - address: %q\n", address)
	}
	return text.String()
}

func listen(t *testing.T, n *meshtest.Node) net.Listener {
	t.Helper()
	l, err := n.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// startGreeter starts a server that speaks first, and then repeats each line, on a node's loopback address.
func startGreeter(t *testing.T, n *meshtest.Node) (address string) {
	t.Helper()
	l := listen(t, n)
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				defer c.Close()
				fmt.Fprintln(c, "welcome")
				for lines := bufio.NewScanner(c); lines.Scan(); {
					fmt.Fprintln(c, lines.Text())
				}
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		serving.Wait()
	})
	return l.Addr().String()
}

// line is a connection to a server that talks in lines.
type line struct {
	net.Conn
	lines *bufio.Scanner
}

func dialLine(t *testing.T, n *meshtest.Node, address string) *line {
	t.Helper()
	c, err := n.DialContext(t.Context(), "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	return newLine(t, c)
}

func newLine(t *testing.T, c net.Conn) *line {
	t.Cleanup(func() { c.Close() })
	return &line{Conn: c, lines: bufio.NewScanner(c)}
}

func (l *line) read(t *testing.T) string {
	t.Helper()
	if err := l.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if !l.lines.Scan() {
		t.Fatalf("the connection ended: %v", l.lines.Err())
	}
	return l.lines.Text()
}

func (l *line) say(t *testing.T, text string) (answer string) {
	t.Helper()
	if _, err := fmt.Fprintln(l, text); err != nil {
		t.Fatal(err)
	}
	return l.read(t)
}

// captures returns how many elements a set of the agent's rules has, -1 if there is no such set.
func captures(t *testing.T, a *meshtest.Agent, set string) int {
	t.Helper()
	answer, err := a.Admin.GetCapture(t.Context(), &meshv1.GetCaptureRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range answer.Captures[0].Sets {
		if s.Name == set {
			return int(s.Elements)
		}
	}
	return -1
}
