package pods_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/agent/capture"
	"github.com/headroom-mesh/headroom/agent/nettest"
	"github.com/headroom-mesh/headroom/agent/pods"
	"github.com/headroom-mesh/headroom/dataplane/identity"
	"github.com/headroom-mesh/headroom/dataplane/sockets"
)

const capturePort = 15006

// front is an address of a service, at which a server without a mesh listens in the tests' pods.
const front = "10.96.0.10:80"

// node is a machine, as far as its processes are seen: those of pods have network namespaces of their own.
type node struct {
	t    testing.TB
	proc string
}

func newNode(t testing.TB) *node { return &node{t: t, proc: t.TempDir()} }

// process starts one in a network namespace, and in a control group, as far as the node shows it.
func (n *node) process(group string, in *space) *exec.Cmd {
	n.t.Helper()
	cmd := exec.Command("sleep", "1000")
	if err := in.Do(cmd.Start); err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { n.kill(cmd) })
	n.show(cmd.Process.Pid, group)
	return cmd
}

// show shows a process of this machine as one of the node.
func (n *node) show(id int, group string) {
	n.t.Helper()
	dir, actual := filepath.Join(n.proc, fmt.Sprint(id)), filepath.Join("/proc", fmt.Sprint(id))
	err := os.Mkdir(dir, 0o755)
	for _, file := range []string{"ns", "net", "stat"} {
		err = errors.Join(err, os.Symlink(filepath.Join(actual, file), filepath.Join(dir, file)))
	}
	groups := "12:memory:" + group + "\n0::" + group + "\n"
	err = errors.Join(err, os.WriteFile(filepath.Join(dir, "cgroup"), []byte(groups), 0o644))
	if err != nil {
		n.t.Fatal(err)
	}
}

// kill ends one.
func (n *node) kill(cmd *exec.Cmd) {
	n.t.Helper()
	cmd.Process.Kill()
	cmd.Wait()
	if err := os.RemoveAll(filepath.Join(n.proc, fmt.Sprint(cmd.Process.Pid))); err != nil {
		n.t.Fatal(err)
	}
}

// space is a network namespace, as of a pod. The front is one of its addresses.
type space struct{ *nettest.Space }

func newSpace(t testing.TB) *space {
	t.Helper()
	s := &space{nettest.NewSpace(t)}
	s.Run("ip", "address", "add", strings.TrimSuffix(front, ":80"), "dev", "lo")
	return s
}

// plain has a server listen at the front.
func (s *space) plain() *space {
	s.T.Helper()
	l, err := capture.ListenIn(s.Path, front)
	if err != nil {
		s.T.Fatal(err)
	}
	nettest.Serve(s.T, l, func(net.Conn) string { return "plain" })
	return s
}

// original says where a connection was to go, if it is known whose it is.
func original(c net.Conn) string {
	of, ok := c.(identity.WorkloadConn)
	if want := (identity.Workload{Namespace: "shop", ServiceAccount: "clerk"}); !ok || of.Workload != want {
		return fmt.Sprintf("a connection of %v", of.Workload)
	}
	to, err := sockets.OriginalDestination(of.Conn)
	if err != nil {
		return err.Error()
	}
	return "captured " + to.String()
}

func config(n *node) pods.Config {
	return pods.Config{Capture: captureConfig(), Proc: n.proc, Log: slog.New(slog.NewTextHandler(n.t.Output(), nil))}
}

func captureConfig() capture.Config {
	return capture.Config{
		Port: capturePort, IPv4: netip.MustParsePrefix("240.64.0.0/12"), IPv6: netip.MustParsePrefix("fd68:6561:6472::/64"),
	}
}

func pod(uid string) pods.Pod {
	return pods.Pod{UID: uid, Namespace: "shop", Name: uid, ServiceAccount: "clerk"}
}

// captured returns how many pods are.
func captured(p *pods.Pods) (many int) {
	for _, s := range p.Status() {
		if s.Err == nil && s.Capture.Owner != 0 {
			many++
		}
	}
	return many
}

