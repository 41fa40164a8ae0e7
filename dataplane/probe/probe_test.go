package probe_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"pgregory.net/rapid"

	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/dataplane/memnet"
	"github.com/headroom-mesh/headroom/dataplane/probe"
	"github.com/headroom-mesh/headroom/registry"
)

const (
	timeout = 100 * time.Millisecond
	cart    = registry.EndpointID("cart/n1/10.0.0.2:80")
)

// ledger is a Sink that books what became of each probe.
type ledger struct {
	mu       sync.Mutex
	answered map[uint64]int
	lost     map[uint64]int
	last     probe.Answer
	wrong    int // calls that tell a time other than now
}

func newLedger() *ledger { return &ledger{answered: map[uint64]int{}, lost: map[uint64]int{}} }

func (l *ledger) Answered(token uint64, a probe.Answer, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.answered[token]++
	l.last = a
	if now.IsZero() || time.Since(now) < 0 {
		l.wrong++
	}
}

func (l *ledger) Lost(token uint64, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lost[token]++
	if now.IsZero() || time.Since(now) < 0 {
		l.wrong++
	}
}

func (l *ledger) counts() (answered, lost int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.answered), len(l.lost)
}

func (l *ledger) latest() probe.Answer {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.last
}

// check expects one call for each probe that was sent, and none for others.
func (l *ledger) check(t testing.TB, sent []uint64) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, token := range sent {
		if n := l.answered[token] + l.lost[token]; n != 1 {
			t.Errorf("probe %d: %d calls", token, n)
		}
	}
	if n := len(l.answered) + len(l.lost); n != len(sent) {
		t.Errorf("%d probes came back of %d sent", n, len(sent))
	}
	if l.wrong > 0 {
		t.Errorf("%d calls with a wrong time", l.wrong)
	}
}

// bench is a client on one host, and agents on others.
type bench struct {
	t       *testing.T
	net     *memnet.Network
	metrics *prometheus.Registry
	client  *probe.Client
	sink    *ledger
	sent    []uint64
	stop    func() // ends the client
	dials   atomic.Int32
	writes  atomic.Int32

	mu     sync.Mutex
	states []string // "10.0.0.2 up after 300ms"
	start  time.Time
}

func newBench(t *testing.T) *bench {
	t.Helper()
	b := &bench{t: t, net: memnet.New(), metrics: prometheus.NewPedanticRegistry(), sink: newLedger(), start: time.Now()}
	from := b.net.Host("10.0.0.1")
	var err error
	b.client, err = probe.NewClient(probe.Config{
		Dial: func(ctx context.Context, agent netip.AddrPort) (net.Conn, error) {
			b.dials.Add(1)
			c, err := from.Dial(ctx, agent)
			return &counted{c, &b.writes}, err
		},
		State:   b.state,
		Metrics: b.metrics,
	})
	if err != nil {
		t.Fatal(err)
	}
	b.stop = background(t, b.client.Run)
	synctest.Wait() // until it runs
	return b
}

// counted is a connection whose writes are counted.
type counted struct {
	net.Conn
	n *atomic.Int32
}

func (c *counted) Write(b []byte) (int, error) {
	c.n.Add(1)
	return c.Conn.Write(b)
}

// background runs f and returns what stops it and waits.
func background(t testing.TB, f func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := f(ctx); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	stop = sync.OnceFunc(func() { cancel(); wg.Wait() })
	t.Cleanup(stop)
	return stop
}

func (b *bench) state(agent netip.AddrPort, up bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	word := "down"
	if up {
		word = "up"
	}
	b.states = append(b.states, fmt.Sprintf("%s %v", word, time.Since(b.start).Round(10*time.Millisecond)))
}

// took returns the states since it was last asked.
func (b *bench) took() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := strings.Join(b.states, ", ")
	b.states, b.start = nil, time.Now()
	return s
}

func agent(host string) netip.AddrPort { return netip.AddrPortFrom(netip.MustParseAddr(host), 7000) }

