package relay

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"pgregory.net/rapid"
)

// straight is a Router of which all calls go to one place. It is a Call, too: none has a state of its own.
type straight struct {
	to           *Upstream
	begun, ended atomic.Int64
}

func (r *straight) Begin(Head, time.Time) Call { r.begun.Add(1); return r }
func (r *straight) Waits() bool                { return false }
func (r *straight) Next(_ context.Context, failed *fault.Error) (Hop, *fault.Error) {
	return Hop{To: r.to}, failed
}
func (r *straight) Answered(Answer, time.Time) ([]Field, *fault.Error) { return nil, nil }
func (r *straight) End(Ending, time.Time)                              { r.ended.Add(1) }

// relayed is an engine between callers and a replica, over TCP. In the end all must be as it was before.
type relayed struct {
	t      testing.TB
	at     string
	router *straight
	stop   func()
}

func relayTo(t testing.TB, replica func(net.Conn), reg prometheus.Registerer) *relayed {
	goroutines, files := runtime.NumGoroutine(), openFiles(t)
	e := New(Config{Metrics: reg, DrainTimeout: 5 * time.Second})
	behind, front := listen(t), listen(t)
	r := &straight{to: e.NewUpstream(Target{Name: "it", IdleTimeout: time.Minute, Dial: func(ctx context.Context, _ Protocol) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "tcp", behind.Addr().String())
	}})}
	serving, endServing := context.WithCancel(context.Background())
	running, endRunning := context.WithCancel(context.Background())
	var served, all sync.WaitGroup
	served.Go(func() {
		if err := e.Serve(serving, front, Entry{Router: r, Protocol: HTTP1}); err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	all.Go(func() { e.Run(running) })
	all.Go(func() {
		for {
			c, err := behind.Accept()
			if err != nil {
				return
			}
			all.Go(func() {
				defer c.Close()
				replica(c)
			})
		}
	})
	stop := sync.OnceFunc(func() {
		endServing()
		served.Wait()
		endRunning()
		behind.Close()
		all.Wait()
		if b, e := r.begun.Load(), r.ended.Load(); b != e {
			t.Errorf("%d calls began, %d ended", b, e)
		}
		back(t, "goroutines", goroutines, runtime.NumGoroutine)
		back(t, "open files", files, func() int { return openFiles(t) })
	})
	t.Cleanup(stop)
	return &relayed{t, front.Addr().String(), r, stop}
}

// back waits until something is as it was.
func back(t testing.TB, what string, before int, now func() int) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for end := time.After(5 * time.Second); now() > before; {
		select {
		case <-tick.C:
		case <-end:
			t.Errorf("%d %s, there were %d", now(), what, before)
			return
		}
	}
}

func openFiles(t testing.TB) int {
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skip("there is no /proc")
	}
	n := 0
	for _, f := range all {
		// Pipes are kept by the runtime, to splice with.
		if to, err := os.Readlink("/proc/self/fd/" + f.Name()); err == nil && strings.HasPrefix(to, "socket:") {
			n++
		}
	}
	return n
}

func (r *relayed) dial() net.Conn {
	r.t.Helper()
	c, err := net.Dial("tcp", r.at)
	if err != nil {
		r.t.Fatal(err)
	}
	c.SetDeadline(time.Now().Add(30 * time.Second))
	return c
}

// message is a request, or its response, with a body that is framed in some way.
type message struct {
	body    []byte
	chunks  []int // nil: by length
	trailer string
}

func drawMessage(t *rapid.T, label string) message {
	sizes := rapid.OneOf(rapid.IntRange(0, 20), rapid.IntRange(0, 3000), rapid.IntRange(16300, 16500), rapid.IntRange(0, 300000))
	m := message{body: bytes.Repeat([]byte(label), 1+sizes.Draw(t, label)/len(label))}
	if rapid.Bool().Draw(t, label+" chunked") {
		for left := len(m.body); left > 0; {
			n := rapid.IntRange(1, left).Draw(t, "chunk")
			m.chunks = append(m.chunks, n)
			left -= n
		}
		m.trailer = rapid.SampledFrom([]string{"", "X-Sum: 7\r\n"}).Draw(t, "trailer")
	}
	return m
}

