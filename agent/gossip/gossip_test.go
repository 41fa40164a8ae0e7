package gossip

import (
	"bytes"
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"pgregory.net/rapid"

	"github.com/headroom-mesh/headroom/registry"
)

// buffer is a log that is written and read at the same time.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func (b *buffer) count(s string) int { return strings.Count(b.String(), s) }

// agent is a Gossip that runs, and what it logs.
type agent struct {
	*Gossip
	log  *buffer
	stop func()
}

func start(t *testing.T, n *network, cfg Config) agent {
	t.Helper()
	log := &buffer{}
	cfg.Log = slog.New(slog.NewTextHandler(io.MultiWriter(log, t.Output()), nil)).With("of", string(cfg.Node))
	g, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if n != nil {
		n.attach(g)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := g.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	stop := sync.OnceFunc(func() { cancel(); wg.Wait() })
	t.Cleanup(stop)
	return agent{g, log, stop}
}

// inBubble runs a test in virtual time, and lets the library's goroutines end before it returns.
func inBubble(t *testing.T, f func(t *testing.T, n *network)) {
	synctest.Test(t, func(t *testing.T) {
		t.Cleanup(func() { time.Sleep(time.Minute) })
		f(t, newNetwork())
	})
}

func at(i int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), DefaultPort)
}

func member(i int, seeds ...int) Config {
	c := Config{
		Node: registry.NodeName(fmt.Sprintf("n%d", i)), Zone: "z", Version: "v1",
		Bind: at(i), Mesh: netip.AddrPortFrom(at(i).Addr(), 15001),
	}
	for _, s := range seeds {
		c.Join = append(c.Join, at(s).String())
	}
	return c
}

// view renders what g knows: "n1:alive n2:dead".
func view(g agent) string {
	var words []string
	for _, m := range g.Members() {
		words = append(words, string(m.Node)+":"+m.State.String())
	}
	return strings.Join(words, " ")
}

// eventually waits until the view of g is want.
func eventually(t *testing.T, within time.Duration, g agent, want string) {
	t.Helper()
	deadline := time.After(within)
	for {
		changed := g.Changed()
		if view(g) == want {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			t.Fatalf("%s sees %q after %v, want %q", g.cfg.Node, view(g), within, want)
		}
	}
}

// logs waits until g has logged text.
func logs(t *testing.T, within time.Duration, g agent, text string) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(within)
	for g.log.count(text) == 0 {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("%s has not logged %q after %v", g.cfg.Node, text, within)
		}
	}
}

func TestJoinBySeveralSeedsOfWhichOneIsDead(t *testing.T) {
	inBubble(t, func(t *testing.T, n *network) {
		a := start(t, n, member(1, 1, 9, 2))
		b := start(t, n, member(2, 9, 1))
		eventually(t, 15*time.Second, a, "n1:alive n2:alive")
		eventually(t, 15*time.Second, b, "n1:alive n2:alive")
		m := b.Members()[0]
		if m.Zone != "z" || m.Version != "v1" || m.Gossip != at(1) || m.Mesh.String() != "10.0.0.1:15001" {
			t.Errorf("member %+v", m)
		}
	})
}

func TestLonelyAgentWarnsOnceAndKeepsTrying(t *testing.T) {
	inBubble(t, func(t *testing.T, n *network) {
		a := start(t, n, member(1, 2))
		time.Sleep(5 * time.Minute)
		if got := a.log.count("no seed answers"); got != 1 {
			t.Errorf("%d warnings, want 1", got)
		}
		start(t, n, member(2))
		eventually(t, 20*time.Second, a, "n1:alive n2:alive")
	})
}

func TestFirstAgentHasNobodyToMeet(t *testing.T) {
	inBubble(t, func(t *testing.T, n *network) {
		a, b := start(t, n, member(1)), start(t, n, member(2, 2))
		time.Sleep(5 * time.Minute)
		if lonely := a.log.count("no seed answers") + b.log.count("no seed answers"); lonely > 0 {
			t.Error("an agent without seeds, or with itself as seed, complains that none answers")
		}
	})
}

