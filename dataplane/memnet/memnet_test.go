package memnet_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/memnet"
)

// connect returns both ends of a connection between two hosts.
func connect(t *testing.T, n *memnet.Network) (client, server net.Conn) {
	t.Helper()
	l, err := n.Host("10.0.0.2").Listen(0)
	if err != nil {
		t.Fatal(err)
	}
	to := netip.MustParseAddrPort(l.Addr().String())
	client, err = n.Host("10.0.0.1").Dial(t.Context(), to)
	if err != nil {
		t.Fatal(err)
	}
	server, err = l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	return client, server
}

func read(t *testing.T, c net.Conn, want string) {
	t.Helper()
	b := make([]byte, len(want))
	if _, err := io.ReadFull(c, b); err != nil || string(b) != want {
		t.Fatalf("read %q, %v; want %q", b, err, want)
	}
}

func write(t *testing.T, c net.Conn, s string) {
	t.Helper()
	if _, err := io.WriteString(c, s); err != nil {
		t.Fatal(err)
	}
}

func TestBothWaysAndClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := connect(t, memnet.New())
		write(t, a, "hello")
		write(t, b, "there")
		read(t, b, "hello")
		read(t, a, "there")
		write(t, a, "bye")
		a.Close()
		read(t, b, "bye")
		if _, err := b.Read(make([]byte, 1)); err != io.EOF {
			t.Errorf("read after the other end closed: %v, want EOF", err)
		}
		if _, err := b.Write([]byte("x")); !errors.Is(err, syscall.EPIPE) {
			t.Errorf("write after the other end closed: %v, want EPIPE", err)
		}
		if _, err := a.Read(make([]byte, 1)); !errors.Is(err, net.ErrClosed) {
			t.Errorf("read after Close: %v, want ErrClosed", err)
		}
	})
}

func TestFaults(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := memnet.New()
		a, b := connect(t, n)
		server := n.Host("10.0.0.2")

		server.Delay(30 * time.Millisecond)
		start := time.Now()
		write(t, a, "late")
		read(t, b, "late")
		if took := time.Since(start); took != 30*time.Millisecond {
			t.Errorf("arrived after %v, want 30ms", took)
		}
		server.Delay(0)

		server.Blackhole(true)
		write(t, a, "lost")
		b.SetReadDeadline(time.Now().Add(time.Second))
		if _, err := b.Read(make([]byte, 4)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("read in the dark: %v, want a deadline", err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := n.Host("10.0.0.1").Dial(ctx, netip.MustParseAddrPort("10.0.0.2:1")); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("dial into the dark: %v, want a deadline", err)
		}
		b.SetReadDeadline(time.Time{})
		server.Blackhole(false)
		read(t, b, "lost")

		server.Cut()
		for _, c := range []net.Conn{a, b} {
			if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("read after a cut: %v, want ECONNRESET", err)
			}
		}
		if _, err := n.Host("10.0.0.1").Dial(t.Context(), netip.MustParseAddrPort("10.0.0.2:1")); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("dial where nobody listens: %v, want ECONNREFUSED", err)
		}
	})
}

func TestBackPressure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := connect(t, memnet.New())
		a.SetWriteDeadline(time.Now().Add(time.Second))
		n, err := a.Write(make([]byte, 10<<20))
		if !errors.Is(err, os.ErrDeadlineExceeded) || n == 0 || n == 10<<20 {
			t.Fatalf("wrote %d, %v; want some and a deadline", n, err)
		}
		a.Close()
		got, err := io.Copy(io.Discard, b)
		if err != nil || got != int64(n) {
			t.Errorf("read %d, %v; want %d", got, err, n)
		}
	})
}
