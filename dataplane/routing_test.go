package dataplane_test

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/headroom-mesh/headroom/dataplane/transport"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
)

func name(s string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, s) }
}

// hops lets a test run with a replica on the caller's node and with one on another.
func hops(t *testing.T, test func(t *testing.T, m *mesh, caller *node, replica registry.NodeName)) {
	for _, replica := range []registry.NodeName{"a", "b"} {
		t.Run(map[registry.NodeName]string{"a": "same node", "b": "other node"}[replica], func(t *testing.T) {
			m := newMesh(t, "a", "b")
			test(t, m, m.nodes["a"], replica)
			m.quiet()
		})
	}
}

func TestRoutesByHost(t *testing.T) {
	m := newMesh(t, "a", "b")
	m.serve("web", "b", name("web"))
	m.serve("shop", "a", name("shop"))
	m.serve("cart.shop", "b", name("cart"))
	m.serve("grpc.cart.shop", "b", name("grpc of cart"))
	for _, test := range []struct{ target, host, want string }{
		{"/", "web.mesh", "web"},
		{"/", "shop.mesh", "shop"},
		{"/", "WEB.Mesh", "web"},
		{"/", "web.mesh.", "web"},
		{"/", "web.mesh:80", "web"},
		{"/", "web.mesh.:8080", "web"},
		{"http://web.mesh/", "shop.mesh", "web"}, // RFC 9112 §3.2.2
		{"http://web.mesh:8080/", "web.mesh:8080", "web"},
		{"http://Web.Mesh.", "web.mesh", "web"},
		{"/", "cart.shop.mesh", "cart"},
		{"/", "cart.shop", "cart"}, // as in Kubernetes
		{"/", "cart.shop.svc", "cart"},
		{"/", "Cart.Shop.SVC.cluster.local.:80", "cart"},
		{"/", "grpc.cart.shop.svc.cluster.local", "grpc of cart"},
	} {
		c := m.nodes["a"].dial(t)
		c.send("GET " + test.target + " HTTP/1.1\r\nHost: " + test.host + "\r\n\r\n")
		if resp, body := c.answer("GET"); resp.StatusCode != 200 || body != test.want {
			t.Errorf("GET %s, Host %s: got %d %q, want %q", test.target, test.host, resp.StatusCode, body, test.want)
		}
	}
	if _, body := m.nodes["a"].get(t, "http://web.mesh/"); body != "web" {
		t.Errorf("through an HTTP client's proxy setting: got %q", body)
	}
}

func TestRefusals(t *testing.T) {
	m := newMesh(t, "a", "b")
	m.setPolicy("empty", noChange)
	for _, service := range []registry.ServiceName{"ill", "leaving"} {
		m.setPolicy(service, func(p *policy.Policy) { p.WaitForReady = 0 })
	}
	m.serve("web", "b", name("web"))
	_, ill := m.serve("ill", "b", name("ill"))
	m.setState(ill.ID(), registry.Unhealthy)
	_, leaving := m.serve("leaving", "a", name("leaving"))
	m.setState(leaving.ID(), registry.Draining)
	n := m.nodes["a"]
	for _, test := range []struct {
		request string
		want    fault.Reason
	}{
		{"GET / HTTP/1.1\r\nHost: nosuch.mesh\r\n\r\n", fault.UnknownService},
		{"GET / HTTP/1.1\r\nHost: a.web.mesh\r\n\r\n", fault.UnknownService},
		{"GET / HTTP/1.1\r\nHost: empty.mesh\r\n\r\n", fault.NoEndpoints},
		{"POST / HTTP/1.1\r\nHost: empty.mesh\r\nContent-Length: 3\r\n\r\nabc", fault.NoEndpoints},
		{"GET / HTTP/1.1\r\nHost: ill.mesh\r\n\r\n", fault.NoneReady},
		{"GET / HTTP/1.1\r\nHost: leaving.mesh\r\n\r\n", fault.NoneReady},
		{"GET / HTTP/1.1\r\nHost: nosuch.shop.svc\r\n\r\n", fault.UnknownService},
		{"GET / HTTP/1.1\r\nHost: web\r\n\r\n", fault.NotMesh},
		{"GET / HTTP/1.1\r\nHost: nosuch.shop\r\n\r\n", fault.NotMesh},
		{"GET / HTTP/1.1\r\nHost: web.svcs.example\r\n\r\n", fault.NotMesh},
		{"GET / HTTP/1.1\r\nHost: .mesh\r\n\r\n", fault.NotMesh},
		{"GET / HTTP/1.1\r\nHost: \r\n\r\n", fault.NotMesh},
		{"GET / HTTP/1.1\r\nHost: 127.0.0.1:80\r\n\r\n", fault.NotMesh},
		{"GET / HTTP/1.1\r\nHost: [::1]\r\n\r\n", fault.NotMesh},
		{"GET http://example.com/ HTTP/1.1\r\nHost: web.mesh\r\n\r\n", fault.NotMesh},
		{"GET / HTTP/1.0\r\n\r\n", fault.NotMesh},
		{"GET / HTTP/1.1\r\nHost: web.mesh\r\nConnection: upgrade\r\nUpgrade: \xff\r\n\r\n", fault.BadRequest},
	} {
		c := n.dial(t)
		c.send(test.request)
		resp, body := c.answer("GET")
		t.Logf("%q: %q", test.request, body)
		wantFault(t, resp, body, test.want)
	}
	if _, body := n.get(t, "http://web.mesh/"); body != "web" {
		t.Errorf("afterwards: got %q", body)
	}
}

