package sniff

import (
	"bytes"
	"crypto/tls"
	"encoding/hex"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"
)

func TestDetect(t *testing.T) {
	for _, tt := range []struct {
		in   string
		want Protocol
	}{
		{"", More}, {"P", More}, {"PRI * HTTP/2.0\r\n", More}, {preface, HTTP2}, {preface + "\x00", HTTP2},
		{"PRI * HTTP/2.0\r\n\r\nSX", Opaque},
		{"GET", More}, {"GET / HTTP/1.1", More}, {"GET / HTTP/1.1\r\n", HTTP1}, {"POST /a b HTTP/1.1\n", HTTP1}, {"M-SEARCH * HTTP/1.0\r\nHost: a", HTTP1},
		{"SELECT * FROM t\n", Opaque}, {"QUIT\r\n", Opaque}, {"EHLO example.com\r\n", Opaque}, {"get / HTTP/1.1\r\n", Opaque}, {" GET / HTTP/1.1\r\n", Opaque},
		{"*1\r\n$4\r\nPING\r\n", Opaque}, {"SSH-2.0-OpenSSH\r\n", Opaque}, {"\x00\x00\x00\x08", Opaque},
		{"\x16", More}, {"\x16\x03\x01\x02\x00", More}, {"\x16\x03\x01\x02\x00\x01", TLS}, {"\x16\x03\x01\x02\x00\x02", Opaque}, {"\x16\x04", Opaque},
	} {
		if got := Detect([]byte(tt.in)); got != tt.want {
			t.Errorf("%q: got %d, want %d", tt.in, got, tt.want)
		}
	}
}

// hello returns what a client says first.
func hello(t testing.TB, name string, protocols ...string) []byte {
	client, server := net.Pipe()
	go func() {
		tls.Client(client, &tls.Config{ServerName: name, InsecureSkipVerify: true, NextProtos: protocols}).Handshake()
	}()
	var all []byte
	buf := make([]byte, 4096)
	for len(all) < 5 || len(all) < 5+int(all[3])<<8+int(all[4]) {
		n, err := server.Read(buf)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, buf[:n]...)
	}
	client.Close()
	server.Close()
	return all
}

func TestServerName(t *testing.T) {
	for _, name := range []string{"", "web.mesh", "a.very.long.name.of.a.service.mesh"} {
		b := hello(t, name, "h2", "http/1.1")
		for n := range b {
			if got, p := ServerName(b[:n]); p != More || got != "" {
				t.Fatalf("of %d bytes: %q, %d", n, got, p)
			}
		}
		if got, p := ServerName(b); p != TLS || got != name {
			t.Errorf("got %q, %d, want %q", got, p, name)
		}
		// The same in two records.
		half := len(b) / 2
		split := append([]byte{0x16, 3, 1, byte((half - 5) >> 8), byte(half - 5)}, b[5:half]...)
		split = append(append(split, 0x16, 3, 1, byte((len(b)-half)>>8), byte(len(b)-half)), b[half:]...)
		if got, p := ServerName(split); p != TLS || got != name {
			t.Errorf("in two records: got %q, %d, want %q", got, p, name)
		}
	}
	if _, p := ServerName([]byte("\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00")); p != Opaque {
		t.Errorf("garbage: got %d", p)
	}
}

