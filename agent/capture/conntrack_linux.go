package capture

import (
	"errors"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// untranslatedDNS matches DNS over UDP that goes where its program sent it.
type untranslatedDNS struct{}

func (untranslatedDNS) MatchConntrackFlow(f *netlink.ConntrackFlow) bool {
	there, back := f.Forward, f.Reverse
	return there.Protocol == unix.IPPROTO_UDP && there.DstPort == 53 &&
		back.SrcPort == there.DstPort && back.SrcIP.Equal(there.DstIP) && back.DstIP.Equal(there.SrcIP)
}

// forgetDNS lets queries be redirected whose program has sent others before, from the same port. To the kernel they are one
// connection, for half a minute after the last, and go where the first went.
func (r *router) forgetDNS() error {
	var failed []error
	for _, family := range families() {
		_, err := r.ConntrackDeleteFilters(netlink.ConntrackTable, netlink.InetFamily(family), untranslatedDNS{})
		if !errors.Is(err, netlink.ErrDumpInterrupted) { // what came meanwhile was redirected
			failed = append(failed, err)
		}
	}
	return errors.Join(failed...)
}
