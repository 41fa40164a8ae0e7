package relay

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/fault"
)

// mixed puts an engine between a caller of one version of HTTP and a replica that is known to speak only the other.
func mixed(t *testing.T, h http.HandlerFunc, test func(t *testing.T, l *lab, c *http.Client)) {
	t.Run("HTTP/2 to HTTP/1.1", func(t *testing.T) {
		s := httptest.NewServer(h)
		t.Cleanup(s.Close)
		target := labTarget(s.Listener.Addr().String())
		target.Speaks = HTTP1
		l := newLab(t, Entry{}, target)
		test(t, l, l.client())
	})
	t.Run("HTTP/2 to what turns out to be HTTP/1.1", func(t *testing.T) {
		s := httptest.NewServer(h)
		t.Cleanup(s.Close)
		l := newLab(t, Entry{}, labTarget(s.Listener.Addr().String()))
		test(t, l, l.client())
	})
	t.Run("HTTP/1.1 to HTTP/2", func(t *testing.T) {
		target := labTarget(replica(t, h).Listener.Addr().String())
		target.Speaks = HTTP2
		l := newLab(t, Entry{Protocol: HTTP1}, target)
		test(t, l, l.client1())
	})
}

func TestMixed(t *testing.T) {
	mixed(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		w.Header().Set("X-Proto", r.Proto)
		switch r.URL.Path {
		case "/empty":
			w.WriteHeader(http.StatusNoContent)
			return
		case "/hint":
			w.Header().Set("Link", "</x>")
			w.WriteHeader(http.StatusEarlyHints)
		case "/length":
			w.Header().Set("Content-Length", fmt.Sprint(len(body)))
		default:
			w.Header().Set("Trailer", "X-Sum")
		}
		w.Header().Add("Set-Cookie", "a=1")
		w.Header().Add("Set-Cookie", "b=2")
		w.Header().Set("X-Got", fmt.Sprintf("%s %s %s %d %v %q", r.Method, r.Host, r.URL, r.ContentLength, r.Trailer, r.Header["Cookie"]))
		w.WriteHeader(http.StatusAccepted)
		w.Write(body)
		w.Header().Set("X-Sum", "9")
	}, func(t *testing.T, l *lab, c *http.Client) {
		var all sync.WaitGroup
		for i := range 60 {
			all.Go(func() {
				path := []string{"/plain", "/length", "/hint", "/empty"}[i%4]
				method := []string{"POST", "PUT", "HEAD", "GET", "POST"}[i%5]
				size := []int{0, 1, 5000, 200_000, 3_000_000}[i%5]
				if method == "GET" || method == "HEAD" {
					size = 0
				}
				data := make([]byte, size)
				rand.NewChaCha8([32]byte{byte(i)}).Read(data)
				r, _ := http.NewRequest(method, "http://web.mesh"+path+"?q=%20", bytes.NewReader(data))
				r.Header.Set("Cookie", "c=3; d=4")
				length, trailer := int64(size), "map[]"
				if i%2 == 0 && size > 0 {
					r.Body, r.ContentLength, length = io.NopCloser(bytes.NewReader(data)), -1, -1
					r.Trailer, trailer = http.Header{"X-End": {"2"}}, "map[X-End:[2]]"
				}
				resp, err := c.Do(r)
				if err != nil {
					t.Error(err)
					return
				}
				body, err := io.ReadAll(resp.Body)
				resp.Body.Close()
				if path == "/empty" {
					if resp.StatusCode != http.StatusNoContent || len(body) > 0 || err != nil {
						t.Errorf("got %s, %d bytes, %v", resp.Status, len(body), err)
					}
					return
				}
				if method == "HEAD" {
					data = nil
				}
				want := fmt.Sprintf("%s web.mesh %s?q=%%20 %d %s [\"c=3; d=4\"]", method, path, length, trailer)
				if got := resp.Header.Get("X-Got"); err != nil || got != want || sha256.Sum256(body) != sha256.Sum256(data) || resp.StatusCode != http.StatusAccepted {
					t.Errorf("got %s, %d bytes, %v, %s, want %s", resp.Status, len(body), err, got, want)
				}
				if h := resp.Header; h.Get("X-Proto") == resp.Proto || len(h["Set-Cookie"]) != 2 || h.Get("Headroom-Load") != "7" {
					t.Errorf("got fields %v by %s", h, resp.Proto)
				}
				if path == "/plain" && method != "HEAD" && resp.Trailer.Get("X-Sum") != "9" {
					t.Errorf("%s: got trailers %v", method, resp.Trailer)
				}
			})
		}
		all.Wait()
		for _, r := range l.router.endings(t, 60) {
			if r != fault.None {
				t.Errorf("a call ended with %s", r)
			}
		}
	})
}

