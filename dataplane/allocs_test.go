//go:build !race

package dataplane_test

import (
	"io"
	"net"
	"runtime"
	"testing"

	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
)

// TestNoAllocations counts those of all of the process while requests pass through agents, with their probes, metrics and policies: none.
func TestNoAllocations(t *testing.T) {
	for _, balancer := range []policy.Balancer{policy.BalancerRoundRobin, policy.BalancerPrequal} {
		t.Run(string(balancer), func(t *testing.T) {
			hops(t, func(t *testing.T, m *mesh, a *node, replica registry.NodeName) {
				const answer = "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 5\r\n\r\nhello"
				m.register("web", replica, answering(t, answer))
				m.setPolicy("web", func(p *policy.Policy) { p.Balancer = balancer })
				wantNoAllocations(t, a.proxy, answer)
			})
		})
	}
}

// TestNoAllocationsForIdentity has requests of this node and of a workload, of which the replica
// learns who calls. TLS has allocations of its own, so it is on the same node.
func TestNoAllocationsForIdentity(t *testing.T) {
	const answer = "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 5\r\n\r\nhello"
	m := newCertified(t, true, nil)
	m.register("web", "a", answering(t, answer))
	m.setPolicy("web", func(p *policy.Policy) { p.Forwarded = policy.ForwardedXFF })
	for name, at := range map[string]string{"node": m.nodes["a"].proxy, "workload": m.nodes["a"].ports["web"]} {
		t.Run(name, func(t *testing.T) { wantNoAllocations(t, at, answer) })
	}
}

func wantNoAllocations(t *testing.T, at, answer string) {
	t.Helper()
	c := dial(t, at)
	request, buf := []byte("GET / HTTP/1.1\r\nHost: web.mesh\r\nUser-Agent: curl/8.5.0\r\nAccept: */*\r\n\r\n"), make([]byte, 4096)
	ask := func() {
		if _, err := c.Conn.Write(request); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadAtLeast(c.Conn, buf, len(answer)); err != nil {
			t.Fatal(err)
		}
	}
	for range 500 {
		ask()
	}
	const n = 5000
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range n {
		ask()
	}
	runtime.ReadMemStats(&after)
	// A pool may lose what it has now and then, and the runtime has business of its own.
	if a := float64(after.Mallocs-before.Mallocs) / n; a > 0.1 {
		t.Errorf("%.2f allocations a request", a)
	}
}

// answering is a replica that answers each request, which comes in one piece, and does not allocate either.
func answering(t *testing.T, answer string) string {
	l := listen(t, "127.0.0.1:0")
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func(c net.Conn) {
				defer c.Close()
				b, answer := make([]byte, 4096), []byte(answer)
				for {
					if _, err := c.Read(b); err != nil {
						return
					}
					if _, err := c.Write(answer); err != nil {
						return
					}
				}
			}(c)
		}
	}()
	return l.Addr().String()
}
