package dataplane_test

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
)

func noChange(*policy.Policy) {}

// echo answers with the request's body, as it comes.
func echo(w http.ResponseWriter, r *http.Request) {
	http.NewResponseController(w).EnableFullDuplex()
	io.Copy(flushing{w}, r.Body)
}

type flushing struct{ http.ResponseWriter }

func (f flushing) Write(p []byte) (int, error) {
	n, err := f.ResponseWriter.Write(p)
	http.NewResponseController(f.ResponseWriter).Flush()
	return n, err
}

// endpointView returns how a node sees the only endpoint of a service.
func endpointView(n *node, service registry.ServiceName) *meshv1.EndpointView {
	return n.Observe(service).Outbound[0].Endpoints[0]
}

// read reads exactly n bytes.
func (r *raw) read(n int) string {
	r.t.Helper()
	buf := make([]byte, n)
	if _, err := io.ReadFull(r.in, buf); err != nil {
		r.t.Fatalf("read: %v", err)
	}
	return string(buf)
}

// wantEnd checks that the connection is ended by the other end.
func (r *raw) wantEnd() {
	r.t.Helper()
	if n, err := io.Copy(io.Discard, r.in); isTimeout(err) || n > 0 {
		r.t.Errorf("want the connection closed, got %d bytes, %v", n, err)
	}
}

func isTimeout(err error) bool {
	ne, ok := errors.AsType[net.Error](err)
	return ok && ne.Timeout()
}

func TestEchoBothWaysAtOnce(t *testing.T) {
	hops(t, func(t *testing.T, m *mesh, a *node, replica registry.NodeName) {
		_, e := m.serve("web", replica, echo)
		c := a.dial(t)
		c.send("POST / HTTP/1.1\r\nHost: web.mesh\r\nTransfer-Encoding: chunked\r\n\r\n")
		c.send("5\r\nfirst\r\n")
		resp := c.header("POST")
		body := bufio.NewReader(resp.Body)
		for i, s := range []string{"first", "round", "thrid"} {
			if i > 0 {
				c.send("5\r\n" + s + "\r\n")
			}
			buf := make([]byte, 5)
			if _, err := io.ReadFull(body, buf); err != nil || string(buf) != s {
				t.Fatalf("got %q, %v, want %q", buf, err, s)
			}
			if n := m.rif(e); n != 1 {
				t.Errorf("%d requests in flight while streaming", n)
			}
			if n := endpointView(a, "web").OwnRif; n != 1 {
				t.Errorf("%d own requests in flight while streaming", n)
			}
		}
		c.send("0\r\n\r\n")
		if rest, err := io.ReadAll(body); err != nil || len(rest) > 0 {
			t.Errorf("at the end: got %q, %v", rest, err)
		}
	})
}

func TestAnswersAreFlushed(t *testing.T) {
	for _, length := range []string{"", "6"} {
		t.Run("Content-Length "+length, func(t *testing.T) {
			hops(t, func(t *testing.T, m *mesh, a *node, replica registry.NodeName) {
				more := make(chan bool, 2)
				m.serve("web", replica, func(w http.ResponseWriter, r *http.Request) {
					if length != "" {
						w.Header().Set("Content-Length", length)
					}
					w.(http.Flusher).Flush()
					<-more
					io.WriteString(flushing{w}, "abc")
					<-more
					io.WriteString(w, "def")
				})
				c := a.dial(t)
				c.send("GET / HTTP/1.1\r\nHost: web.mesh\r\n\r\n")
				resp := c.header("GET") // comes before the body does
				more <- true
				buf := make([]byte, 3)
				if _, err := io.ReadFull(resp.Body, buf); err != nil || string(buf) != "abc" {
					t.Fatalf("got %q, %v", buf, err)
				}
				more <- true
				if rest, err := io.ReadAll(resp.Body); err != nil || string(rest) != "def" {
					t.Fatalf("got %q, %v", rest, err)
				}
			})
		})
	}
}