// serve runs f at an agent's address.
func (b *bench) serve(host string, f func(context.Context, net.Listener) error) (stop func()) {
	b.t.Helper()
	l, err := b.net.Host(host).Listen(7000)
	if err != nil {
		b.t.Fatal(err)
	}
	return background(b.t, func(ctx context.Context) error { return f(ctx, l) })
}

// respond serves probes properly: every endpoint has 3 requests in flight.
func respond(ctx context.Context, l net.Listener) error {
	return (&probe.Responder{Lookup: busy}).Serve(ctx, l)
}

func busy(_ time.Time, q probe.Request) probe.Answer {
	if !strings.HasPrefix(string(q.Endpoint), "cart/") {
		return probe.Answer{Status: probe.Unknown}
	}
	return probe.Answer{Report: load.Report{RIF: 3, Latency: 2 * time.Millisecond, Known: true}}
}

// each serves every connection with f.
func each(f func(net.Conn)) func(context.Context, net.Listener) error {
	return func(ctx context.Context, l net.Listener) error {
		var wg sync.WaitGroup
		defer wg.Wait()
		context.AfterFunc(ctx, func() { l.Close() })
		for {
			c, err := l.Accept()
			if err != nil {
				return nil
			}
			wg.Go(func() {
				defer c.Close()
				defer context.AfterFunc(ctx, func() { c.Close() })()
				f(c)
			})
		}
	}
}

// probe sends one probe and reports whether it was sent.
func (b *bench) probe(host string) bool {
	token := uint64(len(b.sent)) + 1
	if !b.client.Probe(agent(host), probe.Request{Endpoint: cart}, timeout, b.sink, token) {
		return false
	}
	b.sent = append(b.sent, token)
	return true
}

// probeFor sends a probe every ten milliseconds and returns how many were refused.
func (b *bench) probeFor(host string, d time.Duration) (refused int) {
	for range d / (10 * time.Millisecond) {
		if !b.probe(host) {
			refused++
		}
		time.Sleep(10 * time.Millisecond)
	}
	return refused
}

// end stops everything and expects that each probe was accounted for.
func (b *bench) end() {
	b.t.Helper()
	b.stop()
	b.sink.check(b.t, b.sent)
}

func (b *bench) metric(name, result string) float64 {
	b.t.Helper()
	families, err := b.metrics.Gather()
	if err != nil {
		b.t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			if result == "" || m.GetLabel()[0].GetValue() == result {
				return m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	b.t.Fatalf("no metric %s %s", name, result)
	return 0
}

func (b *bench) result(result string) float64 {
	return b.metric("headroom_probe_results_total", result)
}

func TestAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.serve("10.0.0.2", respond)
		b.net.Host("10.0.0.2").Delay(time.Millisecond)
		if !b.probe("10.0.0.2") {
			t.Fatal("the first probe is refused")
		}
		time.Sleep(10 * time.Millisecond)
		b.sink.check(t, b.sent)
		want := probe.Answer{Report: load.Report{RIF: 3, Latency: 2 * time.Millisecond, Known: true}}
		if got := b.sink.latest(); got != want {
			t.Errorf("answer %+v, want %+v", got, want)
		}
		if !b.client.Probe(agent("10.0.0.2"), probe.Request{Endpoint: "other/n1/10.0.0.2:80"}, timeout, b.sink, 2) {
			t.Fatal("refused")
		}
		b.sent = append(b.sent, 2)
		time.Sleep(10 * time.Millisecond)
		if got := b.sink.latest(); got.Status != probe.Unknown {
			t.Errorf("answer %+v for an endpoint that isn't there", got)
		}
		if got := b.took(); got != "up 0s" {
			t.Errorf("states: %s", got)
		}
		if n, up := b.metric("headroom_probe_sent_total", ""), b.metric("headroom_probe_peers", "up"); n != 2 || up != 1 {
			t.Errorf("%v sent, %v up", n, up)
		}
		if problems, err := testutil.GatherAndLint(b.metrics); err != nil || len(problems) > 0 {
			t.Errorf("metrics: %v %v", problems, err)
		}
		b.end()
	})
}