func (m message) append(dst []byte, first string) []byte {
	dst = append(dst, first...)
	if m.chunks == nil {
		dst = fmt.Appendf(dst, "Content-Length: %d\r\n\r\n", len(m.body))
		return append(dst, m.body...)
	}
	dst = append(dst, "Trailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n"...)
	at := 0
	for _, n := range m.chunks {
		dst = fmt.Appendf(dst, "%x\r\n%s\r\n", n, m.body[at:at+n])
		at += n
	}
	return fmt.Appendf(dst, "0\r\n%s\r\n", m.trailer)
}

func (m message) check(t *rapid.T, what string, got []byte, err error, trailer http.Header) {
	want := ""
	if m.trailer != "" {
		want = "7"
	}
	if err != nil || !bytes.Equal(got, m.body) || trailer.Get("X-Sum") != want {
		t.Fatalf("%s: %d bytes, %v, trailers %v; want %d bytes and X-Sum %q", what, len(got), err, trailer, len(m.body), want)
	}
}

// writeInPieces writes b as a sender would that is cut off here and there.
func writeInPieces(w io.Writer, b []byte, cuts []int) error {
	for _, n := range cuts {
		n = min(n, len(b))
		if _, err := w.Write(b[:n]); err != nil {
			return err
		}
		b = b[n:]
		runtime.Gosched()
	}
	_, err := w.Write(b)
	return err
}

// TestSegments sends requests, pipelined, and answers in all kinds of pieces. Each end must get what the other has sent.
func TestSegments(t *testing.T) {
	type exchange struct{ request, response message }
	var expected []exchange
	var cuts []int
	var failed atomic.Pointer[string]
	fail := func(format string, args ...any) { s := fmt.Sprintf(format, args...); failed.CompareAndSwap(nil, &s) }
	r := relayTo(t, func(c net.Conn) {
		in := bufio.NewReader(c)
		for {
			req, err := http.ReadRequest(in)
			if err != nil {
				return
			}
			var i int
			fmt.Sscanf(req.URL.Path, "/%d", &i)
			body, err := io.ReadAll(req.Body)
			if want := expected[i].request; err != nil || !bytes.Equal(body, want.body) || want.trailer != "" && req.Trailer.Get("X-Sum") != "7" {
				fail("request %d: the replica gets %d bytes, %v, want %d", i, len(body), err, len(want.body))
			}
			if writeInPieces(c, expected[i].response.append(nil, "HTTP/1.1 200 OK\r\n"), cuts) != nil {
				return
			}
		}
	}, nil)
	rapid.Check(t, func(t *rapid.T) {
		expected, cuts = nil, rapid.SliceOfN(rapid.IntRange(1, 2000), 0, 20).Draw(t, "cuts")
		var out []byte
		for i := range rapid.IntRange(1, 4).Draw(t, "requests") {
			x := exchange{drawMessage(t, "req"), drawMessage(t, "resp")}
			expected = append(expected, x)
			out = x.request.append(out, fmt.Sprintf("POST /%d HTTP/1.1\r\nHost: web.mesh\r\n", i))
		}
		c := r.dial()
		defer c.Close()
		var sending sync.WaitGroup
		sending.Go(func() { writeInPieces(c, out, cuts) })
		in := bufio.NewReader(c)
		for i, x := range expected {
			resp, err := http.ReadResponse(in, nil)
			if err != nil {
				t.Fatalf("response %d: %v", i, err)
			}
			body, err := io.ReadAll(resp.Body)
			x.response.check(t, fmt.Sprint("response ", i), body, err, resp.Trailer)
			if resp.Close {
				t.Fatalf("response %d closes the connection", i)
			}
		}
		sending.Wait()
		if f := failed.Load(); f != nil {
			t.Fatal(*f)
		}
	})
}

// answering returns a replica that answers each request, which comes in one piece, and a caller who does not allocate either.
func answering(response string) func(net.Conn) {
	return func(c net.Conn) {
		b, answer := make([]byte, 64<<10), []byte(response)
		for {
			if _, err := c.Read(b); err != nil {
				return
			}
			if _, err := c.Write(answer); err != nil {
				return
			}
		}
	}
}

func ask(t testing.TB, c net.Conn, request, buf []byte, want int) {
	if _, err := c.Write(request); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAtLeast(c, buf, want); err != nil {
		t.Fatal(err)
	}
}

