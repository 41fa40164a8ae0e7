package dataplane_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/sniff"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
)

// serveBytes starts a replica that serves each connection to its end.
func (m *mesh) serveBytes(l net.Listener, serve func(net.Conn)) {
	m.t.Helper()
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				serve(c)
			})
		}
	})
	m.t.Cleanup(func() { l.Close(); wg.Wait() })
}

// greet says a word first, and then what it hears.
func greet(c net.Conn) {
	io.WriteString(c, "ready\n")
	io.Copy(c, c)
}

// conversation has a greeting, an echo, and the end of either direction.
func conversation(t *testing.T, at string) {
	t.Helper()
	c := dial(t, at)
	if line, err := c.in.ReadString('\n'); line != "ready\n" {
		t.Fatalf("greeted with %q, %v", line, err)
	}
	c.send("hello")
	c.Conn.(*net.TCPConn).CloseWrite()
	if got, err := io.ReadAll(c.in); string(got) != "hello" || err != nil {
		t.Errorf("got %q, %v", got, err)
	}
}

// TestPorts has a port for a service at each of two agents, where one has the replica.
func TestPorts(t *testing.T) {
	m := meshConfig{ports: []registry.ServiceName{"db", "web", "none"}}.newMesh(t, "a", "b")
	l := listen(t, "127.0.0.1:0")
	m.serveBytes(l, greet)
	m.register("db", "b", l.Addr().String())
	m.serve("web", "b", func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, r.Host) })
	for _, n := range m.nodes {
		conversation(t, n.ports["db"])

		c := dial(t, n.ports["web"])
		for range 2 {
			c.send("GET / HTTP/1.1\r\nHost: example.com\r\n\r\n")
			if resp, body := c.answer("GET"); resp.StatusCode != 200 || body != "example.com" {
				t.Errorf("node %s: got %d, %q", n.name, resp.StatusCode, body)
			}
		}
		c = dial(t, n.ports["web"])
		<-time.After(policy.Default().DetectTimeout + 20*time.Millisecond) // a client that is slow
		c.send("GET / HTTP/1.1\r\nHost: example.com\r\n\r\n")
		if resp, body := c.answer("GET"); resp.StatusCode != 200 || body != "example.com" {
			t.Errorf("node %s: a slow client got %d, %q", n.name, resp.StatusCode, body)
		}
		c.send("GET / HTTP/1.1\r\nHost: example.com\r\n\r\n")
		c.answer("GET")

		c = dial(t, n.ports["none"])
		c.send("bytes")
		if got, err := io.ReadAll(c.in); err == nil {
			t.Errorf("node %s: a service that is not there answers %q", n.name, got)
		}
	}
	m.quiet()
}

// TestDeclaredProtocol has a service that is known to speak bytes: a port for it does not wait, nor look at them. If its
// replicas don't agree it does.
func TestDeclaredProtocol(t *testing.T) {
	m := meshConfig{ports: []registry.ServiceName{"db"}}.newMesh(t, "a", "b")
	m.setPolicy("db", func(p *policy.Policy) { p.DetectTimeout = time.Minute })
	l := listen(t, "127.0.0.1:0")
	m.serveBytes(l, greet)
	e := registry.Endpoint{Service: "db", Node: "b", Protocol: policy.ProtocolTCP}
	e.Address = l.Addr().(*net.TCPAddr).AddrPort()
	m.registerAs(e)
	for _, n := range m.nodes {
		conversation(t, n.ports["db"])
	}

	m.register("db", "a", listen(t, "127.0.0.1:0").Addr().String())
	c := dial(t, m.nodes["a"].ports["db"])
	c.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
	if line, err := c.in.ReadString('\n'); err == nil {
		t.Errorf("greeted with %q before the time to detect was over", line)
	}
}

// TestUnixSockets has replicas on sockets, at the agent itself and at another.
func TestUnixSockets(t *testing.T) {
	m := meshConfig{ports: []registry.ServiceName{"db"}}.newMesh(t, "a", "b")
	dir, err := os.MkdirTemp("", "sockets") // its name is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket := func(name string) (net.Listener, string) {
		path := filepath.Join(dir, name)
		l, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		return l, path
	}
	bytes, path := socket("db")
	m.serveBytes(bytes, greet)
	db := m.registerAs(registry.Endpoint{Service: "db", Node: "a", Socket: path})
	pages, path := socket("web")
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(w, r.Body)
	})}
	var wg sync.WaitGroup
	wg.Go(func() { s.Serve(pages) })
	t.Cleanup(func() { s.Close(); wg.Wait() })
	m.registerAs(registry.Endpoint{Service: "web", Node: "a", Socket: path})

	body := strings.Repeat("x", 1<<20)
	for _, n := range m.nodes {
		conversation(t, n.ports["db"])
		for _, size := range []int{0, 100, 1 << 20, 1} {
			resp, got := n.do(t, request(t, "POST", "http://web.mesh/", strings.NewReader(body[:size])))
			if resp.StatusCode != 200 || got != body[:size] {
				t.Errorf("node %s: got status %d and %d bytes, want %d", n.name, resp.StatusCode, len(got), size)
			}
		}
		for _, o := range n.Observe("db").Outbound {
			for _, e := range o.Endpoints {
				if e.Id != string(db.ID()) || e.Address != "unix:"+filepath.Join(dir, "db") || e.Picks == 0 {
					t.Errorf("node %s sees %v", n.name, e)
				}
			}
		}
	}
	m.quiet()
}

// TestProxyProtocol has a replica learn where its callers are, be they at its own agent or at another.
func TestProxyProtocol(t *testing.T) {
	m := meshConfig{ports: []registry.ServiceName{"db", "web"}}.newMesh(t, "a", "b")
	l := listen(t, "127.0.0.1:0")
	m.serveBytes(l, func(c net.Conn) {
		in := bufio.NewReader(c)
		b, err := in.Peek(28)
		from, to, n, parseErr := sniff.ParseProxyHeader(b)
		in.Discard(n)
		line, _ := in.ReadString('\n')
		fmt.Fprintf(c, "%s to %s: %s, %v, %v", from, to, strings.TrimSpace(line), err, parseErr)
	})
	m.register("db", "b", l.Addr().String())
	m.serve("web", "b", func(w http.ResponseWriter, r *http.Request) {})
	for _, service := range []registry.ServiceName{"db", "web"} {
		m.setPolicy(service, func(p *policy.Policy) { p.ProxyProtocol = true })
	}
	for _, n := range m.nodes {
		c := dial(t, n.ports["db"])
		c.send("hello\n")
		got, err := io.ReadAll(c.in)
		if want := fmt.Sprintf("%s to %s: hello, <nil>, <nil>", c.LocalAddr(), l.Addr()); string(got) != want || err != nil {
			t.Errorf("node %s: the replica says %q, %v; want %q", n.name, got, err, want)
		}
		c.Close()
		if resp, _ := n.get(t, "http://web.mesh/"); resp.StatusCode != 200 { // requests say it in their own ways
			t.Errorf("node %s: got status %d", n.name, resp.StatusCode)
		}
	}
	m.quiet()
}