// start captures until the test ends, or stop is called. Captured connections are told where they were to go.
func start(t testing.TB, cfg pods.Config) (p *pods.Pods, stop func()) {
	t.Helper()
	p = pods.New(cfg)
	if err := p.SetReal([]netip.AddrPort{netip.MustParseAddrPort(front)}); err != nil {
		t.Fatal(err)
	}
	nettest.Serve(t, p.Listener(), original)
	return p, run(t, p)
}

func run(t testing.TB, p *pods.Pods) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("capture of pods ended with %v", err)
		}
	})
	t.Cleanup(stop)
	return stop
}

const patience = 10 * time.Second

// eventually waits until something is said at the other end.
func (s *space) eventually(to, want string) time.Duration {
	s.T.Helper()
	began := time.Now()
	said := ""
	for time.Since(began) < patience {
		if said = s.Dial(to); said == want {
			return time.Since(began)
		}
	}
	s.T.Fatalf("after %v a connection to %s still leads to %q, want %q", patience, to, said, want)
	return 0
}

// await waits until something is so.
func await(t *testing.T, what string, done func() bool) {
	t.Helper()
	for began := time.Now(); !done(); runtime.Gosched() {
		if time.Since(began) > patience {
			t.Fatalf("after %v it is not so: %s", patience, what)
		}
	}
}

// echo has a server at an address say what it hears.
func (s *space) echo(at string) {
	s.T.Helper()
	l, err := capture.ListenIn(s.Path, at)
	if err != nil {
		s.T.Fatal(err)
	}
	echo(s.T, l)
}

func echo(t testing.TB, l net.Listener) {
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				defer c.Close()
				io.Copy(c, c)
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		serving.Wait()
	})
}

// conn is a connection of a pod's.
type conn struct{ net.Conn }

func (s *space) connect(to string) conn {
	s.T.Helper()
	var c conn
	err := s.Do(func() (err error) {
		c.Conn, err = net.DialTimeout("tcp", to, patience)
		return err
	})
	if err != nil {
		s.T.Fatal(err)
	}
	s.T.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(patience))
	return c
}

// says says something, and wants to hear it.
func (c conn) says(t *testing.T, word string) {
	t.Helper()
	if _, err := io.WriteString(c, word); err != nil {
		t.Fatalf("saying %q: %v", word, err)
	}
	c.hears(t, word)
}

func (c conn) hears(t *testing.T, word string) {
	t.Helper()
	heard := make([]byte, len(word))
	if _, err := io.ReadFull(c, heard); err != nil || string(heard) != word {
		t.Fatalf("heard %q, %v, want %q", heard, err, word)
	}
}

func group(uid string) string { return "/kubepods/burstable/pod" + uid + "/0123" }

// TestPods has pods come and go.
func TestPods(t *testing.T) {
	n := newNode(t)
	before, after, out := newSpace(t).plain(), newSpace(t).plain(), newSpace(t).plain()
	n.process(group("before"), before)
	n.process(group("out"), out)
	p, _ := start(t, config(n))
	p.Set([]pods.Pod{pod("before"), pod("after")})
	before.eventually(front, "captured "+front)
	if said := out.Dial(front); said != "plain" {
		t.Errorf("a pod that is not to be captured gets to %q", said)
	}
	n.process(group("after"), after)
	t.Logf("captured %v after it began", after.eventually(front, "captured "+front))
	p.Set([]pods.Pod{pod("after")})
	before.eventually(front, "plain")
	if said := after.Dial(front); said != "captured "+front {
		t.Errorf("the pod that stays gets to %q", said)
	}
	await(t, "nothing is left in a pod that is captured no more", func() bool { return before.Rules() == "" })
	const service = "10.96.0.20:443"
	p.SetReal([]netip.AddrPort{netip.MustParseAddrPort(front), netip.MustParseAddrPort(service)})
	before.Run("ip", "address", "add", "10.96.0.20", "dev", "lo")
	after.Run("ip", "address", "add", "10.96.0.20", "dev", "lo")
	after.eventually(service, "captured "+service)
	p.Set([]pods.Pod{pod("before"), pod("after")})
	before.eventually(service, "captured "+service)
}