func TestLeaveIsToldFromDeath(t *testing.T) {
	inBubble(t, func(t *testing.T, n *network) {
		a, b, c := start(t, n, member(1)), start(t, n, member(2, 1)), start(t, n, member(3, 1))
		eventually(t, 10*time.Second, a, "n1:alive n2:alive n3:alive")
		eventually(t, 10*time.Second, b, "n1:alive n2:alive n3:alive")

		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		if err := b.Leave(ctx); err != nil {
			t.Fatal(err)
		}
		b.stop()
		eventually(t, 3*time.Second, a, "n1:alive n2:left n3:alive")
		c.stop()
		eventually(t, time.Minute, a, "n1:alive n2:left n3:dead")
		if err := b.Leave(ctx); err != nil {
			t.Errorf("Leave after the end: %v", err)
		}
	})
}

func TestTheGoneAreForgottenAfterADay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ms := newMembers("n1", slog.New(slog.DiscardHandler), newMetrics(nil))
		node := func(i int) *memberlist.Node {
			return &memberlist.Node{Name: fmt.Sprintf("n%d", i), Addr: at(i).Addr().AsSlice(), Port: DefaultPort}
		}
		for i := 1; i <= 3; i++ {
			ms.NotifyJoin(node(i))
		}
		ms.NotifyLeave(node(2))
		for _, test := range []struct {
			after time.Duration
			known int
		}{{keepGone, 3}, {time.Second, 2}} {
			time.Sleep(test.after)
			ms.NotifyUpdate(node(1))
			if got := ms.all(); len(got) != test.known {
				t.Errorf("known: %v, want %d", got, test.known)
			}
		}
	})
}

func TestRestartAtTheSameAddress(t *testing.T) {
	inBubble(t, func(t *testing.T, n *network) {
		a := start(t, n, member(1))
		b := start(t, n, member(2, 1))
		eventually(t, 10*time.Second, a, "n1:alive n2:alive")
		b.stop()
		again := member(2, 1)
		again.Version = "v2"
		start(t, n, again)
		for a.Members()[1].Version != "v2" {
			<-a.Changed()
		}
		if got := a.log.count("counts as dead"); got != 0 {
			t.Error("an upgrade was taken for a death")
		}
	})
}

// TestRestartAtANewAddress starts an agent again before the others have noticed that it was away, while they suspect it,
// and when it counts as dead.
func TestRestartAtANewAddress(t *testing.T) {
	for _, away := range []time.Duration{0, 2 * time.Second, 3 * time.Second, 5 * time.Second, 8 * time.Second, 20 * time.Second} {
		t.Run(away.String(), func(t *testing.T) {
			inBubble(t, func(t *testing.T, n *network) {
				a, b, c := start(t, n, member(1)), start(t, n, member(2, 1)), start(t, n, member(3, 1))
				eventually(t, 10*time.Second, a, "n1:alive n2:alive n3:alive")
				c.stop()
				time.Sleep(away)
				moved := member(3, 1)
				moved.Bind = at(33)
				d := start(t, n, moved)
				wantMoved(t, a, b)
				if got := d.log.count("another live agent"); got != 0 {
					t.Error("took its own past for another agent")
				}
			})
		})
	}
}

// wantMoved wants these agents to know the third one at its new address soon.
func wantMoved(t *testing.T, agents ...agent) {
	t.Helper()
	begin := time.Now()
	for _, g := range agents {
		for g.Members()[2].Gossip != at(33) || g.Members()[2].State != Alive {
			select {
			case <-g.Changed():
			case <-time.After(time.Minute):
				t.Fatalf("%s still sees %+v", g.cfg.Node, g.Members()[2])
			}
		}
	}
	if took := time.Since(begin); took > 20*time.Second {
		t.Errorf("took %v", took)
	}
}

func TestTwoLiveAgentsOfOneNameBothSaySo(t *testing.T) {
	inBubble(t, func(t *testing.T, n *network) {
		a, b := start(t, n, member(1)), start(t, n, member(2, 1))
		eventually(t, 10*time.Second, a, "n1:alive n2:alive")
		twin := member(2, 1)
		twin.Bind = at(22)
		c := start(t, n, twin)
		for _, g := range []agent{b, c} {
			logs(t, 30*time.Second, g, "another live agent has the name of this one")
		}
		time.Sleep(5 * time.Minute)
		for _, g := range []agent{b, c} {
			if got := g.log.count("another live agent"); got > 6 {
				t.Errorf("%d errors in 5 minutes, want one a minute", got)
			}
		}
		if got := a.Members()[1].Gossip; got != at(2) {
			t.Errorf("n2 is now at %s; the first one should have kept its name", got)
		}
	})
}

