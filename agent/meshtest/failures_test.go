//go:build linux

package meshtest_test

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/agent/meshtest"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
)

const (
	// rate is the load of these tests, in requests a second.
	rate = 300
	// patience is for what must happen soon.
	patience = 20 * time.Second
	// promised is within which time silence is noticed; a busy machine may take half as much again.
	promised = time.Second
	// leaseTTL is the default of the registry.
	leaseTTL = 15 * time.Second
)

// config returns the usual mesh. The tests share the machine, two at a time.
func config(t *testing.T) meshtest.Config {
	t.Helper()
	if testing.Short() {
		t.Skip("runs agents in network namespaces")
	}
	if err := meshtest.Check(); err != nil {
		t.Fatal(err)
	}
	p, err := programs()
	if err != nil {
		t.Fatal(err)
	}
	t.Parallel()
	return meshtest.Config{Programs: p}
}

// wantLostOn fails the test if a request was lost that was not on its way to one of the nodes, named by a letter each, at
// that moment, or that was sent too late.
func wantLostOn(t *testing.T, o *meshtest.Outcome, nodes string, from, until time.Time) {
	t.Helper()
	for _, l := range o.Lost {
		switch {
		case l.Entry.Node() == "" || !strings.Contains(nodes, l.Entry.Node()):
			t.Errorf("lost, though not sent to %s: %s", nodes, l)
		case l.Sent.Add(l.Took).Before(from):
			t.Errorf("lost before anything failed: %s", l)
		case l.Sent.After(until):
			t.Errorf("lost %v after it should have been safe: %s", l.Sent.Sub(until), l)
		default:
			t.Logf("lost, as may be: %s", l)
		}
	}
}

// noticed says how long it took an agent to find out that another one is silent.
func noticed(t *testing.T, a *meshtest.Agent, of *meshtest.Node, since time.Time) time.Duration {
	t.Helper()
	var at time.Time
	meshtest.Eventually(t, 10*time.Second, "the agent logs that another one is silent", func() (found bool) {
		at, found = a.LoggedSince(since, "agent does not answer probes", of.Addr.String())
		return found
	})
	took := at.Sub(since)
	if took > promised*3/2 {
		t.Errorf("agent %s took %v to notice that %s is silent, want %v", a.Node.Name, took, of.Name, promised)
	}
	return took
}

// servedBy waits until requests of a load come to a node, or to a replica, and returns how long that took.
func servedBy(t *testing.T, load *meshtest.Load, where string, since time.Time, within time.Duration) time.Duration {
	t.Helper()
	meshtest.Eventually(t, time.Until(since.Add(within)), where+" takes traffic", func() bool {
		return load.Arrived(where, since) > 0
	})
	return time.Since(since)
}

// wantFirstAnswer wants the first answer that an application gets from an agent that is just starting to be a good one:
// until then it may only find the port closed.
func wantFirstAnswer(t *testing.T, a *meshtest.Agent) {
	t.Helper()
	caller := a.Caller()
	var err error
	meshtest.Eventually(t, patience, "the agent takes connections", func() bool {
		_, err = caller.Get(t.Context(), "http://web.mesh/")
		return !errors.Is(err, syscall.ECONNREFUSED)
	})
	if err != nil {
		t.Errorf("first answer of an agent that starts: %v", err)
	}
}

// TestKilledAgent kills an agent under load, and starts it again at another address.
func TestKilledAgent(t *testing.T) {
	m, agents := meshtest.Start(t, config(t))
	load := agents["a"].Load(rate)
	load.More(2 * rate)

	killed := time.Now()
	agents["c"].Kill()
	gone := time.Now()
	took := noticed(t, agents["a"], m.Node("c"), killed)
	load.More(2 * rate)
	if n := load.Arrived("c", gone.Add(50*time.Millisecond)); n > 0 {
		t.Errorf("%d requests reached replicas without an agent", n)
	}

	changes := etcdClient(t, m).Watch(t.Context(), endpointKeys, clientv3.WithPrefix(), clientv3.WithFilterPut(), clientv3.WithCreatedNotify())
	<-changes // from now on
	restarted := time.Now()
	m.Move(m.Node("c"))
	agents["c"] = m.StartAgent(m.Node("c"))
	wantFirstAnswer(t, agents["c"])
	back := servedBy(t, load, "c", restarted, 15*time.Second)
	m.AwaitAll(agents["a"])
	load.More(rate)
	select {
	case change := <-changes:
		t.Errorf("an agent that restarts has withdrawn %s", change.Events[0].Kv.Key)
	default:
	}
	o := load.Stop()
	wantLostOn(t, o, "c", killed, gone.Add(50*time.Millisecond))
	t.Logf("%s; noticed %v after the kill; traffic again %v after the restart", o, took, back)
}