// TestNoAllocations counts those of all of the process while requests pass.
func TestNoAllocations(t *testing.T) {
	const response = "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nDate: Mon, 30 Nov 2026 06:00:00 GMT\r\nContent-Length: 5\r\n\r\nhello"
	const chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
	for _, test := range []struct{ name, request, response string }{
		{"GET", "GET /index.html HTTP/1.1\r\nHost: web.mesh\r\nUser-Agent: curl/8.5.0\r\nAccept: */*\r\n\r\n", response},
		{"POST", "POST / HTTP/1.1\r\nHost: web.mesh\r\nContent-Length: 1000\r\n\r\n" + strings.Repeat("x", 1000), response},
		{"chunked response", "GET / HTTP/1.1\r\nHost: web.mesh\r\n\r\n", chunked},
		{"chunked request", "POST / HTTP/1.1\r\nHost: web.mesh\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", response},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := relayTo(t, answering(test.response), nil)
			c := r.dial()
			defer c.Close()
			request, buf := []byte(test.request), make([]byte, 4096)
			ask := func() { ask(t, c, request, buf, len(test.response)) }
			for range 100 {
				ask()
			}
			const n = 2000
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			for range n {
				ask()
			}
			runtime.ReadMemStats(&after)
			// The pool of buffers may lose one now and then, and the runtime has business of its own.
			if a := float64(after.Mallocs-before.Mallocs) / n; a > 0.1 && !raceEnabled() {
				t.Errorf("%.2f allocations a request", a)
			}
		})
	}
}

// TestIdleConnections keeps many open, each after a request, and looks at the heap.
func TestIdleConnections(t *testing.T) {
	const n = 500
	const response = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
	r := relayTo(t, answering(response), nil)
	buf := make([]byte, 4096)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for range n {
		c := r.dial()
		defer c.Close()
		ask(t, c, []byte("GET / HTTP/1.1\r\nHost: web.mesh\r\n\r\n"), buf, len(response))
	}
	runtime.GC()
	runtime.GC() // what pools have kept for a while goes only now
	runtime.ReadMemStats(&after)
	each := (int64(after.HeapInuse+after.StackInuse) - int64(before.HeapInuse+before.StackInuse)) / n
	t.Logf("%d bytes a connection, with the caller's end", each)
	if each > 16<<10 && !raceEnabled() {
		t.Errorf("an idle connection holds %d bytes", each)
	}
}

// TestLargeBodies sends a lot in both directions, framed in either way, and looks at the heap meanwhile.
func TestLargeBodies(t *testing.T) {
	size := int64(256 << 20)
	if testing.Short() || raceEnabled() {
		size = 64 << 20
	}
	r := relayTo(t, func(c net.Conn) {
		in := bufio.NewReader(c)
		for {
			req, err := http.ReadRequest(in)
			if err != nil {
				return
			}
			n, err := io.Copy(io.Discard, req.Body)
			if err != nil || req.Method == "POST" && n != size {
				t.Errorf("the replica gets %d bytes, %v", n, err)
			}
			resp := &http.Response{StatusCode: 200, ProtoMajor: 1, ProtoMinor: 1, ContentLength: size, Body: io.NopCloser(io.LimitReader(zeros{}, size))}
			if req.URL.Path == "/chunked" {
				resp.ContentLength, resp.TransferEncoding = -1, []string{"chunked"}
			}
			if req.Method == "POST" {
				resp.ContentLength, resp.TransferEncoding, resp.Body = 0, nil, http.NoBody
			}
			if resp.Write(c) != nil {
				return
			}
		}
	}, nil)
	client := &http.Client{Transport: &http.Transport{DisableCompression: true}}
	defer client.CloseIdleConnections()
	for _, path := range []string{"/length", "/chunked"} {
		for _, method := range []string{"GET", "POST"} {
			t.Run(method+path, func(t *testing.T) {
				var before, now runtime.MemStats
				runtime.GC()
				runtime.ReadMemStats(&before)
				req, _ := http.NewRequestWithContext(t.Context(), method, "http://"+r.at+path, nil)
				req.Host = "web.mesh"
				if method == "POST" {
					req.Body, req.ContentLength = io.NopCloser(io.LimitReader(zeros{}, size)), size
					if path == "/chunked" {
						req.ContentLength = -1
					}
				}
				resp, err := client.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				defer resp.Body.Close()
				n, err := io.Copy(io.Discard, resp.Body)
				if err != nil || method == "GET" && n != size {
					t.Errorf("the caller gets %d bytes, %v", n, err)
				}
				runtime.ReadMemStats(&now)
				if grown := int64(now.HeapInuse) - int64(before.HeapInuse); grown > 8<<20 {
					t.Errorf("the heap grew by %d MiB", grown>>20)
				}
			})
		}
	}
}