// TestMalformedRequests sends what no HTTP client would. Each must be answered, or hung up on, without harm to others.
func TestMalformedRequests(t *testing.T) {
	m := newMesh(t, "a", "b")
	m.serve("web", "b", func(w http.ResponseWriter, r *http.Request) {
		if body, err := io.ReadAll(r.Body); err == nil {
			w.Write(body)
		}
	})
	n := m.nodes["a"]
	other := n.dial(t) // lives through all of it
	for _, test := range []struct {
		name, request string
		status        int // 0: the mesh may just hang up
	}{
		{"garbage", "\x00\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400},
		{"words", "hello there\r\n\r\n", 400},
		{"no version", "GET /\r\n\r\n", 400},
		{"strange version", "GET / HTTP/3.0\r\nHost: web.mesh\r\n\r\n", 505},
		{"space in target", "GET /a b HTTP/1.1\r\nHost: web.mesh\r\n\r\n", 400},
		{"control byte in target", "GET /a\x01b HTTP/1.1\r\nHost: web.mesh\r\n\r\n", 400},
		{"bad escape in path", "GET /%zz HTTP/1.1\r\nHost: web.mesh\r\n\r\n", 400},
		{"no host", "GET / HTTP/1.1\r\n\r\n", 400},
		{"two hosts", "GET / HTTP/1.1\r\nHost: web.mesh\r\nHost: shop.mesh\r\n\r\n", 400},
		{"bad host", "GET / HTTP/1.1\r\nHost: we b.mesh\r\n\r\n", 400},
		{"bad header name", "GET / HTTP/1.1\r\nHost: web.mesh\r\nA B: c\r\n\r\n", 400},
		{"space before colon", "GET / HTTP/1.1\r\nHost: web.mesh\r\nContent-Length : 3\r\n\r\nabc", 400},
		{"folded header", "GET / HTTP/1.1\r\n Host: web.mesh\r\n\r\n", 400},
		{"null in header", "GET / HTTP/1.1\r\nHost: web.mesh\r\nA: b\x00c\r\n\r\n", 400},
		{"header too large", "GET / HTTP/1.1\r\nHost: web.mesh\r\nA: " + strings.Repeat("a", 2<<20) + "\r\n\r\n", 431},
		{"negative length", "POST / HTTP/1.1\r\nHost: web.mesh\r\nContent-Length: -1\r\n\r\n", 400},
		{"length with sign", "POST / HTTP/1.1\r\nHost: web.mesh\r\nContent-Length: +3\r\n\r\nabc", 400},
		{"two lengths", "POST / HTTP/1.1\r\nHost: web.mesh\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", 400},
		{"unknown coding", "POST / HTTP/1.1\r\nHost: web.mesh\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501},
		{"obfuscated coding", "POST / HTTP/1.1\r\nHost: web.mesh\r\nTransfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n", 400},
		{"bad chunk length", "POST / HTTP/1.1\r\nHost: web.mesh\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n", 400},
		{"bad chunk end", "POST / HTTP/1.1\r\nHost: web.mesh\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcdef\r\n0\r\n\r\n", 400},
		{"huge chunk", "POST / HTTP/1.1\r\nHost: web.mesh\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n", 400},
		{"half a header", "GET / HTTP/1.1\r\nHost: we", 0},
		{"half a body", "POST / HTTP/1.1\r\nHost: web.mesh\r\nContent-Length: 10\r\n\r\nabc", 0},
		{"half a chunk", "POST / HTTP/1.1\r\nHost: web.mesh\r\nTransfer-Encoding: chunked\r\n\r\n10\r\nabc", 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := n.dial(t)
			io.WriteString(c, test.request) // it may hang up meanwhile
			if test.status == 0 {
				c.Conn.(*net.TCPConn).CloseWrite()
				io.Copy(io.Discard, c.in)
			} else {
				resp, body := c.answer("POST")
				t.Logf("%d %q", resp.StatusCode, body)
				if got := resp.Header[fault.Header]; resp.StatusCode != test.status || !slices.Equal(got, []string{"bad_request"}) {
					t.Errorf("got %d, reason %q, want %d, bad_request", resp.StatusCode, got, test.status)
				}
				if !strings.HasPrefix(body, "headroom: ") || strings.Count(body, "\n") != 1 {
					t.Errorf("want one sentence from headroom, got %q", body)
				}
			}
			other.send("POST / HTTP/1.1\r\nHost: web.mesh\r\nContent-Length: 2\r\n\r\nhi")
			if _, body := other.answer("POST"); body != "hi" {
				t.Errorf("another connection: got %q", body)
			}
		})
	}
	m.quiet()
	if e := endpointView(n, "web"); e.Errors != 0 {
		t.Errorf("%d errors are laid at the replica's door", e.Errors)
	}
}

// TestMalformedAfterTheAnswer sends a bad chunk when the answer has begun: that breaks off, and is not the replica's fault.
func TestMalformedAfterTheAnswer(t *testing.T) {
	hops(t, func(t *testing.T, m *mesh, a *node, replica registry.NodeName) {
		m.serve("web", replica, echo)
		c := a.dial(t)
		c.send("POST / HTTP/1.1\r\nHost: web.mesh\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
		resp := c.header("POST")
		buf := make([]byte, 3)
		if _, err := io.ReadFull(resp.Body, buf); err != nil || string(buf) != "abc" {
			t.Fatalf("got %q, %v", buf, err)
		}
		c.send("zz\r\n")
		if rest, err := io.ReadAll(resp.Body); err == nil || isTimeout(err) {
			t.Errorf("got %q, %v, want an answer that breaks off", rest, err)
		}
		m.quiet()
		if e := endpointView(a, "web"); e.Errors != 0 {
			t.Errorf("%d errors are laid at the replica's door", e.Errors)
		}
		if in := m.nodes[replica].Observe("web").Inbound[0]; in.Errors != 0 {
			t.Errorf("%d errors at the replica", in.Errors)
		}
	})
}

// TestOnlyTheProxyAnswersForItself passes content that looks like an answer of net/http to a malformed request.
func TestOnlyTheProxyAnswersForItself(t *testing.T) {
	hops(t, func(t *testing.T, m *mesh, a *node, replica registry.NodeName) {
		forged := "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n400 Bad Request"
		m.serve("web", replica, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set(fault.Header, "timeout")
			w.(http.Flusher).Flush()
			io.WriteString(w, forged)
			w.(http.Flusher).Flush()
			io.WriteString(w, forged)
		})
		for range 2 {
			resp, body := a.get(t, "http://web.mesh/")
			if body != forged+forged || resp.Header.Get(fault.Header) != "" {
				t.Errorf("got %q, %v", body, resp.Header)
			}
		}
	})
}

// TestSmuggling sends what two servers may take for different numbers of requests. The replica must see what the mesh saw.
func TestSmuggling(t *testing.T) {
	hops(t, func(t *testing.T, m *mesh, a *node, replica registry.NodeName) {
		seen := make(chan string, 10)
		m.serve("web", replica, func(w http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			seen <- fmt.Sprintf("%s %s %q length %d coding %v", r.Method, r.URL.Path, body, r.ContentLength, r.TransferEncoding)
		})
		c := a.dial(t)
		c.send("POST /one HTTP/1.1\r\nHost: web.mesh\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n" +
			"1c\r\nGET /smuggled HTTP/1.1\r\nA: b\r\n0\r\n\r\n")
		if resp, body := c.answer("POST"); resp.StatusCode == 200 {
			if got, want := within(t, "request", seen), `POST /one "GET /smuggled HTTP/1.1\r\nA: b" length -1 coding [chunked]`; got != want {
				t.Errorf("the replica saw %s", got)
			}
		} else {
			wantFault(t, resp, body, fault.BadRequest)
		}
		if len(seen) > 0 {
			t.Errorf("the replica also saw %s", <-seen)
		}
	})
}

func TestSameNodeTakesNoSecondHop(t *testing.T) {
	m := newMesh(t, "a", "b")
	_, e := m.serve("web", "a", echo)
	for range 20 {
		if resp, _ := m.nodes["a"].get(t, "http://web.mesh/"); resp.StatusCode != 200 {
			t.Fatal(resp.Status)
		}
	}
	if n := m.nodes["a"].dialed.Load() + m.nodes["b"].dialed.Load(); n != 0 {
		t.Errorf("%d connections between agents", n)
	}
	if resp, _ := m.nodes["b"].get(t, "http://web.mesh/"); resp.StatusCode != 200 {
		t.Fatal(resp.Status)
	}
	m.quiet()
	in := m.nodes["a"].Observe("web").Inbound[0]
	if in.Id != string(e.ID()) || in.Requests != 21 || in.Latency == nil {
		t.Errorf("requests of this node and of others are not counted alike: %v", in)
	}
}

// TestPassesUnchanged compares what the caller sends with what the replica gets, and the other way round.
func TestPassesUnchanged(t *testing.T) {
	targets := []string{
		"/", "/?", "/a?x=1", "/?a=1;b=2&c=%zz&d", "/?q=%", "/?q=\"<>|{}", "/a%2Fb/%2e%2e/c", "//a//b/", "/a/../b/./c",
		"/trailing%20%20", "/a|b\"<>^`{}c%2Fd", "/caf\xc3\xa9%2F", "/;p=1/@:!$&'()*+,=~", "/[1]", "/a\\b", "*", "/%41%7e",
	}
	hops(t, func(t *testing.T, m *mesh, a *node, replica registry.NodeName) {
		address, received := rawReplica(t, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nX-Twice: 1\r\nX-Twice: 2\r\nSet-Cookie: a=b\r\n\r\n")
		m.register("web", replica, address)
		for _, target := range targets {
			method := "GET"
			if target == "*" {
				method = "OPTIONS"
			}
			c := a.dial(t)
			c.send(method + " " + target + " HTTP/1.1\r\nHost: Web.mesh:81\r\n" +
				"Accept: b\r\nAccept: a\r\nX-Forwarded-For: 1.2.3.4, 5.6.7.8\r\nX-Forwarded-Host: h\r\nX-Forwarded-Proto: https\r\n" +
				"Forwarded: for=1.2.3.4\r\nVia: 1.0 fred\r\nHeadroom-Endpoint: web/x/1.2.3.4:5\r\nheadroom-reason: x\r\n" +
				"Connection: x-hop, keep-alive\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\nTE: trailers\r\nProxy-Connection: close\r\n\r\n")
			resp, body := c.answer(method)
			if resp.StatusCode != 200 {
				t.Fatalf("%s: got %s, %q", target, resp.Status, body)
			}
			got := lines(within(t, "request at the replica", received))
			want := lines(method + " " + target + " HTTP/1.1\r\nHost: Web.mesh:81\r\n" +
				"Accept: b\r\nAccept: a\r\nX-Forwarded-For: 1.2.3.4, 5.6.7.8\r\nX-Forwarded-Host: h\r\nX-Forwarded-Proto: https\r\n" +
				"Forwarded: for=1.2.3.4\r\nVia: 1.0 fred\r\nVia: 1.1 headroom\r\nConnection: TE\r\nTE: trailers\r\n")
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("%s: the replica gets (-want +got):\n%s", target, d)
			}
			delete(resp.Header, "Date")
			if d := cmp.Diff(http.Header{"Content-Length": {"0"}, "X-Twice": {"1", "2"}, "Set-Cookie": {"a=b"}}, resp.Header); d != "" {
				t.Errorf("the caller gets (-want +got):\n%s", d)
			}
		}
	})
}

// lines sorts the lines of a request's header, of which only the first has a place.
func lines(s string) []string {
	all := strings.Split(strings.TrimSpace(s), "\r\n")
	slices.Sort(all[1:])
	return all
}

// rawReplica answers each connection's first request with the same bytes, and tells what header it got.
func rawReplica(t *testing.T, answer string) (address string, received <-chan string) {
	l := listen(t, "127.0.0.1:0")
	t.Cleanup(func() { l.Close() })
	requests := make(chan string, 100)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				var got bytes.Buffer
				buf := make([]byte, 4<<10)
				for !bytes.Contains(got.Bytes(), []byte("\r\n\r\n")) {
					n, err := c.Read(buf)
					if err != nil {
						return
					}
					got.Write(buf[:n])
				}
				requests <- got.String()
				io.WriteString(c, answer)
			}()
		}
	}()
	return l.Addr().String(), requests
}