func TestRefused(t *testing.T) {
	if _, err := probe.NewClient(probe.Config{}); err == nil || !strings.Contains(err.Error(), "Dial") {
		t.Errorf("without Dial: %v", err)
	}
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.serve("10.0.0.2", respond)
		long := registry.EndpointID(strings.Repeat("x", probe.MaxEndpointID+1))
		if b.client.Probe(agent("10.0.0.2"), probe.Request{Endpoint: long}, timeout, b.sink, 1) {
			t.Error("sent a name that is too long")
		}
		b.end()
		if b.probe("10.0.0.2") {
			t.Error("sent though Run has ended")
		}
		if n := b.result("refused"); n != 2 {
			t.Errorf("%v refused, want 2", n)
		}
	})
}

func TestDeadResponder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		if refused := b.probeFor("10.0.0.2", time.Second); refused < 95 {
			t.Errorf("%d of 100 probes refused by a peer that nobody runs", refused)
		}
		if got := b.took(); got != "down 0s" {
			t.Errorf("states: %s", got)
		}
		if dials := b.dials.Load(); dials < 3 || dials > 6 {
			t.Errorf("%d dials in a second", dials)
		}
		b.serve("10.0.0.2", respond)
		b.probeFor("10.0.0.2", 3*time.Second)
		if got := b.took(); !strings.HasPrefix(got, "up ") || strings.Contains(got, "down") {
			t.Errorf("states once it runs: %s", got)
		}
		b.end()
	})
}

// TestConnectionLost cuts the connection of an agent that lives, and then of one that has gone.
func TestConnectionLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		stop := b.serve("10.0.0.2", respond)
		b.probeFor("10.0.0.2", 3*time.Second)
		b.took()
		b.net.Host("10.0.0.2").Cut()
		if refused := b.probeFor("10.0.0.2", time.Second); refused > 0 || b.took() != "" {
			t.Errorf("%d probes refused for a cut connection", refused)
		}
		b.probeFor("10.0.0.2", 3*time.Second)
		stop()
		b.probeFor("10.0.0.2", time.Second)
		if got := b.took(); got != "down 3s" {
			t.Errorf("states of an agent that ended: %s", got)
		}
		b.end()
	})
}

func TestBlackhole(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.serve("10.0.0.2", respond)
		b.probeFor("10.0.0.2", 3*time.Second)
		b.took()
		b.net.Host("10.0.0.2").Blackhole(true)
		refused := b.probeFor("10.0.0.2", 5*time.Second)
		if got := b.took(); got != "down 500ms" && got != "down 510ms" {
			t.Errorf("states in the dark: %s", got)
		}
		if refused < 440 {
			t.Errorf("%d of 500 probes refused", refused)
		}
		b.net.Host("10.0.0.2").Blackhole(false)
		b.probeFor("10.0.0.2", 4*time.Second)
		if got := b.took(); !strings.HasPrefix(got, "up ") || strings.Contains(got, "down") {
			t.Errorf("states in the light: %s", got)
		}
		b.end()
	})
}

// TestBlackholeFromTheStart probes a peer whose first connection never comes about.
func TestBlackholeFromTheStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.net.Host("10.0.0.2").Blackhole(true)
		b.probeFor("10.0.0.2", 2*time.Second)
		if got := b.took(); got != "down 1s" {
			t.Errorf("states: %s", got)
		}
		if answered, lost := b.sink.counts(); answered > 0 || lost != len(b.sent) {
			t.Errorf("%d lost of %d sent", lost, len(b.sent))
		}
		b.end()
	})
}

