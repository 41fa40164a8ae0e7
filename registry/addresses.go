package registry

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"time"
)

// Addresses are the virtual addresses of a service. No machine has them: they stand for the service.
type Addresses struct {
	Service    ServiceName
	IPv4, IPv6 netip.Addr
	Released   time.Time // when the service went away; zero while it is there
}

// Validate reports all that keeps the addresses from being stored.
func (a Addresses) Validate() error {
	problems := []error{a.Service.Validate()}
	if !a.IPv4.Is4() {
		problems = append(problems, fmt.Errorf("ipv4 %q: want an IPv4 address", a.IPv4))
	}
	if !a.IPv6.Is6() || a.IPv6.Zone() != "" {
		problems = append(problems, fmt.Errorf("ipv6 %q: want an IPv6 address without a zone", a.IPv6))
	}
	for _, addr := range []netip.Addr{a.IPv4, a.IPv6} {
		if addr.IsValid() {
			problems = append(problems, CheckVirtual(netip.PrefixFrom(addr.WithZone(""), addr.BitLen())))
		}
	}
	return errors.Join(problems...)
}

// CheckVirtual reports whether all addresses of a prefix may be virtual ones: whether none has a meaning to every machine.
func CheckVirtual(prefix netip.Prefix) error {
	for _, taken := range []string{
		"0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "255.255.255.255/32",
		"::/127", "::ffff:0:0/96", "fe80::/10", "ff00::/8",
	} {
		if prefix.Overlaps(netip.MustParsePrefix(taken)) {
			return fmt.Errorf("%s overlaps %s, which has a meaning of its own", prefix, taken)
		}
	}
	return nil
}

// addresses returns the zero Addresses if the service has none.
func (s *Service) addresses() Addresses {
	if s == nil || !s.IPv4.IsValid() || !s.IPv6.IsValid() {
		return Addresses{}
	}
	return Addresses{Service: s.Name, IPv4: s.IPv4, IPv6: s.IPv6}
}

// ServiceAt returns the service that has a virtual address.
func (s *Snapshot) ServiceAt(addr netip.Addr) (ServiceName, bool) {
	at := s.at
	if at == nil {
		at = byAddress(s.Services)
	}
	name, ok := at[addr]
	return name, ok
}

// byAddress returns the services by their addresses.
func byAddress(services map[ServiceName]*Service) map[netip.Addr]ServiceName {
	at := make(map[netip.Addr]ServiceName, 2*len(services))
	for _, service := range services {
		service.claim(at)
	}
	return at
}

// withAddresses adds what has settled to at, or makes it anew from all services if it is nil, which takes much longer.
func withAddresses(at map[netip.Addr]ServiceName, settled []*Service, all map[ServiceName]*Service) map[netip.Addr]ServiceName {
	if at == nil {
		return byAddress(all)
	}
	if len(settled) > 0 {
		at = maps.Clone(at)
	}
	for _, service := range settled {
		service.claim(at)
	}
	return at
}

// claim leaves an address that two services have to the one whose name comes first. Only somebody who writes into the
// store by hand can bring that about.
func (s *Service) claim(at map[netip.Addr]ServiceName) {
	for _, addr := range []netip.Addr{s.IPv4, s.IPv6} {
		if other, taken := at[addr]; addr.IsValid() && (!taken || s.Name < other) {
			at[addr] = s.Name
		}
	}
}
