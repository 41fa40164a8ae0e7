package sniff

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
)

// What a header of the PROXY protocol, version 2, is made of (HAProxy, "The PROXY protocol", 2.2).
const (
	proxySignature = "\r\n\r\n\x00\r\nQUIT\n"
	proxyHead      = len(proxySignature) + 4

	proxyLocal = 0x20 // version 2, and a connection that comes from the proxy itself
	proxyPass  = 0x21 // version 2, and one that comes from somebody else
	proxyTCP4  = 0x11
	proxyTCP6  = 0x21
)

// AppendProxyHeader appends a header of the PROXY protocol, version 2, that tells where a connection over TCP comes from
// and where it went: to nowhere, if to is invalid, as on Unix sockets. If it is not known where it comes from the header
// says so: LOCAL.
func AppendProxyHeader(dst []byte, from, to netip.AddrPort) []byte {
	dst = append(dst, proxySignature...)
	if !from.IsValid() {
		return append(dst, proxyLocal, 0, 0, 0)
	}
	a, b := from.Addr().Unmap(), to.Addr().Unmap()
	if !to.IsValid() && a.Is4() {
		b = netip.IPv4Unspecified()
	}
	if a.Is4() && b.Is4() {
		dst = append(dst, proxyPass, proxyTCP4, 0, 12)
		dst = append(append(dst, a.AsSlice()...), b.AsSlice()...)
	} else {
		dst = append(dst, proxyPass, proxyTCP6, 0, 36)
		a16, b16 := a.As16(), b.As16()
		dst = append(append(dst, a16[:]...), b16[:]...)
	}
	dst = binary.BigEndian.AppendUint16(dst, from.Port())
	return binary.BigEndian.AppendUint16(dst, to.Port())
}

var errProxy = errors.New("no header of the PROXY protocol as agents write it")

// ParseProxyHeader reads the header that b begins with, and returns its length; 0 if more of it is to come. It takes what
// AppendProxyHeader writes, and nothing else. The addresses are invalid if the header does not tell.
func ParseProxyHeader(b []byte) (from, to netip.AddrPort, n int, err error) {
	if !bytes.HasPrefix([]byte(proxySignature), b[:min(len(b), len(proxySignature))]) {
		return from, to, 0, fmt.Errorf("%w: it begins with %.12q", errProxy, b)
	}
	if len(b) < proxyHead {
		return from, to, 0, nil
	}
	command, family, length := b[12], b[13], int(binary.BigEndian.Uint16(b[14:]))
	size := 0 // of an address
	switch {
	case command == proxyLocal && family == 0 && length == 0:
		return from, to, proxyHead, nil
	case command == proxyPass && family == proxyTCP4 && length == 12:
		size = 4
	case command == proxyPass && family == proxyTCP6 && length == 36:
		size = 16
	default:
		return from, to, 0, fmt.Errorf("%w: command %#02x, family %#02x, %d bytes of addresses", errProxy, command, family, length)
	}
	if len(b) < proxyHead+length {
		return from, to, 0, nil
	}
	rest := b[proxyHead:]
	address := func(i int) netip.AddrPort {
		ip, _ := netip.AddrFromSlice(rest[i*size : (i+1)*size])
		return netip.AddrPortFrom(ip.Unmap(), binary.BigEndian.Uint16(rest[2*size+2*i:]))
	}
	return address(0), address(1), proxyHead + length, nil
}
