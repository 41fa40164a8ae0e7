package dataplane_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
	"golang.org/x/net/http2"
)

// serveHTTP2 starts a replica that speaks HTTP/2 without TLS.
func (m *mesh) serveHTTP2(service registry.ServiceName, at registry.NodeName, h http.HandlerFunc) registry.Endpoint {
	s := httptest.NewUnstartedServer(h)
	s.Config.Protocols = new(http.Protocols)
	s.Config.Protocols.SetUnencryptedHTTP2(true)
	s.Start()
	m.t.Cleanup(s.Close)
	return m.register(service, at, s.Listener.Addr().String())
}

// http2Client returns a client that speaks HTTP/2 to the proxy, whatever it asks for.
func (n *node) http2Client(t *testing.T) *http.Client {
	tr := &http.Transport{
		Protocols: new(http.Protocols),
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", n.proxy)
		},
	}
	tr.Protocols.SetUnencryptedHTTP2(true)
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

func TestHTTP2(t *testing.T) {
	hops(t, func(t *testing.T, m *mesh, a *node, replica registry.NodeName) {
		m.serveHTTP2("web", replica, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("X-Proto", r.Proto)
			w.Header().Set("Trailer", "X-Sum")
			body, _ := io.ReadAll(r.Body)
			fmt.Fprintf(w, "%s %s %s %s %v", r.Method, r.Host, r.URL, body, r.Trailer)
			w.Header().Set("X-Sum", "1")
		})
		c := a.http2Client(t)
		var all sync.WaitGroup
		for i := range 50 {
			all.Go(func() {
				r, _ := http.NewRequest("POST", fmt.Sprintf("http://web.mesh/%d?q", i), struct{ io.Reader }{bytes.NewReader([]byte("hello"))})
				r.Trailer = http.Header{"X-End": {"2"}}
				resp, err := c.Do(r)
				if err != nil {
					t.Error(err)
					return
				}
				body, err := io.ReadAll(resp.Body)
				resp.Body.Close()
				want := fmt.Sprintf("POST web.mesh /%d?q hello map[X-End:[2]]", i)
				if err != nil || string(body) != want || resp.Header.Get("X-Proto") != "HTTP/2.0" || resp.Trailer.Get("X-Sum") != "1" {
					t.Errorf("got %q, %v, %v, %v, want %q", body, err, resp.Header, resp.Trailer, want)
				}
				if d := cmp.Diff([]string(nil), resp.Header["Headroom-Load"]); d != "" {
					t.Error(d)
				}
			})
		}
		all.Wait()
		resp, err := c.Get("http://nosuch.mesh/")
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(resp.Body)
		wantFault(t, resp, string(body), fault.UnknownService)
		m.quiet()
	})
}

// TestHTTP2Large sends 50 MB there and back again at the same time.
func TestHTTP2Large(t *testing.T) {
	hops(t, func(t *testing.T, m *mesh, a *node, replica registry.NodeName) {
		m.serveHTTP2("web", replica, func(w http.ResponseWriter, r *http.Request) { io.Copy(w, r.Body) })
		sent, got := sha256.New(), sha256.New()
		source := io.TeeReader(io.LimitReader(rand.NewChaCha8([32]byte{1}), 50<<20), sent)
		resp, err := a.http2Client(t).Post("http://web.mesh/", "", struct{ io.Reader }{source})
		if err != nil {
			t.Fatal(err)
		}
		if n, err := io.Copy(got, resp.Body); n != 50<<20 || err != nil || !bytes.Equal(sent.Sum(nil), got.Sum(nil)) {
			t.Errorf("got %d bytes back, %v", n, err)
		}
		m.quiet()
	})
}

// TestHTTP2GoesAwayAtOnce has a replica that ends each connection as it comes: nobody may dial it without a pause.
func TestHTTP2GoesAwayAtOnce(t *testing.T) {
	m := newMesh(t, "a")
	m.setPolicy("web", func(p *policy.Policy) { p.Timeout = 500 * time.Millisecond })
	var connections atomic.Int32
	l := listen(t, "127.0.0.1:0")
	m.serveBytes(l, func(c net.Conn) {
		connections.Add(1)
		f := http2.NewFramer(c, c)
		f.WriteSettings()
		io.ReadFull(c, make([]byte, len(http2.ClientPreface)))
		for {
			frame, err := f.ReadFrame()
			if err != nil {
				return
			}
			if s, ok := frame.(*http2.SettingsFrame); ok && s.IsAck() {
				f.WriteGoAway(0, http2.ErrCodeNo, nil)
			}
		}
	})
	m.registerAs(registry.Endpoint{Service: "web", Node: "a", Address: mustAddr(l.Addr().String()), Protocol: policy.ProtocolHTTP2})
	a := m.nodes["a"]
	a.client = a.http2Client(t)
	resp, body := a.get(t, "http://web.mesh/")
	wantFault(t, resp, body, fault.Timeout)
	if n := connections.Load(); n > 20 {
		t.Errorf("%d connections in half a second", n)
	}
	m.quiet()
}
