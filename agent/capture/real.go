package capture

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
)

// Real is a set of real addresses. It never changes, so that many Captures can share it.
type Real struct{ sorted []netip.AddrPort }

// RealOf leaves out what can't be captured, and names it in the error.
func RealOf(addrs []netip.AddrPort) (Real, error) {
	all := make([]netip.AddrPort, 0, len(addrs))
	var bad []error
	for _, a := range addrs {
		addr := a.Addr().Unmap().WithZone("")
		if !addr.IsValid() || addr.IsUnspecified() || a.Port() == 0 {
			bad = append(bad, fmt.Errorf("can't capture real address %v: want an IP address and a port", a))
			continue
		}
		all = append(all, netip.AddrPortFrom(addr, a.Port()))
	}
	slices.SortFunc(all, netip.AddrPort.Compare)
	return Real{slices.Compact(all)}, errors.Join(bad...)
}

// without returns what is in r, and not in o.
func (r Real) without(o Real) (rest []netip.AddrPort) {
	others := o.sorted
	for _, a := range r.sorted {
		for len(others) > 0 && others[0].Compare(a) < 0 {
			others = others[1:]
		}
		if len(others) == 0 || others[0] != a {
			rest = append(rest, a)
		}
	}
	return rest
}

// Equal reports whether both have the same addresses.
func (r Real) Equal(o Real) bool { return slices.Equal(r.sorted, o.sorted) }