// TestVirtual has a pod connect to virtual addresses, whether or not an agent is there.
// TestStatusOfAPodThatEnds asks while the pod's namespace is given up: nobody may look into what has its file descriptor next.
func TestStatusOfAPodThatEnds(t *testing.T) {
	n := newNode(t)
	n.process(group("a"), newSpace(t))
	p, _ := start(t, config(n))
	for range 20 {
		p.Set([]pods.Pod{pod("a")})
		await(t, "it is captured", func() bool { return captured(p) == 1 })
		p.Set(nil)
		await(t, "it is captured no more", func() bool {
			all := p.Status()
			if len(all) == 1 && all[0].Err != nil {
				t.Fatalf("its status: %v", all[0].Err)
			}
			return len(all) == 0
		})
	}
}

func TestVirtual(t *testing.T) {
	n := newNode(t)
	s := newSpace(t)
	s.Run("ip", "route", "add", "default", "dev", "lo")
	s.Run("ip", "-6", "route", "add", "default", "dev", "lo")
	n.process(group("a"), s)
	p, _ := start(t, config(n))
	p.Set([]pods.Pod{pod("a")})
	for _, to := range []string{"240.64.0.7:80", "[fd68:6561:6472::7]:443"} {
		s.eventually(to, "captured "+to)
	}
	p.Release()
	for _, to := range []string{"240.64.0.7:80", "[fd68:6561:6472::7]:443"} {
		if said := s.Dial(to); said != nettest.Refused {
			t.Errorf("a connection to %s leads to %q when the agent leaves, want a refusal", to, said)
		}
	}
}

// TestIPv4Only has pods without IPv6, and with one that lacks the loopback address.
func TestIPv4Only(t *testing.T) {
	for name, without := range map[string][]string{
		"switched off":        {"sh", "-c", "echo 1 | tee /proc/sys/net/ipv6/conf/*/disable_ipv6"},
		"no loopback address": {"ip", "-6", "address", "flush", "dev", "lo"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			s := newSpace(t).plain()
			s.Run(without[0], without[1:]...)
			n.process(group("a"), s)
			p, _ := start(t, config(n))
			p.Set([]pods.Pod{pod("a")})
			s.eventually(front, "captured "+front)
		})
	}
}

// TestExistingConnections has connections that began before their pod was captured, and others that outlive that.
func TestExistingConnections(t *testing.T) {
	n := newNode(t)
	s := newSpace(t)
	s.echo(front)
	n.process(group("a"), s)
	old := s.connect(front)
	p := pods.New(config(n))
	if err := p.SetReal([]netip.AddrPort{netip.MustParseAddrPort(front)}); err != nil {
		t.Fatal(err)
	}
	echo(t, p.Listener())
	run(t, p)
	p.Set([]pods.Pod{pod("a")})
	await(t, "the pod is captured", func() bool { return captured(p) == 1 })
	old.says(t, "before")
	taken := s.connect(front)
	taken.says(t, "during")
	if status := p.Status(); len(status) != 1 || status[0].Connections != 1 {
		t.Errorf("status %+v, want one captured connection", status)
	}
	p.Set(nil)
	await(t, "new connections are not captured", func() bool { return !strings.Contains(s.Rules(), "redirect") })
	s.connect(front).says(t, "new")
	taken.says(t, "after")
	old.says(t, "after")
	taken.Close()
	await(t, "nothing is left", func() bool { return s.Rules() == "" })
	old.says(t, "in the end")
}

// TestAnotherSandbox has a pod get another network namespace, as when its sandbox is made anew, and end.
func TestAnotherSandbox(t *testing.T) {
	n := newNode(t)
	first, second := newSpace(t).plain(), newSpace(t).plain()
	one := n.process(group("a"), first)
	p, _ := start(t, config(n))
	p.Set([]pods.Pod{pod("a")})
	first.eventually(front, "captured "+front)
	n.kill(one)
	two := n.process(group("a"), second)
	p.Set([]pods.Pod{pod("a")})
	second.eventually(front, "captured "+front)
	if said := first.Dial(front); said != "plain" {
		t.Errorf("the namespace that was the pod's leads to %q", said)
	}
	n.kill(two)
	p.Set(nil)
	await(t, "nothing is left", func() bool { return second.Rules() == "" && len(p.Status()) == 0 })
}