func TestProxyHeader(t *testing.T) {
	for _, tt := range []struct{ from, to, want string }{
		{"10.0.0.1:4660", "10.0.0.2:80", "0d0a0d0a000d0a515549540a2111000c0a0000010a00000212340050"},
		{"[::ffff:10.0.0.1]:4660", "10.0.0.2:80", "0d0a0d0a000d0a515549540a2111000c0a0000010a00000212340050"},
		{"[::1]:1", "[::2]:2", "0d0a0d0a000d0a515549540a21210024" + "00000000000000000000000000000001" + "00000000000000000000000000000002" + "00010002"},
		{"[::1]:1", "10.0.0.2:2", "0d0a0d0a000d0a515549540a21210024" + "00000000000000000000000000000001" + "00000000000000000000ffff0a000002" + "00010002"},
		{"10.0.0.1:4660", "", "0d0a0d0a000d0a515549540a2111000c0a0000010000000012340000"},
		{"[::1]:1", "", "0d0a0d0a000d0a515549540a21210024" + "00000000000000000000000000000001" + "00000000000000000000000000000000" + "00010000"},
		{"", "10.0.0.2:80", "0d0a0d0a000d0a515549540a20000000"},
	} {
		from, _ := netip.ParseAddrPort(tt.from)
		to, _ := netip.ParseAddrPort(tt.to)
		b := AppendProxyHeader([]byte("x"), from, to)[1:]
		if hex.EncodeToString(b) != tt.want {
			t.Errorf("%s to %s: got %x", tt.from, tt.to, b)
		}
		for n := range b {
			if _, _, got, err := ParseProxyHeader(b[:n]); got != 0 || err != nil {
				t.Errorf("%s to %s: of %d bytes: %d, %v", tt.from, tt.to, n, got, err)
			}
		}
		gotFrom, _, n, err := ParseProxyHeader(append(b, "rest"...))
		if n != len(b) || err != nil || from.IsValid() != gotFrom.IsValid() || from.Addr().Unmap() != gotFrom.Addr() || from.Port() != gotFrom.Port() {
			t.Errorf("%s to %s: read as %s, %d bytes, %v", tt.from, tt.to, gotFrom, n, err)
		}
	}
}

func TestParseProxyHeaderRefuses(t *testing.T) {
	for _, b := range []string{
		"PROXY TCP4 10.0.0.1 10.0.0.2 1 2\r\n", "\r\n\r\n\x01", "GET / HTTP/1.1\r\n",
		proxySignature + "\x11\x11\x00\x0c", // version 1
		proxySignature + "\x22\x11\x00\x0c", // a command of the future
		proxySignature + "\x21\x12\x00\x0c", // UDP
		proxySignature + "\x21\x11\x00\x0b", // too short
		proxySignature + "\x21\x21\x00\x0c", // for IPv6
		proxySignature + "\x21\x11\x00\x0d", // with more than addresses
		proxySignature + "\x20\x00\x00\x01",
		proxySignature + "\x20\x11\x00\x00",
	} {
		if _, _, n, err := ParseProxyHeader([]byte(b)); n != 0 || err == nil {
			t.Errorf("%q: taken as %d bytes", b, n)
		}
	}
}

func TestLongBeginnings(t *testing.T) {
	line := "GET /" + strings.Repeat("a", maxLine) + " HTTP/1.1\r\n"
	if got := Detect([]byte(line)); got != Opaque {
		t.Errorf("a line of %d bytes: got %d", len(line), got)
	}
	record := func(n int) []byte { return append([]byte{0x16, 3, 1, byte(n >> 8), byte(n)}, make([]byte, n)...) }
	long := record(maxHello - 5)
	copy(long[5:], "\x01\x00\xff\x00") // a ClientHello of 65,280 bytes
	if _, p := ServerName(long[:maxHello-1]); p != More {
		t.Errorf("most of a long ClientHello: got %d", p)
	}
	if _, p := ServerName(append(long, record(1000)...)); p != Opaque {
		t.Errorf("a ClientHello that is too long: got %d", p)
	}
}

func FuzzDetect(f *testing.F) {
	for _, b := range []string{
		"GET / HTTP/1.1\r\n", preface, "PRI * HTTP/2.0\r\n\r\nSX", "\x16\x03\x01\x02\x00\x01", "\x16\x03\x01", "*1\r\n$4\r\nPING\r\n",
		"EHLO me\r\n", "POST /a?b HTTP/1.0\nHost: a\r\n", "SSH-2.0-x\r\n", "\x00\x00\x00\x08\x04\xd2\x16\x2f", "",
	} {
		f.Add([]byte(b))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		all := Detect(b)
		if line, _, _ := bytes.Cut(b, []byte("\n")); all == HTTP1 && !bytes.Contains(line, []byte(" HTTP/1.")) {
			t.Fatalf("%q is no request", line)
		}
		for n := range b { // what a part of it tells holds for all of it
			if p := Detect(b[:n]); p != More && p != all {
				t.Fatalf("%q: %d bytes say %d, all say %d", b, n, p, all)
			}
		}
	})
}