// TestEarlyAnswer has the replica answer while the caller still sends. The caller must get all of the answer before it
// sends any more.
func TestEarlyAnswer(t *testing.T) {
	t.Parallel()
	for _, request := range []struct{ begin, rest string }{
		{"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n", "0\r\n\r\n"},
		{"Content-Length: 9000\r\n\r\n" + strings.Repeat("a", 8000), strings.Repeat("a", 1000)},
		{"Content-Length: 9000\r\n\r\n" + strings.Repeat("a", 8000), ""},
	} {
		hops(t, func(t *testing.T, m *mesh, a *node, replica registry.NodeName) {
			_, e := m.serve("web", replica, func(w http.ResponseWriter, r *http.Request) {
				http.NewResponseController(w).EnableFullDuplex()
				r.Body.Read(make([]byte, 1))
				w.WriteHeader(http.StatusRequestEntityTooLarge)
				io.WriteString(w, "too ")
				w.(http.Flusher).Flush()
				io.WriteString(w, "much")
			})
			c := a.dial(t)
			c.send("POST / HTTP/1.1\r\nHost: web.mesh\r\n" + request.begin)
			if resp, body := c.answer("POST"); resp.StatusCode != 413 || body != "too much" || !resp.Close {
				t.Errorf("got %d %q, close %v", resp.StatusCode, body, resp.Close)
			}
			eventually(t, "requests in flight", func() any { return m.rif(e) }, func(v any) bool { return v == 0 })
			io.WriteString(c, request.rest+"GET /smuggled HTTP/1.1\r\nHost: web.mesh\r\n\r\n") // must not count as a request
			c.wantEnd()
		})
	}
}

func TestExpectContinue(t *testing.T) {
	hops(t, func(t *testing.T, m *mesh, a *node, replica registry.NodeName) {
		var asked atomic.Int32
		m.serve("web", replica, func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/no" {
				w.WriteHeader(http.StatusForbidden)
				return
			}
			asked.Add(1)
			io.Copy(w, r.Body)
		})
		const head = " HTTP/1.1\r\nHost: web.mesh\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n"
		c := a.dial(t)
		c.send("POST /no" + head)
		if resp, _ := c.answer("POST"); resp.StatusCode != 403 {
			t.Errorf("got %d before the body is sent, want 403", resp.StatusCode)
		}
		c = a.dial(t)
		c.send("POST /yes" + head)
		if resp := c.header("POST"); resp.StatusCode != 100 {
			t.Errorf("got %d, want 100", resp.StatusCode)
		}
		c.send("abc")
		if resp, body := c.answer("POST"); resp.StatusCode != 200 || body != "abc" {
			t.Errorf("got %d %q", resp.StatusCode, body)
		}
	})
}

func TestTrailers(t *testing.T) {
	hops(t, func(t *testing.T, m *mesh, a *node, replica registry.NodeName) {
		got := make(chan http.Header, 1)
		m.serve("web", replica, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Trailer", "X-Sum, Headroom-Load")
			io.Copy(w, r.Body)
			got <- r.Trailer
			w.Header().Set("X-Sum", "2")
			w.Header().Set("Headroom-Load", "rif=0")
			w.Header().Set(http.TrailerPrefix+"X-Late", "3")
			w.Header().Set(http.TrailerPrefix+"Headroom-Reason", "timeout")
		})
		c := a.dial(t)
		c.send("POST / HTTP/1.1\r\nHost: web.mesh\r\nTE: trailers\r\nTrailer: X-Sum, Headroom-Endpoint\r\nTransfer-Encoding: chunked\r\n\r\n" +
			"3\r\nabc\r\n0\r\nX-Sum: 1\r\nHeadroom-Endpoint: x\r\n\r\n")
		resp, body := c.answer("POST")
		if d := cmp.Diff(http.Header{"X-Sum": {"1"}}, within(t, "trailers", got)); d != "" {
			t.Errorf("the replica gets (-want +got):\n%s", d)
		}
		if d := cmp.Diff(http.Header{"X-Sum": {"2"}, "X-Late": {"3"}}, resp.Trailer); d != "" || body != "abc" {
			t.Errorf("the caller gets %q and (-want +got):\n%s", body, d)
		}
	})
}