// TestInventsNothing checks that responses get no header which the replica did not send.
func TestInventsNothing(t *testing.T) {
	hops(t, func(t *testing.T, m *mesh, a *node, replica registry.NodeName) {
		address, _ := rawReplica(t, "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\nHeadroom-Load: x\r\n\r\n"+
			"HTTP/1.1 200 OK\r\nContent-Length: 6\r\nHeadroom-Load: rif=0\r\nHeadroom-Endpoint: x\r\n\r\n<html>")
		m.register("web", replica, address)
		c := a.dial(t)
		c.send("GET / HTTP/1.1\r\nHost: web.mesh\r\n\r\n")
		early := c.header("GET")
		if early.StatusCode != 103 || !cmp.Equal(early.Header, http.Header{"Link": {"</a>"}}) {
			t.Errorf("informational response: got %d %v", early.StatusCode, early.Header)
		}
		resp, body := c.answer("GET")
		delete(resp.Header, "Date")
		if body != "<html>" || !cmp.Equal(resp.Header, http.Header{"Content-Length": {"6"}}) {
			t.Errorf("got %q, %v", body, resp.Header)
		}
	})
}

func TestLoadReportsTravel(t *testing.T) {
	m := newMesh(t, "a", "b")
	_, e := m.serve("web", "b", echo)
	for range 3 {
		resp, _ := m.nodes["a"].get(t, "http://web.mesh/")
		for name := range resp.Header {
			if strings.HasPrefix(name, "Headroom-") {
				t.Errorf("the caller sees %s: %s", name, resp.Header[name])
			}
		}
	}
	eventually(t, "probe of "+string(e.ID()), func() any { return endpointView(m.nodes["a"], "web").Probe.String() },
		func(any) bool { p := endpointView(m.nodes["a"], "web").Probe; return p != nil && p.Latency != nil })

	m.quiet()
	// Between agents, the report is on the response.
	c := dialAgent(t, m.nodes["b"])
	c.send("GET / HTTP/1.1\r\nHost: web.mesh\r\nHeadroom-Endpoint: " + string(e.ID()) + "\r\n\r\n")
	resp, _ := c.answer("GET")
	if got := resp.Header.Get("Headroom-Load"); resp.StatusCode != 200 || !strings.HasPrefix(got, "rif=0 latency=") {
		t.Errorf("got %d, load %q", resp.StatusCode, got)
	}
}

