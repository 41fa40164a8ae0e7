package dataplane_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/dataplane"
	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

func mustAddr(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

// TestPolicyChangesUnderLoad changes the policy all the time. No request may fail, and counters go on.
func TestPolicyChangesUnderLoad(t *testing.T) {
	m := newMesh(t, "a", "b", "c")
	for _, n := range []registry.NodeName{"a", "b", "c"} {
		m.serve("web", n, echo)
	}
	stop := make(chan bool)
	changed := make(chan int)
	go func() {
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for n := 0; ; n++ {
			m.setPolicy("web", func(p *policy.Policy) {
				p.Balancer = policy.Balancers()[n%len(policy.Balancers())]
				p.Hash.Key = policy.HashKey{Source: policy.KeyPath}
				p.Timeout = []time.Duration{0, time.Minute}[n%2]
			})
			select {
			case <-tick.C:
			case <-stop:
				changed <- n
				return
			}
		}
	}()
	const workers, each = 50, 40
	concurrently(workers, func(i int) func() {
		return func() {
			for k := range each {
				body := fmt.Sprint(i, k)
				r := request(t, "POST", "http://web.mesh/"+body, strings.NewReader(body))
				resp, err := m.nodes["a"].client.Do(r)
				if err != nil {
					t.Error(err)
					return
				}
				got, err := io.ReadAll(resp.Body)
				resp.Body.Close()
				if err != nil || resp.StatusCode != 200 || string(got) != body {
					t.Errorf("got %d %q, %v", resp.StatusCode, got, err)
				}
			}
		}
	})
	close(stop)
	t.Logf("the policy changed %d times", <-changed)
	m.quiet()
	v := m.nodes["a"].Observe("web").Outbound[0]
	picks := uint64(0)
	for _, e := range v.Endpoints {
		picks += e.Picks
	}
	if v.Requests != workers*each || picks != v.Requests || v.Errors != 0 || v.Retries != 0 {
		t.Errorf("counted %d requests, %d picks, %d errors, %d retries", v.Requests, picks, v.Errors, v.Retries)
	}
}

// TestHashKeys sends requests that differ in nothing but their key.
func TestHashKeys(t *testing.T) {
	const replicas, keys = 4, 24
	for _, test := range []struct {
		name   string
		key    policy.HashKey
		set    func(r *http.Request, key string)
		spread int // over how many replicas at least
	}{
		{"header", policy.HashKey{Source: policy.KeyHeader, Name: "x-user"}, func(r *http.Request, key string) { r.Header.Set("X-User", key) }, 2},
		{"cookie", policy.HashKey{Source: policy.KeyCookie, Name: "user"}, func(r *http.Request, key string) {
			r.Header.Set("Cookie", "a=b; user="+key+"; c=d")
		}, 2},
		{"path", policy.HashKey{Source: policy.KeyPath}, func(r *http.Request, key string) {
			r.URL.Path = "/" + key
			r.URL.RawQuery = fmt.Sprint("q=", time.Now().UnixNano())
		}, 2},
		{"source", policy.HashKey{Source: policy.KeySourceAddress}, func(*http.Request, string) {}, 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			m := newMesh(t, "a", "b")
			for i := range replicas {
				m.serve("web", []registry.NodeName{"a", "b"}[i%2], name(fmt.Sprint(i)))
			}
			m.setPolicy("web", func(p *policy.Policy) { p.Balancer, p.Hash.Key = policy.BalancerRingHash, test.key })
			home := map[string]string{}
			used := map[string]bool{}
			for range 3 {
				for k := range keys {
					key := fmt.Sprint("key", k)
					r := request(t, "GET", "http://web.mesh/", nil)
					test.set(r, key)
					_, replica := m.nodes["a"].do(t, r)
					if home[key] != "" && home[key] != replica {
						t.Errorf("%s went to %s and to %s", key, home[key], replica)
					}
					home[key], used[replica] = replica, true
					m.quiet() // no replica is full
				}
			}
			if len(used) < test.spread || test.spread == 1 && len(used) != 1 {
				t.Errorf("%d keys went to %d replicas", keys, len(used))
			}
		})
	}
}

