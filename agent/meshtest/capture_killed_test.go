//go:build linux

package meshtest_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/agent/meshtest"
)

// TestCaptureKilled kills an agent again and again under the eyes of applications, on its node and in a pod. Those that call
// real addresses go on as if there had never been a mesh; those that call virtual ones are refused at once; nobody hangs. An
// application that tries again misses the service no longer than there is no agent.
func TestCaptureKilled(t *testing.T) {
	t.Run("IPv4", func(t *testing.T) { testKilled(t, false, 20) })
	t.Run("IPv6", func(t *testing.T) { testKilled(t, true, 4) })
}

func testKilled(t *testing.T, ipv6 bool, kills int) {
	m := capturable(t, meshtest.Config{Nodes: []string{"a", "b"}, Open: true, IPv6: ipv6})
	a, b := m.Node("a"), m.Node("b")
	pod := b.Pod("pod", netip.MustParsePrefix("10.244.1.2/24"), netip.MustParsePrefix("fd01:1::2/64"))
	route := "10.244.1.0/24"
	if ipv6 {
		route = "fd01:1::/64"
	}
	a.IP("route", "add", route, "via", b.Addr.String())
	agents := map[string]*meshtest.Agent{"a": m.StartAgent(a), "b": m.StartAgent(b, "--capture")}
	m.AwaitAll(agents["a"])
	agents["a"].MustMeshctl("policy", "set", meshtest.Service, "--capture-real", "--balancer", "round_robin")
	meshtest.Eventually(t, patience, "real addresses are captured", func() bool {
		return captures(t, agents["b"], "real4")+captures(t, agents["b"], "real6") == len(m.Replicas)
	})
	virtual4, virtual6 := virtual(t, agents["b"])
	called := replicasOf(m, "a")[0]
	nameless := startNameless(t, m.Outside("outside"))
	apps := []*application{
		{what: "a name", from: b, host: "web.mesh", resolver: nameless},
		{what: "virtual IPv4", from: b, host: virtual4},
		{what: "virtual IPv6", from: b, host: "[" + virtual6 + "]"},
		{what: "virtual IPv4 from a pod", from: pod, host: virtual4},
		{what: "virtual IPv6 from a pod", from: pod, host: "[" + virtual6 + "]"},
		{what: "a real address", from: b, host: called.Address.String(), plain: called.String()},
		{what: "a real address from a pod", from: pod, host: called.Address.String(), plain: called.String()},
	}
	for _, app := range apps[:len(apps):len(apps)] {
		apps = append(apps, &application{
			what: app.what + ", lasting connection", lasting: true,
			from: app.from, host: app.host, plain: app.plain, resolver: app.resolver,
		})
	}
	stop := callAll(t, apps)
	deaths := make([]death, kills)
	for i := range deaths {
		served := served(apps)
		meshtest.Eventually(t, patience, "all applications are served", func() bool { return served() })
		deaths[i].killed = time.Now()
		agents["b"].Kill()
		deaths[i].gone = time.Now()
		<-time.After(time.Second / 2) // of calls that there is no agent for
		deaths[i].restarted = time.Now()
		agents["b"] = m.StartAgent(b, "--capture")
		agents["b"].AwaitLog("connections are captured")
		deaths[i].captures, _ = agents["b"].LoggedSince(deaths[i].restarted, "connections are captured")
	}
	after := served(apps)
	meshtest.Eventually(t, patience, "all applications are served", func() bool { return after() })
	stop()
	for _, app := range apps {
		app.judge(t, deaths)
	}
	dying, starting := time.Duration(0), time.Duration(0)
	for _, d := range deaths {
		dying, starting = max(dying, d.gone.Sub(d.killed)), max(starting, d.captures.Sub(d.restarted))
	}
	t.Logf("at most, an agent was gone %v after it was killed, and captured %v after it was started", rounded(dying), rounded(starting))
}

func rounded(d time.Duration) time.Duration { return d.Round(time.Millisecond) }

// death is one of the agent.
type death struct{ killed, gone, restarted, captures time.Time }

// tell places a call among what happened.
func (d death) tell(c call) string {
	at := func(t time.Time) time.Duration { return t.Sub(d.gone) }
	return fmt.Sprintf("a call from %v to %v after the agent was gone, which was killed at %v, started again at %v, and captured from %v: %q, %v",
		at(c.began), at(c.ended), at(d.killed), at(d.restarted), at(d.captures), c.replica, c.err)
}

// application makes one call after the other, whatever comes of each.
type application struct {
	what     string
	from     *meshtest.Node
	host     string
	plain    string // the replica that answers without an agent; none: nobody does
	lasting  bool   // keeps its connection
	resolver string // is asked for names

	mu    sync.Mutex
	calls []call // guarded by mu
}

// call is one request, and what came of it.
type call struct {
	began, ended time.Time
	replica      string
	err          error
}

// callAll has all applications call until stop is called.
func callAll(t *testing.T, apps []*application) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	var calling sync.WaitGroup
	for _, app := range apps {
		calling.Go(func() { app.call(ctx) })
	}
	stop = func() {
		cancel()
		calling.Wait()
	}
	t.Cleanup(stop)
	return stop
}

// patienceWithDNS is when an application asks again; resolv.conf says it to most, and five seconds if it says nothing.
const patienceWithDNS = time.Second

