package transport

import (
	"net/netip"
	"testing"
	"time"
)

// TestPeers follows what is thought of an agent.
func TestPeers(t *testing.T) {
	at := netip.MustParseAddrPort("10.0.0.1:15008")
	start := time.Unix(1000, 0)
	now := func(seconds int) time.Time { return start.Add(time.Duration(seconds) * time.Second) }
	var ps peers
	if ps.isPlain(at, now(0)) {
		t.Error("an agent that was never dialled is taken for a plain one")
	}
	if !ps.failed(at, now(0)) {
		t.Error("one that never spoke TLS is not dialled in the clear")
	}
	if !ps.isPlain(at, now(59)) || ps.isPlain(at, now(60)) {
		t.Error("want it to be remembered for a minute")
	}
	ps.succeeded(at)
	if ps.isPlain(at, now(61)) {
		t.Error("it speaks TLS, and is taken for a plain one")
	}
	// It is restarted.
	for _, second := range []int{70, 71, 74} {
		if ps.failed(at, now(second)) {
			t.Errorf("dialled in the clear %d s after the first failure", second-70)
		}
	}
	ps.succeeded(at)
	// It comes back without a certificate.
	if ps.failed(at, now(80)) || !ps.failed(at, now(85)) || !ps.isPlain(at, now(86)) {
		t.Error("not dialled in the clear after 5 s")
	}
	ps.heard(netip.MustParseAddr("10.0.0.2"))
	if !ps.isPlain(at, now(86)) {
		t.Error("what another agent does is taken for what it does")
	}
	ps.heard(at.Addr())
	if ps.isPlain(at, now(86)) {
		t.Error("it has dialled in TLS, and is taken for a plain one")
	}
	for i := range 3 * maxPeers {
		ps.succeeded(netip.AddrPortFrom(at.Addr(), uint16(i)))
	}
	if len(ps.at) > maxPeers {
		t.Errorf("%d agents are remembered", len(ps.at))
	}
}
