package capture_test

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/headroom-mesh/headroom/agent/capture"
	"github.com/headroom-mesh/headroom/agent/nettest"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

const (
	front   = "10.96.0.10:80" // a real address, at which a server without a mesh listens in the tests' pods
	virtual = "240.64.0.7:80"
)

// newPod is a network namespace as that of a pod.
func newPod(t *testing.T) *space {
	s := newSpace(t)
	takeOwnPort(t, s.Path)
	s.Run("ip", "address", "add", "10.96.0.10", "dev", "lo")
	s.Run("ip", "route", "add", "default", "dev", "lo")
	s.listen(front, constant("plain"))
	return s
}

// takeOwnPort takes the netlink port that is this process's ID. A socket gets it when it is free, and the kernel removes the
// tables of a port that a socket has given up also if another one has it by then: agents that follow each other are processes
// of their own, with other ports.
func takeOwnPort(t *testing.T, netns string) {
	t.Helper()
	file, err := os.Open(netns)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{NetNS: int(file.Fd())})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
}

func (s *space) podConfig() capture.Config {
	return capture.Config{
		Port: 15006, IPv4: netip.MustParsePrefix("240.64.0.0/12"), IPv6: netip.MustParsePrefix("fd68:6561:6472::/64"),
		Netns: s.Path, Pod: true, TakeOver: true,
	}
}

// generation is an agent of several that follow each other in a pod.
type generation struct {
	*capture.Capture
	end func() // in good order
}

func (s *space) generation(name string) generation {
	s.T.Helper()
	t := s.T.(*testing.T)
	c, err := capture.New(s.podConfig())
	if err != nil {
		t.Fatal(err)
	}
	c.SetReal([]netip.AddrPort{netip.MustParseAddrPort(front)})
	listeners, err := c.Listen()
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	for _, l := range listeners {
		nettest.Serve(t, l, constant(name))
	}
	stop := run(t, c)
	return generation{c, func() {
		for _, l := range listeners {
			l.Close()
		}
		stop()
	}}
}

// leadsTo expects new connections to come to an agent.
func (s *space) leadsTo(when, want string) {
	s.T.Helper()
	for _, to := range []string{front, virtual} {
		if said := s.Dial(to); said != want {
			s.T.Errorf("%s, %s leads to %q, want %q", when, to, said, want)
		}
	}
}

// TestTakeOver has agents follow each other, each beside the one before. The newest decides, whichever table is whose.
func TestTakeOver(t *testing.T) {
	s := newPod(t)
	var before generation
	for i := range 6 {
		name := fmt.Sprint("agent ", i)
		next := s.generation(name)
		s.leadsTo(name+" is there", name)
		if want := uint16(15006 + i%2); next.Port() != want {
			t.Errorf("%s has port %d, want %d", name, next.Port(), want)
		}
		if before.Capture != nil {
			s.wantBoth(before, next)
			if i%2 == 0 {
				before.Release()
				s.leadsTo(name+" is there, the other has let go", name)
			}
			before.end()
			s.leadsTo(name+" is alone", name)
			if rules := s.Rules(); !strings.Contains(rules, "table inet headroom-guard") {
				t.Errorf("%s has no guard:\n%s", name, rules)
			}
		}
		before = next
	}
	before.end()
	if rules := s.Rules(); rules != "" {
		t.Errorf("this is left:\n%s", rules)
	}
	s.leadsToPlain()
}

func (s *space) leadsToPlain() {
	s.T.Helper()
	if said := s.Dial(front); said != "plain" {
		s.T.Errorf("without an agent, %s leads to %q", front, said)
	}
}

// wantBoth expects an agent and its successor to tell of themselves, and the first that the other comes before it.
func (s *space) wantBoth(before, next generation) {
	s.T.Helper()
	one, err := before.Status()
	two, err2 := next.Status()
	if err != nil || err2 != nil || one.Owner == two.Owner {
		s.T.Fatalf("status %+v, %v, and %+v, %v", one, err, two, err2)
	}
	own := func(st capture.Status) string {
		i := slices.IndexFunc(st.Chains, func(c capture.Chain) bool { return c.Table != "inet headroom-guard" })
		return st.Chains[i].Table
	}
	if len(one.Chains) != 3 || len(two.Chains) != 3 || own(one) == own(two) {
		s.T.Errorf("chains %+v and %+v, want a table of its own for each", one.Chains, two.Chains)
	}
	if len(one.Before) != 1 || one.Before[0].Table != own(two) || len(two.Before) != 0 {
		s.T.Errorf("before the first come %+v, before the second %+v", one.Before, two.Before)
	}
	for _, r := range two.Rules {
		if r.What == "redirect virtual IPv4" && r.Packets == 0 {
			s.T.Error("the second agent's rules have not counted what came to it")
		}
	}
}

// TestTakeOverEndsFirst has a successor end before the agent it was to follow, which then captures again.
func TestTakeOverEndsFirst(t *testing.T) {
	s := newPod(t)
	first := s.generation("the first")
	second := s.generation("the second")
	s.leadsTo("both are there", "the second")
	second.end()
	s.leadsTo("the second has ended", "the first")
	if rules := s.Rules(); !strings.Contains(rules, "table inet headroom-guard") {
		t.Errorf("the first has no guard:\n%s", rules)
	}
	first.end()
	if rules := s.Rules(); rules != "" {
		t.Errorf("this is left:\n%s", rules)
	}
}