func TestPartitionHeals(t *testing.T) {
	for _, length := range []time.Duration{40 * time.Second, 10 * time.Minute, 30 * time.Minute} {
		t.Run(length.String(), func(t *testing.T) {
			inBubble(t, func(t *testing.T, n *network) {
				var all []agent
				for i := 1; i <= 4; i++ {
					all = append(all, start(t, n, member(i, 1)))
				}
				const whole = "n1:alive n2:alive n3:alive n4:alive"
				for _, g := range all {
					eventually(t, 20*time.Second, g, whole)
				}
				right := func(a string) bool { return a == at(3).String() || a == at(4).String() }
				n.partition(func(from, to string) bool { return right(from) != right(to) })
				time.Sleep(length)
				eventually(t, time.Minute, all[0], "n1:alive n2:alive n3:dead n4:dead")
				eventually(t, time.Minute, all[3], "n1:dead n2:dead n3:alive n4:alive")

				n.partition(func(string, string) bool { return false })
				for _, g := range all {
					eventually(t, 30*time.Second, g, whole)
				}
			})
		})
	}
}

func TestLossyNetworkKeepsItsMembers(t *testing.T) {
	inBubble(t, func(t *testing.T, n *network) {
		var count int
		n.partition(func(string, string) bool { count++; return count%5 == 0 })
		var all []agent
		want := ""
		for i := 1; i <= 9; i++ {
			all = append(all, start(t, n, member(i, 1, 2)))
			want = strings.TrimSpace(want + fmt.Sprintf(" n%d:alive", i))
		}
		for _, g := range all {
			eventually(t, 2*time.Minute, g, want)
		}
	})
}

// loopback returns a configuration for real sockets.
func loopback(node string, bind string, seeds ...agent) Config {
	c := Config{Node: registry.NodeName(node), Bind: netip.MustParseAddrPort(bind)}
	for _, s := range seeds {
		for s.Members() == nil {
			<-s.Changed()
		}
		c.Join = append(c.Join, s.Members()[0].Gossip.String())
	}
	return c
}

func TestSockets(t *testing.T) {
	for name, bind := range map[string]string{"IPv4": "127.0.0.1:0", "IPv6": "[::1]:0"} {
		t.Run(name, func(t *testing.T) {
			if ln, err := net.Listen("tcp", bind); err != nil {
				t.Fatal(err)
			} else {
				_ = ln.Close()
			}
			key := bytes.Repeat([]byte{7}, 32)
			first := loopback("a", bind)
			first.Key = key
			a := start(t, nil, first)
			second := loopback("b", bind, a)
			second.Key = key
			b := start(t, nil, second)
			eventually(t, 10*time.Second, a, "a:alive b:alive")
			eventually(t, 10*time.Second, b, "a:alive b:alive")
			begin := time.Now()
			b.stop()
			if took := time.Since(begin); took > 3*time.Second {
				t.Errorf("Run took %v to end", took)
			}
		})
	}
}

func TestWrongKey(t *testing.T) {
	first := loopback("a", "127.0.0.1:0")
	first.Key = bytes.Repeat([]byte{1}, 16)
	a := start(t, nil, first)
	good := loopback("b", "127.0.0.1:0", a)
	good.Key = first.Key
	b := start(t, nil, good)
	for name, key := range map[string][]byte{"other": bytes.Repeat([]byte{2}, 16), "none": nil} {
		t.Run(name, func(t *testing.T) {
			c := loopback("c", "127.0.0.1:0", a)
			c.Key = key
			stranger := start(t, nil, c)
			logs(t, 10*time.Second, stranger, "no seed answers")
			logs(t, 10*time.Second, stranger, "wrong gossip key?")
			logs(t, 10*time.Second, a, "gossip message refused: wrong gossip key?")
			eventually(t, 10*time.Second, stranger, "c:alive")
			eventually(t, 10*time.Second, a, "a:alive b:alive")
			eventually(t, 10*time.Second, b, "a:alive b:alive")
		})
	}
	if got := a.log.count("gossip message refused"); got != 1 {
		t.Errorf("%d warnings about one peer within a minute, want 1", got)
	}
}

func TestPortInUseFailsTheStart(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	g, err := New(loopback("a", ln.Addr().String()))
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Run(t.Context()); err == nil || !strings.Contains(err.Error(), ln.Addr().String()) {
		t.Errorf("error %v, want one that names %s", err, ln.Addr())
	}
}