// TestFailingReplicas has one replica say that it is not well, and kills another one.
func TestFailingReplicas(t *testing.T) {
	m, agents := meshtest.Start(t, config(t))
	load := agents["a"].Load(rate)
	load.More(rate)
	sick, victim := m.Replicas[len(m.Replicas)-1], m.Replicas[len(m.Replicas)-2] // both on c

	sick.SetHealthy(false)
	out := meshtest.Eventually(t, patience, "the sick one is left out", func() bool { return len(agents["a"].Usable()) == 8 })
	since := time.Now()
	load.More(rate)
	if n := load.Arrived(sick.String(), since.Add(50*time.Millisecond)); n > 0 {
		t.Errorf("%d requests came to a replica that is not healthy", n)
	}
	since = time.Now()
	sick.SetHealthy(true)
	back := servedBy(t, load, sick.String(), since, patience)
	t.Logf("a sick replica is out after %v, and in again after %v", out, back)

	killed := time.Now()
	victim.Kill()
	load.More(2 * rate)
	o := load.Stop()
	wantLostOn(t, o, "c", killed, time.Now())
	for _, l := range o.Lost {
		if l.Tries != 1 || !strings.HasSuffix(l.Endpoint, victim.Address.String()) || l.Sent.After(killed.Add(50*time.Millisecond)) {
			t.Errorf("lost, though not at the replica when it was killed: %s", l)
		}
	}
	t.Log(o)
}

// TestDrain ends agents as an operator does: nobody notices, not even who waits for a long answer.
func TestDrain(t *testing.T) {
	m, agents := meshtest.Start(t, config(t))
	agents["a"].MustMeshctl("policy", "set", "web", "--balancer", "round_robin", "--wait") // some must be on c
	loads := []*meshtest.Load{agents["a"].Load(rate / 2), agents["b"].Load(rate / 2)}
	loads[0].More(rate / 2)
	long := agents["a"].Caller().GetAll(30, "http://web.mesh/?take=3500ms")
	loads[0].More(rate / 10)

	signalled := time.Now()
	agents["c"].Signal(syscall.SIGTERM)
	meshtest.Eventually(t, patience, "c is out of the registry", func() bool { return agents["a"].Registered("c") == 0 })
	// What changes while the last requests are answered must not bring the node back into the registry.
	m.WriteService(m.Node("c"), "late.yaml", "apiVersion: headroom.dev/v1\nkind: LocalService\nmetadata: {name: late}\n"+
		"spec:\n  endpoints:\n  - address: 127.0.0.1:9\n")
	agents["c"].AwaitLog("replica on this node", "service=late")
	if code := agents["c"].Wait(patience); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	took := time.Since(signalled)
	if b, c := agents["a"].Registered("b"), agents["a"].Registered("c"); b != 3 || c != 0 {
		t.Errorf("%d replicas of b and %d of c are registered, want 3 and 0", b, c)
	}
	onC := 0
	for _, answer := range long() {
		if answer.Err != nil {
			t.Errorf("a long request was cut off: %v", answer.Err)
		}
		if strings.HasPrefix(answer.Replica, "c/") {
			onC++
		}
	}
	if onC == 0 {
		t.Error("no long request was on c: the test shows nothing")
	}
	loads[0].More(rate / 2)
	for _, l := range loads {
		o := l.Stop()
		o.WantNoLoss(t)
		t.Log(o)
	}
	t.Logf("the agent ended %v after the signal, with %d long requests to finish", took, onC)
	meshtest.Eventually(t, patience, "the others have been told", func() bool { return len(agents["a"].Alive()) == 2 })
	if n := len(agents["a"].Logged("counts as dead")); n > 0 {
		t.Error("an agent that took its leave counts as dead")
	}
}