// TestDrain ends an agent while requests of several kinds are in flight through it, outbound and inbound.
func TestDrain(t *testing.T) {
	for _, leaving := range []registry.NodeName{"a", "b"} {
		t.Run(map[registry.NodeName]string{"a": "outbound", "b": "inbound"}[leaving], func(t *testing.T) {
			m := newMesh(t, "a", "b")
			begun, goOn := make(chan bool, 3), make(chan bool)
			m.serve("web", "b", func(w http.ResponseWriter, r *http.Request) {
				switch r.URL.Path {
				case "/stream":
					io.WriteString(flushing{w}, "begin ")
				case "/upgrade":
					c, rw, _ := http.NewResponseController(w).Hijack()
					defer c.Close()
					io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n")
					begun <- true
					io.Copy(c, rw)
					return
				}
				begun <- true
				<-goOn
				io.WriteString(w, "end")
			})
			a, b := m.nodes["a"], m.nodes[leaving]
			a.dial(t) // never used
			slow, stream, upgraded := a.dial(t), a.dial(t), a.dial(t)
			slow.send("GET /slow HTTP/1.1\r\nHost: web.mesh\r\n\r\n")
			stream.send("GET /stream HTTP/1.1\r\nHost: web.mesh\r\n\r\n")
			upgraded.send("GET /upgrade HTTP/1.1\r\nHost: web.mesh\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n")
			for range 3 {
				within(t, "request at the replica", begun)
			}
			streaming := stream.header("GET")
			upgraded.header("GET")

			stopped := make(chan error)
			go func() { stopped <- b.stop() }()
			closed := b.proxy
			eventually(t, "new connections", func() any {
				c, err := net.Dial("tcp", closed)
				if err == nil {
					c.Close()
				}
				return err
			}, func(err any) bool { return err != nil })

			upgraded.send("still here")
			if got := upgraded.read(10); got != "still here" {
				t.Errorf("got %q", got)
			}
			close(goOn)
			if body, err := io.ReadAll(streaming.Body); err != nil || string(body) != "begin end" {
				t.Errorf("got %q, %v", body, err)
			}
			if resp, body := slow.answer("GET"); resp.StatusCode != 200 || body != "end" {
				t.Errorf("got %d %q", resp.StatusCode, body)
			}
			select {
			case err := <-stopped:
				t.Errorf("the agent is gone before the last connection: %v", err)
			case <-time.After(50 * time.Millisecond):
			}
			start := time.Now()
			upgraded.Close()
			if err := within(t, "end of the agent", stopped); err != nil {
				t.Error(err)
			}
			if d := time.Since(start); d > 3*time.Second {
				t.Errorf("the agent ended %v after the last connection", d)
			}
		})
	}
}

// TestDrainIsBounded leaves requests unfinished: they are cut, and that is an error.
func TestDrainIsBounded(t *testing.T) {
	m := meshConfig{drain: 200 * time.Millisecond}.newMesh(t, "a", "b")
	begun, ended := make(chan bool, 3), make(chan bool, 3)
	handler := func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/upgrade" {
			c, rw, _ := http.NewResponseController(w).Hijack()
			defer c.Close()
			io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n")
			begun <- true
			io.Copy(io.Discard, rw)
			ended <- true
			return
		}
		io.WriteString(flushing{w}, "begin ")
		begun <- true
		<-r.Context().Done()
		ended <- true
	}
	m.serve("web", "a", handler)
	m.serve("web", "b", handler)
	m.setPolicy("web", roundRobin)
	var cs []*raw
	for _, path := range []string{"/stream", "/upgrade", "/stream", "/upgrade"}[:3] {
		c := m.nodes["a"].dial(t)
		c.send("GET " + path + " HTTP/1.1\r\nHost: web.mesh\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n")
		within(t, "request at the replica", begun)
		cs = append(cs, c)
	}
	a := m.nodes["a"]
	err := a.stop()
	if err == nil || !strings.Contains(err.Error(), "cut off") {
		t.Errorf("got %v, want an error that says that requests were cut off", err)
	}
	a.stop = func() error { return nil } // as expected
	for range cs {
		within(t, "end of the request at the replica", ended)
	}
	for _, c := range cs {
		if _, err := io.Copy(io.Discard, c.in); isTimeout(err) {
			t.Error("the caller is not told")
		}
	}
	if left := inFlight(a.Observe("")); len(left) > 0 {
		t.Error(left)
	}
	m.quiet()
}