func TestValidateReportsAllProblems(t *testing.T) {
	err := Config{
		Node:      "a/b",
		Advertise: netip.MustParseAddrPort("0.0.0.0:7946"),
		Key:       make([]byte, 5),
		Join:      []string{"10.0.0.1:7946", "nowhere", "host:99999"},
		Zone:      strings.Repeat("z", 600),
	}.Validate()
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{
		`node "a/b"`, "advertise: 0.0.0.0:7946", "key: 5 bytes", `join[1]: "nowhere"`, `join[2]: "host:99999"`,
		"zone: what is told about this agent takes", "at most 512 fit: shorten zone, which has 600",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error lacks %q:\n%v", want, err)
		}
	}
	if err := (Config{Node: "node-1.example_x"}).Validate(); err != nil {
		t.Errorf("minimal configuration: %v", err)
	}
}

func TestParseKey(t *testing.T) {
	for _, n := range []int{16, 24, 32} {
		key := bytes.Repeat([]byte{9}, n)
		got, err := ParseKey(base64.StdEncoding.EncodeToString(key) + "\n")
		if err != nil || !bytes.Equal(got, key) {
			t.Errorf("%d bytes: %v, %v", n, got, err)
		}
	}
	for in, want := range map[string]string{"": "empty", "no base64!": "not base64", "c2hvcnQ=": "5 bytes: want 16, 24 or 32"} {
		if _, err := ParseKey(in); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want %q", in, err, want)
		}
	}
}

func TestAdvertiseAddressIsTheOnlyOne(t *testing.T) {
	addrs := func(s ...string) (all []netip.Addr) {
		for _, a := range s {
			all = append(all, netip.MustParseAddr(a))
		}
		return all
	}
	for _, test := range []struct {
		bind  string
		local []netip.Addr
		want  string
	}{
		{"0.0.0.0:7946", addrs("127.0.0.1", "::1", "10.1.2.3", "fd00::1", "fe80::1"), "10.1.2.3:7946"},
		{"[::]:7946", addrs("127.0.0.1", "::1", "fd00::1", "fe80::1"), "[fd00::1]:7946"},
		{"0.0.0.0:7946", addrs("127.0.0.1", "10.1.2.3", "172.17.0.1"), ""},
		{"0.0.0.0:7946", addrs("127.0.0.1"), ""},
	} {
		got, err := advertise(netip.MustParseAddrPort(test.bind), test.local)
		if test.want == "" && err == nil || test.want != "" && got.String() != test.want {
			t.Errorf("%s of %v: %s, %v; want %q", test.bind, test.local, got, err, test.want)
		}
	}
}

func TestMetrics(t *testing.T) {
	inBubble(t, func(t *testing.T, n *network) {
		r := prometheus.NewPedanticRegistry()
		c := member(1)
		c.Metrics = r
		a := start(t, n, c)
		start(t, n, member(2, 1))
		eventually(t, 10*time.Second, a, "n1:alive n2:alive")
		if problems, err := testutil.GatherAndLint(r); err != nil || len(problems) > 0 {
			t.Errorf("%v %v", problems, err)
		}
		want := `
# HELP headroom_gossip_members Agents known by gossip, this one included; dead ones and those that left for a day.
# TYPE headroom_gossip_members gauge
headroom_gossip_members{state="alive"} 2
headroom_gossip_members{state="dead"} 0
headroom_gossip_members{state="left"} 0
`
		if err := testutil.GatherAndCompare(r, strings.NewReader(want), "headroom_gossip_members"); err != nil {
			t.Error(err)
		}
	})
}

func TestPauseBetweenRounds(t *testing.T) {
	for _, test := range []struct {
		name  string
		r     round
		alive int
		last  time.Duration
		want  time.Duration
	}{
		{"alone, first", round{dialled: 1}, 1, 0, time.Second},
		{"alone, later", round{dialled: 1}, 1, 4 * time.Second, 8 * time.Second},
		{"alone, long", round{dialled: 1}, 1, 8 * time.Second, 10 * time.Second},
		{"alone, no name resolves", round{err: io.EOF}, 1, 0, time.Second},
		{"alone, nobody to meet", round{}, 1, 0, 10 * time.Second},
		{"a few", round{}, 5, 0, 10 * time.Second},
		{"many", round{dialled: 3, err: io.EOF}, 320, 0, 110 * time.Second},
		{"many, one came back", round{revived: true}, 320, time.Minute, time.Second},
		{"name in dispute", round{contested: true}, 5, 0, time.Second},
	} {
		if got := nextRound(test.r, test.alive, test.last); got != test.want {
			t.Errorf("%s: %v, want %v", test.name, got, test.want)
		}
	}
}

