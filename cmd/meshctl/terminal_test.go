package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestTopInATerminal drives meshctl top in a real terminal, that of tmux, as a person would.
func TestTopInATerminal(t *testing.T) {
	if testing.Short() {
		t.Skip("needs tmux")
	}
	agent := newFakeAgent()
	server, address, err := agent.listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Stop()
	s := newTerminal(t, 80, 24, "env", "NO_COLOR=1", meshctlLink(t), "--agent", address, "top")

	raw := filepath.Join(t.TempDir(), "raw")
	s.tmux("pipe-pane", "-t", s.name, "cat > "+raw)

	for _, want := range []string{"checkout", "ADDRESS*", "REQ/S", "q quit"} {
		s.await(want)
	}
	s.await("q quit", "24 lines of at most 80 columns")
	s.tmux("resize-window", "-t", s.name, "-x", "50", "-y", "15")
	s.await("q quit", "15 lines of at most 50 columns")
	s.tmux("send-keys", "-t", s.name, "s")
	s.await("sort: req/s")
	s.tmux("send-keys", "-t", s.name, "?")
	s.await("leave this help")
	s.tmux("send-keys", "-t", s.name, "?")
	s.await("ADDRESS")
	s.tmux("send-keys", "-t", s.name, "q")
	s.await("ended with 0")
	wantNoColors(t, raw)
}

// TestTopInATerminalMoves has the agent of a cluster end that top is connected to.
func TestTopInATerminalMoves(t *testing.T) {
	if testing.Short() {
		t.Skip("needs tmux")
	}
	two := newTwoAgents(t)
	s := newTerminal(t, 100, 24, meshctlLink(t), "--kubeconfig", two.kubeconfig, "top")
	s.await("headroom-1 of node n1", "checkout")
	two.server.Stop()
	s.await("headroom-2 of node n2", "checkout", "q quit")
	s.tmux("send-keys", "-t", s.name, "q")
	s.await("ended with 0")
}

func wantNoColors(t *testing.T, raw string) {
	t.Helper()
	sent, err := os.ReadFile(raw)
	if err != nil || len(sent) == 0 {
		t.Fatalf("nothing was sent to the terminal: %v", err)
	}
	if found := colored.Find(sent); found != nil {
		t.Errorf("under NO_COLOR %q is sent", found)
	}
}

// meshctlLink returns the path of a link by which this test program is meshctl.
func meshctlLink(t *testing.T) string {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(t.TempDir(), "meshctl")
	if err := os.Symlink(self, link); err != nil {
		t.Fatal(err)
	}
	return link
}

// terminal is a terminal of tmux.
type terminal struct {
	t      *testing.T
	name   string
	socket string
}

func newTerminal(t *testing.T, width, height int, command ...string) *terminal {
	if _, err := exec.LookPath("tmux"); err != nil {
		t.Fatalf("%v: install the package tmux (`make deps`), or leave this test out with -short", err)
	}
	s := &terminal{t: t, name: "headroom-test", socket: filepath.Join(t.TempDir(), "tmux")}
	shell := strings.Join(command, " ") + `; echo "ended with $?"; exec cat`
	s.start("new-session", "-d", "-s", s.name, "-x", fmt.Sprint(width), "-y", fmt.Sprint(height), shell)
	t.Cleanup(func() { s.tmux("kill-server") })
	return s
}

// start starts the server. On a crowded machine its daemon may find no process to be ("server exited unexpectedly"):
// that says nothing about meshctl, so it is tried again.
func (s *terminal) start(args ...string) {
	s.t.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; <-time.After(100 * time.Millisecond) {
		out, err := s.run(args...)
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			s.t.Fatalf("tmux %v: %v: %s", args, err, out)
		}
		s.t.Logf("tmux did not start: %v: %s", err, out)
	}
}

// tmux runs tmux, on a server of its own.
func (s *terminal) tmux(args ...string) string {
	s.t.Helper()
	out, err := s.run(args...)
	if err != nil {
		s.t.Fatalf("tmux %v: %v: %s", args, err, out)
	}
	return out
}

func (s *terminal) run(args ...string) (string, error) {
	out, err := exec.Command("tmux", append([]string{"-S", s.socket, "-f", os.DevNull}, args...)...).CombinedOutput()
	return string(out), err
}

// await waits until the screen shows all that is wanted. "N lines of at most M columns" is about its form.
func (s *terminal) await(wanted ...string) {
	s.t.Helper()
	shown := ""
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); {
		shown = s.tmux("capture-pane", "-p", "-t", s.name)
		if shows(shown, wanted) {
			return
		}
		<-time.After(20 * time.Millisecond)
	}
	s.t.Fatalf("the screen does not show %q:\n%s", wanted, shown)
}

func shows(screen string, wanted []string) bool {
	for _, w := range wanted {
		var lines, columns int
		if n, _ := fmt.Sscanf(w, "%d lines of at most %d columns", &lines, &columns); n == 2 {
			if !fits(screen, lines, columns) {
				return false
			}
		} else if !strings.Contains(screen, w) {
			return false
		}
	}
	return true
}

// fits reports whether the screen's last line is used, which it is if all is drawn anew for its size.
func fits(screen string, lines, columns int) bool {
	rows := strings.Split(strings.TrimSuffix(screen, "\n"), "\n")
	for _, row := range rows {
		if len([]rune(row)) > columns {
			return false
		}
	}
	return len(rows) == lines && strings.Contains(rows[lines-1], "q quit")
}
