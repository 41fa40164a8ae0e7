package capture

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// protocol is the routing protocol by which this package's routes are known.
const protocol = 104

// router has netlink sockets to the routing tables, and to what the kernel knows of connections.
type router struct {
	*netlink.Handle
	loopback int // the interface
	up       bool
}

func openRouter(ns namespace) (*router, error) {
	at := netns.None()
	if ns.File != nil {
		at = netns.NsHandle(ns.fd())
	}
	h, err := netlink.NewHandleAt(at, unix.NETLINK_ROUTE, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("open a netlink socket: %w", err)
	}
	lo, err := h.LinkByName("lo")
	if err != nil {
		h.Close()
		return nil, fmt.Errorf("find the loopback interface: %w", err)
	}
	return &router{h, lo.Attrs().Index, lo.Attrs().Flags&net.FlagUp != 0}, nil
}

func (r *router) close() { r.Close() }

// route makes all addresses of a range this node's own, so that there is a way to them on any node. What goes there has a
// loopback address as its source: else it would be the very address it goes to.
func (r *router) route(p netip.Prefix) *netlink.Route {
	source := netip.IPv6Loopback()
	if p.Addr().Is4() {
		source = netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}
	return &netlink.Route{
		LinkIndex: r.loopback,
		Type:      unix.RTN_LOCAL,
		Table:     unix.RT_TABLE_LOCAL,
		Scope:     netlink.SCOPE_HOST,
		Protocol:  protocol,
		Dst:       &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())},
		Src:       source.AsSlice(),
	}
}

// add adds the routes to ranges. It returns those of IPv6 as left out if that is switched off here.
func (r *router) add(ranges []netip.Prefix) (leftOut []netip.Prefix, err error) {
	for _, p := range ranges {
		err := r.RouteReplace(r.route(p))
		off := errors.Is(err, unix.EACCES) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EAFNOSUPPORT)
		switch {
		case p.Addr().Is6() && off:
			leftOut = append(leftOut, p)
		case errors.Is(err, unix.EPERM):
			return nil, fmt.Errorf("%w (%w)", errNoAdmin, err)
		case err != nil:
			return nil, fmt.Errorf("add route local %v dev lo: %w", p, err)
		}
	}
	return leftOut, nil
}

// ranges returns those to which there are routes of this package.
func (r *router) ranges() ([]netip.Prefix, error) {
	var all []netip.Prefix
	for _, family := range families() {
		routes, err := r.list(family)
		if err != nil {
			return nil, err
		}
		for _, route := range routes {
			if p, ok := prefix(route.Dst); ok && ours(route) {
				all = append(all, p)
			}
		}
	}
	return all, nil
}

func families() []int { return []int{netlink.FAMILY_V4, netlink.FAMILY_V6} }

// list returns the routes of all tables.
func (r *router) list(family int) ([]netlink.Route, error) {
	routes, err := whole(func() ([]netlink.Route, error) {
		return r.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return nil, fmt.Errorf("list routes: %w", err)
	}
	return routes, nil
}

// whole lists again if what is listed has changed meanwhile.
func whole[T any](list func() ([]T, error)) (all []T, err error) {
	for range 10 {
		if all, err = list(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return all, err
}

func ours(route netlink.Route) bool {
	return route.Protocol == protocol && route.Type == unix.RTN_LOCAL && route.Table == unix.RT_TABLE_LOCAL
}

// remove removes the routes to all ranges that are not to be kept, and returns these ranges.
func (r *router) remove(keep ...netip.Prefix) ([]netip.Prefix, error) {
	ranges, err := r.ranges()
	if err != nil {
		return nil, err
	}
	ranges = slices.DeleteFunc(ranges, func(p netip.Prefix) bool { return slices.Contains(keep, p) })
	for i, p := range ranges {
		if err := r.RouteDel(r.route(p)); err != nil && !errors.Is(err, unix.ESRCH) {
			return ranges[:i], fmt.Errorf("remove route local %v dev lo: %w", p, err)
		}
	}
	return ranges, nil
}

// free fails if part of a range has a meaning here.
func (r *router) free(ranges []netip.Prefix) error {
	if !r.up {
		return errors.New("the loopback interface is down, there is no way to virtual addresses: ip link set lo up")
	}
	for _, p := range ranges {
		family := netlink.FAMILY_V6
		if p.Addr().Is4() {
			family = netlink.FAMILY_V4
		}
		if err := r.unassigned(p, family); err != nil {
			return err
		}
		if err := r.unrouted(p, family); err != nil {
			return err
		}
	}
	return nil
}

func (r *router) unassigned(p netip.Prefix, family int) error {
	addrs, err := whole(func() ([]netlink.Addr, error) { return r.AddrList(nil, family) })
	if err != nil {
		return fmt.Errorf("list addresses: %w", err)
	}
	for _, a := range addrs {
		if taken, ok := prefix(a.IPNet); ok && taken.Overlaps(p) {
			return fmt.Errorf("virtual range %v overlaps %v, the network of interface %s: %w", p, taken, r.name(a.LinkIndex), ErrTaken)
		}
	}
	return nil
}

// unrouted takes routes to an eighth of all addresses or more for default routes, of which there may be several parts.
func (r *router) unrouted(p netip.Prefix, family int) error {
	routes, err := r.list(family)
	if err != nil {
		return err
	}
	for _, route := range routes {
		if to, ok := prefix(route.Dst); ok && to.Bits() > 3 && to.Overlaps(p) && !ours(route) {
			return fmt.Errorf("virtual range %v is routed elsewhere: there is a route to %v by interface %s in table %d: %w",
				p, to, r.name(route.LinkIndex), route.Table, ErrTaken)
		}
	}
	return nil
}

func (r *router) name(link int) string {
	l, err := r.LinkByIndex(link)
	if err != nil {
		return fmt.Sprintf("number %d", link)
	}
	return l.Attrs().Name
}

// prefix returns false for nil, by which routes mean all addresses.
func prefix(n *net.IPNet) (netip.Prefix, bool) {
	if n == nil {
		return netip.Prefix{}, false
	}
	addr, ok := netip.AddrFromSlice(n.IP)
	if !ok {
		return netip.Prefix{}, false
	}
	if len(n.Mask) == net.IPv4len {
		addr = addr.Unmap()
	}
	bits, _ := n.Mask.Size()
	return netip.PrefixFrom(addr, bits).Masked(), true
}

// looped6 reports whether the loopback interface has its address of IPv6.
func (r *router) looped6() (bool, error) {
	addrs, err := whole(func() ([]netlink.Addr, error) { return r.AddrList(nil, netlink.FAMILY_V6) })
	if err != nil {
		return false, fmt.Errorf("list addresses: %w", err)
	}
	return slices.ContainsFunc(addrs, func(a netlink.Addr) bool { return a.IP.Equal(net.IPv6loopback) }), nil
}
