package relay

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/headroom-mesh/headroom/policy"
)

// lab is an engine between a client and a replica, both of HTTP/2.
type lab struct {
	t      testing.TB
	engine *Engine
	at     string // where callers connect
	router *labRouter
	stop   func() // ends Serve
	served chan error
}

// labRouter sends each call to one Upstream after the other, and counts.
type labRouter struct {
	hops      []*Upstream
	spare     []*Upstream // that are not used now
	fields    []Field
	forwarded policy.Forwarded
	limit     time.Duration
	waits     bool
	agent     bool // the upstreams are agents, which say why they can't deliver

	begun, ended, tries atomic.Int64

	mu      sync.Mutex
	reasons []fault.Reason
	grpc    []string // grpc-status of the trailers
}

func (r *labRouter) Begin(h Head, now time.Time) Call {
	r.begun.Add(1)
	return &labCall{router: r, head: h, now: now}
}

type labCall struct {
	router *labRouter
	head   Head
	now    time.Time
	tries  int
	busy   atomic.Int32
}

// alone fails if two goroutines speak to the call at the same time, or one does after its end.
func (c *labCall) alone() func() {
	if !c.busy.CompareAndSwap(0, 1) {
		panic("two at a time")
	}
	return func() { c.busy.Store(0) }
}

func (c *labCall) Waits() bool { return c.router.waits }

func (c *labCall) Next(ctx context.Context, failed *fault.Error) (Hop, *fault.Error) {
	defer c.alone()()
	if failed != nil && (!failed.Reason.Unsent() || c.tries == len(c.router.hops)) {
		return Hop{}, failed
	}
	if c.router.waits {
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return Hop{}, fault.New(fault.Canceled, "gone")
		}
	}
	if len(c.router.hops) == 0 {
		return Hop{}, fault.New(fault.NoEndpoints, "service \"no\n100%%\" has no replicas")
	}
	c.router.tries.Add(1)
	hop := Hop{To: c.router.hops[c.tries], Fields: c.router.fields, Forwarded: c.router.forwarded}
	c.tries++
	if c.router.limit > 0 {
		hop.Deadline = c.now.Add(c.router.limit)
	}
	return hop, nil
}

func (c *labCall) Answered(a Answer, now time.Time) ([]Field, *fault.Error) {
	defer c.alone()()
	if reason, ok := a.Field(nil, FieldReason); ok && c.router.agent {
		detail, _ := a.Field(nil, FieldDetail)
		return nil, fault.New(fault.Reason(reason), "%s", detail)
	}
	return []Field{{FieldLoad, []byte("7")}}, nil
}

func (c *labCall) End(e Ending, now time.Time) {
	c.alone()
	if c.head.Protocol() == HTTP2 && len(c.head.Method(nil)) == 0 {
		panic("the head is gone before the call")
	}
	r := c.router
	r.mu.Lock()
	r.reasons = append(r.reasons, e.Reason)
	if e.Trailers != nil {
		status, _ := e.Trailers.Field(nil, "grpc-status")
		r.grpc = append(r.grpc, string(status))
	}
	r.mu.Unlock()
	r.ended.Add(1)
}

// endings returns how calls ended, once so many have.
func (r *labRouter) endings(t testing.TB, n int64) []fault.Reason {
	t.Helper()
	eventually(t, fmt.Sprint(n, " calls end"), func() bool { return r.ended.Load() >= n })
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]fault.Reason(nil), r.reasons...)
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for end := time.After(10 * time.Second); !ok(); {
		select {
		case <-tick.C:
		case <-end:
			buf := make([]byte, 1<<20)
			t.Fatalf("it does not happen that %s\n%s", what, buf[:runtime.Stack(buf, true)])
		}
	}
}

// target leads to an address.
func labTarget(addr string) Target {
	return Target{
		Name: "replica web-1", IdleTimeout: time.Minute,
		Dial: func(ctx context.Context, _ Protocol) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "tcp", addr)
		},
	}
}