// dialAgent connects to an agent as another one would.
func dialAgent(t *testing.T, n *node) *raw {
	c := dial(t, n.agent.String())
	c.send("HEADROOM " + string(transport.HTTP) + "\n")
	return c
}

func TestInboundRefusals(t *testing.T) {
	m := newMesh(t, "b")
	_, e := m.serve("web", "b", echo)
	for _, test := range []struct {
		request string
		want    fault.Reason
	}{
		{"GET / HTTP/1.1\r\nHost: web.mesh\r\nHeadroom-Endpoint: web/b/1.2.3.4:5\r\n\r\n", fault.UnknownEndpoint},
		{"GET / HTTP/1.1\r\nHost: web.mesh\r\nHeadroom-Endpoint: \x80\xff%s\r\n\r\n", fault.UnknownEndpoint},
		{"GET / HTTP/1.1\r\nHost: web.mesh\r\n\r\n", fault.UnknownEndpoint},
		{"GET / HTTP/1.1\r\n\r\n", fault.BadRequest},
		{"junk\r\n\r\n", fault.BadRequest},
		{"POST / HTTP/1.1\r\nHost: web.mesh\r\nHeadroom-Endpoint: " + string(e.ID()) + "\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n", fault.BadRequest},
	} {
		c := dialAgent(t, m.nodes["b"])
		c.send(test.request)
		resp, body := c.answer("GET")
		t.Logf("%q: %q", test.request, body)
		wantFault(t, resp, body, test.want)
	}
	m.quiet()
}