// TestPortTaken has a pod with a server of its own where captured connections should come: it is left alone until that ends.
func TestPortTaken(t *testing.T) {
	n := newNode(t)
	s := newSpace(t).plain()
	l, err := capture.ListenIn(s.Path, fmt.Sprintf("127.0.0.1:%d", capturePort))
	if err != nil {
		t.Fatal(err)
	}
	n.process(group("a"), s)
	p, _ := start(t, config(n))
	p.Set([]pods.Pod{pod("a")})
	await(t, "it is said why", func() bool {
		status := p.Status()
		return len(status) == 1 && errors.Is(status[0].Err, syscall.EADDRINUSE)
	})
	if said := s.Dial(front); said != "plain" {
		t.Errorf("the pod gets to %q", said)
	}
	l.Close()
	s.eventually(front, "captured "+front)
}

// TestNamespaceThatIsNone has an agent that finds something else where the namespace of a pod should be. No other port would help.
func TestNamespaceThatIsNone(t *testing.T) {
	n := newNode(t)
	cmd := n.process(group("a"), newSpace(t))
	ns := filepath.Join(n.proc, fmt.Sprint(cmd.Process.Pid), "ns")
	other := filepath.Join(t.TempDir(), "net")
	if err := errors.Join(os.WriteFile(other, nil, 0o600), os.Remove(ns), os.Symlink(filepath.Dir(other), ns)); err != nil {
		t.Fatal(err)
	}
	p, _ := start(t, config(n))
	p.Set([]pods.Pod{pod("a")})
	await(t, "it is said why", func() bool {
		status := p.Status()
		if len(status) != 1 || !errors.Is(status[0].Err, syscall.EINVAL) {
			return false
		}
		if err := status[0].Err; strings.Contains(err.Error(), "another port") {
			t.Errorf("misleading advice: %v", err)
		}
		return true
	})
}

// TestKilled kills the agent: pods' connections go where they would without one, and what is left there is harmless, and
// removed by the next one.
func TestKilled(t *testing.T) {
	n := newNode(t)
	s := newSpace(t).plain()
	n.process(group("a"), s)
	cfg := config(n)
	kill := startProcess(t, cfg)
	await(t, "the agent captures", func() bool { return strings.Contains(s.Rules(), "redirect") })
	c := s.connect(front)
	c.hears(t, "held")
	kill()
	if took := s.eventually(front, "plain"); took > time.Second {
		t.Errorf("connections went elsewhere for %v", took)
	}
	if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a captured connection ends with %v, want its end to be seen", err)
	}
	if s.Rules() == "" {
		t.Error("nothing is left, so the rest of this test means nothing")
	}
	removed, err := capture.RemoveAll(n.proc)
	if err != nil || len(removed) != 1 || !strings.Contains(removed[0], "headroom-guard") {
		t.Errorf("removed %q, %v, want the guard", removed, err)
	}
	if left := s.Rules(); left != "" {
		t.Errorf("this is left: %s", left)
	}
	kill = startProcess(t, cfg)
	await(t, "another agent captures", func() bool { return strings.Contains(s.Rules(), "redirect") })
	kill()
	p, stop := start(t, cfg)
	p.Set([]pods.Pod{pod("a")})
	s.eventually(front, "captured "+front)
	stop()
	if left := s.Rules(); left != "" {
		t.Errorf("the agent after one that was killed leaves this: %s", left)
	}
}

// TestControlGroups finds a pod by the true control group of its process.
func TestControlGroups(t *testing.T) {
	s := newSpace(t).plain()
	cmd := exec.Command("sleep", "1000")
	if err := s.Do(cmd.Start); err != nil {
		t.Fatal(err)
	}
	uid := fmt.Sprintf("0b5e8a7c-0000-4000-8000-%012d", os.Getpid())
	leave := enterGroup(t, cmd.Process.Pid, filepath.Join("kubepods", "pod"+uid, "0123"))
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		leave()
	})
	cfg := config(newNode(t))
	cfg.Proc = "" // the true one
	p, _ := start(t, cfg)
	p.Set([]pods.Pod{pod(uid)})
	s.eventually(front, "captured "+front)
}

