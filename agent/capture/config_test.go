package capture_test

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/headroom-mesh/headroom/agent/capture"
)

// TestValidate expects each mistake to be named, with what would be right.
func TestValidate(t *testing.T) {
	good := func() capture.Config {
		return capture.Config{Port: 15001, IPv4: netip.MustParsePrefix("198.18.0.0/15"), IPv6: netip.MustParsePrefix("fd68:6472::/96")}
	}
	if err := good().Validate(); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		spoil func(*capture.Config)
		want  string
	}{
		{func(c *capture.Config) { c.Port = 0 }, "Port: want the port"},
		{func(c *capture.Config) { c.RedirectDNS = true }, "DNSPort: want the port"},
		{func(c *capture.Config) { c.IPv4, c.IPv6 = netip.Prefix{}, netip.Prefix{} }, "want a range of virtual addresses"},
		{func(c *capture.Config) { c.IPv4 = c.IPv6 }, "IPv4: fd68:6472::/96 is no range of IPv4 addresses"},
		{func(c *capture.Config) { c.IPv6 = c.IPv4 }, "IPv6: 198.18.0.0/15 is no range of IPv6 addresses"},
		{func(c *capture.Config) { c.IPv6 = netip.MustParsePrefix("::ffff:1.2.0.0/112") }, "no range of IPv6"},
		{func(c *capture.Config) { c.IPv4 = netip.MustParsePrefix("198.18.0.1/15") }, "as in 198.18.0.0/15"},
		{func(c *capture.Config) { c.IPv4 = netip.MustParsePrefix("0.0.0.0/0") }, "most of all addresses"},
		{func(c *capture.Config) { c.IPv4 = netip.MustParsePrefix("127.1.0.0/16") }, "127.0.0.0/8, which has a meaning of its own"},
		{func(c *capture.Config) { c.IPv6 = netip.MustParsePrefix("fe80::/64") }, "fe80::/10, which has a meaning of its own"},
		{func(c *capture.Config) { c.ExemptPorts = []uint16{22, 0} }, "ExemptPorts: 0 is no port"},
		{func(c *capture.Config) { c.TakeOver = true }, "TakeOver: another agent can be taken over from in pods only: set Pod"},
		{func(c *capture.Config) { c.TakeOver, c.Pod, c.Port = true, true, 65535 }, "Port: want the next one, too"},
		{func(c *capture.Config) { c.ExemptCgroups = []string{"a/../b"} }, `ExemptCgroups: "a/../b"`},
		{func(c *capture.Config) { c.ExemptCgroups = []string{"/"} }, `ExemptCgroups: "/"`},
	}
	for _, tt := range tests {
		cfg := good()
		tt.spoil(&cfg)
		if err := cfg.Validate(); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("got error %v, want one with %q", err, tt.want)
		}
	}
	all := capture.Config{ExemptPorts: []uint16{0}}.Validate()
	for _, want := range []string{"Port:", "IPv4, IPv6:", "ExemptPorts:"} {
		if !strings.Contains(all.Error(), want) {
			t.Errorf("error %v does not name %s", all, want)
		}
	}
}
