//go:build linux

package load

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// origin starts a loop with an origin at an address that tests of other packages do not use.
func origin(t testing.TB, at string) (*Loop, netip.Addr) {
	t.Helper()
	l, err := NewLoop()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	ip := netip.MustParseAddr(at)
	if err := l.Serve(ip); err != nil {
		t.Fatal(err)
	}
	return l, ip
}

func open(t testing.TB, l *Loop, k Kind, ip netip.Addr) *Session {
	t.Helper()
	s, err := l.Open(k, "bench.mesh", netip.AddrPortFrom(ip, k.Protocol.Port()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func TestEveryKind(t *testing.T) {
	l, ip := origin(t, "127.79.1.1")
	for _, k := range Kinds() {
		t.Run(k.Name, func(t *testing.T) {
			s := open(t, l, k, ip)
			metered := time.Duration(0)
			rate, err := s.Saturate(time.Millisecond, 50*time.Millisecond, func() time.Duration { metered += time.Second; return metered })
			if err != nil {
				t.Fatal(err)
			}
			if rate.Took < 50*time.Millisecond || rate.Spent != time.Second {
				t.Errorf("saturated: %+v", rate)
			}
			took, err := s.Pace(200, 100*time.Millisecond, 1)
			if err != nil {
				t.Fatal(err)
			}
			if len(took) < 5 || len(took) > 60 || took.Quantile(0.5) <= 0 || took.Quantile(0.5) > took.Quantile(0.99) {
				t.Errorf("%d calls at 200/s in 100 ms: %v", len(took), took)
			}
			if err := s.Grow(k.Connections + 3); err != nil {
				t.Fatal(err)
			}
			if err := s.Try(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestNotTheOrigin holds callers against servers that answer something else.
func TestNotTheOrigin(t *testing.T) {
	tests := []struct {
		name, kind string
		answer     http.HandlerFunc
		want       string
	}{
		{"a refusal", "h1-128", func(w http.ResponseWriter, _ *http.Request) {
			http.Error(w, "no replicas", http.StatusServiceUnavailable)
		}, "503 Service Unavailable"},
		{"another size", "h1-128", func(w http.ResponseWriter, _ *http.Request) { w.Write([]byte("short")) }, "a body of 5 bytes, want 128"},
		{"chunks", "h1-128", func(w http.ResponseWriter, _ *http.Request) { w.(http.Flusher).Flush() }, "Transfer-Encoding: chunked"},
		{"no keeping", "h1-128", func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("Connection", "close") }, "ends the connection"},
		{"HTTP/1 only", "grpc-unary", func(http.ResponseWriter, *http.Request) {}, "HTTP/1"},
		{"hanging up", "h1-128", func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, "EOF"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			server := httptest.NewServer(test.answer)
			defer server.Close()
			l, err := NewLoop()
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			s, err := l.Open(kind(t, test.kind), "bench.mesh", netip.MustParseAddrPort(strings.TrimPrefix(server.URL, "http://")))
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			_, err = s.Saturate(time.Second, time.Second, func() time.Duration { return 0 })
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("saturated: %v, want %q", err, test.want)
			}
		})
	}
}

func kind(t *testing.T, name string) Kind {
	t.Helper()
	for _, k := range Kinds() {
		if k.Name == name {
			return k
		}
	}
	t.Fatalf("no kind %s", name)
	return Kind{}
}

// TestOthersCall calls the origin with a client of others.
func TestOthersCall(t *testing.T) {
	l, ip := origin(t, "127.79.1.2")
	tests := []struct {
		protocol   Protocol
		path, body string
		size       int
		status     string
	}{
		{HTTP1, "/300", "", 300, ""},
		{HTTP1, "/20000", "some", 20000, ""},
		{HTTP2, unaryPath, strings.Repeat("m", messageSize), messageSize, "0"},
		{HTTP2, streamPath, strings.Repeat("m", 100*messageSize), 100 * messageSize, "0"},
	}
	for _, test := range tests {
		t.Run(string(test.protocol)+test.path, func(t *testing.T) {
			transport := &http.Transport{Protocols: new(http.Protocols)}
			transport.Protocols.SetUnencryptedHTTP2(test.protocol == HTTP2)
			transport.Protocols.SetHTTP1(test.protocol == HTTP1)
			defer transport.CloseIdleConnections()
			url := fmt.Sprintf("http://%s%s", netip.AddrPortFrom(ip, test.protocol.Port()), test.path)
			var ended atomic.Bool
			var calling sync.WaitGroup
			calling.Go(func() {
				defer ended.Store(true)
				resp, err := (&http.Client{Transport: transport}).Post(url, "application/grpc", strings.NewReader(test.body))
				if err != nil {
					t.Error(err)
					return
				}
				defer resp.Body.Close()
				body, err := io.ReadAll(resp.Body)
				if err != nil || len(body) != test.size || resp.Trailer.Get("grpc-status") != test.status {
					t.Errorf("%d bytes, error %v, trailers %v", len(body), err, resp.Trailer)
				}
			})
			for !ended.Load() {
				if err := l.turn(1); err != nil {
					t.Fatal(err)
				}
			}
			calling.Wait()
		})
	}
}

func TestMessagesInPieces(t *testing.T) {
	text := "GET /5 HTTP/1.1\r\nHost: a\r\n\r\nPOST /7 HTTP/1.1\r\ncontent-length: 3\r\n\r\nabcGET /9 HTTP/1.1\r\n\r\n"
	for size := 1; size <= len(text); size++ {
		var got strings.Builder
		m := messages{begun: func(head []byte) error { got.WriteString(strings.Fields(string(head))[1]); return nil }, ended: func() error { got.WriteString("."); return nil }}
		for p := text; p != ""; p = p[min(size, len(p)):] {
			if err := m.received([]byte(p[:min(size, len(p))])); err != nil {
				t.Fatal(err)
			}
		}
		if got.String() != "/5./7./9." {
			t.Errorf("in pieces of %d: %s", size, &got)
		}
	}
}

func TestQuantile(t *testing.T) {
	l := Merge(Latencies{1, 3}, Latencies{2, 4})
	for q, want := range map[float64]time.Duration{0: 1, 0.5: 3, 0.75: 4, 0.999: 4, 1: 4} {
		if got := l.Quantile(q); got != want {
			t.Errorf("quantile %v of %v: %d, want %d", q, l, got, want)
		}
	}
	if got := (Latencies{}).Quantile(0.5); got != 0 {
		t.Errorf("quantile of nothing: %d", got)
	}
}

// TestWaitingCounts wants calls that were due while all connections were busy to count from when they were due.
func TestWaitingCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &Session{}
		p := &pace{session: s}
		s.ended = p.end
		c := newCall(&conn{gone: true}, func() {})
		c.ended = s.end
		s.idle = []*call{c}
		due := time.Now()
		p.begin(due)
		p.begin(due.Add(time.Second))
		time.Sleep(10 * time.Second)
		c.done(nil)
		time.Sleep(time.Second)
		c.done(nil)
		if len(p.took) != 2 || p.took[0] != 10*time.Second || p.took[1] != 10*time.Second {
			t.Errorf("took %v, want 10s twice", p.took)
		}
	})
}
