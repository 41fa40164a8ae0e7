package dataplane_test

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
)

// deaf returns an address at which nobody listens.
func deaf(t *testing.T) string {
	l := listen(t, "127.0.0.1:0")
	defer l.Close()
	return l.Addr().String()
}

// roundRobin tries one after the other, and says at once when there is none left.
func roundRobin(p *policy.Policy) {
	p.Balancer = policy.BalancerRoundRobin
	p.WaitForReady = 0
}

func noRetries(p *policy.Policy) {
	roundRobin(p)
	p.RetryBudget.Ratio, p.RetryBudget.MinPerSecond = 0, 0
}

// unconnectable are the ways in which a replica can't be reached although it is registered.
var unconnectable = []struct {
	name string
	add  func(t *testing.T, m *mesh)
}{
	{"dead replica, same node", func(t *testing.T, m *mesh) { m.register("web", "a", deaf(t)) }},
	{"dead replica, other node", func(t *testing.T, m *mesh) { m.register("web", "b", deaf(t)) }},
	{"dead agent", func(t *testing.T, m *mesh) {
		e := m.register("web", "b", nowhere(m))
		e.Node, e.Agent = "gone", mustAddr(deaf(t))
		m.endpoints[len(m.endpoints)-1] = e
		m.publish()
	}},
	{"unknown to its agent", func(t *testing.T, m *mesh) {
		m.register("web", "b", nowhere(m))
		m.nodes["b"].UpdateLocal(nil)
	}},
}

// nowhere returns an address that no other endpoint has.
func nowhere(m *mesh) string { return fmt.Sprintf("127.0.0.1:%d", 1+len(m.endpoints)) }

func TestRetriesElsewhere(t *testing.T) {
	for _, dead := range unconnectable {
		t.Run(dead.name, func(t *testing.T) {
			m := newMesh(t, "a", "b", "c")
			m.setPolicy("web", roundRobin)
			m.serve("web", "c", func(w http.ResponseWriter, r *http.Request) { io.Copy(w, r.Body) })
			dead.add(t, m)
			a := m.nodes["a"]
			for i := range 4 {
				body := fmt.Sprint("body ", i)
				resp, got := a.do(t, request(t, "POST", "http://web.mesh/", strings.NewReader(body)))
				if resp.StatusCode != 200 || got != body {
					t.Errorf("got %d %q", resp.StatusCode, got)
				}
			}
			m.quiet()
			v := a.Observe("web").Outbound[0]
			if v.Retries == 0 || v.Errors != 0 || v.Requests != 4 {
				t.Errorf("%d requests, %d retries, %d errors", v.Requests, v.Retries, v.Errors)
			}
		})
	}
}

func TestRetriesAreBounded(t *testing.T) {
	for _, dead := range unconnectable {
		t.Run(dead.name, func(t *testing.T) {
			m := newMesh(t, "a", "b", "c")
			for range 5 {
				dead.add(t, m)
			}
			a := m.nodes["a"]
			for _, test := range []struct {
				policy  func(*policy.Policy)
				retries uint64
			}{{roundRobin, 2}, {noRetries, 2}} { // counted together
				m.setPolicy("web", test.policy)
				if dead.name == "unknown to its agent" {
					m.nodes["b"].UpdateLocal(nil)
				}
				resp, body := a.get(t, "http://web.mesh/")
				t.Log(body)
				wantFault(t, resp, body, fault.RetriesExhausted)
				if n := a.Observe("web").Outbound[0].Retries; n != test.retries {
					t.Errorf("%d retries, want %d", n, test.retries)
				}
			}
			wantMetric(t, a, `headroom_outbound_retry_budget_exhausted_total{service="web"}`, 1)
			m.quiet()
		})
	}
}

// TestTheOnlyReplicaIsTriedOnce has nowhere else to send the request.
func TestTheOnlyReplicaIsTriedOnce(t *testing.T) {
	for _, dead := range unconnectable {
		t.Run(dead.name, func(t *testing.T) {
			m := newMesh(t, "a", "b", "c")
			m.setPolicy("web", func(p *policy.Policy) { p.WaitForReady = 0 })
			dead.add(t, m)
			a := m.nodes["a"]
			resp, body := a.get(t, "http://web.mesh/")
			wantFault(t, resp, body, fault.RetriesExhausted)
			if v := a.Observe("web").Outbound[0]; v.Endpoints[0].Errors != 1 {
				t.Errorf("it was tried %d times", v.Endpoints[0].Errors)
			}
			m.quiet()
		})
	}
}