// TestBodilessAnswers lets each kind of them end, and be counted out.
func TestBodilessAnswers(t *testing.T) {
	hops(t, func(t *testing.T, m *mesh, a *node, replica registry.NodeName) {
		m.serve("web", replica, func(w http.ResponseWriter, r *http.Request) {
			switch r.URL.Path {
			case "/204":
				w.WriteHeader(204)
			case "/304":
				w.Header().Set("ETag", "77")
				w.WriteHeader(304)
			default:
				w.Header().Set("Content-Length", "77")
			}
		})
		c := a.dial(t) // one connection for all: their ends must be clear
		for _, test := range []struct {
			method, path string
			status       int
			length       string
		}{{"GET", "/204", 204, ""}, {"GET", "/304", 304, ""}, {"HEAD", "/", 200, "77"}, {"HEAD", "/204", 204, ""}} {
			c.send(test.method + " " + test.path + " HTTP/1.1\r\nHost: web.mesh\r\n\r\n")
			resp, body := c.answer(test.method)
			if resp.StatusCode != test.status || resp.Header.Get("Content-Length") != test.length || body != "" {
				t.Errorf("%s %s: got %d %v %q", test.method, test.path, resp.StatusCode, resp.Header, body)
			}
			m.quiet()
		}
		if v := a.Observe("web").Outbound[0]; v.Errors != 0 || v.Requests != 4 {
			t.Errorf("counted %d requests, %d errors", v.Requests, v.Errors)
		}
	})
}

// TestLargeBodies sends 100 MB there and back again, and looks at the heap meanwhile.
func TestLargeBodies(t *testing.T) {
	const size = 100 << 20
	m := newMesh(t, "a", "b")
	m.serve("web", "b", echo)
	var before runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	var most atomic.Uint64
	sent, got := sha256.New(), sha256.New()
	source := io.TeeReader(io.LimitReader(rand.NewChaCha8([32]byte{1}), size), sent)
	r := request(t, "POST", "http://web.mesh/", io.NopCloser(source))
	resp, err := m.nodes["a"].client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	n := 0
	buf := make([]byte, 1<<20)
	for {
		k, err := io.ReadFull(resp.Body, buf)
		got.Write(buf[:k])
		n += k
		if n%(16<<20) == 0 {
			var now runtime.MemStats
			runtime.ReadMemStats(&now)
			most.Store(max(most.Load(), now.HeapInuse))
		}
		if err != nil {
			break
		}
	}
	if n != size || !bytes.Equal(sent.Sum(nil), got.Sum(nil)) {
		t.Errorf("got %d bytes back, want the same %d", n, size)
	}
	if grown := int64(most.Load()) - int64(before.HeapInuse); grown > 30<<20 {
		t.Errorf("the heap grew by %d MB", grown>>20)
	}
	m.quiet()
}