// FuzzServerName compares with a server of TLS that reads the same, a few bytes at a time.
func FuzzServerName(f *testing.F) {
	for _, name := range []string{"", "web.mesh", strings.Repeat("long.", 40) + "mesh"} {
		b := hello(f, name, "h2")
		f.Add(b, uint8(1))
		f.Add(b[:len(b)/2], uint8(7))
		f.Add(append([]byte{0x16, 3, 1, 0, 2, b[5], b[6], 0x16, 3, 3, byte((len(b) - 7) >> 8), byte(len(b) - 7)}, b[7:]...), uint8(100))
	}
	f.Fuzz(func(t *testing.T, b []byte, step uint8) {
		name, p := ServerName(b)
		if p != TLS && name != "" {
			t.Fatalf("a name, %q, of no ClientHello", name)
		}
		seen, want := "", false
		server := tls.Server(&dribble{b, int(step) + 1}, &tls.Config{GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
			seen, want = h.ServerName, true
			return nil, io.EOF
		}})
		server.Handshake()
		if len(b) <= maxHello && (want != (p == TLS) || seen != name) {
			t.Fatalf("got %d, %q; a server sees %v, %q", p, name, want, seen)
		}
		for n := 0; n < len(b); n += max(int(step)+1, len(b)/50) { // as it is asked while more comes
			if part, q := ServerName(b[:n]); q != More && (q != p || part != name) {
				t.Fatalf("%d bytes say %d, %q; all say %d, %q", n, q, part, p, name)
			}
		}
	})
}

// dribble is a connection of which a few bytes come at a time.
type dribble struct {
	left []byte
	most int
}

func (d *dribble) Read(p []byte) (int, error) {
	if len(d.left) == 0 {
		return 0, io.EOF
	}
	n := copy(p[:min(len(p), d.most)], d.left)
	d.left = d.left[n:]
	return n, nil
}
func (d *dribble) Write(p []byte) (int, error)      { return len(p), nil }
func (d *dribble) Close() error                     { return nil }
func (d *dribble) LocalAddr() net.Addr              { return nil }
func (d *dribble) RemoteAddr() net.Addr             { return nil }
func (d *dribble) SetDeadline(time.Time) error      { return nil }
func (d *dribble) SetReadDeadline(time.Time) error  { return nil }
func (d *dribble) SetWriteDeadline(time.Time) error { return nil }

// FuzzProxyHeader reads anything, and what it takes is what is written for the same addresses.
func FuzzProxyHeader(f *testing.F) {
	for _, a := range [][2]string{{"10.0.0.1:1", "10.0.0.2:2"}, {"[2001:db8::1]:1", "[2001:db8::2]:65535"}, {"", ""}, {"10.0.0.1:1", ""}} {
		from, _ := netip.ParseAddrPort(a[0])
		to, _ := netip.ParseAddrPort(a[1])
		f.Add(append(AppendProxyHeader(nil, from, to), "rest"...))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		from, to, n, err := ParseProxyHeader(b)
		if err != nil || n == 0 {
			return
		}
		again := AppendProxyHeader(nil, from, to)
		if b[13] == proxyTCP6 && from.Addr().Is4() && to.Addr().Is4() {
			return // which is written shorter
		}
		if !bytes.Equal(again, b[:n]) {
			t.Fatalf("%x says %s to %s, which is written %x", b[:n], from, to, again)
		}
		for i := range n {
			if _, _, m, err := ParseProxyHeader(b[:i]); m != 0 || err != nil {
				t.Fatalf("%d bytes of %x: %d, %v", i, b[:n], m, err)
			}
		}
	})
}