// TestReplay sends bodies of all sizes to where the first try finds no replica. Short ones arrive whole; of long ones
// either all arrives or nothing.
func TestReplay(t *testing.T) {
	for _, dead := range unconnectable {
		t.Run(dead.name, func(t *testing.T) {
			m := newMesh(t, "a", "b", "c")
			m.serve("web", "c", func(w http.ResponseWriter, r *http.Request) {
				body, err := io.ReadAll(r.Body)
				if err == nil {
					w.Write(body)
				}
			})
			dead.add(t, m)
			rng := rand.NewChaCha8([32]byte{})
			for _, size := range []int{0, 1, 4096, 64<<10 - 1, 64 << 10, 64<<10 + 1, 1 << 20} {
				m.setPolicy("web", roundRobin) // forget who was ejected
				for try := range 4 {
					body := make([]byte, size)
					rng.Read(body)
					var reader io.Reader = bytes.NewReader(body)
					if try%2 == 1 {
						reader = io.MultiReader(reader) // of unknown length
					}
					resp, got := m.nodes["a"].do(t, request(t, "POST", "http://web.mesh/", reader))
					switch {
					case resp.StatusCode == 200 && got == string(body):
					case size > 64<<10 && resp.StatusCode == 503:
						wantFault(t, resp, got, fault.RetriesExhausted)
					default:
						t.Errorf("%d bytes: got %d, %d bytes", size, resp.StatusCode, len(got))
					}
				}
			}
			m.quiet()
		})
	}
}

// TestRetriesMidway retries while the caller, who has sent a part of its request, waits to see that arrive.
func TestRetriesMidway(t *testing.T) {
	for _, dead := range unconnectable {
		t.Run(dead.name, func(t *testing.T) {
			m := newMesh(t, "a", "b", "c")
			seen := make(chan string, 1)
			m.serve("web", "c", func(w http.ResponseWriter, r *http.Request) {
				buf := make([]byte, 5)
				io.ReadFull(r.Body, buf)
				seen <- string(buf)
				io.Copy(w, r.Body)
			})
			m.setPolicy("web", roundRobin)
			dead.add(t, m)
			for range 4 {
				c := m.nodes["a"].dial(t)
				c.send("POST / HTTP/1.1\r\nHost: web.mesh\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n")
				if got := within(t, "part of a request", seen); got != "abcde" {
					t.Errorf("the replica gets %q", got)
				}
				c.send("3\r\nfgh\r\n0\r\n\r\n")
				if resp, body := c.answer("POST"); resp.StatusCode != 200 || body != "fgh" {
					t.Errorf("got %d %q", resp.StatusCode, body)
				}
			}
			m.quiet()
			if n := m.nodes["a"].Observe("web").Outbound[0].Retries; n == 0 {
				t.Error("no retries")
			}
		})
	}
}

// TestNothingIsSentTwice has replicas that take a request and break off. Another may not get it.
func TestNothingIsSentTwice(t *testing.T) {
	for _, warm := range []bool{false, true} {
		t.Run(fmt.Sprintf("warm connections %v", warm), func(t *testing.T) {
			hops(t, func(t *testing.T, m *mesh, a *node, node registry.NodeName) {
				var posts atomic.Int32
				dying := func(w http.ResponseWriter, r *http.Request) {
					if r.URL.Path == "/warm" {
						return
					}
					posts.Add(1)
					io.Copy(io.Discard, r.Body)
					panic(http.ErrAbortHandler)
				}
				for range 3 {
					m.serve("web", node, dying)
				}
				m.setPolicy("web", roundRobin)
				for i := range 9 {
					for range 6 {
						if warm {
							a.get(t, "http://web.mesh/warm")
						}
					}
					resp, body := a.do(t, request(t, "POST", "http://web.mesh/", strings.NewReader("once")))
					wantFault(t, resp, body, fault.Reset)
					if n := posts.Load(); n != int32(i+1) {
						t.Fatalf("%d requests came to replicas, %d were sent", n, i+1)
					}
				}
			})
		})
	}
}