func TestMissingAreDeadMembersAndUnmetSeeds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		self := at(1)
		all := []Member{{Node: "n1", Gossip: self}}
		want := map[netip.AddrPort]bool{}
		alive := map[netip.AddrPort]bool{self: true}
		for i := 2; i < 10; i++ {
			state := rapid.SampledFrom([]State{Alive, Dead, Left}).Draw(t, "state")
			all = append(all, Member{Gossip: at(i), State: state, Since: time.Now()})
			alive[at(i)] = state == Alive
			if state == Dead {
				want[at(i)] = true
			}
		}
		var seeds []netip.AddrPort
		for _, i := range rapid.SliceOf(rapid.IntRange(1, 20)).Draw(t, "seeds") {
			seeds = append(seeds, at(i))
			if !alive[at(i)] {
				want[at(i)] = true
			}
		}
		got := missing(rand.New(rand.NewPCG(1, 1)), all, seeds, self)
		for _, target := range got {
			if !want[target.addr] {
				t.Fatalf("%s is to be met twice, or not at all", target.addr)
			}
			delete(want, target.addr)
		}
		if len(want) > 0 {
			t.Fatalf("not to be met: %v", want)
		}
	})
}

func TestSeedsByName(t *testing.T) {
	got, err := resolve(t.Context(), []string{"localhost:7946", "10.0.0.9:1", "[::ffff:10.0.0.8]:2"})
	if err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprint(got)
	for _, want := range []string{"127.0.0.1:7946", "10.0.0.9:1", "10.0.0.8:2"} {
		if !strings.Contains(text, want) {
			t.Errorf("%s lacks %s", text, want)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	got, err = resolve(ctx, []string{"name.invalid:1", "10.0.0.9:1"})
	if err == nil || !strings.Contains(err.Error(), "look up seed name.invalid:1") || len(got) != 1 {
		t.Errorf("%v, %v: want the other seed and an error", got, err)
	}
}

func FuzzMetadata(f *testing.F) {
	f.Add(encodeMetadata(member(1), false))
	f.Add(encodeMetadata(member(1), true))
	f.Add([]byte{0xff, 0x01})
	f.Fuzz(func(t *testing.T, b []byte) {
		m, leaving, err := decodeMetadata(b)
		if err != nil {
			return
		}
		again, leavingAgain, err := decodeMetadata(encodeMetadata(Config{Zone: m.Zone, Version: m.Version, Mesh: m.Mesh}, leaving))
		if err != nil || again != m || leavingAgain != leaving {
			t.Errorf("%+v became %+v, %v", m, again, err)
		}
	})
}

func TestLibraryLinesGetALevelAndASender(t *testing.T) {
	for _, test := range []struct {
		line  string
		level slog.Level
		text  string
	}{
		{"[DEBUG] memberlist: x\n", slog.LevelDebug, "x"},
		{"[ERR] memberlist: Push/Pull with b failed: EOF", slog.LevelWarn, "Push/Pull with b failed: EOF"},
		{"[WARN] memberlist: Refuting a suspect message (from: b)", slog.LevelDebug, "Refuting a suspect message (from: b)"},
		{"Err: Could not set the deadline", slog.LevelInfo, "Err: Could not set the deadline"},
	} {
		if level, text := parseLine(test.line); level != test.level || text != test.text {
			t.Errorf("%q: %v %q", test.line, level, text)
		}
	}
	for text, want := range map[string]string{
		"failed to receive: x from=10.0.0.1:333": "10.0.0.1", "x from=[::1]:5 y": "::1", "x from=<unknown address>": "<unknown", "x": "",
	} {
		if got := sender(text); got != want {
			t.Errorf("sender of %q is %q, want %q", text, got, want)
		}
	}
}

func TestLimiterIsBounded(t *testing.T) {
	l, now := newLimiter(time.Minute), time.Unix(0, 0)
	passed := 0
	for i := range 1000 {
		if l.allow(fmt.Sprint(i), now) {
			passed++
		}
	}
	if passed != maxLimited {
		t.Errorf("%d passed, want %d", passed, maxLimited)
	}
	if l.allow("5", now.Add(59*time.Second)) || !l.allow("5", now.Add(time.Minute)) {
		t.Error("want one event a minute")
	}
}
