//go:build linux

package conformance

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"
)

// stream is a connection for TCP to a service, however it was made.
type stream interface {
	io.ReadWriteCloser
	CloseWrite() error
}

func testTCP(t *testing.T, at target) {
	ways := map[string]func(t *testing.T, service string) stream{
		"listener": func(t *testing.T, service string) stream { return at.dial(t, at.services[service]) },
	}
	if at.proxy != "" {
		ways["connect"] = at.connect
	}
	for name, dial := range ways {
		t.Run(name, func(t *testing.T) {
			for name, test := range map[string]func(*testing.T, func(*testing.T, string) stream){
				"server first": testServerFirst, "client first": testClientFirst, "client late": testClientLate, "half-closed": testHalfClosed,
				"both ways": testBothWays, "gone": testGone, "many": testManyStreams,
			} {
				t.Run(name, func(t *testing.T) { test(t, dial) })
			}
		})
	}
}

// tunnel is what is left of a connection after CONNECT.
type tunnel struct {
	*net.TCPConn
	in *bufio.Reader
}

func (c tunnel) Read(p []byte) (int, error) { return c.in.Read(p) }

// connect asks the proxy for a service.
func (at target) connect(t *testing.T, service string) stream {
	t.Helper()
	c := at.dial(t, at.proxy)
	fmt.Fprintf(c, "CONNECT %[1]s.mesh:25 HTTP/1.1\r\nHost: %[1]s.mesh:25\r\n\r\n", service)
	in := bufio.NewReader(c)
	resp, err := http.ReadResponse(in, &http.Request{Method: http.MethodConnect})
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("CONNECT: %+v, %v", resp, err)
	}
	return tunnel{c, in}
}

// testServerFirst waits for a greeting before it says a word.
func testServerFirst(t *testing.T, dial func(*testing.T, string) stream) {
	c := dial(t, serviceGreeter)
	in := bufio.NewReader(c)
	for _, line := range []struct{ say, want string }{
		{"", "220 greeter ready"}, {"EHLO here", "250 EHLO here"}, {"MAIL FROM:<a@b>", "250 MAIL FROM:<a@b>"}, {"QUIT", "221 bye"},
	} {
		if line.say != "" {
			fmt.Fprintf(c, "%s\r\n", line.say)
		}
		if got, err := in.ReadString('\n'); strings.TrimSpace(got) != line.want {
			t.Fatalf("%q: got %q, %v", line.say, got, err)
		}
	}
	if rest, err := io.ReadAll(in); len(rest) > 0 || err != nil {
		t.Errorf("after the end: %q, %v", rest, err)
	}
}

// testClientFirst sends bytes that are no protocol that anybody knows.
func testClientFirst(t *testing.T, dial func(*testing.T, string) stream) {
	for _, message := range []string{
		"\x00", "\x00\x01\x02\xff\xfe", "*1\r\n$4\r\nPING\r\n", "hello\n", "\r\n\r\n", "G", "GET", "\x16\x03", "PRI * HTTP/",
		string(bodyOf(0, 100_000)),
	} {
		c := dial(t, serviceEcho)
		if _, err := io.WriteString(c, message); err != nil {
			t.Errorf("%.20q: %v", message, err)
			continue
		}
		got := make([]byte, len(message))
		if n, err := io.ReadFull(c, got); err != nil || string(got) != message {
			t.Errorf("%.20q: got %.20q, %v", message, got[:n], err)
		}
		c.Close()
	}
}

// testClientLate says its first bytes when nobody expects any more that the client speaks first.
func testClientLate(t *testing.T, dial func(*testing.T, string) stream) {
	var all sync.WaitGroup
	for _, late := range []struct{ service, say, want string }{
		{serviceEcho, "\x16\x03", "\x16\x03"}, {serviceEcho, "G", "G"}, {serviceEcho, "late\n", "late\n"},
		{serviceWeb, "GET / HTTP/1.1\r\nHost: web.mesh\r\n\r\n", "HTTP/1.1 200 OK\r\n"},
	} {
		c := dial(t, late.service)
		all.Go(func() {
			<-time.After(200 * time.Millisecond) // a slow client
			io.WriteString(c, late.say)
			got := make([]byte, len(late.want))
			if n, err := io.ReadFull(c, got); err != nil || string(got) != late.want {
				t.Errorf("%q: got %q, %v", late.say, got[:n], err)
			}
		})
	}
	all.Wait()
}

