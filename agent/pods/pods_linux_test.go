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
	"syscall"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/agent/capture"
	"github.com/headroom-mesh/headroom/agent/pods"
	"github.com/headroom-mesh/headroom/dataplane/sockets"
	"golang.org/x/sys/unix"
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
	if err := in.do(cmd.Start); err != nil {
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

// space is a network namespace, as of a pod, that ends with the test.
type space struct {
	t    testing.TB
	file *os.File
	path string
}

func newSpace(t testing.TB) *space {
	t.Helper()
	s := &space{t: t}
	made := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			s.file, err = os.Open("/proc/thread-self/ns/net")
		}
		made <- err
	}()
	if err := <-made; err != nil {
		t.Fatalf("make a network namespace (it takes root): %v", err)
	}
	t.Cleanup(func() { s.file.Close() })
	s.path = fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), s.file.Fd())
	s.run("ip", "link", "set", "lo", "up")
	s.run("ip", "address", "add", strings.TrimSuffix(front, ":80"), "dev", "lo")
	return s
}

// do runs f on a thread of the namespace.
func (s *space) do(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		err := unix.Setns(int(s.file.Fd()), unix.CLONE_NEWNET)
		if err == nil {
			err = f()
		}
		done <- err
	}()
	return <-done
}

func (s *space) run(name string, args ...string) string {
	s.t.Helper()
	var out []byte
	err := s.do(func() (err error) {
		out, err = exec.Command(name, args...).CombinedOutput()
		return err
	})
	if err != nil {
		s.t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// plain has a server listen at the front.
func (s *space) plain() *space {
	s.t.Helper()
	l, err := capture.ListenIn(s.path, front)
	if err != nil {
		s.t.Fatal(err)
	}
	serve(s.t, l, func(net.Conn) string { return "plain" })
	return s
}

func serve(t testing.TB, l net.Listener, say func(net.Conn) string) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			io.WriteString(c, say(c))
			c.Close()
		}
	}()
	t.Cleanup(func() {
		l.Close()
		<-done
	})
}

// dial returns what is said at the other end of a connection from there.
func (s *space) dial(to string) string {
	var said []byte
	err := s.do(func() error {
		c, err := net.DialTimeout("tcp", to, 3*time.Second)
		if err != nil {
			return err
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(3 * time.Second))
		said, err = io.ReadAll(c)
		return err
	})
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return "refused"
	case err != nil:
		return err.Error()
	}
	return string(said)
}

// original says where a connection was to go.
func original(c net.Conn) string {
	to, err := sockets.OriginalDestination(c)
	if err != nil {
		return err.Error()
	}
	return "captured " + to.String()
}

func config(n *node) pods.Config {
	return pods.Config{
		Capture: capture.Config{
			Port: capturePort, IPv4: netip.MustParsePrefix("240.64.0.0/12"), IPv6: netip.MustParsePrefix("fd68:6561:6472::/64"),
		},
		Proc: n.proc, Log: slog.New(slog.NewTextHandler(n.t.Output(), nil)),
	}
}

// start captures until the test ends, or stop is called.
func start(t testing.TB, cfg pods.Config) (p *pods.Pods, stop func()) {
	t.Helper()
	p = pods.New(cfg)
	p.SetReal([]netip.AddrPort{netip.MustParseAddrPort(front)})
	serve(t, p.Listener(), original)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	stopped := false
	stop = func() {
		cancel()
		if !stopped {
			if err := <-ended; err != nil {
				t.Errorf("capture of pods ended with %v", err)
			}
		}
		stopped = true
	}
	t.Cleanup(stop)
	return p, stop
}

const patience = 10 * time.Second

// eventually waits until something is said at the other end.
func (s *space) eventually(to, want string) time.Duration {
	s.t.Helper()
	began := time.Now()
	said := ""
	for time.Since(began) < patience {
		if said = s.dial(to); said == want {
			return time.Since(began)
		}
	}
	s.t.Fatalf("after %v a connection to %s still leads to %q, want %q", patience, to, said, want)
	return 0
}

func group(uid string) string { return "/kubepods/burstable/pod" + uid + "/0123" }

// TestPods has pods come and go.
func TestPods(t *testing.T) {
	n := newNode(t)
	before, after, out := newSpace(t).plain(), newSpace(t).plain(), newSpace(t).plain()
	n.process(group("before"), before)
	n.process(group("out"), out)
	p, _ := start(t, config(n))
	p.Set([]pods.Pod{{UID: "before", Namespace: "shop", Name: "before"}, {UID: "after", Namespace: "shop", Name: "after"}})
	before.eventually(front, "captured "+front)
	if said := out.dial(front); said != "plain" {
		t.Errorf("a pod that is not to be captured gets to %q", said)
	}
	n.process(group("after"), after)
	t.Logf("captured %v after it began", after.eventually(front, "captured "+front))
	p.Set([]pods.Pod{{UID: "after", Namespace: "shop", Name: "after"}})
	before.eventually(front, "plain")
	if said := after.dial(front); said != "captured "+front {
		t.Errorf("the pod that stays gets to %q", said)
	}
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
		p, stop := start(b, config(n))
		p.SetReal(fronts)
		began := time.Now()
		p.Set(all)
		for {
			ready := 0
			for _, s := range p.Status() {
				if s.Err == nil && s.Capture.Owner != 0 {
					ready++
				}
			}
			if ready == many {
				break
			}
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