// TestFewLostProbes expects that two lost probes are not taken for the end.
func TestFewLostProbes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.serve("10.0.0.2", respond)
		b.probeFor("10.0.0.2", time.Second)
		b.took()
		b.net.Host("10.0.0.2").Blackhole(true)
		b.probe("10.0.0.2")
		b.probe("10.0.0.2")
		time.Sleep(10 * time.Second)
		if _, lost := b.sink.counts(); lost != 2 || b.took() != "" {
			t.Errorf("%d lost of 2", lost)
		}
		b.net.Host("10.0.0.2").Blackhole(false)
		time.Sleep(time.Second)
		if n := b.result("late"); n != 2 {
			t.Errorf("%v answers counted as late, want 2", n)
		}
		b.end()
	})
}

// TestSlow has every answer come after its probe's timeout: all are lost, but the agent is not down.
func TestSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.serve("10.0.0.2", respond)
		b.net.Host("10.0.0.2").Delay(75 * time.Millisecond)
		b.probeFor("10.0.0.2", 5*time.Second)
		time.Sleep(time.Second)
		if answered, lost := b.sink.counts(); answered > 0 || lost != len(b.sent) {
			t.Errorf("%d answered, %d lost of %d", answered, lost, len(b.sent))
		}
		if got := b.took(); strings.Contains(got, "down") {
			t.Errorf("states: %s", got)
		}
		if late := b.result("late"); late < float64(len(b.sent)-20) {
			t.Errorf("%v answers counted as late of %d", late, len(b.sent))
		}
		b.end()
	})
}

func TestTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.serve("10.0.0.2", respond)
		b.probeFor("10.0.0.2", time.Second)
		b.net.Host("10.0.0.2").Blackhole(true)
		start := time.Now()
		for i, d := range []time.Duration{300, 20, 100} {
			token := uint64(1000 + i)
			if !b.client.Probe(agent("10.0.0.2"), probe.Request{Endpoint: cart}, d*time.Millisecond, b.sink, token) {
				t.Fatal("refused")
			}
			b.sent = append(b.sent, token)
		}
		for i, d := range []time.Duration{20, 100, 300} {
			time.Sleep(time.Until(start.Add(d*time.Millisecond - 1)))
			synctest.Wait()
			if _, lost := b.sink.counts(); lost != i {
				t.Errorf("%d lost before %vms", lost, d)
			}
			time.Sleep(5 * time.Millisecond)
			if _, lost := b.sink.counts(); lost != i+1 {
				t.Errorf("%d lost after %vms", lost, d)
			}
		}
		b.end()
	})
}

// lie answers like a Responder, but changes every answer to a probe for an endpoint.
func lie(change func(id uint32, answer []byte) []byte) func(net.Conn) {
	return func(c net.Conn) {
		in := bufio.NewReader(c)
		for {
			id, _, endpoint, err := probe.ReadRequest(in)
			if err != nil {
				return
			}
			answer := probe.AppendAnswer(nil, id, probe.Answer{})
			if len(endpoint) > 0 {
				answer = change(id, answer)
			}
			if _, err := c.Write(answer); err != nil {
				return
			}
		}
	}
}

func TestLyingResponder(t *testing.T) {
	lies := map[string]func(uint32, []byte) []byte{
		"unknown id":     func(id uint32, _ []byte) []byte { return probe.AppendAnswer(nil, id+7, probe.Answer{}) },
		"answered twice": func(_ uint32, a []byte) []byte { return append(a, a...) },
		"huge rif":       func(_ uint32, a []byte) []byte { a[7] = 0xff; return a },
		"bad status":     func(_ uint32, a []byte) []byte { a[6] = 9; return a },
		"bad length":     func(_ uint32, a []byte) []byte { a[1]++; return append(a, 0) },
		"garbage":        func(uint32, []byte) []byte { return []byte("HTTP/1.1 400 Bad Request\r\n\r\n") },
	}
	for name, change := range lies {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t)
				b.serve("10.0.0.2", each(lie(change)))
				b.serve("10.0.0.3", respond)
				for range 1000 {
					b.probe("10.0.0.2")
					b.probe("10.0.0.3")
					time.Sleep(10 * time.Millisecond)
				}
				if dials := b.dials.Load(); dials < 5 || dials > 20 {
					t.Errorf("%d dials in ten seconds, want some with pauses that grow", dials)
				}
				if n := b.result("bad"); n < 4 {
					t.Errorf("%v bad connections counted", n)
				}
				if ok := b.result("ok"); ok < 999 {
					t.Errorf("%v probes of the honest agent answered of 1000", ok)
				}
				b.end()
			})
		})
	}
}