func (a *application) call(ctx context.Context) {
	dial := a.from.DialContext
	if a.resolver != "" {
		connect := byName(a.from, resolverAt(a.from, a.resolver), "ip4") // Go has lookups of one resolver share their fate
		dial = func(ctx context.Context, network, address string) (net.Conn, error) {
			ctx, cancel := context.WithTimeout(ctx, patienceWithDNS)
			defer cancel()
			return connect(ctx, network, address)
		}
	}
	transport := &http.Transport{DialContext: dial, DisableKeepAlives: !a.lasting}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport, Timeout: 10 * time.Second}
	pause := time.NewTicker(15 * time.Millisecond)
	defer pause.Stop()
	for ctx.Err() == nil {
		c := call{began: time.Now()}
		c.replica, c.err = ask(client, "http://"+a.host+"/?take=1ms")
		c.ended = time.Now()
		a.mu.Lock()
		a.calls = append(a.calls, c)
		a.mu.Unlock()
		<-pause.C
	}
}

func ask(client *http.Client, url string) (replica string, err error) {
	answer, err := client.Get(url)
	if err != nil {
		return "", err
	}
	defer answer.Body.Close()
	if _, err := io.ReadAll(answer.Body); err != nil {
		return "", err
	}
	if answer.StatusCode != http.StatusOK {
		return "", errors.New(answer.Status)
	}
	return answer.Header.Get("X-Replica"), nil
}

// served returns what reports whether all applications have had answers since.
func served(apps []*application) func() bool {
	since := time.Now()
	return func() bool {
		for _, app := range apps {
			if !app.servedSince(since) {
				return false
			}
		}
		return true
	}
}

func (a *application) servedSince(since time.Time) bool {
	const enough = 10
	a.mu.Lock()
	defer a.mu.Unlock()
	n := len(a.calls)
	if n < enough || a.calls[n-enough].began.Before(since) {
		return false
	}
	for _, c := range a.calls[n-enough:] {
		if c.err != nil {
			return false
		}
	}
	return true
}

// harm is what became of an application's calls when the agent died, and when it came back, at worst.
type harm struct {
	inFlight time.Duration // until calls had ended that began before the agent was gone
	slowest  time.Duration // call while there was no agent
	away     time.Duration // without an answer, though there was somebody to answer
	strays   []string      // calls that should have had another outcome: the kernel still took them for those of before
	calls    int
}

func (a *application) judge(t *testing.T, deaths []death) {
	t.Helper()
	var h harm
	for i, d := range deaths {
		until := time.Now()
		if i+1 < len(deaths) {
			until = deaths[i+1].killed
		}
		a.suffer(&h, d, until)
	}
	t.Logf("%s: calls in flight ended within %v, others within %v while there was no agent; %v without an answer though there was somebody to answer; %d of %d calls went astray",
		a.what, rounded(h.inFlight), rounded(h.slowest), rounded(h.away), len(h.strays), h.calls)
	for _, stray := range h.strays {
		t.Logf("%s: %s", a.what, stray)
	}
	soon := time.Second // five are promised
	if a.resolver != "" {
		soon += patienceWithDNS // nobody tells it that a query is lost
	}
	if h.inFlight > soon || h.slowest > soon || h.away > soon {
		t.Errorf("%s: want that within %v", a.what, soon)
	}
	if len(h.strays) > h.calls/100 {
		t.Errorf("%s: want less than one call of a hundred to go astray", a.what)
	}
}

// suffer takes in what became of the calls from one death until the next.
func (a *application) suffer(h *harm, d death, until time.Time) {
	answered := d.captures // when there was somebody to answer, and did
	if a.plain != "" {
		answered = d.gone
	}
	back := false
	for _, c := range a.calls {
		if c.ended.Before(d.killed) || c.ended.After(until) {
			continue
		}
		h.calls++
		switch {
		case c.began.Before(d.gone):
			h.inFlight = max(h.inFlight, c.ended.Sub(d.killed))
			answered = later(answered, c.ended)
		case c.ended.Before(d.captures):
			h.slowest = max(h.slowest, c.ended.Sub(c.began))
			if c.ended.Before(d.restarted) && !a.asPlain(c) {
				h.strays = append(h.strays, d.tell(c))
			}
		case c.err != nil && back:
			h.strays = append(h.strays, d.tell(c))
		}
		if c.err == nil && c.ended.After(answered) {
			back = back || c.began.After(d.captures)
			h.away = max(h.away, c.ended.Sub(answered))
			answered = c.ended
		}
	}
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// asPlain reports whether a call had the outcome that it has without an agent.
func (a *application) asPlain(c call) bool {
	_, unknown := errors.AsType[*net.DNSError](c.err)
	switch {
	case a.plain != "":
		return c.err == nil && c.replica == a.plain
	case a.resolver != "" && unknown:
		return strings.Contains(c.err.Error(), "no such host")
	}
	return errors.Is(c.err, syscall.ECONNREFUSED)
}

// startNameless starts a DNS server that says of each name that there is no such name.
func startNameless(t *testing.T, server *meshtest.Node) (address string) {
	t.Helper()
	var l net.PacketConn
	err := server.Do(func() (err error) {
		l, err = net.ListenPacket("udp", net.JoinHostPort(server.Addr.String(), "53"))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	serving.Go(func() {
		for query := make([]byte, 4096); ; {
			n, from, err := l.ReadFrom(query)
			if err != nil {
				return
			}
			const response, noSuchName = 0x80, 3
			query[2] |= response
			query[3] = query[3]&0xf0 | noSuchName
			_, _ = l.WriteTo(query[:n], from)
		}
	})
	t.Cleanup(func() {
		l.Close()
		serving.Wait()
	})
	return l.LocalAddr().String()
}
