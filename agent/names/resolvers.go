package names

import (
	"context"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// pollEvery is how often to look whether somebody changed resolv.conf.
const pollEvery = 2 * time.Second

// resolvers is what is known of the node's resolvers.
type resolvers struct {
	known  bool              // all was read
	all    []netip.AddrPort  // as last read
	logged map[string]string // the last error logged with each message
}

// readResolvers lets the forwarder ask those resolvers that are there now.
func (s *Server) readResolvers() {
	all, err := s.cfg.upstreams()
	s.complain("resolvers can't be read; those known stay", err)
	if err != nil || s.resolvers.known && slices.Equal(all, s.resolvers.all) {
		return
	}
	s.resolvers.known, s.resolvers.all = true, all
	others := slices.DeleteFunc(slices.Clone(all), s.isOwn)
	s.forwarder.upstreams.Store(&others)
	if len(others) == 0 {
		s.log.Warn("no resolver for names outside the mesh: queries for them fail", "reason", s.cfg.ResolvConf)
		return
	}
	s.log.Info("queries for names outside the mesh go to resolvers", "peer", others)
}

// complain logs an error once, as long as it stays the same.
func (s *Server) complain(message string, err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if err != nil && text != s.resolvers.logged[message] {
		s.log.Warn(message, "err", err)
	}
	s.resolvers.logged[message] = text
}

// watchResolvers follows the system's files until ctx ends.
func (s *Server) watchResolvers(ctx context.Context) {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			s.again()
			s.readResolvers()
		}
	}
}

// isOwn reports whether a resolver is this server, which would forward to itself for ever.
func (s *Server) isOwn(at netip.AddrPort) bool {
	return slices.ContainsFunc(s.addrs, func(own netip.AddrPort) bool {
		if own.Port() != at.Port() {
			return false
		}
		// To connect to an unspecified address is to connect to this machine.
		return own.Addr() == at.Addr() || at.Addr().IsUnspecified() || own.Addr().IsUnspecified() && isLocal(at.Addr())
	})
}

// isLocal reports whether this machine has the address.
func isLocal(a netip.Addr) bool {
	if a.IsLoopback() {
		return true
	}
	addrs, _ := net.InterfaceAddrs()
	return slices.ContainsFunc(addrs, func(of net.Addr) bool {
		prefix, err := netip.ParsePrefix(of.String())
		return err == nil && prefix.Addr() == a.WithZone("")
	})
}

// upstreams returns the resolvers that are configured, here or for the node.
func (c Config) upstreams() ([]netip.AddrPort, error) {
	if len(c.Upstreams) > 0 {
		return unmapped(c.Upstreams), nil
	}
	content, err := os.ReadFile(c.ResolvConf)
	if err != nil {
		return nil, err
	}
	servers := nameservers(without(content))
	if c.avoidsResolved() && slices.ContainsFunc(servers, isStub) {
		behind, err := os.ReadFile(filepath.Join(c.Root, "run/systemd/resolve/resolv.conf"))
		if err == nil && len(nameservers(behind)) > 0 {
			servers = nameservers(behind)
		}
	}
	return servers, nil
}

func unmapped(addrs []netip.AddrPort) []netip.AddrPort {
	var all []netip.AddrPort
	for _, at := range addrs {
		all = append(all, netip.AddrPortFrom(at.Addr().Unmap(), at.Port()))
	}
	return all
}

// avoidsResolved reports whether systemd-resolved, asked by us, might ask us again: because it is told to, or because
// its own queries are redirected. Then we ask those that it asks.
func (c Config) avoidsResolved() bool { return c.Mode == Resolved || c.Mode == Redirect }

// isStub reports whether a resolver is systemd-resolved.
func isStub(at netip.AddrPort) bool {
	return at.Addr() == netip.AddrFrom4([4]byte{127, 0, 0, 53}) || at.Addr() == netip.AddrFrom4([4]byte{127, 0, 0, 54})
}

// nameservers reads the resolvers in the content of a resolv.conf. Lines that make no sense are left out, as in libc.
func nameservers(content []byte) []netip.AddrPort {
	var servers []netip.AddrPort
	for line := range strings.Lines(string(content)) {
		line, _, _ = strings.Cut(line, "#")
		line, _, _ = strings.Cut(line, ";")
		fields := strings.Fields(line)
		if len(fields) < 2 || fields[0] != "nameserver" {
			continue
		}
		if addr, err := netip.ParseAddr(fields[1]); err == nil {
			servers = append(servers, netip.AddrPortFrom(addr.Unmap(), dnsPort))
		}
	}
	return servers
}

// begin lets clients get here, by the means of the mode.
func (s *Server) begin() error {
	Undo(s.cfg, reachable(s.addrs)...)
	switch s.cfg.Mode {
	case ResolvConf:
		if target, _ := filepath.EvalSymlinks(s.cfg.ResolvConf); strings.Contains(target, "/systemd/resolve/") {
			s.log.Warn("systemd-resolved writes this file anew at times: mode resolved suits this machine better", "reason", target)
		}
		_, err := putFirst(s.cfg.ResolvConf, reachable(s.addrs)[0].Addr())
		return err
	case Resolved:
		changed, err := writeDropIn(s.cfg.Root, reachable(s.addrs), s.cfg.Suffixes)
		if changed {
			s.cfg.tellReload()
		}
		return err
	}
	return nil
}

// again does what somebody undid who wrote the file anew, such as a DHCP client. An empty file may be about to be written; if it
// stays empty, clients ask this machine, where the agent is.
func (s *Server) again() {
	if s.cfg.Mode != ResolvConf {
		return
	}
	if info, err := os.Stat(s.cfg.ResolvConf); err == nil && info.Size() == 0 {
		return
	}
	changed, err := putFirst(s.cfg.ResolvConf, reachable(s.addrs)[0].Addr())
	s.complain("clients don't get here any more", err)
	if changed {
		s.log.Info("somebody wrote the file anew; this agent is the first resolver in it again", "reason", s.cfg.ResolvConf)
	}
}

// end undoes what begin did.
func (s *Server) end() error {
	switch s.cfg.Mode {
	case ResolvConf:
		_, err := Restore(s.cfg.ResolvConf)
		return err
	case Resolved:
		changed, err := RestoreResolved(s.cfg.Root)
		if changed {
			s.cfg.tellReload()
		}
		return err
	}
	return nil
}

func (c Config) tellReload() {
	c.Log.Warn("systemd-resolved must be told of a change: systemctl reload-or-restart systemd-resolved",
		"reason", dropIn(c.Root))
}

// reachable returns how clients on this machine reach addresses to listen on.
func reachable(addrs []netip.AddrPort) []netip.AddrPort {
	var all []netip.AddrPort
	for _, at := range addrs {
		switch at.Addr() {
		case netip.IPv4Unspecified():
			at = netip.AddrPortFrom(loopback4(), at.Port())
		case netip.IPv6Unspecified():
			at = netip.AddrPortFrom(netip.IPv6Loopback(), at.Port())
		}
		all = append(all, at)
	}
	return all
}