// TestQueueFull probes more than can be outstanding.
func TestQueueFull(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.serve("10.0.0.2", respond)
		b.probeFor("10.0.0.2", time.Second)
		b.net.Host("10.0.0.2").Blackhole(true)
		before := len(b.sent)
		for range 5000 {
			b.probe("10.0.0.2")
		}
		if n := len(b.sent) - before; n != 1024 {
			t.Errorf("%d probes sent without an answer, want 1024", n)
		}
		b.net.Host("10.0.0.2").Blackhole(false)
		time.Sleep(time.Millisecond)
		if !b.probe("10.0.0.2") {
			t.Error("refused though all have been answered")
		}
		b.end()
	})
}

// TestWrites expects probes that are sent together to be written together, and nothing to be written without need.
func TestWrites(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.serve("10.0.0.2", respond)
		b.probeFor("10.0.0.2", time.Second)
		before := b.writes.Load()
		time.Sleep(4 * time.Minute)
		if n := b.writes.Load() - before; n != 0 {
			t.Errorf("%d writes while nobody probes", n)
		}
		b.net.Host("10.0.0.2").Delay(time.Millisecond)
		for range 500 {
			b.probe("10.0.0.2")
		}
		synctest.Wait()
		if n := b.writes.Load() - before; n > 100 {
			t.Errorf("%d writes for 500 probes at once", n)
		}
		b.end()
	})
}

// TestForgotten follows a peer that nobody probes any more.
func TestForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.serve("10.0.0.2", respond)
		b.probe("10.0.0.2")
		b.probe("10.0.0.3") // which isn't there
		time.Sleep(4 * time.Minute)
		dials := b.dials.Load()
		if dials > 60 {
			t.Errorf("%d dials, though nobody has probed for minutes", dials)
		}
		if n := b.metric("headroom_probe_peers", "up") + b.metric("headroom_probe_peers", "down"); n != 2 {
			t.Errorf("%v peers, want 2", n)
		}
		b.took()
		b.probe("10.0.0.3")
		time.Sleep(time.Second)
		if b.dials.Load() == dials {
			t.Error("a peer that is down isn't dialed again though it is probed")
		}
		time.Sleep(10 * time.Minute)
		if n := b.metric("headroom_probe_peers", "up") + b.metric("headroom_probe_peers", "down"); n != 0 {
			t.Errorf("%v peers are kept for ever", n)
		}
		if got := b.took(); !strings.HasPrefix(got, "up ") || strings.Contains(got, ",") {
			t.Errorf("states of a forgotten peer that was down: %s", got)
		}
		if !b.probe("10.0.0.2") {
			t.Error("refused after it was forgotten")
		}
		time.Sleep(time.Second)
		b.end()
	})
}

// TestPropertyAccounted has faults come and go while probes are sent: each sent one must come back once.
func TestPropertyAccounted(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		seed := rapid.Uint64().Draw(rt, "seed")
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 1))
			b := newBench(t)
			hosts := []string{"10.0.0.2", "10.0.0.3", "10.0.0.4"}
			b.serve(hosts[0], respond)
			b.serve(hosts[1], each(lie(func(id uint32, a []byte) []byte {
				if id%50 == 0 {
					return nil
				}
				return a
			})))
			for range 100 {
				h := b.net.Host(hosts[rng.IntN(len(hosts))])
				switch rng.IntN(12) {
				case 0:
					h.Cut()
				case 1:
					h.Blackhole(true)
				case 2, 3:
					h.Blackhole(false)
				case 4:
					h.Delay(time.Duration(rng.Int64N(int64(150 * time.Millisecond))))
				case 5:
					h.Delay(0)
				}
				for range 100 {
					b.probe(hosts[rng.IntN(len(hosts))])
				}
				time.Sleep(time.Duration(rng.Int64N(int64(60 * time.Millisecond))))
			}
			if rng.IntN(2) == 0 {
				time.Sleep(2 * timeout)
				b.sink.check(t, b.sent)
			}
			b.end()
		})
		if t.Failed() {
			rt.Fatalf("seed %d", seed)
		}
	})
}