// TestTakeOverTogether has an agent end just when the next begins: that one is left with its guard.
func TestTakeOverTogether(t *testing.T) {
	s := newPod(t)
	before := s.generation("agent")
	for range 20 {
		var next generation
		var both sync.WaitGroup
		both.Go(func() { before.end() })
		both.Go(func() { next = s.generation("agent") })
		both.Wait()
		if rules := s.Rules(); !strings.Contains(rules, "table inet headroom-guard") {
			t.Fatalf("the next has no guard:\n%s", rules)
		}
		before = next
	}
	s.leadsTo("in the end", "agent")
}

// TestTakeOverBusy expects agents to be told of others that are in the way, and nothing to change.
func TestTakeOverBusy(t *testing.T) {
	s := newPod(t)
	wantBusy := func(what string, takeOver bool) {
		t.Helper()
		before := s.everything()
		cfg := s.podConfig()
		cfg.TakeOver = takeOver
		c, err := capture.New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		listeners, err := c.Listen()
		if err == nil {
			err = startError(t, cfg)
		}
		for _, l := range listeners {
			l.Close()
		}
		if err == nil || !strings.Contains(err.Error(), "another agent captures in this network namespace") {
			t.Errorf("%s: %v", what, err)
		}
		if s.everything() != before {
			t.Errorf("%s: something has changed", what)
		}
	}
	first := s.generation("the first")
	wantBusy("one that is not to take over", false)
	second := s.generation("the second")
	wantBusy("a third", true)
	if _, err := capture.Remove(s.Path); err == nil || !strings.Contains(err.Error(), "another agent captures") {
		t.Errorf("removing what two agents need: %v", err)
	}
	first.end()
	wantBusy("one that is not to take over from a successor", false)
	s.leadsTo("after all that", "the second")
	second.end()
}

// TestTakeOverPort has other programs at the ports of captured connections.
func TestTakeOverPort(t *testing.T) {
	s := newPod(t)
	listen := func() error {
		c, err := capture.New(s.podConfig())
		if err != nil {
			t.Fatal(err)
		}
		listeners, err := c.Listen()
		for _, l := range listeners {
			l.Close()
		}
		return err
	}
	s.listen("127.0.0.1:15007", constant("another program"))
	first := s.generation("the first")
	if err := listen(); err == nil || !strings.Contains(err.Error(), "15007") {
		t.Errorf("another program has the second port: %v", err)
	}
	first.end()
	other, err := capture.ListenIn(s.Path, "127.0.0.1:15006")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if err := listen(); err == nil || !strings.Contains(err.Error(), "15006") {
		t.Errorf("another program has the first port, and there is no agent: %v", err)
	}
}

// TestTakeOverKilled kills an agent beside its successor. Neither table is missed, and both are removed if both die.
func TestTakeOverKilled(t *testing.T) {
	s := newPod(t)
	kill := s.startProcess(s.podConfig())
	kept := s.connect(virtual)
	hear := make([]byte, len("held"))
	if _, err := kept.Read(hear); err != nil {
		t.Fatal(err)
	}
	next := s.generation("the next")
	s.leadsTo("both are there", "the next")
	kill()
	s.leadsTo("one was killed", "the next")
	if _, err := kept.Read(hear); err == nil {
		t.Error("a connection of the one that was killed goes on")
	}
	if err := next.Mend(); err != nil {
		t.Error(err)
	}
	if st, err := next.Status(); err != nil || len(st.Chains) != 3 || len(st.Before) != 0 {
		t.Errorf("status %+v, %v", st, err)
	}
	killNext := s.startProcess(s.podConfig())
	next.end()
	killNext()
	s.leadsToPlain()
	if said := s.Dial(virtual); said != nettest.Refused {
		t.Errorf("a virtual address without an agent leads to %q", said)
	}
	if removed, err := capture.Remove(s.Path); err != nil || !slices.Equal(removed, []string{"table inet headroom-guard"}) {
		t.Errorf("removed %q, %v", removed, err)
	}
}

// TestTakeOverLeftovers expects tables of either name to be replaced that nobody owns.
func TestTakeOverLeftovers(t *testing.T) {
	s := newPod(t)
	for _, name := range []string{"headroom", "headroom-2"} {
		s.nft("table inet "+name+" {", "chain old {", "type nat hook output priority -150",
			`tcp dport 80 counter redirect to :9 comment "headroom v99: redirect"`, "}", "}")
	}
	only := s.generation("the only one")
	s.leadsTo("in place of what was left", "the only one")
	only.end()
	if rules := s.Rules(); rules != "" {
		t.Errorf("this is left:\n%s", rules)
	}
}

// TestTakeOverOwnPorts expects connections to the ports of an agent and its successor not to be captured, though they are named
// as real addresses.
func TestTakeOverOwnPorts(t *testing.T) {
	s := newPod(t)
	real := []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:15006"), netip.MustParseAddrPort("127.0.0.1:15007")}
	for i, name := range []string{"the first", "the second"} {
		if err := s.generation(name).SetReal(real[:i+1]); err != nil {
			t.Fatal(err)
		}
	}
	for i, want := range []string{"the first", "the second"} {
		if said := s.Dial(real[i].String()); said != want {
			t.Errorf("%v leads to %q, want %q", real[i], said, want)
		}
	}
}

// TestWaiting expects connections to be counted that nobody has accepted.
func TestWaiting(t *testing.T) {
	s := newSpace(t)
	l, err := capture.ListenIn(s.Path, "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var accepted []net.Conn
	for want := range 3 {
		if got := capture.Waiting(l); got != want {
			t.Errorf("%d connections wait, want %d", got, want)
		}
		accepted = append(accepted, s.connect(l.Addr().String()))
	}
	for range accepted {
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
	}
	if got := capture.Waiting(l); got != 0 {
		t.Errorf("%d connections wait after all were accepted", got)
	}
}