// TestLeavesNothingBehind counts goroutines after all kinds of traffic.
func TestLeavesNothingBehind(t *testing.T) {
	before := runtime.NumGoroutine()
	t.Run("traffic", func(t *testing.T) {
		m := newMesh(t, "a", "b")
		m.serve("web", "a", echo)
		m.serve("web", "b", echo)
		m.register("web", "b", deaf(t))
		concurrently(10, func(i int) func() {
			return func() {
				for range 20 {
					resp, err := m.nodes["a"].client.Do(request(t, "POST", "http://web.mesh/", strings.NewReader("x")))
					if err == nil {
						io.Copy(io.Discard, resp.Body)
						resp.Body.Close()
					}
				}
			}
		})
		for _, n := range m.nodes {
			if err := n.stop(); err != nil {
				t.Error(err)
			}
		}
	})
	eventually(t, "goroutines", func() any {
		buf := make([]byte, 1<<20)
		return fmt.Sprintf("%d, %d before\n%s", runtime.NumGoroutine(), before, buf[:runtime.Stack(buf, true)])
	}, func(any) bool { return runtime.NumGoroutine() <= before })
}

// TestPartFails takes a listener away: Run must not go on with half of its work.
func TestPartFails(t *testing.T) {
	for _, which := range []string{"proxy", "mesh"} {
		t.Run(which, func(t *testing.T) {
			proxy, mesh := listen(t, "127.0.0.1:0"), listen(t, "127.0.0.1:0")
			done := make(chan error, 1)
			d, err := dataplane.New(dataplane.Config{Node: "a"})
			if err != nil {
				t.Fatal(err)
			}
			go func() { done <- d.Run(context.Background(), proxy, mesh) }()
			dial(t, proxy.Addr().String()).send("GET / HTTP/1.1\r\nHost: x\r\n\r\n")
			map[string]net.Listener{"proxy": proxy, "mesh": mesh}[which].Close()
			if err := within(t, "end of Run", done); err == nil {
				t.Error("want an error")
			}
		})
	}
}

// avoided says how a node avoids the endpoints of another node.
func avoided(n *node, service registry.ServiceName, at registry.NodeName) string {
	for _, e := range n.Observe(service).Outbound[0].Endpoints {
		if e.Node == string(at) {
			return e.Avoided
		}
	}
	return "not registered"
}

// TestAgentGone lets an agent die, or fall silent, under traffic. Its replicas are left out within a second, no request
// fails that did not reach it, and they are back when it is.
func TestAgentGone(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"dies", "falls silent"} {
		for _, rule := range []policy.Balancer{policy.BalancerPrequal, policy.BalancerRoundRobin} {
			t.Run(how+", "+string(rule), func(t *testing.T) {
				m := newMesh(t, "a", "b", "c")
				m.serve("web", "b", name("b"))
				m.serve("web", "c", name("c"))
				m.setPolicy("web", func(p *policy.Policy) { p.Balancer, p.Timeout = rule, 700*time.Millisecond })
				a, b := m.nodes["a"], m.nodes["b"]
				stop := make(chan bool)
				done := make(chan bool)
				go concurrentlyUntil(stop, done, 4, func() {
					resp, err := a.client.Get("http://web.mesh/")
					if err != nil {
						t.Error(err)
						return
					}
					defer resp.Body.Close()
					io.Copy(io.Discard, resp.Body)
					if resp.StatusCode != 200 {
						want := map[string]fault.Reason{"dies": fault.Reset, "falls silent": fault.Timeout}[how]
						if got := fault.Reason(resp.Header.Get(fault.Header)); got != want {
							t.Errorf("got %s, %s", resp.Status, got)
						}
					}
				})
				defer func() { <-done }()
				defer close(stop)
				eventually(t, "picks of b", func() any { return a.Observe("web").Outbound[0].Endpoints[0].Picks }, func(v any) bool { return v.(uint64) > 10 })

				start := time.Now()
				if how == "dies" {
					if err := b.stop(); err != nil {
						t.Error(err)
					}
				} else {
					b.silent.Store(true)
				}
				eventually(t, "avoidance", func() any { return avoided(a, "web", "b") }, func(v any) bool { return v != "" })
				if d := time.Since(start); d > 2*time.Second { // one, on a machine with nothing else to do
					t.Errorf("left out after %v", d)
				}

				eventually(t, "avoidance", func() any { return avoided(a, "web", "b") }, func(v any) bool { return v == "unreachable" })

				start = time.Now()
				if how == "dies" {
					m.start("b", meshConfig{}, b.agent.String())
					m.publish()
				} else {
					b.silent.Store(false)
				}
				eventually(t, "avoidance", func() any { return avoided(a, "web", "b") }, func(v any) bool { return v == "" })
				if d := time.Since(start); d > 4*time.Second {
					t.Errorf("back after %v", d)
				}
			})
		}
	}
}