// newLab starts an engine that leads to targets, and checks at the end that all has come back.
func newLab(t testing.TB, entry Entry, targets ...Target) *lab {
	t.Helper()
	l := &lab{t: t, engine: New(Config{DrainTimeout: 5 * time.Second}), router: new(labRouter), served: make(chan error, 1)}
	for _, target := range targets {
		l.router.hops = append(l.router.hops, l.engine.NewUpstream(target))
	}
	entry.Router = l.router
	if entry.Protocol == Unknown {
		entry.Protocol = HTTP2
	}
	listener := listen(t)
	l.at = listener.Addr().String()
	running, end := context.WithCancel(context.Background())
	serving, stop := context.WithCancel(context.Background())
	l.stop = stop
	var wg sync.WaitGroup
	wg.Go(func() { l.engine.Run(running) })
	wg.Go(func() { l.served <- l.engine.Serve(serving, listener, entry) })
	t.Cleanup(func() {
		stop()
		if err := <-l.served; err != nil {
			t.Error(err)
		}
		end()
		wg.Wait()
		if b, e := l.router.begun.Load(), l.router.ended.Load(); b != e {
			t.Errorf("%d calls began, %d ended", b, e)
		}
		if len(targets) == 0 || !targets[0].Agent { // else there is another engine, which has not ended
			eventually(t, "the goroutines return", func() bool { return !carrying() })
		}
	})
	return l
}

// carrying reports whether a goroutine is left that carries calls.
func carrying() bool {
	stacks := make([]byte, 4<<20)
	stacks = stacks[:runtime.Stack(stacks, true)]
	for _, at := range []string{"dataplane/h2.(*Conn)", "relay.(*session)", "relay.(*stream)"} {
		if bytes.Contains(stacks, []byte(at)) {
			return true
		}
	}
	return false
}

// replica starts a server of net/http that speaks HTTP/2.
func replica(t testing.TB, h http.HandlerFunc) *httptest.Server {
	s := httptest.NewUnstartedServer(h)
	s.Config.Protocols = new(http.Protocols)
	s.Config.Protocols.SetUnencryptedHTTP2(true)
	s.Start()
	t.Cleanup(s.Close)
	return s
}

// client returns a client of net/http that speaks HTTP/2.
func (l *lab) client() *http.Client {
	tr := &http.Transport{
		Protocols: new(http.Protocols),
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "tcp", l.at)
		},
	}
	tr.Protocols.SetUnencryptedHTTP2(true)
	l.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

// client1 returns a client that speaks HTTP/1.1.
func (l *lab) client1() *http.Client {
	tr := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "tcp", l.at)
	}}
	l.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

func newWebLab(t testing.TB, h http.HandlerFunc) *lab {
	s := replica(t, h)
	return newLab(t, Entry{}, labTarget(s.Listener.Addr().String()))
}

func TestHTTP2PassesCalls(t *testing.T) {
	l := newWebLab(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		w.Header().Set("Trailer", "X-Sum")
		w.Header().Set("Headroom-Load", "forged")
		w.Header().Set("Endpoint-Load-Metrics", "TEXT cpu_utilization=0.3")
		w.Header().Set("X-Via", strings.Join(r.Header["Via"], ","))
		w.WriteHeader(http.StatusAccepted)
		fmt.Fprintf(w, "%s %s %s %d %x %v %v", r.Method, r.Host, r.URL, r.ContentLength, sha256.Sum256(body), r.Trailer, r.Header["Headroom-Key"])
		w.Header().Set("X-Sum", "9")
	})
	l.router.fields = []Field{{FieldKey, []byte("ours")}}
	c := l.client()
	var all sync.WaitGroup
	for i, size := range []int{0, 1, 100, 16 << 10, 70 << 10, 3 << 20} {
		for _, declared := range []bool{true, false} {
			all.Go(func() {
				data := make([]byte, size)
				rand.NewChaCha8([32]byte{byte(i)}).Read(data)
				r, _ := http.NewRequest("PUT", fmt.Sprintf("http://web.mesh/%d?q=%%20", i), bytes.NewReader(data))
				r.Header.Set("Headroom-Key", "forged")
				length := int64(size)
				trailer := "map[]"
				if !declared {
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
				want := fmt.Sprintf("PUT web.mesh /%d?q=%%20 %d %x %s [ours]", i, length, sha256.Sum256(data), trailer)
				if err != nil || string(body) != want || resp.StatusCode != http.StatusAccepted || resp.Trailer.Get("X-Sum") != "9" {
					t.Errorf("got %v %q, %v, trailers %v, want %q", resp.Status, body, err, resp.Trailer, want)
				}
				if via := resp.Header.Get("X-Via"); via != "2 headroom" {
					t.Errorf("the replica saw Via %q", via)
				}
				if h := resp.Header; h.Get("Headroom-Load") != "7" || len(h["Endpoint-Load-Metrics"]) > 0 {
					t.Errorf("got fields %v", h)
				}
			})
		}
	}
	all.Wait()
	for _, r := range l.router.endings(t, 12) {
		if r != fault.None {
			t.Errorf("a call ended with %s", r)
		}
	}
}

