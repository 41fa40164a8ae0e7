//go:build linux

package meshtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// patience bounds every wait for something that must happen soon.
const patience = 20 * time.Second

// Eventually waits until done reports true, and returns how long that took. The test fails if it takes longer than within.
func Eventually(t testing.TB, within time.Duration, what string, done func() bool) time.Duration {
	t.Helper()
	began := time.Now()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !done() {
		if time.Since(began) > within {
			t.Fatalf("not within %v: %s", within, what)
		}
		<-tick.C
	}
	return time.Since(began)
}

// Process is a program that runs on a node. It is killed when the test ends.
type Process struct {
	Name string

	t      testing.TB
	cmd    *exec.Cmd
	stdout string // file
	stderr string // file
	ended  chan struct{}
}

// Start starts a program. Its environment is that of the test and env.
func (n *Node) Start(name string, env []string, program string, args ...string) *Process {
	t := n.network.t
	t.Helper()
	dir := t.TempDir()
	p := &Process{
		Name: name, t: t, cmd: exec.Command(program, args...), ended: make(chan struct{}),
		stdout: filepath.Join(dir, "stdout"), stderr: filepath.Join(dir, "stderr"),
	}
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := n.start(p); err != nil {
		t.Fatalf("start %s: %v", name, err)
	}
	var wait sync.WaitGroup
	wait.Go(func() {
		_ = p.cmd.Wait() // ProcessState has it too
		close(p.ended)
	})
	t.Cleanup(func() {
		p.Kill()
		wait.Wait()
		for _, sign := range []string{"panic: ", "DATA RACE"} {
			if strings.Contains(p.Log(), sign) {
				t.Errorf("%s in the log of %s:\n%s", sign, name, lastLines(p.Log(), 200))
			}
		}
		if t.Failed() {
			t.Logf("--- log of %s\n%s", name, lastLines(p.Log(), 40))
		}
	})
	return p
}

func (n *Node) start(p *Process) error {
	stdout, err := os.Create(p.stdout)
	if err != nil {
		return err
	}
	defer stdout.Close()
	stderr, err := os.Create(p.stderr)
	if err != nil {
		return err
	}
	defer stderr.Close()
	p.cmd.Stdout, p.cmd.Stderr = stdout, stderr
	return n.Do(p.cmd.Start)
}

func lastLines(text string, n int) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// PID returns the number of the process.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Signal sends a signal, if the process still runs.
func (p *Process) Signal(s os.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		p.t.Errorf("signal %s: %v", p.Name, err)
	}
}

// Kill ends the process without a word, and returns when it is gone.
func (p *Process) Kill() {
	p.Signal(syscall.SIGKILL)
	<-p.ended
}

// Ended reports whether the process has ended.
func (p *Process) Ended() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

// Wait waits for the process to end and returns its exit code, -1 if a signal ended it.
func (p *Process) Wait(within time.Duration) int {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	select {
	case <-p.ended:
	case <-ctx.Done():
		p.t.Fatalf("%s still runs after %v", p.Name, within)
	}
	return p.cmd.ProcessState.ExitCode()
}

// Log returns what the process has written to its standard error.
func (p *Process) Log() string { return p.read(p.stderr) }

// Output returns what the process has written to its standard output.
func (p *Process) Output() string { return p.read(p.stdout) }

func (p *Process) read(file string) string {
	text, err := os.ReadFile(file)
	if err != nil {
		return fmt.Sprint(err) // after the test
	}
	return string(text)
}

// Logged returns the lines of the log that have all these words.
func (p *Process) Logged(words ...string) []string {
	var found []string
	for line := range strings.Lines(p.Log()) {
		if containsAll(line, words) {
			found = append(found, strings.TrimSpace(line))
		}
	}
	return found
}

func containsAll(line string, words []string) bool {
	for _, word := range words {
		if !strings.Contains(line, word) {
			return false
		}
	}
	return true
}

// LoggedSince returns when the first line with these words was written at or after a moment.
func (p *Process) LoggedSince(since time.Time, words ...string) (time.Time, bool) {
	for _, line := range p.Logged(words...) {
		_, rest, _ := strings.Cut(line, "time=")
		stamp, _, _ := strings.Cut(rest, " ")
		at, err := time.Parse(time.RFC3339Nano, stamp)
		if err == nil && !at.Before(since.Truncate(time.Millisecond)) {
			return at, true
		}
	}
	return time.Time{}, false
}

// AwaitLog waits for a line with all these words.
func (p *Process) AwaitLog(words ...string) {
	p.t.Helper()
	Eventually(p.t, patience, fmt.Sprintf("%s logs %q", p.Name, words), func() bool { return len(p.Logged(words...)) > 0 })
}
