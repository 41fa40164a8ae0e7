package sniff

import (
	"bytes"
	"crypto/tls"
	"encoding/hex"
	"net"
	"net/netip"
	"testing"
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
	} {
		if got := AppendProxyHeader(nil, netip.MustParseAddrPort(tt.from), netip.MustParseAddrPort(tt.to)); hex.EncodeToString(got) != tt.want {
			t.Errorf("%s to %s: got %x", tt.from, tt.to, got)
		}
	}
	if got := AppendProxyHeader(nil, netip.AddrPort{}, netip.AddrPort{}); !bytes.HasSuffix(got, []byte{0x20, 0, 0, 0}) {
		t.Errorf("got %x", got)
	}
}

func FuzzDetect(f *testing.F) {
	f.Add([]byte("GET / HTTP/1.1\r\n"))
	f.Add([]byte(preface))
	f.Add([]byte("\x16\x03\x01\x02\x00\x01"))
	f.Fuzz(func(t *testing.T, b []byte) {
		// What a part of it tells holds for all of it.
		for n := range b {
			if p := Detect(b[:n]); p != More && p != Detect(b) {
				t.Fatalf("%q: %d bytes say %d, all say %d", b, n, p, Detect(b))
			}
		}
	})
}

func FuzzServerName(f *testing.F) {
	f.Add(hello(f, "web.mesh"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if name, p := ServerName(b); p != TLS && name != "" {
			t.Fatalf("%q: a name, %q, of no ClientHello", b, name)
		}
	})
}
