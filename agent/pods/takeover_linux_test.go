package pods_test

import (
	"context"
	"errors"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/headroom-mesh/headroom/agent/capture"
	"github.com/headroom-mesh/headroom/agent/nettest"
	"github.com/headroom-mesh/headroom/agent/pods"
	"github.com/headroom-mesh/headroom/dataplane/identity"
	"github.com/headroom-mesh/headroom/dataplane/sockets"
)

const (
	virtual = "240.64.0.7:80"
	lasting = "10.96.0.10:81" // connections to which agents keep
)

// agent is one of several that follow each other.
type agent struct {
	name string
	*pods.Pods
	stop func()
}

func startAgent(t *testing.T, n *node, name string) *agent {
	t.Helper()
	cfg := config(n)
	cfg.Capture.TakeOver = true
	a := &agent{name: name, Pods: pods.New(cfg)}
	if err := a.SetReal([]netip.AddrPort{netip.MustParseAddrPort(front), netip.MustParseAddrPort(lasting)}); err != nil {
		t.Fatal(err)
	}
	a.serve(t)
	a.stop = run(t, a.Pods)
	a.Set([]pods.Pod{pod("a")})
	return a
}

// serve says the agent's name on each connection. It keeps those that are to last, and says what it hears.
func (a *agent) serve(t *testing.T) {
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			c, err := a.Listener().Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				defer c.Close()
				to, err := sockets.OriginalDestination(c.(identity.WorkloadConn).Conn)
				if err != nil {
					io.WriteString(c, err.Error())
					return
				}
				io.WriteString(c, a.name)
				if to.String() == lasting {
					io.Copy(c, c)
				}
			})
		}
	})
	t.Cleanup(func() {
		a.Listener().Close()
		serving.Wait()
	})
}

func (a *agent) settle(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := a.Settled(ctx); err != nil {
		t.Fatal(err)
	}
}

// load makes connections, one after the other, to a real address and a virtual one, and notes what comes of them.
type load struct {
	t       *testing.T
	now     atomic.Pointer[phase]
	stop    context.CancelFunc
	dialing sync.WaitGroup
	total   int
}

// phase is a time at which the same is wanted of all connections.
type phase struct {
	mu   sync.Mutex
	made map[string]map[string]int // by where they were to go, and what came of them
}

func startLoad(t *testing.T, s *space) *load {
	l := &load{t: t}
	l.now.Store(&phase{made: map[string]map[string]int{}})
	ctx, stop := context.WithCancel(context.Background())
	l.stop = stop
	for range 2 {
		for _, to := range []string{front, virtual} {
			l.dialing.Go(func() {
				s.Do(func() error {
					for ctx.Err() == nil {
						at := l.now.Load()
						at.note(to, nettest.Outcome(nettest.Dial(to, nil)))
					}
					return nil
				})
			})
		}
	}
	t.Cleanup(l.end)
	return l
}

func (l *load) end() {
	l.stop()
	l.dialing.Wait()
}

func (p *phase) note(to, said string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.made[to] == nil {
		p.made[to] = map[string]int{}
	}
	p.made[to][said]++
}

func (p *phase) whole() bool {
	const enough = 100 // connections to each
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, to := range []string{front, virtual} {
		sum := 0
		for n := range maps.Values(p.made[to]) {
			sum += n
		}
		if sum < enough {
			return false
		}
	}
	return true
}

// during has some connections made while something is done, and after that, and expects all to come to one of the agents. What begins
// later is of the next phase.
func (l *load) during(what string, do func(), agents ...string) {
	l.t.Helper()
	p := l.now.Load()
	do()
	await(l.t, what+": connections are made", p.whole)
	l.now.Store(&phase{made: map[string]map[string]int{}})
	p.mu.Lock()
	defer p.mu.Unlock()
	for to, outcomes := range p.made {
		for said, n := range outcomes {
			l.total += n
			if !slices.Contains(agents, said) {
				l.t.Errorf("%s: %d connections to %s lead to %q, want %q", what, n, to, said, agents)
			}
		}
	}
}

// newPod returns a node, and the network namespace of the one pod that it has.
func newPod(t *testing.T) (*node, *space) {
	n, s := newNode(t), newSpace(t).plain()
	s.Run("ip", "route", "add", "default", "dev", "lo")
	n.process(group("a"), s)
	return n, s
}

// isClean wants nothing to be left by agents.
func (s *space) isClean(t *testing.T) {
	t.Helper()
	if rules := s.Rules(); rules != "" {
		t.Errorf("this is left:\n%s", rules)
	}
}

// TestTakeOver has agents follow each other in a pod that makes connections all the time. None fails, none goes past the agents, and all
// that begin when the next agent has settled are its. Those that are kept go on until their agent ends.
func TestTakeOver(t *testing.T) {
	n, s := newPod(t)
	a := startAgent(t, n, "agent 0")
	a.settle(t)
	l := startLoad(t, s)
	nothing := func() {}
	for _, name := range []string{"agent 1", "agent 2", "agent 3", "agent 4", "agent 5"} {
		kept := s.connect(lasting)
		kept.hears(t, a.name)
		l.during("one agent", nothing, a.name)
		var next *agent
		l.during(name+" begins", func() {
			next = startAgent(t, n, name)
			next.settle(t)
		}, a.name, name)
		l.during(name+" has settled", func() { kept.says(t, "beside") }, name)
		l.during(a.name+" lets go", a.Release, name)
		l.during(a.name+" drains", func() { kept.says(t, "released") }, name)
		if status := a.Status(); len(status) != 1 || status[0].Capture.Owner == 0 || len(status[0].Capture.Rules) == 0 {
			t.Errorf("the status of %s while it drains: %+v", a.name, status)
		}
		l.during(a.name+" ends", a.stop, name)
		kept.Close()
		if rules := s.Rules(); !strings.Contains(rules, "table inet headroom-guard") {
			t.Errorf("there is no guard after %s:\n%s", a.name, rules)
		}
		a = next
	}
	l.end()
	t.Logf("%d connections", l.total)
	a.stop()
	s.isClean(t)
}

