package agent

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestProblemsOfPartsAreToldInFlags(t *testing.T) {
	dir := t.TempDir()
	noKey := filepath.Join(dir, "no.pem")
	if err := os.WriteFile(noKey, []byte("nothing"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		set  func(*Config)
		want []string // starts of lines
	}{
		{"etcd member", func(c *Config) { c.Etcd = []string{"http://ok:1", "http://bad"} }, []string{"--etcd: want http://HOST:PORT"}},
		{"etcd members", func(c *Config) { c.Etcd = []string{"bad", "ftp://h:1"}; c.EtcdPrefix = "x" }, []string{
			"--etcd: want http://HOST:PORT", "--etcd: want http://HOST:PORT", "--etcd-prefix: want a path"}},
		{"missing CA", func(c *Config) { c.EtcdCA = filepath.Join(dir, "none") }, []string{"--etcd-ca: open " + dir}},
		{"bad CA", func(c *Config) { c.EtcdCA = noKey }, []string{"--etcd-ca: want certificates in PEM"}},
		{"bad certificate", func(c *Config) { c.EtcdCert, c.EtcdKey = noKey, noKey }, []string{"--etcd-cert, --etcd-key: "}},
		{"seeds", func(c *Config) { c.Join = []string{"h", "h:1", "h:x"} }, []string{`--join: "h": want HOST:PORT`, `--join: "h:x": want`}},
		{"zone", func(c *Config) { c.Zone = strings.Repeat("z", 999) }, []string{"--zone: "}},
		{"no folder of services", func(c *Config) { c.Services = filepath.Join(dir, "none") }, []string{"--services: read the folder, which must exist"}},
		{"long path of the socket", func(c *Config) { c.AdminSocket = "/" + strings.Repeat("x", 200) }, []string{"--admin-socket: /xxx"}},
		{"several parts", func(c *Config) { c.Etcd, c.Join = []string{"bad"}, []string{"h"} }, []string{"--etcd: ", "--join: "}},
		{"virtual ranges", func(c *Config) {
			c.VirtualIPv4, c.VirtualIPv6 = netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("fd00::/120")
		}, []string{"--virtual-ipv4: 127.0.0.0/8 overlaps", "--virtual-ipv6: want an IPv6 prefix of 65536 addresses"}},
		{"DNS", func(c *Config) {
			c.DNS, c.DNSListen = "resolv.conf", []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:5353")}
			c.DNSSuffixes, c.DNSUpstreams = []string{"mesh", "a b"}, []netip.AddrPort{netip.MustParseAddrPort("10.0.0.2:0")}
		}, []string{"--dns-listen: want port 53 in mode resolv.conf", "--dns-suffix: want a domain", "--dns-upstream: want IP:PORT"}},
		{"captured ranges", func(c *Config) {
			c.Capture, c.DNS = true, DNSOff
			c.VirtualIPv4, c.VirtualIPv6 = netip.MustParsePrefix("10.0.0.1/16"), netip.MustParsePrefix("fd00::1/64")
		}, []string{"--virtual-ipv4: want the first address of the range, as in 10.0.0.0/16", "--virtual-ipv6: want the first address"}},
		{"node", func(c *Config) { c.Node = "a b" }, []string{`--node: node "a b": want`}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cfg := configOf(t, "a", t.TempDir())
			tt.set(&cfg)
			_, err := New(cfg)
			if err == nil {
				t.Fatal("no error")
			}
			lines := strings.Split(err.Error(), "\n")
			if len(lines) != len(tt.want) {
				t.Fatalf("got %d lines, want %d:\n%v", len(lines), len(tt.want), err)
			}
			for i, want := range tt.want {
				if !strings.HasPrefix(lines[i], want) {
					t.Errorf("line %q, want it to start with %q", lines[i], want)
				}
			}
		})
	}
}
