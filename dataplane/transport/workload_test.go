package transport_test

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/identity"
	"github.com/headroom-mesh/headroom/dataplane/identity/ca"
	"github.com/headroom-mesh/headroom/dataplane/transport"
)

// issuing is the identity of an agent that has the CA.
func issuing(t *testing.T, dir, node string) *identity.Source {
	t.Helper()
	s, err := identity.New(identity.Config{Load: ca.Loader(dir, nodeID(t, "headroom.local", node))})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func caFolder(t *testing.T) (string, *ca.CA) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "ca")
	d, err := identity.ParseDomain("headroom.local")
	if err != nil {
		t.Fatal(err)
	}
	authority, err := ca.Init(dir, ca.Options{Domain: d}, time.Now().Add(-24*time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	return dir, authority
}

func checkout() identity.Workload {
	return identity.Workload{Namespace: "shop", ServiceAccount: "checkout"}
}

// peers accepts connections for all protocols, and tells whose they are.
func peers(t *testing.T, tr transport.Transport) (netip.AddrPort, <-chan string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	mux := transport.NewMux(tr, slog.New(slog.DiscardHandler), nil)
	ids := make(chan string, 10)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	t.Cleanup(running.Wait)
	t.Cleanup(cancel)
	for _, p := range []transport.Protocol{transport.HTTP, transport.HTTP2, transport.Probe, transport.RPC} {
		l := mux.Listener(p)
		running.Go(func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				ids <- identity.OfPeer(c).String()
				c.Close()
			}
		})
	}
	running.Go(func() { mux.Run(ctx, l) })
	return l.Addr().(*net.TCPAddr).AddrPort(), ids
}

// TestWorkloadsCall has an agent call for itself and for workloads, again and again: sessions that are resumed are never
// another's.
func TestWorkloadsCall(t *testing.T) {
	dir, _ := caFolder(t)
	a, _ := mutual(transport.MutualConfig{Identity: issuing(t, dir, "a"), NamesAt: nodes("b")})
	b, _ := mutual(transport.MutualConfig{Identity: issuing(t, dir, "b")})
	addr, ids := peers(t, b)
	for range 3 {
		for _, tt := range []struct {
			as   identity.Workload
			want string
		}{
			{identity.Workload{}, "spiffe://headroom.local/node/a"},
			{checkout(), "spiffe://headroom.local/ns/shop/sa/checkout"},
			{identity.Workload{Namespace: "shop", ServiceAccount: "cart.v2"}, "spiffe://headroom.local/ns/shop/sa/cart.v2"},
		} {
			for _, p := range []transport.Protocol{transport.HTTP, transport.HTTP2} {
				c, err := a.As(tt.as).Dial(t.Context(), addr, p)
				if err != nil {
					t.Fatal(err)
				}
				if got := <-ids; got != tt.want {
					t.Errorf("%s by %s: the other end sees %q, want %s", tt.as, p, got, tt.want)
				}
				c.Close()
			}
		}
	}
	if _, err := a.As(identity.Workload{Namespace: "a b", ServiceAccount: "x"}).Dial(t.Context(), addr, transport.HTTP); err == nil || !strings.Contains(err.Error(), "workload a b/x can't be part of a SPIFFE ID") {
		t.Errorf("error %v", err)
	}
}

// TestWithoutCA has an agent that can't issue certificates call for a workload: the node's does.
func TestWithoutCA(t *testing.T) {
	_, authority := caFolder(t)
	a, _ := mutual(transport.MutualConfig{Identity: sourceOf(t, issued(t, authority, "a", time.Hour, 0))})
	b, _ := mutual(transport.MutualConfig{Identity: sourceOf(t, issued(t, authority, "b", time.Hour, 0))})
	addr, ids := peers(t, b)
	c, err := a.As(checkout()).Dial(t.Context(), addr, transport.HTTP)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if got := <-ids; got != "spiffe://headroom.local/node/a" {
		t.Errorf("the other end sees %s", got)
	}
}

// TestWorkloadsOnlyCall refuses the certificate of a workload to an end that is dialled, and for what agents say to one another.
func TestWorkloadsOnlyCall(t *testing.T) {
	_, authority := caFolder(t)
	id, err := identity.WorkloadID(authority.Domain, checkout())
	if err != nil {
		t.Fatal(err)
	}
	files, err := authority.Issue(id, time.Hour, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	workload := sourceOf(t, files)
	node := sourceOf(t, issued(t, authority, "a", time.Hour, 0))

	a, _ := mutual(transport.MutualConfig{Identity: node})
	w, _ := mutual(transport.MutualConfig{Identity: workload})
	named, _ := mutual(transport.MutualConfig{Identity: node, NamesAt: nodes("b")})
	posing, _ := peers(t, w)
	for dialer, want := range map[transport.Transport]string{
		a:     "that of spiffe://headroom.local/ns/shop/sa/checkout, a workload, and an agent is expected there",
		named: "that of spiffe://headroom.local/ns/shop/sa/checkout, and spiffe://headroom.local/node/b is expected there",
	} {
		if _, err := dialFor(t, dialer, posing); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}

	addr, ids := peers(t, a)
	for _, p := range []transport.Protocol{transport.Probe, transport.RPC} {
		if _, err := w.Dial(t.Context(), addr, p); err == nil {
			t.Errorf("a workload may use %s", p)
		}
	}
	if _, err := w.Dial(t.Context(), addr, transport.HTTP); err != nil {
		t.Error(err)
	} else if got := <-ids; got != id.String() {
		t.Errorf("seen is %s", got)
	}
}
