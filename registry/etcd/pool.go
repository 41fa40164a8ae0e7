package etcd

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"iter"
	"net/netip"

	"github.com/headroom-mesh/headroom/registry"
)

// reserved is how many slots at the start of the ranges are kept for the mesh itself. The last one, which is the
// broadcast address of the IPv4 range, is not given away either.
const reserved = 16

// The least ranges, in bits of their prefixes.
const (
	maxBitsIPv4 = 24
	maxBitsIPv6 = 112
)

// pool is the range of virtual addresses. Its slots are numbered: slot N is address N of both prefixes, as far as the
// smaller one goes.
type pool struct {
	ipv4, ipv6 netip.Prefix
}

func newPool(ipv4, ipv6 netip.Prefix) pool { return pool{ipv4: ipv4.Masked(), ipv6: ipv6.Masked()} }

// validateRanges wants room, and only addresses that may be virtual.
func validateRanges(ipv4, ipv6 netip.Prefix) error {
	err4, err6 := registry.CheckVirtual(ipv4), registry.CheckVirtual(ipv6)
	if !ipv4.Addr().Is4() || ipv4.Bits() > maxBitsIPv4 {
		err4 = fmt.Errorf("want an IPv4 prefix of 256 addresses (/%d) or more, such as 240.64.0.0/12, got %q", maxBitsIPv4, ipv4)
	}
	if !ipv6.Addr().Is6() || ipv6.Bits() > maxBitsIPv6 {
		err6 = fmt.Errorf("want an IPv6 prefix of 65536 addresses (/%d) or more, such as fd68:6561:6472::/64, got %q", maxBitsIPv6, ipv6)
	}
	return errors.Join(inField("virtualIPv4", err4), inField("virtualIPv6", err6))
}

func inField(name string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", name, err)
}

// room is how many services can have addresses.
func (p pool) room() uint32 {
	hostBits := min(32-p.ipv4.Bits(), 128-p.ipv6.Bits())
	return uint32(uint64(1)<<hostBits-1) - reserved
}

// at returns the addresses in a slot.
func (p pool) at(slot uint32) (ipv4, ipv6 netip.Addr) {
	a, b := p.ipv4.Addr().As4(), p.ipv6.Addr().As16()
	binary.BigEndian.PutUint32(a[:], binary.BigEndian.Uint32(a[:])|slot)
	binary.BigEndian.PutUint32(b[12:], binary.BigEndian.Uint32(b[12:])|slot)
	return netip.AddrFrom4(a), netip.AddrFrom16(b)
}

// slotOf returns the slot that addresses are in, if it is one for services.
func (p pool) slotOf(ipv4, ipv6 netip.Addr) (slot uint32, ok bool) {
	if !p.ipv4.Contains(ipv4) || !p.ipv6.Contains(ipv6) {
		return 0, false
	}
	base, a := p.ipv4.Addr().As4(), ipv4.As4()
	slot = binary.BigEndian.Uint32(a[:]) - binary.BigEndian.Uint32(base[:])
	again4, again6 := p.at(slot)
	ok = again4 == ipv4 && again6 == ipv6 && slot >= reserved && slot-reserved < p.room()
	return slot, ok
}

// slots returns all slots in the order in which a service tries them: from one that follows from its name, so that it
// mostly gets the same again if the store has lost everything.
func (p pool) slots(service registry.ServiceName) iter.Seq[uint32] {
	h := fnv.New64a()
	h.Write([]byte(service)) // never fails
	room := uint64(p.room())
	first := h.Sum64() % room
	return func(yield func(uint32) bool) {
		for i := range room {
			if !yield(reserved + uint32((first+i)%room)) {
				return
			}
		}
	}
}