// enterGroup puts a process into a control group below that of this process, of any hierarchy in which that can be done.
func enterGroup(t *testing.T, pid int, name string) (leave func()) {
	t.Helper()
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(own)) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		for _, mount := range []string{strings.TrimPrefix(fields[1], "name="), "unified"} {
			base := filepath.Join("/sys/fs/cgroup", mount, fields[2])
			dir := filepath.Join(base, name)
			made := os.MkdirAll(dir, 0o755)
			leave = func() {
				for ; dir != base; dir = filepath.Dir(dir) {
					os.Remove(dir) // another test may be in it
				}
			}
			if err = os.WriteFile(filepath.Join(dir, "cgroup.procs"), fmt.Append(nil, pid), 0); made == nil && err == nil {
				return leave
			}
			leave()
		}
	}
	t.Fatalf("make a control group %s (it takes root): %v", name, err)
	return nil
}

// runPods is the environment variable by which a test runs itself again, as an agent.
const runPods = "TEST_PODS"

func TestMain(m *testing.M) {
	if proc := os.Getenv(runPods); proc != "" {
		holdUntilKilled(proc)
		return
	}
	os.Exit(m.Run())
}

// holdUntilKilled captures the pod "a". It says one thing on each connection, and keeps it.
func holdUntilKilled(proc string) {
	p := pods.New(pods.Config{Capture: captureConfig(), Proc: proc})
	p.SetReal([]netip.AddrPort{netip.MustParseAddrPort(front)})
	p.Set([]pods.Pod{pod("a")})
	go func() {
		for {
			c, err := p.Listener().Accept()
			if err != nil {
				return
			}
			defer c.Close() // and so it stays, until then
			io.WriteString(c, "held")
		}
	}()
	p.Run(context.Background())
}

// startProcess runs an agent in a process of its own. It returns how to kill that.
func startProcess(t *testing.T, cfg pods.Config) (kill func()) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), runPods+"="+cfg.Proc)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	kill = sync.OnceFunc(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	t.Cleanup(kill)
	return kill
}

// BenchmarkEnter measures what pods take.
func BenchmarkEnter(b *testing.B) {
	const many = 200
	n := newNode(b)
	var all []pods.Pod
	for i := range many {
		uid := fmt.Sprint("uid", i)
		n.process(group(uid), newSpace(b))
		all = append(all, pods.Pod{UID: uid, Namespace: "shop", Name: uid})
	}
	fronts := make([]netip.AddrPort, 1000)
	for i := range fronts {
		fronts[i] = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}), 80)
	}
	for b.Loop() {
		fds, rss, goroutines := usage(b)
		cfg := config(n)
		captured := make(said, many)
		cfg.Log = slog.New(slog.NewTextHandler(captured, nil))
		p, stop := start(b, cfg)
		p.SetReal(fronts)
		began := time.Now()
		p.Set(all)
		for range many {
			<-captured
		}
		b.Logf("%d pods entered in %v", many, time.Since(began))
		fds2, rss2, goroutines2 := usage(b)
		b.Logf("%d file descriptors, %d KiB, %d goroutines", fds2-fds, rss2-rss, goroutines2-goroutines)
		began = time.Now()
		p.Status()
		b.Logf("status in %v", time.Since(began))
		began = time.Now()
		stop()
		b.Logf("left in %v", time.Since(began))
	}
}

// said gets a value for each thing that is said, as long as there is room.
type said chan struct{}

func (s said) Write(b []byte) (int, error) {
	select {
	case s <- struct{}{}:
	default:
	}
	return len(b), nil
}

func usage(b *testing.B) (fds, rss, goroutines int) {
	runtime.GC()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		b.Fatal(err)
	}
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		b.Fatal(err)
	}
	_, line, _ := strings.Cut(string(status), "VmRSS:")
	fmt.Sscan(line, &rss)
	return len(all), rss, runtime.NumGoroutine()
}
