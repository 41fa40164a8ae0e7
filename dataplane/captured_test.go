package dataplane_test

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/headroom-mesh/headroom/registry"
)

// TestFronts expects an address that stands for a service to be captured as long as the service has replicas.
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
	m.serve("nosuch.shop", "a", name("other"))
	if got := n.CapturedAddresses(); len(got) != 2 {
		t.Errorf("captured: %v, want both", got)
	}
	n.UpdateFronts(nil)
	wantCaptured()
}
