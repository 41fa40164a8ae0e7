package names

import (
	"bytes"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"
)

// Undo takes out of the system's files what an agent put there that could not do so itself, because it was killed. Own are
// addresses at which no other agent can be. What an agent put there that still answers stays, as do the files that the mode
// is about: these are written anew.
func Undo(c Config, own ...netip.AddrPort) {
	c = c.withDefaults()
	if c.Mode != ResolvConf {
		c.undo(c.ResolvConf, own, leftInResolvConf, func() (bool, error) { return Restore(c.ResolvConf) })
	}
	if c.Mode != Resolved {
		c.undo(dropIn(c.Root), own, leftInDropIn, func() (bool, error) {
			changed, err := RestoreResolved(c.Root)
			if changed {
				c.tellReload()
			}
			return changed, err
		})
	}
}

// undo restores a file in which there is the address of an agent that is no more.
func (c Config) undo(path string, own []netip.AddrPort, left func([]byte) (netip.AddrPort, bool), restore func() (bool, error)) {
	content, err := os.ReadFile(path)
	if err != nil {
		return // there is none, or else nobody can have written it
	}
	at, ok := left(content)
	if !ok || !slices.Contains(own, at) && c.answers(at) {
		return
	}
	if _, err := restore(); err != nil {
		c.Log.Warn("clients still ask an agent that was killed", "peer", at, "err", err)
		return
	}
	c.Log.Info("clients no longer ask an agent that was killed", "peer", at, "reason", path)
}

// answers reports whether somebody accepts connections at an address, as an agent does.
func (c Config) answers(at netip.AddrPort) bool {
	d := net.Dialer{Timeout: time.Second, Control: c.Control}
	conn, err := d.Dial("tcp", at.String())
	if err != nil {
		return false
	}
	conn.Close()
	return true
}

// leftInResolvConf returns the resolver that an agent put first.
func leftInResolvConf(content []byte) (netip.AddrPort, bool) {
	_, rest, ok := bytes.Cut(content, []byte(ours))
	_, rest, _ = bytes.Cut(rest, []byte("\n"))
	line, _, _ := bytes.Cut(rest, []byte("\n"))
	servers := nameservers(line)
	if !ok || len(servers) == 0 {
		return netip.AddrPort{}, false
	}
	return servers[0], true
}

// leftInDropIn returns the first address that an agent told systemd-resolved.
func leftInDropIn(content []byte) (netip.AddrPort, bool) {
	_, rest, _ := strings.Cut(string(content), "\nDNS=")
	fields := strings.Fields(rest)
	if len(fields) == 0 {
		return netip.AddrPort{}, false
	}
	at, err := netip.ParseAddrPort(fields[0])
	return at, err == nil
}