// TestTakeOverKilled kills an agent beside its successor, under load: nothing new is lost.
func TestTakeOverKilled(t *testing.T) {
	n, s := newPod(t)
	kill := startProcess(t, config(n))
	await(t, "the first captures", func() bool { return strings.Contains(s.Rules(), "redirect") })
	kept := s.connect(front)
	kept.hears(t, "held")
	next := startAgent(t, n, "next")
	next.settle(t)
	l := startLoad(t, s)
	l.during("both are there", func() {}, "next")
	l.during("one is killed", kill, "next")
	if _, err := kept.Read(make([]byte, 1)); err == nil {
		t.Error("a connection of the one that was killed goes on")
	}
	l.during("one is there", func() {}, "next")
	l.end()
	next.stop()
	s.isClean(t)
}

// TestThird has a third agent come while two are there: it says so, settles, and captures when the first has ended.
func TestThird(t *testing.T) {
	n, s := newPod(t)
	first := startAgent(t, n, "first")
	first.settle(t)
	startAgent(t, n, "second").settle(t)
	third := startAgent(t, n, "third")
	third.settle(t)
	if status := third.Status(); len(status) != 1 || status[0].Err == nil || !strings.Contains(status[0].Err.Error(), "another agent captures") ||
		strings.Contains(status[0].Err.Error(), "another port") {
		t.Errorf("the status of the third: %+v", status)
	}
	s.eventually(front, "second")
	first.stop()
	s.eventually(front, "third")
}

// TestTakenOverBusy has a pod that is no longer wanted keep a connection at the second port.
func TestTakenOverBusy(t *testing.T) {
	n := newNode(t)
	s := newSpace(t)
	n.process(group("a"), s)
	first := startAgent(t, n, "first")
	first.settle(t)
	second := startAgent(t, n, "second")
	second.settle(t)
	first.stop()
	kept := s.connect(lasting)
	kept.hears(t, "second")
	second.Set(nil)
	await(t, "new connections are not captured", func() bool { return !strings.Contains(s.Rules(), "redirect") })
	second.Set(nil)
	kept.says(t, "still there")
	if rules := s.Rules(); !strings.Contains(rules, "table inet headroom-2") {
		t.Errorf("the rules end before the connection does:\n%s", rules)
	}
	kept.Close()
	await(t, "nothing is left", func() bool { return s.Rules() == "" })
}

// TestLastInLine has connections wait to be accepted when their agent ends. It answers them all the same.
func TestLastInLine(t *testing.T) {
	n := newNode(t)
	s := newSpace(t)
	n.process(group("a"), s)
	p := pods.New(config(n))
	p.SetReal([]netip.AddrPort{netip.MustParseAddrPort(front)})
	stop := run(t, p)
	p.Set([]pods.Pod{pod("a")})
	a := &agent{"the last", p, stop}
	a.settle(t)
	var waiting []conn
	for range 20 {
		waiting = append(waiting, s.connect(front))
	}
	startAgent(t, n, "the next").settle(t)
	var ending sync.WaitGroup
	ending.Go(stop)
	await(t, "the agent's rules are gone", func() bool { return strings.Count(s.Rules(), "redirect virtual IPv4") == 1 })
	a.serve(t)
	for _, c := range waiting {
		c.hears(t, "the last")
	}
	ending.Wait()
}

// TestSettled has pods that can be captured, and others that can't.
func TestSettled(t *testing.T) {
	n := newNode(t)
	good, taken := newSpace(t).plain(), newSpace(t)
	l, err := capture.ListenIn(taken.Path, "127.0.0.1:15006")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	n.process(group("good"), good)
	n.process(group("taken"), taken)
	p := pods.New(config(n))
	p.SetReal([]netip.AddrPort{netip.MustParseAddrPort(front)})
	a := &agent{"", p, nil}
	a.settle(t) // nothing is wanted
	p.Set([]pods.Pod{pod("good"), pod("taken"), pod("none")})
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := p.Settled(ended); !errors.Is(err, context.Canceled) {
		t.Errorf("settled without Run: %v", err)
	}
	stop := run(t, p)
	a.settle(t)
	wantSettled(t, p)
	// A pod that comes later, while Run may be about to look for the one that it does not find.
	for range 5 {
		p.Set([]pods.Pod{pod("none")})
		await(t, "the pod is left", func() bool { return good.Rules() == "" })
		p.Set([]pods.Pod{pod("good"), pod("none"), pod("taken")})
		a.settle(t)
		wantSettled(t, p)
	}
	stop()
	p.Set([]pods.Pod{pod("good")})
	a.settle(t) // it never will be
}

func wantSettled(t *testing.T, p *pods.Pods) {
	t.Helper()
	status := p.Status()
	if len(status) != 3 {
		t.Fatalf("status: %+v", status)
	}
	if s := status[0]; s.Err != nil || s.Capture.Owner == 0 {
		t.Errorf("the pod that can be captured is not: %+v", s)
	}
	if s := status[1]; s.Err == nil {
		t.Errorf("a pod without process: %+v", s)
	}
	if s := status[2]; !errors.Is(s.Err, syscall.EADDRINUSE) {
		t.Errorf("a pod in which another program has the port: %v", s.Err)
	}
}