// TestSecondSignal ends an agent that waits for a request.
func TestSecondSignal(t *testing.T) {
	cfg := config(t)
	cfg.Nodes = []string{"a"}
	m, agents := meshtest.Start(t, cfg)
	long := agents["a"].Caller().GetAll(1, "http://web.mesh/?take=1m")
	m.AwaitInFlight(1)
	agents["a"].Signal(syscall.SIGTERM)
	agents["a"].AwaitLog("draining")
	began := time.Now()
	agents["a"].Signal(syscall.SIGTERM)
	if code := agents["a"].Wait(patience); code == 0 {
		t.Error("exit code 0 though a request was cut off")
	}
	if took := time.Since(began); took > time.Second {
		t.Errorf("ended %v after the second signal", took)
	}
	if answers := long(); answers[0].Err == nil {
		t.Error("the request was answered")
	}
}

// TestEtcdStopsAndReturns has etcd away for longer than the leases last, and restarts an agent meanwhile. Then etcd comes
// back, once with its data and once without.
func TestEtcdStopsAndReturns(t *testing.T) {
	cfg := config(t)
	cfg.EtcdApart = true
	m, agents := meshtest.Start(t, cfg)
	load := agents["a"].Load(rate / 2)
	agents["a"].MustMeshctl("policy", "set", "web", "--timeout", "3s", "--wait")

	m.Etcd.Signal(syscall.SIGTERM)
	if code := m.Etcd.Wait(patience); code != 0 {
		t.Fatalf("etcd: exit code %d", code)
	}
	away := time.Now()
	began := time.Now()
	_, stderr, code := agents["a"].Meshctl("policy", "set", "web", "--timeout", "2s")
	if code != 1 || !strings.Contains(stderr, "the registry is unreachable") || !strings.Contains(stderr, "is not confirmed") {
		t.Errorf("policy set without etcd: exit code %d, %q; want 1 and what to do", code, stderr)
	}
	t.Logf("policy set failed after %v: %s", time.Since(began), strings.TrimSpace(stderr))

	agents["b"].Signal(syscall.SIGTERM)
	agents["b"].Wait(patience)
	restarted := time.Now()
	agents["b"] = m.StartAgent(m.Node("b"))
	wantFirstAnswer(t, agents["b"])
	back := servedBy(t, load, "b", restarted, 10*time.Second)
	t.Logf("without etcd, b takes traffic again %v after its restart", back)
	agents["b"].AwaitLog("registry is away")
	for _, name := range []string{"a", "b"} {
		status, text := agents[name].Page("/readyz")
		if status != http.StatusOK || !strings.Contains(text, "[+]registry ok (not connected: serving the last snapshot)\n") {
			t.Errorf("/readyz of %s without etcd: %d %s", name, status, text)
		}
	}

	meshtest.Eventually(t, patience, "leases have run out", func() bool { return time.Since(away) > leaseTTL+2*time.Second })
	m.StartEtcd()
	took := awaitRegistered(t, m, agents["a"])
	wantApplied(t, agents["a"], "3/3", "--timeout", "2500ms")
	t.Logf("etcd was away for %v; registrations are back %v after it", time.Since(away), took)

	m.Etcd.Kill()
	m.LoseEtcd()
	m.StartEtcd()
	took = awaitRegistered(t, m, agents["a"])
	wantApplied(t, agents["a"], "3/3", "--timeout", "2600ms")
	t.Logf("registrations are back %v after etcd lost its data", took)
	o := load.Stop()
	o.WantNoLoss(t)
	t.Log(o)
}

