package agent

import (
	"net/netip"
	"strings"
	"testing"
)

func TestRegistryReadiness(t *testing.T) {
	for _, tt := range []struct {
		revision  int64
		connected bool
		note, err string
	}{
		{0, false, "", "no snapshot"},
		{0, true, "", "no snapshot"},
		{5, false, "not connected: serving the last snapshot", ""},
		{5, true, "", ""},
	} {
		note, err := registryReady(tt.revision, tt.connected)
		if note != tt.note || (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) {
			t.Errorf("%+v: got %q, %v", tt, note, err)
		}
	}
}

func TestNodeNameReadiness(t *testing.T) {
	for _, tt := range []struct{ connected, claimed, ready bool }{
		{true, true, true}, {true, false, false}, {false, true, true}, {false, false, true},
	} {
		err := nameReady("n1", tt.connected, tt.claimed)
		if (err == nil) != tt.ready || err != nil && !strings.Contains(err.Error(), `another agent holds the name "n1"`) {
			t.Errorf("%+v: got %v", tt, err)
		}
	}
}

func TestPortsWithoutAddresses(t *testing.T) {
	c := Config{
		Bind: netip.MustParseAddr("10.0.0.1"), Gossip: netip.AddrPortFrom(netip.Addr{}, 7947),
		Admin: netip.AddrPortFrom(netip.Addr{}, 15011), Metrics: netip.AddrPortFrom(netip.Addr{}, 15020),
	}.withDefaults()
	for want, got := range map[string]netip.AddrPort{
		"10.0.0.1:7947": c.Gossip, "10.0.0.1:15008": c.Mesh, "127.0.0.1:15011": c.Admin, "10.0.0.1:15020": c.Metrics,
	} {
		if got.String() != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
	if c := (Config{}).withDefaults(); c.Metrics.IsValid() {
		t.Errorf("metrics are shown at %s, though nobody asked", c.Metrics)
	}
}
