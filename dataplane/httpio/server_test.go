package httpio

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/memnet"
)

// served is a Server on a network in memory.
type served struct {
	t      *testing.T
	host   *memnet.Host
	at     netip.AddrPort
	cancel func()
	done   chan error
}

func serve(t *testing.T, s Server) *served {
	host := memnet.New().Host("10.0.0.1")
	l, err := host.Listen(80)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx, l) }()
	return &served{t, host, netip.MustParseAddrPort(l.Addr().String()), cancel, done}
}

func (s *served) dial() net.Conn {
	c, err := s.host.Dial(s.t.Context(), s.at)
	if err != nil {
		s.t.Fatal(err)
	}
	return c
}

// stop ends the server and returns how long that took.
func (s *served) stop() (time.Duration, error) {
	start := time.Now()
	s.cancel()
	err := <-s.done
	return time.Since(start), err
}

func respond(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "ok") }

func TestStopsAtOnceWhenNothingIsInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, Server{Handler: http.HandlerFunc(respond)})
		s.dial() // never used
		half := s.dial()
		io.WriteString(half, "GET / HTTP/1.1\r\nHo")
		idle := s.dial()
		io.WriteString(idle, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		if resp, err := http.ReadResponse(bufio.NewReader(idle), nil); err != nil || resp.StatusCode != 200 {
			t.Fatal(resp, err)
		}
		synctest.Wait()
		if took, err := s.stop(); took > time.Second || err != nil {
			t.Errorf("took %v, %v", took, err)
		}
	})
}

func TestDrainTime(t *testing.T) {
	for _, test := range []struct {
		name         string
		limit, work  time.Duration
		upgrade      bool
		lasts        time.Duration
		cut, ignores bool
	}{
		{name: "in time", work: 29 * time.Second, lasts: 29 * time.Second},
		{name: "default limit", work: time.Hour, lasts: 30 * time.Second, cut: true},
		{name: "own limit", limit: time.Second, work: time.Hour, lasts: time.Second, cut: true},
		{name: "upgraded, in time", work: 29 * time.Second, upgrade: true, lasts: 29 * time.Second},
		{name: "upgraded, default limit", work: time.Hour, upgrade: true, lasts: 30 * time.Second, cut: true},
		{name: "handler ignores the end", limit: time.Second, work: time.Minute, ignores: true, lasts: time.Minute, cut: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := serve(t, Server{DrainTimeout: test.limit, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					if test.upgrade {
						c, _, err := http.NewResponseController(w).Hijack()
						if err != nil {
							t.Error(err)
							return
						}
						defer c.Close()
					}
					end := r.Context().Done()
					if test.ignores {
						end = nil
					}
					select {
					case <-time.After(test.work):
					case <-end:
					}
				})})
				c := s.dial()
				io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
				synctest.Wait()
				took, err := s.stop()
				if took < test.lasts || took > test.lasts+time.Second {
					t.Errorf("took %v, want %v", took, test.lasts)
				}
				if cut := err != nil && strings.Contains(err.Error(), "cut off"); cut != test.cut {
					t.Errorf("got %v", err)
				}
			})
		})
	}
}

func TestServerTimeouts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, Server{Handler: http.HandlerFunc(respond), IdleTimeout: time.Minute})
		idle, half, empty := s.dial(), s.dial(), s.dial()
		io.WriteString(idle, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		io.WriteString(half, "GET / HTTP/1.1\r\nHo")
		for _, test := range []struct {
			name  string
			c     net.Conn
			lasts time.Duration
		}{{"half a header", half, headerTimeout}, {"nothing", empty, headerTimeout}, {"idle", idle, time.Minute}} {
			io.Copy(io.Discard, test.c)
			if d := time.Since(start()); d < test.lasts || d > test.lasts+time.Second {
				t.Errorf("%s: closed after %v, want %v", test.name, d, test.lasts)
			}
		}
		s.stop()
	})
}

// start is when time begins in a bubble.
func start() time.Time { return time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC) }

// TestListenerFails takes the listener away. Requests in flight finish nevertheless.
func TestListenerFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host := memnet.New().Host("10.0.0.1")
		l, _ := host.Listen(80)
		done := make(chan error, 1)
		go func() {
			done <- Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				<-time.After(time.Second)
				io.WriteString(w, "ok")
			})}.Run(t.Context(), l)
		}()
		c, _ := host.Dial(t.Context(), netip.MustParseAddrPort("10.0.0.1:80"))
		io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		synctest.Wait()
		l.Close()
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil || resp.StatusCode != 200 {
			t.Error(resp, err)
		}
		if err := <-done; err == nil {
			t.Error("want an error")
		}
	})
}

func TestRawPath(t *testing.T) {
	for _, test := range []struct{ target, want string }{
		{"/", "/"}, {"/a%2Fb?x=/y", "/a%2Fb"}, {"http://h/a|b?c", "/a|b"}, {"http://h", ""}, {"http://h?x=/", ""},
		{"//a/b", ""}, {"http://h//a", ""}, {"/a://b", "/a://b"}, {"*", "*"}, {"", ""}, {"/?u=http://x/y", "/"}, {"http://h/?u=a://b/c", "/"},
	} {
		if got := rawPath(test.target); got != test.want {
			t.Errorf("rawPath(%q) = %q, want %q", test.target, got, test.want)
		}
	}
}

func FuzzRawPath(f *testing.F) {
	for _, s := range []string{"/", "//a", "*", "http://h/a?b", "/a://b//c", "http://%zz/"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, target string) {
		if p := rawPath(target); strings.HasPrefix(p, "//") || strings.Contains(p, "?") || !strings.Contains(target, p) {
			t.Errorf("rawPath(%q) = %q", target, p)
		}
	})
}