// TestAgentLeaves ends an agent in good order under traffic: no request fails.
func TestAgentLeaves(t *testing.T) {
	t.Parallel()
	m := newMesh(t, "a", "b", "c")
	_, e := m.serve("web", "b", name("b"))
	m.serve("web", "c", name("c"))
	a := m.nodes["a"]
	stop, done := make(chan bool), make(chan bool)
	go concurrentlyUntil(stop, done, 4, func() {
		resp, err := a.client.Post("http://web.mesh/", "text/plain", strings.NewReader("once"))
		if err != nil {
			t.Error(err)
			return
		}
		defer resp.Body.Close()
		if resp.StatusCode != 200 {
			t.Errorf("got %s, %s", resp.Status, resp.Header.Get(fault.Header))
		}
	})
	picks := func() any { return a.Observe("web").Outbound[0].Endpoints[0].Picks }
	eventually(t, "picks of b", picks, func(v any) bool { return v.(uint64) > 10 })
	for i := range m.endpoints {
		if m.endpoints[i].ID() == e.ID() {
			m.endpoints[i].State = registry.Draining
		}
	}
	m.nodes["b"].UpdateLocal(m.local("b")) // its probes tell, the registry not yet
	eventually(t, "avoidance", func() any { return avoided(a, "web", "b") }, func(v any) bool { return v == "declined" })
	m.publish()
	eventually(t, "requests in flight", func() any { return m.rif(e) }, func(v any) bool { return v == 0 })
	if err := m.nodes["b"].stop(); err != nil {
		t.Error(err)
	}
	m.endpoints = m.endpoints[1:]
	m.publish()
	close(stop)
	within(t, "end of the traffic", done)
}

// concurrentlyUntil works until stop is closed, and then closes done.
func concurrentlyUntil(stop <-chan bool, done chan<- bool, workers int, work func()) {
	concurrently(workers, func(int) func() {
		return func() {
			tick := time.NewTicker(5 * time.Millisecond)
			defer tick.Stop()
			for {
				select {
				case <-stop:
					return
				case <-tick.C:
					work()
				}
			}
		}
	})
	close(done)
}

var address = regexp.MustCompile(`\d+\.\d+\.\d+\.\d+|:\d`)

func TestMetrics(t *testing.T) {
	m := newMesh(t, "a", "b")
	m.serve("web", "b", echo)
	begun, goOn := make(chan bool), make(chan bool)
	m.serve("shop", "a", func(w http.ResponseWriter, r *http.Request) {
		begun <- true
		<-goOn
		w.WriteHeader(500)
	})
	a := m.nodes["a"]
	a.get(t, "http://web.mesh/")
	a.get(t, "http://nosuch.mesh/")
	a.get(t, "http://10.0.0.1:80/")
	answered := make(chan bool)
	go func() {
		resp, err := a.client.Get("http://shop.mesh/")
		if err != nil || resp.StatusCode != 500 {
			t.Errorf("got %v, %v", resp, err)
		}
		resp.Body.Close()
		close(answered)
	}()
	within(t, "request at the replica", begun)
	wantMetric(t, a, `headroom_outbound_requests_total{code="2xx",reason="",service="web"}`, 1)
	wantMetric(t, a, `headroom_outbound_refused_total{reason="unknown_service"}`, 1)
	wantMetric(t, a, `headroom_outbound_refused_total{reason="not_mesh"}`, 1)
	wantMetric(t, m.nodes["b"], `headroom_inbound_requests_total{outcome="ok",service="web"}`, 1)

	problems, err := testutil.GatherAndLint(a.metrics)
	if err != nil || len(problems) > 0 {
		t.Errorf("%v, %v", problems, err)
	}
	for name := range series(t, a) {
		if address.MatchString(name) {
			t.Errorf("a label with an address: %s", name)
		}
	}

	// The service goes, and only then its last request.
	m.endpoints = m.endpoints[:1]
	m.publish()
	close(goOn)
	within(t, "answer", answered)
	m.quiet()
	if resp, _ := a.get(t, "http://shop.mesh/"); resp.Header.Get(fault.Header) != "unknown_service" {
		t.Errorf("got %d %v", resp.StatusCode, resp.Header)
	}
	wantMetric(t, a, `headroom_outbound_refused_total{reason="unknown_service"}`, 2)
	for name := range series(t, a) {
		if strings.Contains(name, "shop") {
			t.Errorf("a service that is gone has %s", name)
		}
	}
}