// etcdClient reads what agents have written, without their help.
func etcdClient(t *testing.T, m *meshtest.Mesh) *clientv3.Client {
	t.Helper()
	client, err := clientv3.New(clientv3.Config{
		Endpoints: []string{"http://" + netip.AddrPortFrom(m.EtcdNode.Addr, 2379).String()},
		Logger:    zap.NewNop(),
		DialOptions: []grpc.DialOption{grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
			return m.EtcdNode.DialContext(ctx, "tcp", addr)
		})},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	return client
}

const endpointKeys = "/headroom/v1/endpoints/"

// awaitRegistered waits until etcd itself holds all replicas and an agent is connected to it, and returns how long that
// took.
func awaitRegistered(t *testing.T, m *meshtest.Mesh, a *meshtest.Agent) time.Duration {
	t.Helper()
	client := etcdClient(t, m)
	return meshtest.Eventually(t, patience, "all replicas are in etcd", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		found, err := client.Get(ctx, endpointKeys, clientv3.WithPrefix(), clientv3.WithCountOnly())
		return err == nil && found.Count == int64(len(m.Replicas)) && a.Connected()
	})
}

// wantApplied sets a policy and wants so many agents to say that they have it.
func wantApplied(t *testing.T, a *meshtest.Agent, agents string, flags ...string) {
	t.Helper()
	out := a.MustMeshctl(append([]string{"policy", "set", "web", "--wait"}, flags...)...)
	if !strings.Contains(strings.ToLower(out), "applied on "+agents+" agents") {
		t.Errorf("policy set: %q, want it applied on %s agents", out, agents)
	}
}

// TestPartition cuts a node off, for longer than its lease lasts, while requests are made on both sides.
func TestPartition(t *testing.T) {
	cfg := config(t)
	cfg.EtcdApart = true
	m, agents := meshtest.Start(t, cfg)
	c := m.Node("c")
	outside, inside := agents["a"].Load(rate/2), agents["c"].Load(rate/3)
	outside.More(rate / 2)

	cut := time.Now()
	c.Cut()
	took := noticed(t, agents["a"], c, cut)
	tookInside := max(noticed(t, agents["c"], m.Node("a"), cut), noticed(t, agents["c"], m.Node("b"), cut))
	meshtest.Eventually(t, time.Minute, "others hold c for dead", func() bool { return len(agents["a"].Alive()) == 2 })
	t.Logf("a noticed after %v, c after %v; c counts as dead after %v", took, tookInside, time.Since(cut))
	meshtest.Eventually(t, time.Minute, "the registry drops c", func() bool { return agents["a"].Registered("c") == 0 })
	t.Logf("c is out of the registry after %v", time.Since(cut))

	healed := time.Now()
	c.Heal()
	back := servedBy(t, outside, "c", healed, 30*time.Second)
	m.AwaitAll(agents["a"])
	t.Logf("c takes traffic again %v after the partition; all is as before after %v", back, time.Since(healed))
	outside.More(rate / 2)
	for _, side := range []struct {
		load    *meshtest.Load
		nodes   string
		noticed time.Duration
	}{{outside, "c", took}, {inside, "ab", tookInside}} {
		o := side.load.Stop()
		wantLostOn(t, o, side.nodes, cut, cut.Add(side.noticed+50*time.Millisecond))
		t.Logf("towards %s: %s", side.nodes, o)
	}
}

// TestSilentAgent freezes an agent: its kernel takes connections, and nothing answers.
func TestSilentAgent(t *testing.T) {
	m, agents := meshtest.Start(t, config(t))
	load := agents["a"].Load(rate)
	load.More(rate)

	frozen := time.Now()
	agents["c"].Signal(syscall.SIGSTOP)
	took := noticed(t, agents["a"], m.Node("c"), frozen)
	load.More(6 * rate)

	thawed := time.Now()
	agents["c"].Signal(syscall.SIGCONT)
	back := servedBy(t, load, "c", thawed.Add(50*time.Millisecond), 30*time.Second)
	load.More(rate)
	o := load.Stop()
	wantLostOn(t, o, "c", frozen, frozen.Add(took+50*time.Millisecond))
	t.Logf("%s; noticed after %v; traffic again after %v", o, took, back)
}