// TestHTTP2Early wants an answer that comes before the end of the request to arrive, whole.
func TestHTTP2Early(t *testing.T) {
	l := newWebLab(t, func(w http.ResponseWriter, r *http.Request) {
		io.CopyN(io.Discard, r.Body, 1000)
		w.Header().Set("X-Early", "1")
		w.WriteHeader(http.StatusTooManyRequests)
		w.Write(bytes.Repeat([]byte("e"), 300<<10))
	})
	for range 20 {
		body, send := io.Pipe()
		var sending sync.WaitGroup
		sending.Go(func() {
			for {
				if _, err := send.Write(make([]byte, 32<<10)); err != nil {
					return
				}
			}
		})
		resp, err := l.client().Post("http://web.mesh/", "", body)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(resp.Body)
		if err != nil || len(got) != 300<<10 || resp.StatusCode != http.StatusTooManyRequests {
			t.Errorf("got %s, %d bytes, %v", resp.Status, len(got), err)
		}
		body.Close()
		sending.Wait()
	}
	for _, r := range l.router.endings(t, 20) {
		if r != fault.None {
			t.Errorf("a call ended with %s", r)
		}
	}
}

// TestHTTP2Cancel wants the replica to know at once that the caller has gone, and the other way round.
func TestHTTP2Cancel(t *testing.T) {
	canceled := make(chan struct{}, 1)
	arrived := make(chan struct{}, 1)
	l := newWebLab(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/abort" {
			io.WriteString(w, "part")
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		}
		if r.URL.Path == "/begun" {
			w.WriteHeader(200)
			w.(http.Flusher).Flush()
		}
		arrived <- struct{}{}
		<-r.Context().Done()
		canceled <- struct{}{}
	})
	c := l.client()
	for _, path := range []string{"/waiting", "/begun"} {
		ctx, cancel := context.WithCancel(t.Context())
		r, _ := http.NewRequestWithContext(ctx, "GET", "http://web.mesh"+path, nil)
		var calling sync.WaitGroup
		calling.Go(func() {
			resp, err := c.Do(r)
			if err == nil {
				_, err = io.ReadAll(resp.Body)
			}
			if !errors.Is(err, context.Canceled) {
				t.Errorf("%s: got %v", path, err)
			}
		})
		<-arrived
		cancel()
		<-canceled
		calling.Wait()
	}
	resp, err := c.Get("http://web.mesh/abort")
	if err != nil {
		t.Fatal(err)
	}
	if body, err := io.ReadAll(resp.Body); err == nil {
		t.Errorf("an answer that was broken off looks whole: %q", body)
	}
	got := l.router.endings(t, 3)
	if want := []fault.Reason{fault.Canceled, fault.Canceled, fault.Reset}; fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("the calls ended with %q, want %q", got, want)
	}
}