// TestManyCallers probes from many goroutines while the client ends.
func TestManyCallers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.serve("10.0.0.2", respond)
		b.serve("10.0.0.3", respond)
		var wg sync.WaitGroup
		sent := make([][]uint64, 8)
		for g := range sent {
			wg.Go(func() {
				for i := range 1250 {
					token := uint64(g*10000 + i)
					host := [...]string{"10.0.0.2", "10.0.0.3", "10.0.0.4"}[i%3]
					if b.client.Probe(agent(host), probe.Request{Endpoint: cart}, timeout, b.sink, token) {
						sent[g] = append(sent[g], token)
					}
					if i%10 == 0 {
						time.Sleep(time.Millisecond)
					}
				}
			})
		}
		time.Sleep(100 * time.Millisecond)
		b.stop()
		wg.Wait()
		b.sent = slices.Concat(sent...)
		b.end()
	})
}

// TestResponderLimits talks to a responder without a client.
func TestResponderLimits(t *testing.T) {
	dial := func(t *testing.T) (net.Conn, func()) {
		b := newBench(t)
		stop := b.serve("10.0.0.2", respond)
		c, err := b.net.Host("10.0.0.9").Dial(t.Context(), agent("10.0.0.2"))
		if err != nil {
			t.Fatal(err)
		}
		return c, func() { stop(); b.stop() }
	}
	bubble := func(name string, f func(t *testing.T, c net.Conn)) {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c, stop := dial(t)
				f(t, c)
				stop()
			})
		})
	}
	request, _ := probe.AppendRequest(nil, 1, probe.Request{Endpoint: cart})
	bubble("a client that never reads", func(t *testing.T, c net.Conn) {
		start := time.Now()
		many := bytes.Repeat(request, 1000)
		for {
			if _, err := c.Write(many); err != nil {
				break
			}
		}
		if took := time.Since(start); took > 10*time.Second {
			t.Errorf("closed after %v", took)
		}
	})
	bubble("a client that breaks the format", func(t *testing.T, c net.Conn) {
		c.Write([]byte("GET / HTTP/1.1\r\n\r\n"))
		if _, err := c.Read(make([]byte, 1)); err != io.EOF {
			t.Errorf("read: %v, want EOF", err)
		}
	})
	bubble("an idle client", func(t *testing.T, c net.Conn) {
		time.Sleep(9 * time.Minute)
		c.Write(request)
		if _, _, err := probe.ReadAnswer(bufio.NewReader(c)); err != nil {
			t.Error(err)
		}
		start := time.Now()
		if _, err := c.Read(make([]byte, 1)); err != io.EOF || time.Since(start) > 20*time.Minute {
			t.Errorf("idle for %v: %v", time.Since(start), err)
		}
	})
	bubble("requests in pieces and together", func(t *testing.T, c net.Conn) {
		all := bytes.Repeat(request, 3)
		for i := range all {
			c.Write(all[i : i+1])
			synctest.Wait()
		}
		c.Write(bytes.Repeat(request, 500))
		in := bufio.NewReader(c)
		for i := range 503 {
			if id, a, err := probe.ReadAnswer(in); err != nil || id != 1 || a.Report.RIF != 3 {
				t.Fatalf("answer %d: %d %+v %v", i, id, a, err)
			}
		}
	})
	bubble("many names", func(t *testing.T, c net.Conn) {
		in := bufio.NewReader(c)
		for i := range 1000 {
			b, _ := probe.AppendRequest(nil, uint32(i), probe.Request{Endpoint: registry.EndpointID(fmt.Sprintf("cart/n/%d", i%700))})
			c.Write(b)
			if id, a, err := probe.ReadAnswer(in); err != nil || id != uint32(i) || a.Report.RIF != 3 {
				t.Fatalf("answer %d: %d %+v %v", i, id, a, err)
			}
		}
	})
}

