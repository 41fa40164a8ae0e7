package sockets

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
)

// originalDestination is SO_ORIGINAL_DST, and IP6T_SO_ORIGINAL_DST.
const originalDestination = 80

// OriginalDestination returns where a TCP connection that was accepted was to go before netfilter redirected it here, or
// its local address if it was not redirected.
func OriginalDestination(c net.Conn) (netip.AddrPort, error) {
	local, ok := c.LocalAddr().(*net.TCPAddr)
	if !ok {
		return netip.AddrPort{}, fmt.Errorf("original destination: %T is no TCP connection", c)
	}
	read := originalIPv6
	if local.AddrPort().Addr().Unmap().Is4() {
		read = originalIPv4
	}
	var to netip.AddrPort
	var err error
	if controlErr := control(c, func(fd uintptr) { to, err = read(int(fd)) }); controlErr != nil {
		err = controlErr
	}
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("original destination: %w", err)
	}
	return to, nil
}

func control(c net.Conn, f func(fd uintptr)) error {
	if w := WireOf(c); w != nil {
		return w.Control(f)
	}
	sc, ok := c.(syscall.Conn)
	if !ok {
		return fmt.Errorf("%T has no file descriptor", c)
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return err
	}
	return raw.Control(f)
}

// originalIPv4 reads the address as an option of another type, which is as long as it.
func originalIPv4(fd int) (netip.AddrPort, error) {
	in, err := syscall.GetsockoptIPv6Mreq(fd, syscall.SOL_IP, originalDestination)
	if err != nil {
		return netip.AddrPort{}, os.NewSyscallError("getsockopt", err)
	}
	b := in.Multiaddr
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[4:8])), binary.BigEndian.Uint16(b[2:4])), nil
}

// originalIPv6 reads the address as an option of another type, which begins with one.
func originalIPv6(fd int) (netip.AddrPort, error) {
	in, err := syscall.GetsockoptIPv6MTUInfo(fd, syscall.SOL_IPV6, originalDestination)
	if err != nil {
		return netip.AddrPort{}, os.NewSyscallError("getsockopt", err)
	}
	port := binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, in.Addr.Port))
	return netip.AddrPortFrom(netip.AddrFrom16(in.Addr.Addr).Unmap(), port), nil
}
