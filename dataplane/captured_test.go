package dataplane_test

import (
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
)

// TestFronts expects an address that stands for a service to be captured once the service has a replica.
func TestFronts(t *testing.T) {
	m := newMesh(t, "a")
	m.serve("cart.shop", "a", name("cart"))
	n := m.nodes["a"]
	cart, other := netip.MustParseAddrPort("10.96.0.7:80"), netip.MustParseAddrPort("10.96.0.8:80")
	wantCaptured := func(want ...netip.AddrPort) {
		t.Helper()
		if got := n.CapturedAddresses(); !slices.Equal(got, want) {
			t.Errorf("captured: %v, want %v", got, want)
		}
	}
	wantCaptured()
	n.UpdateFronts(map[netip.AddrPort]registry.ServiceName{cart: "cart.shop", other: "nosuch.shop"})
	wantCaptured(cart)
	m.setPolicy("nosuch.shop", noChange)
	wantCaptured(cart) // it is known, but has none
	m.setPolicy("cart.shop", noChange)
	m.serve("nosuch.shop", "a", name("other"))
	if got := n.CapturedAddresses(); len(got) != 2 {
		t.Errorf("captured: %v, want both", got)
	}
	m.endpoints = nil
	m.publish()
	if got := n.CapturedAddresses(); len(got) != 2 {
		t.Errorf("captured when the replicas are gone: %v, want both", got)
	}
	n.UpdateFronts(nil)
	wantCaptured()
}

// TestOutside expects a request that the mesh can't deliver to go where the service is to be had without it, and to be
// answered by the mesh if it isn't there either.
func TestOutside(t *testing.T) {
	outside := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.Copy(w, r.Body) }))
	defer outside.Close()
	var log syncBuffer
	m := meshConfig{log: &log}.newMesh(t, "a", "b")
	n := m.nodes["a"]
	m.setPolicy("cart.shop", noRetries)
	ask := func() (*http.Response, string) {
		t.Helper()
		return n.do(t, request(t, http.MethodPost, "http://cart.shop.mesh/", strings.NewReader("outside")))
	}
	answered := func(when string) {
		t.Helper()
		if resp, body := ask(); resp.StatusCode != http.StatusOK || body != "outside" {
			t.Errorf("%s: %s %q, want it to be answered outside the mesh", when, resp.Status, body)
		}
	}
	resp, body := ask()
	wantFault(t, resp, body, fault.NoEndpoints)
	front := func(at string) {
		n.UpdateFronts(map[netip.AddrPort]registry.ServiceName{mustAddr(at): "cart.shop"})
	}
	front(outside.Listener.Addr().String())
	answered("no replica")
	e := m.register("cart.shop", "b", deaf(t))
	answered("the only replica is dead")
	m.setState(e.ID(), registry.Draining)
	answered("the only replica leaves")
	front(deaf(t))
	resp, body = ask()
	wantFault(t, resp, body, fault.NoneReady)
	m.serve("cart.shop", "b", name("inside"))
	if _, body := ask(); body != "inside" {
		t.Errorf("with a replica in the mesh: answered by %q", body)
	}
	if said := strings.Count(log.String(), "requests leave the mesh"); said != 1 {
		t.Errorf("it is logged %d times that requests leave the mesh, want once:\n%s", said, log.String())
	}
	m.quiet()
}

// TestAwaitsReplica expects a request to wait for the replica that takes the place of one that has ended.
func TestAwaitsReplica(t *testing.T) {
	m := newMesh(t, "a", "b")
	m.setPolicy("cart.shop", func(p *policy.Policy) { noRetries(p); p.WaitForReady = patience })
	m.register("cart.shop", "b", deaf(t))
	front := listen(t, "127.0.0.1:0")
	m.nodes["a"].UpdateFronts(map[netip.AddrPort]registry.ServiceName{mustAddr(front.Addr().String()): "cart.shop"})
	front.Close()
	answers := make(chan string, 1)
	go func() {
		_, body := m.nodes["a"].do(t, request(t, http.MethodPost, "http://cart.shop.mesh/", strings.NewReader("?")))
		answers <- body
	}()
	eventually(t, "first try", func() any { return m.nodes["a"].Observe("cart.shop").Outbound[0].Endpoints[0].Picks }, func(picks any) bool { return picks.(uint64) > 0 })
	m.serve("cart.shop", "b", name("next"))
	if body := within(t, "answer", answers); body != "next" {
		t.Errorf("answered by %q, want the next replica", body)
	}
	m.quiet()
}

// TestDrainingReplica expects each request to a replica that is about to end on a connection of its own.
func TestDrainingReplica(t *testing.T) {
	m := newMesh(t, "a")
	var connections atomic.Int32
	server := httptest.NewUnstartedServer(name("cart"))
	server.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			connections.Add(1)
		}
	}
	server.Start()
	defer server.Close()
	e := m.register("cart", "a", server.Listener.Addr().String())
	three := func() int32 {
		before := connections.Load()
		for range 3 {
			if resp, body := m.nodes["a"].get(t, "http://cart.mesh/"); resp.StatusCode != http.StatusOK {
				t.Fatalf("got %s %s", resp.Status, body)
			}
		}
		return connections.Load() - before
	}
	if n := three(); n != 1 {
		t.Errorf("%d connections for three requests in a row, want 1", n)
	}
	local := m.local("a")
	local[0].State = registry.Draining // which the registry doesn't know yet
	m.nodes["a"].UpdateLocal(local)
	if n := three(); n != 3 {
		t.Errorf("%d connections for three requests to %s, which drains, want 3", n, e.ID())
	}
}
