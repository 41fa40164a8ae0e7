package sniff

import (
	"encoding/binary"
	"net/netip"
)

// AppendProxyHeader appends a header of the PROXY protocol, version 2, that tells where a connection over TCP comes from
// and where it went (HAProxy, "The PROXY protocol", 2.2). If that is not known it says so: LOCAL.
func AppendProxyHeader(dst []byte, from, to netip.AddrPort) []byte {
	dst = append(dst, "\r\n\r\n\x00\r\nQUIT\n"...)
	if !from.IsValid() || !to.IsValid() {
		return append(dst, 0x20, 0x00, 0, 0)
	}
	a, b := from.Addr().Unmap(), to.Addr().Unmap()
	if a.Is4() && b.Is4() {
		dst = append(dst, 0x21, 0x11, 0, 12)
		dst = append(append(dst, a.AsSlice()...), b.AsSlice()...)
	} else {
		dst = append(dst, 0x21, 0x21, 0, 36)
		a16, b16 := a.As16(), b.As16()
		dst = append(append(dst, a16[:]...), b16[:]...)
	}
	dst = binary.BigEndian.AppendUint16(dst, from.Port())
	return binary.BigEndian.AppendUint16(dst, to.Port())
}