// TestResponderDrains goes on with open connections after its listener was closed.
func TestResponderDrains(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		l, err := b.net.Host("10.0.0.2").Listen(7000)
		if err != nil {
			t.Fatal(err)
		}
		stop := background(t, func(ctx context.Context) error { return respond(ctx, l) })
		b.probeFor("10.0.0.2", time.Second)
		l.Close()
		b.probeFor("10.0.0.2", time.Second)
		if answered, lost := b.sink.counts(); answered != 200 || lost > 0 {
			t.Errorf("%d answered, %d lost", answered, lost)
		}
		stop()
		b.end()
	})
}

type failing struct{ net.Listener }

func (failing) Accept() (net.Conn, error) { return nil, errors.New("no sockets today") }
func (failing) Close() error              { return nil }

func TestResponderFails(t *testing.T) {
	err := (&probe.Responder{Lookup: busy}).Serve(t.Context(), failing{})
	if err == nil || !strings.Contains(err.Error(), "no sockets today") {
		t.Errorf("Serve: %v", err)
	}
}

// counter is a Sink that counts and wakes.
type counter struct {
	answered, lost atomic.Int64
	done           chan struct{}
}

func (c *counter) Answered(uint64, probe.Answer, time.Time) {
	c.answered.Add(1)
	c.done <- struct{}{}
}

func (c *counter) Lost(uint64, time.Time) {
	c.lost.Add(1)
	c.done <- struct{}{}
}

// overLoopback connects a client to a responder through the kernel.
func overLoopback(t testing.TB) (send func() bool, sink *counter) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	client, err := probe.NewClient(probe.Config{Dial: func(ctx context.Context, agent netip.AddrPort) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "tcp", agent.String())
	}})
	if err != nil {
		t.Fatal(err)
	}
	background(t, func(ctx context.Context) error { return respond(ctx, l) })
	background(t, client.Run)
	sink = &counter{done: make(chan struct{}, 2048)}
	to := l.Addr().(*net.TCPAddr).AddrPort()
	send = func() bool { return client.Probe(to, probe.Request{Endpoint: cart}, 5*time.Second, sink, 1) }
	for !send() {
		runtime.Gosched() // until Run runs
	}
	<-sink.done
	return send, sink
}

func TestOverLoopback(t *testing.T) {
	send, sink := overLoopback(t)
	for range 100 {
		sent := 0
		for range 100 {
			if send() {
				sent++
			}
		}
		for range sent {
			<-sink.done
		}
	}
	if a, l := sink.answered.Load(), sink.lost.Load(); a != 10001 || l > 0 {
		t.Errorf("%d answered, %d lost", a, l)
	}
}

func TestAllocations(t *testing.T) {
	send, sink := overLoopback(t)
	if n := testing.AllocsPerRun(1000, func() { send(); <-sink.done }); n != 0 {
		t.Errorf("%v allocations a probe, on both sides together", n)
	}
}

func BenchmarkRoundTrip(b *testing.B) {
	send, sink := overLoopback(b)
	b.ReportAllocs()
	for b.Loop() {
		send()
		<-sink.done
	}
}

// BenchmarkBurst sends 50 probes at once; an operation is one of them.
func BenchmarkBurst(b *testing.B) {
	send, sink := overLoopback(b)
	b.ReportAllocs()
	n := 0
	for b.Loop() {
		send()
		if n++; n == 50 {
			for ; n > 0; n-- {
				<-sink.done
			}
		}
	}
}