// TestMixedStreams wants what comes to be passed on at once, both ways, and a caller that leaves to be noticed.
func TestMixedStreams(t *testing.T) {
	left := make(chan struct{}, 1)
	mixed(t, func(w http.ResponseWriter, r *http.Request) {
		http.NewResponseController(w).EnableFullDuplex()
		w.WriteHeader(200)
		w.(http.Flusher).Flush()
		buf := make([]byte, 100)
		for {
			n, err := r.Body.Read(buf)
			if n > 0 {
				w.Write(buf[:n])
				w.(http.Flusher).Flush()
			}
			if err != nil {
				break
			}
		}
		if r.URL.Path == "/leave" {
			<-r.Context().Done()
			left <- struct{}{}
		}
	}, func(t *testing.T, l *lab, c *http.Client) {
		body, send := io.Pipe()
		resp, err := c.Post("http://web.mesh/", "", body)
		if err != nil {
			t.Fatal(err)
		}
		got := make([]byte, 5)
		for range 20 {
			io.WriteString(send, "hello")
			if _, err := io.ReadFull(resp.Body, got); err != nil || string(got) != "hello" {
				t.Fatalf("got %q, %v", got, err)
			}
		}
		send.Close()
		if rest, err := io.ReadAll(resp.Body); len(rest) > 0 || err != nil {
			t.Errorf("got %q, %v", rest, err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		r, _ := http.NewRequestWithContext(ctx, "GET", "http://web.mesh/leave", nil)
		if resp, err = c.Do(r); err != nil {
			t.Fatal(err)
		}
		cancel()
		<-left
		if _, err := io.ReadAll(resp.Body); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
		if got := l.router.endings(t, 2); got[0] != fault.None || got[1] != fault.Canceled {
			t.Errorf("the calls ended with %q", got)
		}
	})
}

// TestMixedFaults wants callers to be told what is wrong, and half an answer not to look whole.
func TestMixedFaults(t *testing.T) {
	mixed(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/slow":
			<-r.Context().Done()
		case "/broken":
			panic(http.ErrAbortHandler)
		case "/half":
			io.WriteString(w, "half")
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		}
	}, func(t *testing.T, l *lab, c *http.Client) {
		l.router.limit = 100 * time.Millisecond
		resp, err := c.Get("http://web.mesh/slow")
		if err != nil || resp.StatusCode != 504 || resp.Header.Get(fault.Header) != "timeout" {
			t.Errorf("got %v, %v", resp, err)
		}
		l.router.limit = 0
		resp, err = c.Post("http://web.mesh/broken", "", strings.NewReader("x"))
		if err == nil && (resp.StatusCode != 502 || resp.Header.Get(fault.Header) != "upstream_reset") {
			t.Errorf("got %v", resp)
		}
		resp, err = c.Get("http://web.mesh/half")
		if err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(resp.Body); err == nil {
			t.Errorf("an answer that was broken off looks whole: %q", got)
		}
		want := []fault.Reason{fault.Timeout, fault.Reset, fault.Reset}
		if got := l.router.endings(t, 3); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("the calls ended with %q, want %q", got, want)
		}
	})
}

// TestMixedLarge wants large bodies to pass in a bounded memory, at the pace of who reads them.
func TestMixedLarge(t *testing.T) {
	const size = 64 << 20
	mixed(t, func(w http.ResponseWriter, r *http.Request) {
		http.NewResponseController(w).EnableFullDuplex()
		io.Copy(w, r.Body)
	}, func(t *testing.T, l *lab, c *http.Client) {
		sent, got := sha256.New(), sha256.New()
		source := io.TeeReader(io.LimitReader(rand.NewChaCha8([32]byte{1}), size), sent)
		resp, err := c.Post("http://web.mesh/", "", io.NopCloser(source))
		if err != nil {
			t.Fatal(err)
		}
		if n, err := io.Copy(got, resp.Body); n != size || err != nil || !bytes.Equal(sent.Sum(nil), got.Sum(nil)) {
			t.Errorf("got %d bytes, %v", n, err)
		}
	})
}
