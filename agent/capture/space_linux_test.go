package capture_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/headroom-mesh/headroom/agent/capture"
	"github.com/headroom-mesh/headroom/agent/nettest"
	"github.com/headroom-mesh/headroom/dataplane/sockets"
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
		fmt.Print(nettest.Outcome(nettest.Dial(os.Getenv(application), nil)))
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
type space struct{ *nettest.Space }

func newSpace(t *testing.T) *space {
	t.Helper()
	return &space{nettest.NewSpace(t)}
}

// nft adds rules in nft's language, given by lines.
func (s *space) nft(lines ...string) {
	s.T.Helper()
	s.RunWith(strings.Join(lines, "\n")+"\n", "nft", "-f", "-")
}

// everything is all that capture may change.
func (s *space) everything() string {
	s.T.Helper()
	return s.Rules() + s.Run("ip", "route", "show", "table", "all") +
		s.Run("ip", "-6", "route", "show", "table", "all") + s.Run("ip", "rule") + s.Run("ip", "-6", "rule")
}

// listen accepts connections there, and says something to each.
func (s *space) listen(addr string, say func(net.Conn) string) (port uint16) {
	s.T.Helper()
	l, err := capture.ListenIn(s.Path, addr)
	if err != nil {
		s.T.Fatal(err)
	}
	nettest.Serve(s.T, l, say)
	return uint16(l.Addr().(*net.TCPAddr).Port)
}

// agent accepts captured connections there, and says where they were to go.
func (s *space) agent() (port uint16) {
	s.T.Helper()
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
	s.T.Helper()
	l, err := capture.ListenIn(s.Path, ":0")
	if err != nil {
		s.T.Fatal(err)
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
	s.T.Helper()
	b, err := json.Marshal(cfg)
	if err != nil {
		s.T.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), runCapture+"="+string(b))
	out, err := cmd.StdoutPipe()
	if err != nil {
		s.T.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		s.T.Fatal(err)
	}
	said := make([]byte, len("ready\n"))
	if _, err := io.ReadFull(out, said); err != nil || string(said) != "ready\n" {
		rest, _ := io.ReadAll(out)
		s.T.Fatalf("the process said %q, %v", string(said)+string(rest), err)
	}
	killed := false
	kill = func() {
		if !killed {
			cmd.Process.Kill()
			cmd.Wait()
		}
		killed = true
	}
	s.T.Cleanup(kill)
	return kill
}
