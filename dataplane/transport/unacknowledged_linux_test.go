package transport

import (
	"net"
	"syscall"
	"testing"

	"github.com/headroom-mesh/headroom/dataplane/sockets"
)

// TestLimitUnacknowledged expects the kernel's limit where readers never pause, and nowhere else.
func TestLimitUnacknowledged(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for p, want := range map[Protocol]int{HTTP: 0, Probe: 10000, RPC: 10000} {
		c, err := (Plain{}).Dial(t.Context(), l.Addr().(*net.TCPAddr).AddrPort(), p)
		if err != nil {
			t.Fatal(err)
		}
		sockets.WireOf(c).Control(func(fd uintptr) {
			if got, err := syscall.GetsockoptInt(int(fd), syscall.IPPROTO_TCP, 18); err != nil || got != want {
				t.Errorf("%s: limit of %d ms, %v; want %d", p, got, err, want)
			}
		})
		c.Close()
	}
}