// testHalfClosed ends one direction while the other goes on.
func testHalfClosed(t *testing.T, dial func(*testing.T, string) stream) {
	c := dial(t, serviceSink)
	fmt.Fprint(c, "0\nall I have to say")
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	want := sumOf(strings.NewReader("all I have to say")) + "\n"
	if got, err := io.ReadAll(c); string(got) != want || err != nil {
		t.Errorf("got %q, %v", got, err)
	}

	c = dial(t, serviceGreeter) // which ends its direction first
	fmt.Fprint(c, "QUIT\r\n")
	if got, err := io.ReadAll(c); string(got) != "220 greeter ready\r\n221 bye\r\n" || err != nil {
		t.Errorf("got %q, %v", got, err)
	}

	c = dial(t, serviceEcho)
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(c); len(got) > 0 || err != nil {
		t.Errorf("nothing said: got %q, %v", got, err)
	}
}

func testBothWays(t *testing.T, dial func(*testing.T, string) stream) {
	const n = 64 << 20
	c := dial(t, serviceSink)
	var sending sync.WaitGroup
	sending.Go(func() {
		fmt.Fprintf(c, "%d\n", n)
		if _, err := io.Copy(struct{ io.Writer }{c}, body(n)); err != nil {
			t.Errorf("send: %v", err)
		}
		if err := c.CloseWrite(); err != nil {
			t.Errorf("end: %v", err)
		}
	})
	got := sumOf(io.LimitReader(c, n))
	rest, err := io.ReadAll(c)
	sending.Wait()
	if want := sumOf(body(n)); got != want || string(rest) != want+"\n" || err != nil {
		t.Errorf("got %s; the server got %s, %v; want %s", got, rest, err, want)
	}
}

// testGone goes away without a word, while the other end has much to say.
func testGone(t *testing.T, dial func(*testing.T, string) stream) {
	for _, first := range []string{"", "x", fmt.Sprintf("%d\n", 100<<20)} {
		c := dial(t, serviceSink)
		io.WriteString(c, first)
		c.Close()
	}
}

func testManyStreams(t *testing.T, dial func(*testing.T, string) stream) {
	var all sync.WaitGroup
	for i := range 50 {
		c := dial(t, serviceEcho)
		all.Go(func() {
			defer c.Close()
			message := bodyOf(int64(i), 10_000)
			for range 10 {
				if _, err := c.Write(message); err != nil {
					t.Error(err)
					return
				}
				got := make([]byte, len(message))
				if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, message) {
					t.Errorf("stream %d: %v", i, err)
					return
				}
			}
		})
	}
	all.Wait()
}

// testTLS wants the replica's own certificate: nobody on the way looks into its connections.
func testTLS(t *testing.T, at target) {
	ways := map[string]func(*testing.T) net.Conn{
		"listener": func(t *testing.T) net.Conn { return at.dial(t, at.services[serviceSecret]) },
	}
	if at.proxy != "" {
		ways["connect"] = func(t *testing.T) net.Conn { return at.connect(t, serviceSecret).(tunnel) }
		ways["server name"] = func(t *testing.T) net.Conn { return at.dial(t, at.proxy) }
	}
	for name, dial := range ways {
		t.Run(name, func(t *testing.T) {
			for _, curves := range [][]tls.CurveID{nil, {tls.X25519}} { // the first is a ClientHello of two segments
				c := tls.Client(dial(t), &tls.Config{ServerName: secretName, InsecureSkipVerify: true, CurvePreferences: curves})
				if err := c.HandshakeContext(t.Context()); err != nil {
					t.Fatal(err)
				}
				if peer := c.ConnectionState().PeerCertificates[0]; peer.VerifyHostname(secretName) != nil {
					t.Errorf("the certificate is for %v", peer.DNSNames)
				}
				fmt.Fprintf(c, "GET /bytes/3000000 HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", secretName)
				resp, err := http.ReadResponse(bufio.NewReader(c), nil)
				if err != nil {
					t.Fatal(err)
				}
				if got := sumOf(resp.Body); got != sumOf(body(3000000)) {
					t.Errorf("got %s", got)
				}
				c.Close()
			}
		})
	}
}