func TestAccessLog(t *testing.T) {
	var log bytes.Buffer
	leaveOut := func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey || a.Key == "took" {
			return slog.Attr{}
		}
		return a
	}
	m := meshConfig{access: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{ReplaceAttr: leaveOut}))}.newMesh(t, "a")
	_, e := m.serve("web", "a", name("web"))
	a := m.nodes["a"]
	a.get(t, "http://web.mesh/path?secret=1")
	a.do(t, request(t, "POST", "http://other.mesh/", nil))
	if err := a.stop(); err != nil {
		t.Error(err)
	}
	want := "level=INFO msg=request source=\"\" method=GET host=web.mesh path=/path endpoint=" + string(e.ID()) + " status=200 reason=\"\" tries=1\n" +
		"level=INFO msg=request source=\"\" method=POST host=other.mesh path=/ endpoint=\"\" status=404 reason=unknown_service tries=0\n"
	if log.String() != want {
		t.Errorf("got\n%swant\n%s", log.String(), want)
	}
}

func TestObserve(t *testing.T) {
	m := newMesh(t, "a", "b")
	begun, goOn := make(chan bool), make(chan bool)
	_, e := m.serve("web", "b", func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/wait" {
			begun <- true
			<-goOn
		}
		w.WriteHeader(500)
	})
	m.serve("shop", "a", name("shop"))
	a, b := m.nodes["a"], m.nodes["b"]
	for range 2 {
		a.get(t, "http://web.mesh/")
	}
	wantErrors(t, a, "web", 2)
	done := make(chan bool)
	go func() {
		if resp, err := a.client.Get("http://web.mesh/wait"); err == nil {
			resp.Body.Close()
		}
		close(done)
	}()
	within(t, "request at the replica", begun)

	o := a.Observe("")
	if o.Node != "a" || o.Time.AsTime().Before(o.Started.AsTime()) || len(o.Outbound) != 2 || len(o.Inbound) != 1 {
		t.Errorf("a sees %v", o)
	}
	out := a.Observe("web").Outbound
	if len(out) != 1 || len(out[0].Endpoints) != 1 {
		t.Fatalf("a sees %v", out)
	}
	v, ev := out[0], out[0].Endpoints[0]
	if v.Service != "web" || v.Balancer != "prequal" || v.Requests != 3 || v.Errors != 2 || v.RetryBalance < 1 || v.PoolCapacity == 0 {
		t.Errorf("a sees %v", v)
	}
	if ev.Id != string(e.ID()) || ev.Node != "b" || ev.Address != e.Address.String() || ev.OwnRif != 1 || ev.Picks != 3 || ev.Errors != 2 {
		t.Errorf("a sees %v", ev)
	}
	eventually(t, "probes answered", func() any { return a.Observe("web").Outbound[0].ProbeAnswers }, func(n any) bool { return n.(uint64) > 0 })
	in := b.Observe("web").Inbound
	if len(in) != 1 || in[0].Rif != 1 || in[0].Requests != 3 || in[0].Errors != 2 || in[0].Latency == nil {
		t.Errorf("b sees %v", in)
	}
	if o := a.Observe("nosuch"); len(o.Outbound)+len(o.Inbound) > 0 {
		t.Errorf("of no service, a sees %v", o)
	}
	close(goOn)
	within(t, "answer", done)
}

// TestLeave expects callers to be told that their connection ends, with an answer and not by its end.
func TestLeave(t *testing.T) {
	m := newMesh(t, "a")
	m.serve("web", "a", name("web"))
	a := m.nodes["a"]
	kept := a.dial(t)
	ask := func() bool {
		kept.send("GET / HTTP/1.1\r\nHost: web.mesh\r\n\r\n")
		resp, body := kept.answer("GET")
		if body != "web" {
			t.Errorf("got %q", body)
		}
		return resp.Close
	}
	if ask() {
		t.Error("the connection ends before the agent leaves")
	}
	a.Leave()
	eventually(t, "the last answer", func() any { return ask() }, func(last any) bool { return last.(bool) })
	if _, err := kept.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("after the last answer: %v, want the end of the connection", err)
	}
	if resp, body := a.get(t, "http://web.mesh/"); body != "web" {
		t.Errorf("on a new connection: got %s %q", resp.Status, body)
	}
}
