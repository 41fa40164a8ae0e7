//go:build linux

package nettest

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Space is a network namespace that ends with the test. Its loopback interface is up.
type Space struct {
	T    testing.TB
	Path string // of a file that stands for it
	file *os.File
}

// NewSpace makes a network namespace.
func NewSpace(t testing.TB) *Space {
	t.Helper()
	s := &Space{T: t}
	err := onThread(func() (err error) {
		if err = unix.Unshare(unix.CLONE_NEWNET); err == nil {
			s.file, err = os.Open("/proc/thread-self/ns/net")
		}
		return err
	})
	if err != nil {
		t.Fatalf("make a network namespace (it takes root): %v", err)
	}
	t.Cleanup(func() { s.file.Close() })
	s.Path = fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), s.file.Fd())
	s.Run("ip", "link", "set", "lo", "up")
	return s
}

// onThread runs f on a thread that ends afterwards, so that f may change it.
func onThread(f func() error) (err error) {
	var running sync.WaitGroup
	running.Go(func() {
		runtime.LockOSThread() // never unlocked
		err = f()
	})
	running.Wait()
	return err
}

// Do runs f on a thread of the namespace, which ends afterwards, so that f may change it. The sockets that f opens and the
// processes that it starts stay there.
func (s *Space) Do(f func() error) error {
	return onThread(func() error {
		if err := unix.Setns(int(s.file.Fd()), unix.CLONE_NEWNET); err != nil {
			return err
		}
		return f()
	})
}

// Run runs a command there, which must succeed, and returns what it says.
func (s *Space) Run(name string, args ...string) string {
	s.T.Helper()
	return s.RunWith("", name, args...)
}

// RunWith is Run for a command that reads something.
func (s *Space) RunWith(input, name string, args ...string) string {
	s.T.Helper()
	var out []byte
	err := s.Do(func() (err error) {
		cmd := exec.Command(name, args...)
		cmd.Stdin = strings.NewReader(input)
		out, err = cmd.CombinedOutput()
		return err
	})
	if err != nil {
		s.T.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// Rules returns all of nftables there.
func (s *Space) Rules() string {
	s.T.Helper()
	return s.Run("nft", "list", "ruleset")
}

// Dial makes a connection from there, and returns what comes of it.
func (s *Space) Dial(to string) string {
	var said string
	err := s.Do(func() (err error) {
		said, err = Dial(to, nil)
		return err
	})
	return Outcome(said, err)
}

// Dial makes a connection on this thread, and reads all that the other end says. Prepare may change the socket; nil: nothing.
func Dial(to string, prepare func(fd int) error) (said string, err error) {
	const patience = 3 * time.Second
	d := net.Dialer{Timeout: patience}
	if prepare != nil {
		d.Control = func(_, _ string, c syscall.RawConn) (err error) {
			control := c.Control(func(fd uintptr) { err = prepare(int(fd)) })
			return errors.Join(control, err)
		}
	}
	c, err := d.Dial("tcp", to)
	if err != nil {
		return "", err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(patience))
	all, err := io.ReadAll(c)
	return string(all), err
}

// Refused is the outcome of a connection that is refused at once.
const Refused = "refused"

// Outcome says in one word what came of a connection.
func Outcome(said string, err error) string {
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return Refused
	case err != nil:
		return err.Error()
	}
	return said
}

// Serve says something to each connection until the test ends.
func Serve(t testing.TB, l net.Listener, say func(net.Conn) string) {
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			io.WriteString(c, say(c))
			c.Close()
		}
	})
	t.Cleanup(func() {
		l.Close()
		serving.Wait()
	})
}
