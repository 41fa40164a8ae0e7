package main

import (
	"bufio"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

// asAgent has the test binary run the agent.
const asAgent = "HEADROOM_TEST_AS_AGENT"

func TestMain(m *testing.M) {
	if os.Getenv(asAgent) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// freePort returns a loopback address at which nothing listens.
func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// awaitLine reads up to a line with these words.
func awaitLine(t *testing.T, lines *bufio.Scanner, words string) {
	t.Helper()
	for lines.Scan() {
		if strings.Contains(lines.Text(), words) {
			return
		}
	}
	t.Fatalf("the agent never logged %q", words)
}

// TestSecondSignalOfABackgroundJob starts an agent as `agent &` in a script does, with SIGINT ignored.
func TestSecondSignalOfABackgroundJob(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	script := []string{"-c", `trap "" INT; exec "$0" "$@"`, self, "--node", "a", "--data-dir", t.TempDir(), "--drain-delay", "1m"}
	for _, flag := range []string{"--etcd", "--gossip", "--mesh", "--proxy", "--admin", "--admin-http"} {
		script = append(script, flag, freePort(t))
	}
	agent := exec.CommandContext(t.Context(), "sh", script...)
	agent.Env = append(os.Environ(), asAgent+"=1")
	stderr, err := agent.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := agent.Start(); err != nil {
		t.Fatal(err)
	}
	hung := time.AfterFunc(20*time.Second, func() { _ = agent.Process.Kill() })
	defer hung.Stop()
	lines := bufio.NewScanner(io.TeeReader(stderr, t.Output()))
	awaitLine(t, lines, "agent started")
	for _, effect := range []string{"draining", "second signal: ending at once"} {
		if err := agent.Process.Signal(syscall.SIGINT); err != nil {
			t.Fatal(err)
		}
		awaitLine(t, lines, effect)
	}
	err = agent.Wait()
	if exit, ok := errors.AsType[*exec.ExitError](err); !ok || exit.ExitCode() != 1 {
		t.Errorf("the agent ended with %v, want exit code 1", err)
	}
}