// TestUploadsKeepTheConnection has replicas answer a large upload as soon as they have it: the caller's connection serves
// the next one.
func TestUploadsKeepTheConnection(t *testing.T) {
	const size, times = 1 << 20, 50
	r := relayTo(t, func(c net.Conn) {
		in := bufio.NewReader(c)
		for {
			req, err := http.ReadRequest(in)
			if err != nil {
				return
			}
			io.Copy(io.Discard, req.Body)
			io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
		}
	}, nil)
	c := r.dial()
	defer c.Close()
	answers := bufio.NewReader(c)
	body := make([]byte, size)
	for i := range times {
		fmt.Fprintf(c, "POST / HTTP/1.1\r\nHost: web\r\nContent-Length: %d\r\n\r\n", size)
		if _, err := c.Write(body); err != nil {
			t.Fatalf("upload %d: %v", i, err)
		}
		resp, err := http.ReadResponse(answers, nil)
		if err != nil || resp.StatusCode != http.StatusOK || resp.Close {
			t.Fatalf("upload %d: %v, %v; want the connection kept", i, resp, err)
		}
	}
}

// TestHangUpOverTCP has the kernel tell that a caller is gone, while the replica has nothing to say.
func TestHangUpOverTCP(t *testing.T) {
	begun, ended := make(chan bool, 1), make(chan bool, 1)
	r := relayTo(t, func(c net.Conn) {
		c.Read(make([]byte, 4096))
		begun <- true
		c.Read(make([]byte, 1))
		ended <- true
	}, nil)
	for _, how := range []string{"closes", "half-closes", "resets"} {
		c := r.dial().(*net.TCPConn)
		io.WriteString(c, "GET / HTTP/1.1\r\nHost: web.mesh\r\n\r\n")
		<-begun
		switch how {
		case "half-closes":
			c.CloseWrite()
		case "resets":
			c.SetLinger(0)
		}
		if how != "half-closes" {
			c.Close()
		}
		select {
		case <-ended:
		case <-time.After(2 * time.Second):
			t.Errorf("the caller %s, and nobody notices", how)
		}
		c.Close()
	}
}

// TestEndWithTheRequest has callers end their direction in the packet that brings the request, after which the kernel wakes
// nobody any more.
func TestEndWithTheRequest(t *testing.T) {
	const response = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
	r := relayTo(t, answering(response), nil)
	for range 50 {
		c := r.dial().(*net.TCPConn)
		io.WriteString(c, "GET / HTTP/1.1\r\nHost: web.mesh\r\n\r\n")
		c.CloseWrite()
		start := time.Now()
		// On a machine that is busy the caller may count as gone before it has its answer.
		if b, err := io.ReadAll(c); err != nil || len(b) > 0 && string(b) != response {
			t.Errorf("got %q, %v", b, err)
		}
		if d := time.Since(start); d > time.Second {
			t.Errorf("the connection was left open for %v", d)
		}
		c.Close()
	}
}

func TestMetrics(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	relayTo(t, answering(""), reg).stop()
	if problems, err := testutil.GatherAndLint(reg); err != nil || len(problems) > 0 {
		t.Errorf("metrics: %v %v", problems, err)
	}
}

// BenchmarkRelay has the caller, the engine and the replica in one process.
func BenchmarkRelay(b *testing.B) {
	const response = "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 5\r\n\r\nhello"
	r := relayTo(b, answering(response), nil)
	c := r.dial()
	defer c.Close()
	request, buf := []byte("GET / HTTP/1.1\r\nHost: web.mesh\r\nAccept: */*\r\n\r\n"), make([]byte, 4096)
	b.ReportAllocs()
	for b.Loop() {
		ask(b, c, request, buf, len(response))
	}
}
