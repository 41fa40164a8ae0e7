package capture_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/agent/capture"
	"github.com/headroom-mesh/headroom/dataplane/sockets"
	"golang.org/x/sys/unix"
)

// The environment variables by which a test runs itself again, as an agent that captures, or as an application.
const (
	runCapture  = "TEST_CAPTURE"
	application = "TEST_APPLICATION"
)

func TestMain(m *testing.M) {
	switch {
	case os.Getenv(runCapture) != "":
		captureUntilKilled()
	case os.Getenv(application) != "":
		fmt.Print(outcome(dial(os.Getenv(application), nil)))
	default:
		os.Exit(m.Run())
	}
}

func captureUntilKilled() {
	var cfg capture.Config
	err := json.Unmarshal([]byte(os.Getenv(runCapture)), &cfg)
	if err == nil {
		var c *capture.Capture
		if c, err = capture.New(cfg); err == nil {
			listeners, _ := c.Listen() // none if the test itself does
			for _, l := range listeners {
				go hold(l)
			}
			go func() {
				<-c.Ready()
				fmt.Println("ready")
			}()
			err = c.Run(context.Background())
		}
	}
	fmt.Println(err)
}

// hold says one thing to each connection, and keeps it.
func hold(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close() // and so it stays, until then
		io.WriteString(c, "held")
	}
}

// space is a network namespace that ends with the test.
type space struct {
	t    *testing.T
	file *os.File
	path string
}

func newSpace(t *testing.T) *space {
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
	return s
}

// do runs f on a thread of the namespace, which ends afterwards, so that f may change it.
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

// run runs a command there, and returns what it says.
func (s *space) run(name string, args ...string) string {
	s.t.Helper()
	return s.runWith("", name, args...)
}

// nft adds rules in nft's language, given by lines.
func (s *space) nft(lines ...string) {
	s.t.Helper()
	s.runWith(strings.Join(lines, "\n")+"\n", "nft", "-f", "-")
}

func (s *space) runWith(input, name string, args ...string) string {
	s.t.Helper()
	var out []byte
	err := s.do(func() (err error) {
		cmd := exec.Command(name, args...)
		cmd.Stdin = strings.NewReader(input)
		out, err = cmd.CombinedOutput()
		return err
	})
	if err != nil {
		s.t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// everything is all that capture may change.
func (s *space) everything() string {
	s.t.Helper()
	return s.run("nft", "list", "ruleset") + s.run("ip", "route", "show", "table", "all") +
		s.run("ip", "-6", "route", "show", "table", "all") + s.run("ip", "rule") + s.run("ip", "-6", "rule")
}

// dial makes a connection on this thread, and reads what the other end says.
func dial(to string, prepare func(fd int) error) (string, error) {
	d := net.Dialer{Timeout: 3 * time.Second}
	d.Control = func(_, _ string, c syscall.RawConn) (err error) {
		if prepare != nil {
			if controlErr := c.Control(func(fd uintptr) { err = prepare(int(fd)) }); controlErr != nil {
				return controlErr
			}
		}
		return err
	}
	c, err := d.Dial("tcp", to)
	if err != nil {
		return "", err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(3 * time.Second))
	said, err := io.ReadAll(c)
	return string(said), err
}

// refused is the outcome of a connection that is refused at once.
const refused = "refused"

func outcome(said string, err error) string {
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return refused
	case err != nil:
		return err.Error()
	}
	return said
}

// dial returns what is said at the other end of a connection from this namespace.
func (s *space) dial(to string) string {
	var said string
	err := s.do(func() (err error) {
		said, err = dial(to, nil)
		return err
	})
	return outcome(said, err)
}

// listen accepts connections there, and says something to each.
func (s *space) listen(addr string, say func(net.Conn) string) (port uint16) {
	s.t.Helper()
	l, err := capture.ListenIn(s.path, addr)
	if err != nil {
		s.t.Fatal(err)
	}
	serve(s.t, l, say)
	return uint16(l.Addr().(*net.TCPAddr).Port)
}

// serve says something to each connection.
func serve(t *testing.T, l net.Listener, say func(net.Conn) string) {
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

// agent accepts captured connections there, and says where they were to go.
func (s *space) agent() (port uint16) {
	s.t.Helper()
	return s.listen(":0", original)
}

// original says where a connection was to go.
func original(c net.Conn) string {
	to, err := sockets.OriginalDestination(sockets.Wired(c))
	plain, plainErr := sockets.OriginalDestination(c)
	if err != nil || plainErr != nil || plain != to {
		return fmt.Sprintf("%v %v, as a Wire %v %v", plain, plainErr, to, err)
	}
	return "captured " + to.String()
}

// freePort returns a port at which nobody listens there.
func (s *space) freePort() uint16 {
	s.t.Helper()
	l, err := capture.ListenIn(s.path, ":0")
	if err != nil {
		s.t.Fatal(err)
	}
	defer l.Close()
	return uint16(l.Addr().(*net.TCPAddr).Port)
}

// constant says the same to all.
func constant(said string) func(net.Conn) string { return func(net.Conn) string { return said } }

// start captures until the test ends, or stop is called.
func start(t *testing.T, cfg capture.Config) (c *capture.Capture, stop func()) {
	t.Helper()
	c, err := capture.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c, run(t, c)
}

// run does so with a Capture.
func run(t *testing.T, c *capture.Capture) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	stopped := false
	stop = func() {
		cancel()
		if !stopped {
			if err := <-ended; err != nil {
				t.Errorf("capture ended with %v", err)
			}
		}
		stopped = true
	}
	select {
	case <-c.Ready():
		t.Cleanup(stop)
	case err := <-ended:
		cancel()
		t.Fatalf("capture did not start: %v", err)
	}
	return stop
}

// startError returns why capture doesn't start.
func startError(t *testing.T, cfg capture.Config) error {
	t.Helper()
	c, err := capture.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	select {
	case <-c.Ready():
		t.Fatal("capture started")
		return nil
	case err := <-ended:
		return err
	}
}

// startProcess captures in a process of its own. It returns how to kill that.
func (s *space) startProcess(cfg capture.Config) (kill func()) {
	s.t.Helper()
	b, err := json.Marshal(cfg)
	if err != nil {
		s.t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), runCapture+"="+string(b))
	out, err := cmd.StdoutPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	said := make([]byte, len("ready\n"))
	if _, err := io.ReadFull(out, said); err != nil || string(said) != "ready\n" {
		rest, _ := io.ReadAll(out)
		s.t.Fatalf("the process said %q, %v", string(said)+string(rest), err)
	}
	killed := false
	kill = func() {
		if !killed {
			cmd.Process.Kill()
			cmd.Wait()
		}
		killed = true
	}
	s.t.Cleanup(kill)
	return kill
}
