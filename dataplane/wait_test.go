package dataplane_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
)

// losses are the ways in which a service is without replicas, each with what brings one back.
var losses = []struct {
	name string
	lose func(t *testing.T, m *mesh, at registry.NodeName) (back func())
}{
	{"unhealthy", func(_ *testing.T, m *mesh, at registry.NodeName) func() {
		_, e := m.serve("web", at, echo)
		m.setState(e.ID(), registry.Unhealthy)
		return func() { m.setState(e.ID(), registry.Ready) }
	}},
	{"gone", func(_ *testing.T, m *mesh, at registry.NodeName) func() {
		m.register("web", at, nowhere(m))
		m.endpoints = nil
		m.publish()
		return func() { m.serve("web", at, echo) }
	}},
	{"dead", func(t *testing.T, m *mesh, at registry.NodeName) func() {
		address := deaf(t)
		m.register("web", at, address)
		return func() {
			s := &http.Server{Handler: http.HandlerFunc(echo)}
			l := listen(t, address)
			served := make(chan error, 1)
			go func() { served <- s.Serve(l) }()
			t.Cleanup(func() { s.Close(); <-served })
		}
	}},
}

const waits = `headroom_outbound_waits_total{service="web"}`

// TestWaitForReady expects requests to a service that has just lost its last replica to wait for the next.
func TestWaitForReady(t *testing.T) {
	for _, loss := range losses {
		for _, way := range []struct {
			client string
			at     registry.NodeName
		}{{"http1", "a"}, {"http1", "b"}, {"http2", "a"}, {"http2", "b"}} {
			t.Run(fmt.Sprint(loss.name, " ", way), func(t *testing.T) {
				m := newMesh(t, "a", "b")
				m.setPolicy("web", noChange)
				back := loss.lose(t, m, way.at)
				a := m.nodes["a"]
				if way.client == "http2" {
					a.client = a.http2Client(t)
				}
				const several = 5
				answers := make(chan string, several)
				for range several {
					go func() {
						_, body := a.do(t, request(t, http.MethodPost, "http://web.mesh/", strings.NewReader("hello")))
						answers <- body
					}()
				}
				wantMetric(t, a, waits, several)
				back()
				for range several {
					if body := within(t, "answer", answers); body != "hello" {
						t.Errorf("got %q", body)
					}
				}
				m.quiet()
			})
		}
	}
}

// TestWaitForReadyTCP does the same with a connection.
func TestWaitForReadyTCP(t *testing.T) {
	m := meshConfig{ports: []registry.ServiceName{"db"}}.newMesh(t, "a")
	l := listen(t, "127.0.0.1:0")
	m.serveBytes(l, greet)
	e := m.register("db", "a", l.Addr().String())
	m.setState(e.ID(), registry.Unhealthy)
	done := make(chan bool, 1)
	go func() {
		conversation(t, m.nodes["a"].ports["db"])
		done <- true
	}()
	wantMetric(t, m.nodes["a"], `headroom_outbound_waits_total{service="db"}`, 1)
	m.setState(e.ID(), registry.Ready)
	within(t, "conversation", done)
	m.quiet()
}

// TestWaitForReadyEnds expects that who can't get a replica in time hears of it, and whoever comes later, at once.
func TestWaitForReadyEnds(t *testing.T) {
	for _, test := range []struct {
		name   string
		policy func(*policy.Policy)
		first  fault.Reason
		waits  float64
	}{
		{"after its time", func(p *policy.Policy) { p.WaitForReady = 50 * time.Millisecond }, "", 1},
		{"off", func(p *policy.Policy) { p.WaitForReady = 0 }, "", 0},
		{"at the timeout", func(p *policy.Policy) { p.Timeout = 50 * time.Millisecond }, fault.Timeout, 1},
	} {
		for _, loss := range losses {
			t.Run(test.name+" "+loss.name, func(t *testing.T) {
				m := newMesh(t, "a", "b")
				m.setPolicy("web", test.policy)
				loss.lose(t, m, "b")
				a := m.nodes["a"]
				usual := map[string]fault.Reason{"unhealthy": fault.NoneReady, "gone": fault.NoEndpoints, "dead": fault.RetriesExhausted}[loss.name]
				resp, body := a.get(t, "http://web.mesh/")
				if test.first != "" {
					wantFault(t, resp, body, test.first)
					m.setPolicy("web", func(p *policy.Policy) { p.WaitForReady = time.Millisecond }) // which is over
				} else {
					wantFault(t, resp, body, usual)
				}
				resp, body = a.get(t, "http://web.mesh/")
				wantFault(t, resp, body, usual)
				if got := series(t, a)[waits]; got != test.waits {
					t.Errorf("%v requests waited, want %v", got, test.waits)
				}
				m.quiet()
			})
		}
	}
}

// TestWaitForReadyCanceled has a caller go away meanwhile.
func TestWaitForReadyCanceled(t *testing.T) {
	for _, loss := range losses {
		t.Run(loss.name, func(t *testing.T) {
			m := newMesh(t, "a", "b")
			m.setPolicy("web", noChange)
			loss.lose(t, m, "b")
			a := m.nodes["a"]
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() {
				resp, err := a.client.Do(request(t, http.MethodPost, "http://web.mesh/", strings.NewReader("hello")).WithContext(ctx))
				if err == nil {
					_, _ = io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
				}
				done <- err
			}()
			wantMetric(t, a, waits, 1)
			cancel()
			if err := within(t, "end", done); err == nil {
				t.Error("it was answered")
			}
			wantMetric(t, a, `headroom_outbound_requests_total{code="4xx",reason="canceled",service="web"}`, 1)
			m.quiet()
		})
	}
}