// TestBackPressure lets the replica not read, and then the caller not read: the other must be stopped.
func TestBackPressure(t *testing.T) {
	t.Parallel()
	const limit = 120 << 20 // what Linux may buffer on three connections: 32 MiB to be read, 4 MiB to be sent, on each
	hops(t, func(t *testing.T, m *mesh, a *node, replica registry.NodeName) {
		var written atomic.Int64
		readOn := make(chan bool)
		m.serve("web", replica, func(w http.ResponseWriter, r *http.Request) {
			if r.Method == "POST" {
				<-readOn
				io.Copy(io.Discard, r.Body)
				return
			}
			for {
				n, err := w.Write(make([]byte, 64<<10))
				if written.Add(int64(n)); err != nil {
					return
				}
			}
		})
		c := a.dial(t)
		c.send("POST / HTTP/1.1\r\nHost: web.mesh\r\nContent-Length: 1000000000\r\n\r\n")
		c.SetWriteDeadline(time.Now().Add(500 * time.Millisecond))
		if n, err := io.CopyN(c, zeros{}, limit); err == nil {
			t.Errorf("the mesh took %d bytes that the replica did not read", n)
		}
		c.Close()
		close(readOn)

		c = a.dial(t)
		c.send("GET / HTTP/1.1\r\nHost: web.mesh\r\n\r\n")
		c.header("GET")
		stalled := func() any {
			n := written.Load()
			<-time.After(100 * time.Millisecond)
			return written.Load() == n
		}
		eventually(t, "the replica writes", stalled, func(v any) bool { return v.(bool) })
		if n := written.Load(); n > limit {
			t.Errorf("the mesh took %d bytes that the caller did not read", n)
		}
		c.Close()
	})
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// TestAborts lets the caller leave at every stage: the replica must hear of it, and be counted out.
func TestAborts(t *testing.T) {
	for _, stage := range []string{"before the header", "in the body", "in the request", "in the request, stalled"} {
		t.Run(stage, func(t *testing.T) {
			hops(t, func(t *testing.T, m *mesh, a *node, replica registry.NodeName) {
				begun, ended := make(chan bool, 1), make(chan bool, 1)
				_, e := m.serve("web", replica, func(w http.ResponseWriter, r *http.Request) {
					if stage == "in the body" {
						io.WriteString(flushing{w}, "abc")
					}
					begun <- true
					if strings.HasPrefix(stage, "in the request") {
						io.Copy(io.Discard, r.Body)
					}
					<-r.Context().Done()
					ended <- true
				})
				c := a.dial(t)
				if strings.HasPrefix(stage, "in the request") {
					c.send("POST / HTTP/1.1\r\nHost: web.mesh\r\nContent-Length: 100000\r\n\r\n" + strings.Repeat("a", 50000))
				} else {
					c.send("GET / HTTP/1.1\r\nHost: web.mesh\r\n\r\n")
				}
				within(t, "request at the replica", begun)
				if stage == "in the body" {
					c.read(100)
				}
				if n := m.rif(e); n != 1 {
					t.Errorf("%d requests in flight, want 1", n)
				}
				start := time.Now()
				if stage != "in the request, stalled" {
					c.Close()
				} else {
					c.Conn.(*net.TCPConn).SetLinger(0)
					c.Close()
				}
				within(t, "end of the request at the replica", ended)
				if d := time.Since(start); d > 2*time.Second {
					t.Errorf("the replica heard of it after %v", d)
				}
				m.quiet()
				if v := endpointView(a, "web"); v.Errors != 0 {
					t.Error("the caller's leaving is held against the replica")
				}
			})
		})
	}
}

// TestReplicaBreaksOff lets the replica die at every stage.
func TestReplicaBreaksOff(t *testing.T) {
	for _, test := range []struct {
		stage     string
		answer    string
		status    int // 0: the answer is cut off
		malformed bool
	}{
		{"before the answer", "", 502, false},
		{"in the header", "HTTP/1.1 200 OK\r\nConte", 502, false},
		{"in the body", "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc", 0, false},
		{"in a chunk", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc", 0, false},
		{"no HTTP", "220 mail.example.com ESMTP\r\n\r\n", 502, true},
		{"status 7", "HTTP/1.1 007 OK\r\nContent-Length: 0\r\n\r\n", 502, true},
		{"status 0", "HTTP/1.1 000 OK\r\nContent-Length: 0\r\n\r\n", 502, true},
		{"status 999", "HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n", 999, false},
		{"upgrade not asked for", "HTTP/1.1 101 Switching\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n", 502, true},
		{"upgrade to nothing", "HTTP/1.1 101 Switching\r\n\r\n", 502, true},
		{"endless hints", strings.Repeat("HTTP/1.1 103 Early Hints\r\n\r\n", 3) + "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 200, false},
	} {
		t.Run(test.stage, func(t *testing.T) {
			hops(t, func(t *testing.T, m *mesh, a *node, replica registry.NodeName) {
				address, _ := rawReplica(t, test.answer)
				m.register("web", replica, address)
				c := a.dial(t)
				c.send("POST / HTTP/1.1\r\nHost: web.mesh\r\nContent-Length: 2\r\n\r\nhi")
				resp := c.header("POST")
				for resp.StatusCode == 103 {
					resp = c.header("POST")
				}
				body, err := io.ReadAll(resp.Body)
				switch {
				case test.status == 0 && err == nil:
					t.Errorf("a part of the answer passes for all of it: %q", body)
				case test.status == 502:
					reason := fault.Reset
					if test.malformed {
						reason = fault.MalformedResponse
					}
					wantFault(t, resp, string(body), reason)
				case test.status != 0 && resp.StatusCode != test.status:
					t.Errorf("got %d, want %d", resp.StatusCode, test.status)
				}
				m.quiet()
				want := uint64(1)
				if test.status == 200 {
					want = 0
				}
				out, in := wantErrors(t, a, "web", want), m.nodes[replica].Observe("web").Inbound[0]
				if out.Endpoints[0].Errors != want || in.Errors != want {
					t.Errorf("errors: endpoint %d, replica %d, want %d", out.Endpoints[0].Errors, in.Errors, want)
				}
			})
		})
	}
}

// TestReplicaBreaksOffMidway lets the replica die while the caller, who has more to send, sends nothing for now.
func TestReplicaBreaksOffMidway(t *testing.T) {
	hops(t, func(t *testing.T, m *mesh, a *node, replica registry.NodeName) {
		address, _ := rawReplica(t, "")
		m.register("web", replica, address)
		c := a.dial(t)
		c.send("POST / HTTP/1.1\r\nHost: web.mesh\r\nTransfer-Encoding: chunked\r\n\r\n1388\r\n" + strings.Repeat("a", 5000) + "\r\n")
		resp, body := c.answer("POST")
		wantFault(t, resp, body, fault.Reset)
		m.quiet()
		if v := endpointView(a, "web"); v.Errors != 1 {
			t.Errorf("%d errors, want 1", v.Errors)
		}
	})
}

// TestUpgrades speaks another protocol after a 101.
func TestUpgrades(t *testing.T) {
	// shout answers each line in capitals, until the line "bye", or the end.
	shout := func(w http.ResponseWriter, r *http.Request) {
		c, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer c.Close()
		io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: shout\r\n\r\n")
		for {
			line, err := rw.ReadString('\n')
			if err != nil {
				fmt.Fprintf(c, "AFTER ALL %v\n", err)
				return
			}
			if line == "bye\n" {
				return
			}
			io.WriteString(c, strings.ToUpper(line))
		}
	}
	const ask = "GET / HTTP/1.1\r\nHost: web.mesh\r\nConnection: Upgrade\r\nUpgrade: shout\r\n\r\n"
	for _, end := range []string{"caller closes", "caller resets", "caller half-closes", "replica closes"} {
		t.Run(end, func(t *testing.T) {
			hops(t, func(t *testing.T, m *mesh, a *node, replica registry.NodeName) {
				_, e := m.serve("web", replica, shout)
				c := a.dial(t)
				c.send(ask + "early\n") // before it knows
				if resp := c.header("GET"); resp.StatusCode != 101 || resp.Header.Get("Upgrade") != "shout" || len(resp.Header) != 2 {
					t.Fatalf("got %d %v", resp.StatusCode, resp.Header)
				}
				if got := c.read(6); got != "EARLY\n" {
					t.Errorf("got %q", got)
				}
				c.send("more\n")
				if got := c.read(5); got != "MORE\n" {
					t.Errorf("got %q", got)
				}
				if n := m.rif(e); n != 1 {
					t.Errorf("%d in flight, want 1", n)
				}
				switch end {
				case "caller closes":
					c.Close()
				case "caller resets":
					c.Conn.(*net.TCPConn).SetLinger(0)
					c.Close()
				case "caller half-closes":
					c.Conn.(*net.TCPConn).CloseWrite()
					if got := c.read(14); got != "AFTER ALL EOF\n" {
						t.Errorf("got %q", got)
					}
					c.wantEnd()
				case "replica closes":
					c.send("bye\n")
					c.Conn.(*net.TCPConn).CloseWrite()
					c.wantEnd()
				}
				m.quiet()
			})
		})
	}
}

// TestUpgradeMidway has the replica switch protocols while the caller still sends its request, which makes no sense.
func TestUpgradeMidway(t *testing.T) {
	hops(t, func(t *testing.T, m *mesh, a *node, replica registry.NodeName) {
		address, _ := rawReplica(t, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n")
		m.register("web", replica, address)
		for range 20 {
			c := a.dial(t)
			c.send("POST / HTTP/1.1\r\nHost: web.mesh\r\nConnection: Upgrade\r\nUpgrade: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n")
			resp, body := c.answer("POST")
			wantFault(t, resp, body, fault.MalformedResponse)
			io.WriteString(c, "5\r\nabcde\r\n0\r\n\r\nmore and more")
			c.wantEnd()
			c.Close() // the replica may have ended its direction only
		}
	})
}

// TestRandomAborts ends requests of all kinds at random moments, from both sides. In the end nothing may be in flight.
func TestRandomAborts(t *testing.T) {
	m := newMesh(t, "a", "b")
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	service := func(w http.ResponseWriter, r *http.Request) {
		rng := rand.New(rand.NewPCG(seed, uint64(len(r.URL.RawQuery))))
		http.NewResponseController(w).EnableFullDuplex()
		switch r.URL.Path {
		case "/echo":
			io.Copy(flushing{w}, r.Body)
		case "/early":
			w.WriteHeader(500)
			io.WriteString(flushing{w}, "early")
		case "/die":
			io.WriteString(flushing{w}, "dying")
			panic(http.ErrAbortHandler)
		case "/upgrade":
			c, rw, err := http.NewResponseController(w).Hijack()
			if err != nil {
				return
			}
			defer c.Close()
			io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n")
			io.CopyN(c, rw, rng.Int64N(1000))
		case "/slow":
			for range 20 {
				if _, err := flushing.Write(flushing{w}, make([]byte, rng.IntN(10000))); err != nil {
					return
				}
			}
			io.Copy(io.Discard, r.Body) // only then net/http notices that the other end is gone
			<-r.Context().Done()
		}
	}
	m.serve("web", "a", service)
	m.serve("web", "b", service)
	m.setPolicy("web", func(p *policy.Policy) { p.Timeout = 300 * time.Millisecond })
	caller := func(worker int) func() {
		rng := rand.New(rand.NewPCG(seed, uint64(worker)))
		return func() {
			for range 60 {
				abortAtRandom(m.nodes["a"].proxy, rng)
			}
		}
	}
	concurrently(8, caller)
	m.quiet()
	for _, n := range m.nodes {
		for _, in := range n.Observe("").Inbound {
			t.Logf("%s: %d requests, %d errors", in.Id, in.Requests, in.Errors)
		}
	}
}

// abortAtRandom sends one request and leaves at some moment, in some way.
func abortAtRandom(proxy string, rng *rand.Rand) {
	c, err := net.Dial("tcp", proxy)
	if err != nil {
		return
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(time.Duration(rng.IntN(30)) * time.Millisecond))
	path := []string{"/echo", "/early", "/die", "/upgrade", "/slow"}[rng.IntN(5)]
	head := "Transfer-Encoding: chunked\r\n"
	if path == "/upgrade" && rng.IntN(2) == 0 {
		head = "Connection: Upgrade\r\nUpgrade: x\r\n"
	} else if path == "/upgrade" {
		head += "Connection: Upgrade\r\nUpgrade: x\r\n"
	}
	fmt.Fprintf(c, "POST %s?%s HTTP/1.1\r\nHost: web.mesh\r\n%s\r\n", path, strings.Repeat("x", rng.IntN(100)), head)
	for range rng.IntN(10) {
		fmt.Fprintf(c, "400\r\n%s\r\n", strings.Repeat("a", 1024))
	}
	if rng.IntN(2) == 0 {
		io.WriteString(c, "0\r\n\r\n")
	}
	io.CopyN(io.Discard, c, rng.Int64N(20000))
	if rng.IntN(2) == 0 {
		c.(*net.TCPConn).SetLinger(0)
	}
}

func concurrently(n int, worker func(int) func()) {
	done := make(chan bool)
	for i := range n {
		work := worker(i)
		go func() {
			defer func() { done <- true }()
			work()
		}()
	}
	for range n {
		<-done
	}
}

func TestTimeout(t *testing.T) {
	t.Parallel()
	hops(t, func(t *testing.T, m *mesh, a *node, replica registry.NodeName) {
		ended := make(chan bool, 1)
		_, e := m.serve("web", replica, func(w http.ResponseWriter, r *http.Request) {
			switch r.URL.Path {
			case "/slow":
			case "/body":
				io.WriteString(flushing{w}, "abc")
			case "/upload":
				io.Copy(io.Discard, r.Body)
			case "/flood":
				for {
					if _, err := w.Write(make([]byte, 64<<10)); err != nil {
						break
					}
				}
			}
			<-r.Context().Done()
			ended <- true
		})
		m.setPolicy("web", func(p *policy.Policy) { p.Timeout = 200 * time.Millisecond })

		start := time.Now()
		resp, body := a.get(t, "http://web.mesh/slow")
		wantFault(t, resp, body, fault.Timeout)
		if d := time.Since(start); d < 200*time.Millisecond || d > 2*time.Second {
			t.Errorf("answered after %v", d)
		}
		within(t, "end of the request at the replica", ended)

		c := a.dial(t)
		c.send("GET /body HTTP/1.1\r\nHost: web.mesh\r\n\r\n")
		if got, err := io.ReadAll(c.header("GET").Body); string(got) != "abc" || err == nil {
			t.Errorf("got %q, %v, want an answer that breaks off", got, err)
		}
		within(t, "end of the request at the replica", ended)

		// The caller sends no further.
		c = a.dial(t)
		c.send("POST /upload HTTP/1.1\r\nHost: web.mesh\r\nContent-Length: 100000\r\n\r\n" + strings.Repeat("a", 50000))
		resp, body = c.answer("POST")
		wantFault(t, resp, body, fault.Timeout)
		within(t, "end of the request at the replica", ended)

		// The caller reads no further.
		c = a.dial(t)
		c.send("GET /flood HTTP/1.1\r\nHost: web.mesh\r\n\r\n")
		within(t, "end of the request at the replica", ended)

		m.quiet()
		if v := wantErrors(t, a, "web", 4); v.Requests != 4 {
			t.Errorf("%d requests", v.Requests)
		}
		if in := m.nodes[e.Node].Observe("web").Inbound[0]; in.Errors != 0 {
			t.Errorf("%d errors at the replica, though only callers gave up", in.Errors)
		}
		wantMetric(t, a, `headroom_outbound_requests_total{code="5xx",reason="timeout",service="web"}`, 2)
		wantMetric(t, a, `headroom_outbound_requests_total{code="2xx",reason="timeout",service="web"}`, 2)
	})
}

// wantErrors waits until a node has counted so many errors of a service: it counts when the caller has its answer already.
func wantErrors(t *testing.T, n *node, service registry.ServiceName, want uint64) *meshv1.OutboundView {
	t.Helper()
	view := func() any { return n.Observe(service).Outbound[0] }
	eventually(t, fmt.Sprintf("errors, want %d", want), view, func(v any) bool { return v.(*meshv1.OutboundView).Errors == want })
	return view().(*meshv1.OutboundView)
}

// wantMetric waits until a series has a value.
func wantMetric(t *testing.T, n *node, name string, want float64) {
	t.Helper()
	eventually(t, fmt.Sprintf("%s, want %v", name, want), func() any { return series(t, n)[name] }, func(v any) bool { return v == want })
}

// series returns the values of a node's counters and gauges.
func series(t *testing.T, n *node) map[string]float64 {
	families, err := n.metrics.Gather()
	if err != nil {
		t.Fatal(err)
	}
	values := map[string]float64{}
	for _, f := range families {
		for _, s := range f.Metric {
			var labels []string
			for _, l := range s.Label {
				labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
			}
			values[f.GetName()+"{"+strings.Join(labels, ",")+"}"] = s.GetCounter().GetValue() + s.GetGauge().GetValue()
		}
	}
	return values
}