// TestHTTP2StalledReader wants a caller that does not read one answer to get the others on the same connection.
func TestHTTP2StalledReader(t *testing.T) {
	l := newWebLab(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/large" {
			io.CopyN(w, zeros{}, 64<<20)
			return
		}
		io.WriteString(w, "small")
	})
	c := l.client()
	stalled, err := c.Get("http://web.mesh/large")
	if err != nil {
		t.Fatal(err)
	}
	for range 100 {
		resp, err := c.Get("http://web.mesh/small")
		if err != nil {
			t.Fatal(err)
		}
		if body, err := io.ReadAll(resp.Body); string(body) != "small" {
			t.Fatalf("got %q, %v", body, err)
		}
	}
	var memory runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&memory)
	if memory.HeapAlloc > 60<<20 {
		t.Errorf("%d MiB are in use", memory.HeapAlloc>>20)
	}
	if n, err := io.Copy(io.Discard, stalled.Body); n != 64<<20 || err != nil {
		t.Errorf("got %d bytes, %v", n, err)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// TestHTTP2Deadline wants the policy's timeout to end a call.
func TestHTTP2Deadline(t *testing.T) {
	canceled := make(chan struct{}, 1)
	l := newWebLab(t, func(w http.ResponseWriter, r *http.Request) {
		<-r.Context().Done()
		canceled <- struct{}{}
	})
	l.router.limit = 50 * time.Millisecond
	resp, err := l.client().Get("http://web.mesh/")
	if err != nil {
		t.Fatal(err)
	}
	body, _ := io.ReadAll(resp.Body)
	if resp.StatusCode != 504 || resp.Header.Get(fault.Header) != "timeout" || !strings.HasPrefix(string(body), "headroom: ") {
		t.Errorf("got %s %v %q", resp.Status, resp.Header, body)
	}
	<-canceled
	if got := l.router.endings(t, 1); got[0] != fault.Timeout {
		t.Errorf("the call ended with %q", got)
	}
}

// TestHTTP2Faults wants callers to be told what is wrong.
func TestHTTP2Faults(t *testing.T) {
	refused := Target{Name: "replica web-1", IdleTimeout: time.Minute, Dial: func(context.Context, Protocol) (net.Conn, error) {
		return nil, errors.New("connection refused")
	}}
	notHTTP2 := labTarget(serveRaw(t, func(c net.Conn) { io.WriteString(c, "HTTP/1.1 400 Bad Request\r\n\r\n") }))
	broken := labTarget(serveRaw(t, func(c net.Conn) {
		c.Write([]byte{0, 0, 0, 4, 0, 0, 0, 0, 0}) // settings
		io.CopyN(io.Discard, c, 150)               // more than the preface
	}))
	notHTTP2.Speaks = HTTP2
	for _, test := range []struct {
		name    string
		targets []Target
		status  int
		reason  fault.Reason
		waits   bool
	}{
		{"no replica", nil, 503, fault.NoEndpoints, false},
		{"no replica, asked for long", nil, 503, fault.NoEndpoints, true},
		{"no connection", []Target{refused, refused}, 503, fault.ConnectFailed, false},
		{"no connection, asked for long", []Target{refused, refused}, 503, fault.ConnectFailed, true},
		{"declared to be HTTP/2, and not", []Target{notHTTP2}, 503, fault.ConnectFailed, false},
		{"broken connection", []Target{broken}, 502, fault.Reset, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			l := newLab(t, Entry{}, test.targets...)
			l.router.waits = test.waits
			resp, err := l.client().Post("http://web.mesh/", "text/plain", strings.NewReader("hello"))
			if err != nil {
				t.Fatal(err)
			}
			body, err := io.ReadAll(resp.Body)
			if resp.StatusCode != test.status || resp.Header.Get(fault.Header) != string(test.reason) || err != nil || !strings.HasPrefix(string(body), "headroom: ") {
				t.Errorf("got %s, %v, %q, %v", resp.Status, resp.Header, body, err)
			}
			if got := l.router.endings(t, 1); got[0] != test.reason {
				t.Errorf("the call ended with %q", got)
			}
			if got := l.router.tries.Load(); got != int64(len(test.targets)) {
				t.Errorf("there were %d tries", got)
			}
		})
	}
}

// serveRaw serves each connection with a function, and returns the address.
func serveRaw(t testing.TB, serve func(net.Conn)) string {
	l := listen(t)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				serve(c)
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		wg.Wait()
	})
	return l.Addr().String()
}
