package capture_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/agent/capture"
	"github.com/headroom-mesh/headroom/agent/nettest"
	"golang.org/x/sys/unix"
)

// node is a network namespace with an agent, and a "pod", which is another one whose way out is the node.
type node struct {
	*space
	pod  *space
	port uint16 // where the agent accepts connections
}

// The addresses of node and pod are 10.9.0.1 and .2, fd09::1 and ::2.
func newNode(t *testing.T) *node {
	n := &node{space: newSpace(t), pod: newSpace(t)}
	n.Run("ip", "link", "add", "veth0", "type", "veth", "peer", "name", "eth0", "netns", n.pod.Path)
	for i, s := range []*space{n.space, n.pod} {
		link := []string{"veth0", "eth0"}[i]
		s.Run("ip", "link", "set", link, "addrgenmode", "none") // a link-local address would come later
	}
	for i, s := range []*space{n.space, n.pod} {
		link := []string{"veth0", "eth0"}[i]
		s.Run("ip", "link", "set", link, "up")
		s.Run("ip", "addr", "add", fmt.Sprintf("10.9.0.%d/24", i+1), "dev", link)
		s.Run("ip", "addr", "add", fmt.Sprintf("fd09::%d/64", i+1), "dev", link, "nodad")
	}
	for i, s := range []*space{n.space, n.pod} {
		other := 2 - i
		s.Run("ip", "route", "add", "default", "via", fmt.Sprintf("10.9.0.%d", other))
		s.Run("ip", "route", "add", "default", "via", fmt.Sprintf("fd09::%d", other))
	}
	for _, s := range []*space{n.space, n.pod} {
		s.settle()
	}
	n.port = n.agent()
	return n
}

// settle waits for what the kernel does by and by when a link is up: its routes of IPv6.
func (s *space) settle() {
	s.T.Helper()
	const patience = 10 * time.Second
	routes := ""
	for began := time.Now(); time.Since(began) < patience; {
		routes = s.Run("ip", "-6", "route", "show", "table", "all")
		if strings.Contains(routes, "local fd09::") && !strings.Contains(routes, "linkdown") {
			return
		}
	}
	s.T.Fatalf("after %v the link is not up:\n%s", patience, routes)
}

func (n *node) config() capture.Config {
	return capture.Config{
		Port:  n.port,
		IPv4:  netip.MustParsePrefix("198.18.0.0/15"),
		IPv6:  netip.MustParsePrefix("fd68:6472::/96"),
		Netns: n.Path,
	}
}

func wantOutcome(t *testing.T, what, got, want string) {
	t.Helper()
	if got != want {
		t.Errorf("%s: %q, want %q", what, got, want)
	}
}

// TestRedirect expects connections of the node and of a pod to come to the agent, if they are to virtual addresses or to
// real ones that were named, and only these.
func TestRedirect(t *testing.T) {
	n := newNode(t)
	n.listen(":8080", constant("the node itself"))
	n.pod.listen(":8080", constant("the pod itself"))
	c, _ := start(t, n.config())
	named := []string{"10.77.0.7:80", "[fd77::7]:80", "10.9.0.2:81", "[fd09::2]:81"}
	var addrs []netip.AddrPort
	for _, a := range named {
		addrs = append(addrs, netip.MustParseAddrPort(a))
	}
	if err := c.SetReal(addrs); err != nil {
		t.Fatal(err)
	}
	captured := append(named, "198.18.0.1:80", "198.19.255.255:65535", "[fd68:6472::1]:80", "[fd68:6472::ffff:ffff]:1")
	for _, to := range append(captured, fmt.Sprintf("198.18.0.1:%d", n.port)) {
		wantOutcome(t, "node to "+to, n.Dial(to), "captured "+to)
	}
	for _, to := range []string{"198.18.0.1:80", "[fd68:6472::1]:80", "10.77.0.7:80", "[fd77::7]:80"} {
		wantOutcome(t, "pod to "+to, n.pod.Dial(to), "captured "+to)
	}
	for _, to := range []string{"10.9.0.2:8080", "[fd09::2]:8080"} {
		wantOutcome(t, "node to "+to, n.Dial(to), "the pod itself")
	}
	for _, to := range []string{"127.0.0.1:8080", "[::1]:8080", "10.9.0.1:8080"} {
		wantOutcome(t, "node to "+to, n.Dial(to), "the node itself")
	}
	for _, to := range []string{"10.9.0.1:8080", "[fd09::1]:8080"} {
		wantOutcome(t, "pod to "+to, n.pod.Dial(to), "the node itself")
	}
}

// TestListen expects connections of all kinds to come to where Listen listens, also those of a pod behind an interface without
// an address but a link-local one, as many networks of pods have them.
func TestListen(t *testing.T) {
	n := newNode(t)
	n.Run("ip", "addr", "flush", "dev", "veth0")
	for _, addr := range []string{"10.9.0.1/32", "fd09::1/128"} {
		n.Run("ip", "addr", "add", addr, "dev", "lo")
	}
	for _, pod := range []string{"10.9.0.2/32", "fd09::2/128"} {
		n.Run("ip", "route", "add", pod, "dev", "veth0")
	}
	n.Run("ip", "route", "replace", "default", "dev", "veth0")
	n.Run("ip", "route", "replace", "default", "via", "fd09::2", "dev", "veth0")
	n.Run("ip", "addr", "add", "fe80::1/64", "dev", "veth0", "nodad")
	n.pod.Run("ip", "addr", "add", "fe80::2/64", "dev", "eth0", "nodad")
	n.pod.Run("ip", "route", "replace", "default", "via", "fe80::1", "dev", "eth0")
	n.pod.Run("ip", "route", "add", "fd09::1", "via", "fe80::1", "dev", "eth0")
	cfg := n.config()
	cfg.Port = n.freePort()
	c, err := capture.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	listeners, err := c.Listen()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range listeners {
		nettest.Serve(t, l, original)
	}
	if err := c.SetReal([]netip.AddrPort{netip.MustParseAddrPort("10.77.0.7:80"), netip.MustParseAddrPort("[fd77::7]:80")}); err != nil {
		t.Fatal(err)
	}
	run(t, c)
	for _, to := range []string{"198.18.0.1:80", "[fd68:6472::1]:80", "10.77.0.7:80", "[fd77::7]:80"} {
		wantOutcome(t, "node to "+to, n.Dial(to), "captured "+to)
		wantOutcome(t, "pod to "+to, n.pod.Dial(to), "captured "+to)
	}
	for _, to := range []string{"10.9.0.1", "fd09::1"} {
		to := netip.AddrPortFrom(netip.MustParseAddr(to), cfg.Port).String()
		wantOutcome(t, "pod to the agent's port at "+to, n.pod.Dial(to), nettest.Refused)
	}
}

// TestOneSourcePort expects the original destinations of connections to be told apart that come from the same port.
func TestOneSourcePort(t *testing.T) {
	n := newNode(t)
	release := make(chan struct{})
	cfg := n.config()
	cfg.Port = n.listen("127.0.0.1:0", func(c net.Conn) string {
		<-release
		return original(c)
	})
	start(t, cfg)
	source := net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: int(n.freePort())}
	d := net.Dialer{LocalAddr: &source, Timeout: 3 * time.Second, Control: func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) { unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) })
	}}
	to := []string{"198.18.0.1:80", "198.18.0.2:80", "198.18.0.1:81"}
	var conns []net.Conn
	for _, to := range to {
		var c net.Conn
		if err := n.Do(func() (err error) {
			c, err = d.Dial("tcp", to)
			return err
		}); err != nil {
			t.Fatalf("%s: %v", to, err)
		}
		defer c.Close()
		conns = append(conns, c)
	}
	close(release)
	for i, c := range conns {
		c.SetDeadline(time.Now().Add(3 * time.Second))
		said, err := io.ReadAll(c)
		wantOutcome(t, to[i], nettest.Outcome(string(said), err), "captured "+to[i])
	}
}

// TestAgentsOwnAddress expects connections to the agent's own port to be left alone even if that is named as a real address.
func TestAgentsOwnAddress(t *testing.T) {
	n := newNode(t)
	c, _ := start(t, n.config())
	to := fmt.Sprintf("10.9.0.1:%d", n.port)
	if err := c.SetReal([]netip.AddrPort{netip.MustParseAddrPort(to)}); err != nil {
		t.Fatal(err)
	}
	wantOutcome(t, "node to "+to, n.Dial(to), "captured "+to) // which is where it is
	st, err := c.Status()
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range st.Rules {
		if r.What == "redirect real IPv4" && r.Packets > 0 {
			t.Errorf("it was redirected: %+v", r)
		}
	}
}

// TestEstablished expects connections that were there before to stay where they are, though the kernel knew nothing of them
// until connections were captured.
func TestEstablished(t *testing.T) {
	n := newNode(t)
	l, err := capture.ListenIn(n.pod.Path, ":8080")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var addrs []netip.AddrPort
	var near, far []net.Conn
	for _, to := range []string{"10.9.0.2:8080", "[fd09::2]:8080"} {
		addrs = append(addrs, netip.MustParseAddrPort(to))
		near = append(near, n.connect(to))
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		far = append(far, c)
	}
	c, err := capture.New(n.config())
	if err != nil {
		t.Fatal(err)
	}
	if err := c.SetReal(addrs); err != nil {
		t.Fatal(err)
	}
	run(t, c)
	for i := range near {
		far[i].SetDeadline(time.Now().Add(3 * time.Second))
		if _, err := io.WriteString(near[i], "x"); err != nil {
			t.Error(err)
		}
		if _, err := io.ReadFull(far[i], make([]byte, 1)); err != nil {
			t.Errorf("%v: %v", addrs[i], err)
		}
		wantOutcome(t, "a new one", n.Dial(addrs[i].String()), "captured "+addrs[i].String())
	}
}

// TestOtherTraffic expects what is no TCP to be refused at virtual addresses.
func TestOtherTraffic(t *testing.T) {
	n := newNode(t)
	start(t, n.config())
	for _, s := range []*space{n.space, n.pod} {
		for _, to := range []string{"198.18.0.1:80", "[fd68:6472::1]:80"} {
			err := s.Do(func() error {
				c, err := net.Dial("udp", to)
				if err != nil {
					return err
				}
				defer c.Close()
				c.SetDeadline(time.Now().Add(3 * time.Second))
				if _, err := c.Write([]byte("x")); err != nil {
					return err
				}
				_, err = c.Read(make([]byte, 1))
				return err
			})
			if !errors.Is(err, syscall.ECONNREFUSED) && !errors.Is(err, syscall.EPERM) {
				t.Errorf("UDP to %s: %v, want it refused", to, err)
			}
		}
	}
}

// TestExempt expects connections that are exempt to go where they would: to virtual addresses they are refused.
func TestExempt(t *testing.T) {
	n := newNode(t)
	group := newCgroup(t)
	cfg := n.config()
	cfg.ExemptUIDs = []uint32{4242, 4243, 4242}
	cfg.ExemptPorts = []uint16{2222, 22}
	cfg.ExemptCgroups = []string{group.path}
	start(t, cfg)
	const to = "198.18.0.1:80"
	wantOutcome(t, "nobody exempt", n.Dial(to), "captured "+to)
	wantOutcome(t, "an exempt port", n.Dial("198.18.0.1:2222"), nettest.Refused)
	wantOutcome(t, "an exempt port, from a pod", n.pod.Dial("198.18.0.1:22"), nettest.Refused)
	wantOutcome(t, "the agent's mark", n.dialAs(to, func(fd int) error {
		return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, capture.DefaultMark)
	}, 0), nettest.Refused)
	wantOutcome(t, "another mark", n.dialAs(to, func(fd int) error {
		return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, capture.DefaultMark+1)
	}, 0), "captured "+to)
	wantOutcome(t, "an exempt user", n.dialAs(to, nil, 4242), nettest.Refused)
	wantOutcome(t, "another user", n.dialAs(to, nil, 4244), "captured "+to)
	wantOutcome(t, "an exempt control group", n.dialFrom(group.folder, to), nettest.Refused)
	wantOutcome(t, "no control group", n.dialFrom(filepath.Dir(group.folder), to), "captured "+to)
}

// dialAs dials as another user.
func (s *space) dialAs(to string, prepare func(fd int) error, uid uintptr) string {
	var said string
	err := s.Do(func() (err error) {
		if uid != 0 { // of this thread only, unlike by syscall.Setresuid
			if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uid, uid, uid); errno != 0 {
				return errno
			}
		}
		said, err = nettest.Dial(to, prepare)
		return err
	})
	return nettest.Outcome(said, err)
}

// dialFrom dials from another process, in a control group.
func (s *space) dialFrom(folder, to string) string {
	s.T.Helper()
	group, err := os.Open(folder)
	if err != nil {
		s.T.Fatal(err)
	}
	defer group.Close()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), application+"="+to)
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(group.Fd())}
	var out []byte
	err = s.Do(func() (err error) {
		out, err = cmd.CombinedOutput()
		return err
	})
	if err != nil {
		s.T.Fatalf("%v: %s", err, out)
	}
	return string(out)
}

type testCgroup struct{ folder, path string }

func newCgroup(t *testing.T) testCgroup {
	t.Helper()
	out, err := exec.Command("findmnt", "-n", "-t", "cgroup2", "-o", "TARGET").Output()
	root, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
	if err != nil {
		t.Fatalf("find control groups of version 2: %v", err)
	}
	outer := fmt.Sprintf("headroom-test-%d", os.Getpid())
	inner := filepath.Join(root, outer, "inner")
	if err := os.MkdirAll(inner, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, folder := range []string{inner, filepath.Dir(inner)} {
			if err := os.Remove(folder); err != nil {
				t.Error(err)
			}
		}
	})
	return testCgroup{inner, outer + "/inner"}
}

// TestDNS expects queries to come to the agent, from the node and, if asked for, from pods.
func TestDNS(t *testing.T) {
	n := newNode(t)
	cfg := n.config()
	cfg.RedirectDNS, cfg.DNSPort = true, n.dns()
	_, stop := start(t, cfg)
	for _, to := range []string{"10.9.0.2:53", "[fd09::2]:53", "127.0.0.53:53"} {
		wantOutcome(t, "UDP from the node to "+to, n.query(to), "an answer")
		wantOutcome(t, "TCP from the node to "+to, n.Dial(to), "captured "+to)
	}
	if got := n.pod.Dial("10.9.0.1:53"); got != nettest.Refused {
		t.Errorf("a query of a pod: %q", got)
	}
	stop()
	cfg.RedirectPodDNS = true
	start(t, cfg)
	wantOutcome(t, "UDP from a pod", n.pod.query("10.9.0.1:53"), "an answer")
	wantOutcome(t, "TCP from a pod", n.pod.Dial("10.9.0.1:53"), "captured 10.9.0.1:53")
}

// TestDNSOfLastingSockets expects the queries of a program that keeps its socket to be redirected as soon as capture begins.
func TestDNSOfLastingSockets(t *testing.T) {
	n := newNode(t)
	n.nft("table inet firewall {", "chain c {", "type filter hook output priority 0", "ct state new accept", "}", "}") // has the kernel track connections
	cfg := n.config()
	cfg.RedirectDNS, cfg.DNSPort = true, n.dns()
	for _, to := range []string{"10.9.0.2:53", "[fd09::2]:53"} {
		n.pod.answer(netip.MustParseAddrPort(to), "no agent")
		var c net.Conn
		if err := n.Do(func() (err error) { c, err = net.Dial("udp", to); return err }); err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		wantOutcome(t, "before", nettest.Outcome(ask(c)), "no agent")
		_, stop := start(t, cfg)
		wantOutcome(t, "while it captures", nettest.Outcome(ask(c)), "an answer")
		stop()
	}
}

// dns answers everything over UDP at the agent's port.
func (n *node) dns() uint16 {
	n.T.Helper()
	for _, addr := range []string{"127.0.0.1", "10.9.0.1", "::1"} {
		n.answer(netip.AddrPortFrom(netip.MustParseAddr(addr), n.port), "an answer")
	}
	return n.port
}

// answer answers everything that comes to an address by UDP.
func (s *space) answer(at netip.AddrPort, with string) {
	s.T.Helper()
	var c net.PacketConn
	err := s.Do(func() (err error) {
		c, err = net.ListenPacket("udp", at.String())
		return err
	})
	if err != nil {
		s.T.Fatal(err)
	}
	s.T.Cleanup(func() { c.Close() })
	go func() {
		b := make([]byte, 100)
		for {
			_, from, err := c.ReadFrom(b)
			if err != nil {
				return
			}
			c.WriteTo([]byte(with), from)
		}
	}()
}

// query sends something by UDP, and returns the answer.
func (s *space) query(to string) string {
	var said string
	err := s.Do(func() error {
		c, err := net.Dial("udp", to)
		if err != nil {
			return err
		}
		defer c.Close()
		said, err = ask(c)
		return err
	})
	return nettest.Outcome(said, err)
}

// ask sends something, and returns the answer.
func ask(c net.Conn) (string, error) {
	c.SetDeadline(time.Now().Add(3 * time.Second))
	c.Write([]byte("a query"))
	b := make([]byte, 100)
	k, err := c.Read(b)
	return string(b[:k]), err
}

// TestKilled kills a process that captures. Virtual addresses are refused at once, whoever listens at their ports; real ones
// are reached; and the next agent takes over.
func TestKilled(t *testing.T) {
	n := newNode(t)
	before := n.everything()
	n.listen(":80", constant("the wrong one"))
	n.pod.listen(":80", constant("the pod itself"))
	kill := n.startProcess(n.config())
	for _, to := range []string{"198.18.0.1:80", "[fd68:6472::1]:80"} {
		wantOutcome(t, "before, "+to, n.Dial(to), "captured "+to)
	}
	kill()
	killed := time.Now()
	for _, to := range []string{"198.18.0.1:80", "[fd68:6472::1]:80"} {
		wantOutcome(t, "the node to "+to, n.Dial(to), nettest.Refused)
		wantOutcome(t, "the pod to "+to, n.pod.Dial(to), nettest.Refused)
	}
	if took := time.Since(killed); took > time.Second {
		t.Errorf("it took %v", took)
	}
	wantOutcome(t, "a real address", n.Dial("10.9.0.2:80"), "the pod itself")

	cfg := n.config()
	cfg.IPv4 = netip.MustParsePrefix("198.18.0.0/16") // another one than its predecessor's
	_, stop := start(t, cfg)
	wantOutcome(t, "the next agent", n.Dial("198.18.0.1:80"), "captured 198.18.0.1:80")
	stop()
	if after := n.everything(); after != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}
}

// TestKilledWhileConnected expects applications that wait on a captured connection to see it end at once when the agent is
// killed.
func TestKilledWhileConnected(t *testing.T) {
	n := newNode(t)
	cfg := n.config()
	cfg.Port = n.freePort()
	kill := n.startProcess(cfg)
	var waiting []net.Conn
	for _, s := range []*space{n.space, n.pod} {
		for _, to := range []string{"198.18.0.1:80", "[fd68:6472::1]:80"} {
			c := s.connect(to)
			if _, err := io.ReadFull(c, make([]byte, len("held"))); err != nil {
				t.Fatal(err)
			}
			waiting = append(waiting, c)
		}
	}
	kill()
	for _, c := range waiting {
		c.SetDeadline(time.Now().Add(time.Second))
		if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%v to %v: %v, want it ended", c.LocalAddr(), c.RemoteAddr(), err)
		}
	}
}

func (s *space) connect(to string) net.Conn {
	s.T.Helper()
	var c net.Conn
	err := s.Do(func() (err error) {
		c, err = net.DialTimeout("tcp", to, 3*time.Second)
		return err
	})
	if err != nil {
		s.T.Fatal(err)
	}
	s.T.Cleanup(func() { c.Close() })
	return c
}

// TestRemove expects all that a killed agent has left to be removed, and named, and nothing else.
func TestRemove(t *testing.T) {
	s := newSpace(t)
	s.nft("table inet mine {", "chain c {", "type nat hook output priority -100", "ip daddr 10.96.0.10 tcp dport 80 counter redirect to :9", "}", "}")
	s.Run("ip", "route", "add", "local", "10.10.0.0/24", "dev", "lo")
	before := s.everything()
	n := node{space: s, port: 15001}
	if removed, err := capture.Remove(s.Path); err != nil || len(removed) != 0 {
		t.Errorf("removed %q, %v, though nothing was there", removed, err)
	}
	kill := s.startProcess(n.config())
	if _, err := capture.Remove(s.Path); err == nil || !strings.Contains(err.Error(), "another agent captures") {
		t.Errorf("removing what a running agent needs: %v", err)
	}
	kill()
	if s.everything() == before {
		t.Error("the killed agent left nothing")
	}
	removed, err := capture.Remove(s.Path)
	want := []string{"route local 198.18.0.0/15 dev lo", "route local fd68:6472::/96 dev lo", "table inet headroom-guard"}
	if err != nil || !slices.Equal(removed, want) {
		t.Errorf("removed %q, %v", removed, err)
	}
	if after := s.everything(); after != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}
}

// TestOlderVersion expects tables of an older version to be replaced, though nobody owns them, and those of others to be
// left alone.
func TestOlderVersion(t *testing.T) {
	n := newNode(t)
	old := func(comment string) {
		n.nft("table inet headroom {", "chain old {", "type nat hook output priority -150",
			fmt.Sprintf("tcp dport 80 counter redirect to :9 comment %q", comment), "}", "}")
	}
	old("headroom v99: redirect")
	_, stop := start(t, n.config())
	wantOutcome(t, "in place of the old", n.Dial("198.18.0.1:80"), "captured 198.18.0.1:80")
	stop()
	old("headroom v99: redirect")
	if removed, err := capture.Remove(n.Path); err != nil || !slices.Equal(removed, []string{"table inet headroom"}) {
		t.Errorf("removed %q, %v", removed, err)
	}
	old("redirect")
	before := n.everything()
	if err := startError(t, n.config()); !strings.Contains(err.Error(), "was not made by an agent") {
		t.Errorf("a table of somebody else: %v", err)
	}
	if _, err := capture.Remove(n.Path); err == nil || !strings.Contains(err.Error(), "was not made by an agent") {
		t.Errorf("removing a table of somebody else: %v", err)
	}
	if n.everything() != before {
		t.Error("something has changed")
	}
}

// TestTwo expects the second agent in a namespace to be told of the first, and nothing to change.
func TestTwo(t *testing.T) {
	n := newNode(t)
	start(t, n.config())
	before := n.everything()
	cfg := n.config()
	cfg.Port++
	if err := startError(t, cfg); !strings.Contains(err.Error(), "another agent captures in this network namespace") {
		t.Errorf("the second: %v", err)
	}
	if n.everything() != before {
		t.Error("something has changed")
	}
	wantOutcome(t, "the first", n.Dial("198.18.0.1:80"), "captured 198.18.0.1:80")
}

// TestRangeTaken expects an error, and no change, if part of a range is used here.
func TestRangeTaken(t *testing.T) {
	n := newNode(t)
	n.Run("ip", "route", "add", "198.18.7.0/24", "via", "10.9.0.2")
	n.Run("ip", "route", "add", "table", "77", "198.51.100.0/24", "via", "10.9.0.2")
	n.Run("ip", "route", "add", "0.0.0.0/1", "via", "10.9.0.2") // a default route in parts
	n.Run("ip", "route", "add", "128.0.0.0/1", "via", "10.9.0.2")
	before := n.everything()
	tests := []struct{ four, six, want string }{
		{"198.18.0.0/15", "", "there is a route to 198.18.7.0/24 by interface veth0 in table 254"},
		{"198.51.100.128/25", "", "by interface veth0 in table 77"},
		{"10.9.0.0/16", "", "overlaps 10.9.0.0/24, the network of interface veth0"},
		{"", "fd09::/96", "overlaps fd09::/64, the network of interface veth0"},
	}
	for _, tt := range tests {
		cfg := capture.Config{Port: 1, Netns: n.Path}
		if tt.four != "" {
			cfg.IPv4 = netip.MustParsePrefix(tt.four)
		}
		if tt.six != "" {
			cfg.IPv6 = netip.MustParsePrefix(tt.six)
		}
		if err := startError(t, cfg); !strings.Contains(err.Error(), tt.want) {
			t.Errorf("got error %v, want one with %q", err, tt.want)
		}
	}
	if n.everything() != before {
		t.Error("something has changed")
	}
	cfg := n.config()
	cfg.IPv4 = netip.MustParsePrefix("198.19.0.0/16")
	start(t, cfg)
}

// TestWithoutIPv6 expects IPv4 to be captured where IPv6 is switched off.
func TestWithoutIPv6(t *testing.T) {
	n := newNode(t)
	n.Run("sh", "-c", "echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6")
	start(t, n.config())
	wantOutcome(t, "IPv4", n.Dial("198.18.0.1:80"), "captured 198.18.0.1:80")
}

// TestLoopbackDown expects to be told how to bring it up.
func TestLoopbackDown(t *testing.T) {
	n := newNode(t)
	n.Run("ip", "link", "set", "lo", "down")
	if err := startError(t, n.config()); !strings.Contains(err.Error(), "ip link set lo up") {
		t.Error(err)
	}
}

// TestNotAllowed expects one error that says what is missing.
func TestNotAllowed(t *testing.T) {
	s := newSpace(t)
	cfg := (&node{space: s, port: 1}).config()
	cfg.Netns = ""
	err := s.Do(func() error {
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var none [2]unix.CapUserData
		if err := unix.Capset(&header, &none[0]); err != nil { // of this thread
			t.Error(err)
		}
		c, err := capture.New(cfg)
		if err != nil {
			return err
		}
		return c.Run(t.Context())
	})
	if err == nil || !strings.Contains(err.Error(), "capture needs CAP_NET_ADMIN: run the agent as root") {
		t.Errorf("got %v", err)
	}
}

// TestMend expects what others have removed to be put back.
func TestMend(t *testing.T) {
	n := newNode(t)
	c, stop := start(t, n.config())
	whole := n.everything()
	n.Run("nft", "flush", "ruleset")
	n.Run("ip", "route", "del", "local", "198.18.0.0/15", "dev", "lo", "table", "local")
	n.Run("ip", "-6", "route", "del", "local", "fd68:6472::/96", "dev", "lo", "table", "local")
	if n.everything() == whole {
		t.Fatal("nothing was removed")
	}
	if err := c.Mend(); err != nil {
		t.Fatal(err)
	}
	if mended := n.everything(); sorted(mended) != sorted(whole) {
		t.Errorf("before:\n%s\nmended:\n%s", whole, mended)
	}
	wantOutcome(t, "mended", n.Dial("198.18.0.1:80"), "captured 198.18.0.1:80")
	stop()
}

func sorted(s string) string {
	lines := strings.Split(s, "\n")
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// TestRelease expects new connections to be refused, and those that are captured to go on.
func TestRelease(t *testing.T) {
	n := newNode(t)
	release := make(chan struct{})
	cfg := n.config()
	cfg.Port = n.listen("127.0.0.1:0", func(c net.Conn) string {
		<-release
		return "still captured"
	})
	c, _ := start(t, cfg)
	held := make(chan string)
	go func() { held <- n.Dial("198.18.0.1:80") }()
	for waiting := true; waiting; {
		st, err := c.Status()
		if err != nil {
			t.Fatal(err)
		}
		waiting = !slices.ContainsFunc(st.Rules, func(r capture.Rule) bool {
			return r.Chain == "output" && r.What == "redirect virtual IPv4" && r.Packets == 1
		})
	}
	if err := c.Release(); err != nil {
		t.Fatal(err)
	}
	wantOutcome(t, "a new connection", n.Dial("198.18.0.1:80"), nettest.Refused)
	if err := startError(t, cfg); !strings.Contains(err.Error(), "another agent captures") {
		t.Errorf("a second agent: %v", err)
	}
	if st, err := c.Status(); err != nil || st.Owner == 0 {
		t.Errorf("status: %+v, %v", st, err)
	}
	close(release)
	wantOutcome(t, "a captured one", <-held, "still captured")
}

// TestReleaseBeforeRun expects nothing to be captured from the start.
func TestReleaseBeforeRun(t *testing.T) {
	n := newNode(t)
	n.pod.listen(":8080", constant("the pod itself"))
	c, err := capture.New(n.config())
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Release(); err != nil {
		t.Fatal(err)
	}
	run(t, c)
	if err := c.SetReal([]netip.AddrPort{netip.MustParseAddrPort("10.9.0.2:8080")}); err != nil {
		t.Error(err)
	}
	wantOutcome(t, "a virtual address", n.Dial("198.18.0.1:80"), nettest.Refused)
	wantOutcome(t, "a real address", n.Dial("10.9.0.2:8080"), "the pod itself")
	if st, err := c.Status(); err != nil || st.Owner == 0 {
		t.Errorf("status: %+v, %v", st, err)
	}
}

// TestManyRealAddresses prints how long changes take, and expects each address to be captured only while it is wanted.
func TestManyRealAddresses(t *testing.T) {
	n := newNode(t)
	var addrs []netip.AddrPort
	for i := range 12_000 {
		addr := netip.AddrFrom4([4]byte{10, 9, byte(i >> 8), byte(i)})
		if i%2 == 1 {
			addr = netip.AddrFrom16([16]byte{0xfd, 9, 14: byte(i >> 8), 15: byte(i)})
		}
		addrs = append(addrs, netip.AddrPortFrom(addr, uint16(1+i)))
	}
	c, _ := start(t, n.config())
	set := func(what string, addrs []netip.AddrPort) {
		t.Helper()
		began := time.Now()
		if err := c.SetReal(addrs); err != nil {
			t.Fatal(err)
		}
		t.Logf("%s: %v", what, time.Since(began).Round(10*time.Microsecond))
		st, err := c.Status()
		if err != nil {
			t.Fatal(err)
		}
		elements := 0
		for _, s := range st.Sets {
			if s.Name == "real4" || s.Name == "real6" {
				elements += s.Elements
			}
		}
		if elements != len(addrs) {
			t.Errorf("%s: %d elements, want %d", what, elements, len(addrs))
		}
	}
	set("10,000 at once", addrs[:10_000])
	set("1,000 others", addrs[1000:11_000])
	set("1,000 others again", addrs[2000:12_000])
	set("one more", addrs[1999:12_000])
	set("no change", addrs[1999:12_000])
	wantOutcome(t, "one of them", n.Dial(addrs[6000].String()), "captured "+addrs[6000].String())
	set("none", nil)
	c.SetReal(addrs[:1])
	if err := c.SetReal([]netip.AddrPort{netip.MustParseAddrPort("10.9.0.8:80"), {}}); err == nil {
		t.Error("no error for an address that is none")
	}
	wantOutcome(t, "one beside an address that is none", n.Dial("10.9.0.8:80"), "captured 10.9.0.8:80")
}

// TestSetBeforeRun expects addresses that were set before to be captured from the start.
func TestSetBeforeRun(t *testing.T) {
	n := newNode(t)
	c, err := capture.New(n.config())
	if err != nil {
		t.Fatal(err)
	}
	if err := c.SetReal([]netip.AddrPort{netip.MustParseAddrPort("[::ffff:10.9.0.7]:80")}); err != nil {
		t.Fatal(err)
	}
	run(t, c)
	wantOutcome(t, "a real address", n.Dial("10.9.0.7:80"), "captured 10.9.0.7:80")
}

// TestStatus expects to be told what is there, and how often it was of use.
func TestStatus(t *testing.T) {
	n := newNode(t)
	cfg := n.config()
	cfg.ExemptUIDs, cfg.ExemptPorts = []uint32{7}, []uint16{22, 23}
	n.nft("table ip early {", "chain c {", "type nat hook output priority -110", "ip daddr 10.1.1.1 accept", "}",
		"chain d {", "type nat hook prerouting priority -110", "}", "}",
		"table ip same {", "chain c {", "type nat hook output priority -101", "ip daddr 10.1.1.1 accept", "}", "}")
	c, stop := start(t, cfg)
	n.Dial("198.18.0.1:80")
	n.Dial("198.18.0.1:80")
	n.Dial("198.18.0.1:22")
	st, err := c.Status()
	if err != nil {
		t.Fatal(err)
	}
	if st.Owner == 0 || st.Version != 1 {
		t.Errorf("owner %d, version %d", st.Owner, st.Version)
	}
	counts := map[string]uint64{}
	for _, r := range st.Rules {
		counts[r.Table+" "+r.Chain+" "+r.What] = r.Packets
	}
	for rule, want := range map[string]uint64{
		"inet headroom output redirect virtual IPv4":            2,
		"inet headroom prerouting redirect virtual IPv4":        0,
		"inet headroom output leave exempt ports":               1,
		"inet headroom-guard output refuse TCP to virtual IPv4": 1,
	} {
		if got, ok := counts[rule]; !ok || got != want {
			t.Errorf("%s: %d, %v, want %d", rule, got, ok, want)
		}
	}
	wantStatus(t, st)
	stop()
	if st, err = c.Status(); err != nil || st.Owner != 0 || len(st.Chains) != 0 || len(st.Routes) != 0 {
		t.Errorf("afterwards: %+v, %v", st, err)
	}
}

func wantStatus(t *testing.T, st capture.Status) {
	t.Helper()
	var chains []string
	for _, c := range st.Chains {
		chains = append(chains, fmt.Sprintf("%s %s %s %d", c.Table, c.Name, c.Hook, c.Priority))
	}
	slices.Sort(chains)
	if want := []string{
		"inet headroom output output -101", "inet headroom prerouting prerouting -101", "inet headroom-guard forward forward 0",
		"inet headroom-guard input input 0", "inet headroom-guard output output 0", "inet headroom-guard translate output -101",
	}; !slices.Equal(chains, want) {
		t.Errorf("chains %q", chains)
	}
	early := capture.Chain{Table: "ip early", Name: "c", Hook: "output", Priority: -110, Rules: 1}
	same := capture.Chain{Table: "ip same", Name: "c", Hook: "output", Priority: -101, Rules: 1}
	if !slices.Equal(st.Before, []capture.Chain{early, same}) {
		t.Errorf("chains before: %+v", st.Before)
	}
	if len(st.Routes) != 2 || st.Exempt.Mark != capture.DefaultMark || !slices.Equal(st.Exempt.UIDs, []uint32{7}) {
		t.Errorf("routes %v, exempt %+v", st.Routes, st.Exempt)
	}
	for _, s := range st.Sets {
		if want := map[string]int{"exempt_uids": 1, "exempt_ports": 2, "real4": 0, "real6": 0}[s.Name]; s.Elements != want {
			t.Errorf("set %s has %d elements, want %d", s.Name, s.Elements, want)
		}
	}
}

// TestBesideOthers expects both to work: capture, and a table that directs other addresses at the same hooks, as kube-proxy
// does, whichever came first.
func TestBesideOthers(t *testing.T) {
	proxy := []string{
		"table ip kube-proxy {",
		"map service-ips {", "type ipv4_addr . inet_proto . inet_service : verdict",
		"elements = { 10.96.0.10 . tcp . 80 : goto service }", "}",
		"chain service {", "numgen random mod 1 vmap { 0 : goto endpoint }", "}",
		"chain endpoint {", "meta l4proto tcp dnat to 10.9.0.2:8080", "}",
		"chain services {", "ip daddr . meta l4proto . th dport vmap @service-ips", "}",
		"chain nat-output {", "type nat hook output priority -100", "jump services", "}",
		"chain nat-prerouting {", "type nat hook prerouting priority -100", "jump services", "}",
		"chain nat-postrouting {", "type nat hook postrouting priority 100", "ip daddr 10.9.0.2 masquerade", "}",
		"}",
	}
	for _, first := range []bool{true, false} {
		n := newNode(t)
		n.pod.listen(":8080", constant("the pod itself"))
		if first {
			n.nft(proxy...)
		}
		c, _ := start(t, n.config())
		if !first {
			n.nft(proxy...)
		}
		wantOutcome(t, "a virtual address", n.Dial("198.18.0.1:80"), "captured 198.18.0.1:80")
		wantOutcome(t, "a virtual address, from the pod", n.pod.Dial("198.18.0.1:80"), "captured 198.18.0.1:80")
		wantOutcome(t, "an address of the other", n.Dial("10.96.0.10:80"), "the pod itself")
		if st, err := c.Status(); err != nil || len(st.Before) != 0 {
			t.Errorf("status: %+v, %v", st.Before, err)
		}
	}
}

// TestBesideIPTables expects capture to work beside rules made by iptables as kube-proxy, Docker and ufw make theirs, whoever
// came first, and to leave them byte for byte.
func TestBesideIPTables(t *testing.T) {
	for _, first := range []bool{true, false} {
		n := newNode(t)
		n.listen(":8080", constant("the node itself"))
		n.pod.listen(":8080", constant("the pod itself"))
		if first {
			n.iptables(n.port)
		}
		before := n.stateless()
		c, stop := start(t, n.config())
		if err := c.SetReal([]netip.AddrPort{netip.MustParseAddrPort("10.9.0.2:8080"), netip.MustParseAddrPort("10.96.0.11:80")}); err != nil {
			t.Fatal(err)
		}
		if !first {
			n.iptables(n.port)
		}
		for port, what := range map[string]string{"80": "a virtual address", "8081": "at a port of a container", "30080": "at a port of a node"} {
			wantOutcome(t, what, n.Dial("198.18.0.1:"+port), "captured 198.18.0.1:"+port)
			wantOutcome(t, what+", from the pod", n.pod.Dial("198.18.0.1:"+port), "captured 198.18.0.1:"+port)
		}
		wantOutcome(t, "IPv6", n.Dial("[fd68:6472::1]:80"), "captured [fd68:6472::1]:80")
		wantOutcome(t, "a real address", n.Dial("10.9.0.2:8080"), "captured 10.9.0.2:8080")
		wantOutcome(t, "a real address that others translate, too", n.Dial("10.96.0.11:80"), "captured 10.96.0.11:80")
		wantOutcome(t, "a port of a container", n.Dial("10.9.0.1:8081"), "the pod itself")
		wantOutcome(t, "a port of a node", n.Dial("10.9.0.1:30080"), "the pod itself")
		stop()
		wantOutcome(t, "a service of Kubernetes", n.Dial("10.96.0.10:80"), "the pod itself")
		if got := n.stateless(); first && got != before {
			t.Errorf("afterwards there is\n%s\nwant\n%s", got, before)
		}
		if got := n.stateless(); strings.Contains(got, "headroom") {
			t.Errorf("afterwards there is\n%s", got)
		}
	}
}

// stateless is all that there is of rules, without the counters.
func (s *space) stateless() string {
	s.T.Helper()
	return s.Run("nft", "--stateless", "list", "ruleset")
}

// iptables makes rules such as those of kube-proxy, Docker and ufw. The last let in what comes to a port.
func (s *space) iptables(port uint16) {
	s.T.Helper()
	s.RunWith(strings.ReplaceAll(iptablesRules, "AGENT", fmt.Sprint(port)), "iptables-restore")
	s.RunWith("*filter\n:INPUT DROP [0:0]\n-A INPUT -i lo -j ACCEPT\nCOMMIT\n", "ip6tables-restore")
}

const iptablesRules = `*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:DOCKER - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-SVC-A - [0:0]
:KUBE-SEP-A - [0:0]
:KUBE-SEP-B - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-POSTROUTING - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-A OUTPUT ! -d 127.0.0.0/8 -m addrtype --dst-type LOCAL -j DOCKER
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A DOCKER -p tcp -m tcp --dport 8081 -j DNAT --to-destination 10.9.0.2:8080
-A KUBE-SERVICES -d 10.96.0.10/32 -p tcp -m comment --comment "default/a cluster IP" -m tcp --dport 80 -j KUBE-SVC-A
-A KUBE-SERVICES -d 10.96.0.11/32 -p tcp -m comment --comment "default/b cluster IP" -m tcp --dport 80 -j KUBE-SVC-A
-A KUBE-SERVICES -m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-NODEPORTS -p tcp -m comment --comment "default/a" -m tcp --dport 30080 -j KUBE-SVC-A
-A KUBE-SVC-A ! -s 10.9.0.0/24 -p tcp -j KUBE-MARK-MASQ
-A KUBE-SVC-A -m comment --comment "default/a -> 10.9.0.2:8080" -m statistic --mode random --probability 0.50000000000 -j KUBE-SEP-A
-A KUBE-SVC-A -m comment --comment "default/a -> 10.9.0.2:8080" -j KUBE-SEP-B
-A KUBE-SEP-A -p tcp -m tcp -j DNAT --to-destination 10.9.0.2:8080
-A KUBE-SEP-B -p tcp -m tcp -j DNAT --to-destination 10.9.0.2:8080
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -j MASQUERADE --random-fully
COMMIT
*filter
:INPUT DROP [0:0]
:FORWARD DROP [0:0]
:OUTPUT ACCEPT [0:0]
:DOCKER-USER - [0:0]
:ufw-before-input - [0:0]
:ufw-user-input - [0:0]
-A INPUT -j ufw-before-input
-A INPUT -j ufw-user-input
-A FORWARD -j DOCKER-USER
-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A DOCKER-USER -j RETURN
-A ufw-before-input -i lo -j ACCEPT
-A ufw-before-input -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A ufw-before-input -m conntrack --ctstate INVALID -j DROP
-A ufw-user-input -p tcp -m tcp --dport AGENT -j ACCEPT
COMMIT
`

// TestListenIn expects an error that names the namespace, and connections there and nowhere else.
func TestListenIn(t *testing.T) {
	if _, err := capture.ListenIn("/run/netns/no-such-namespace", "127.0.0.1:0"); err == nil || !strings.Contains(err.Error(), "no-such-namespace") {
		t.Errorf("a namespace that isn't there: %v", err)
	}
	if _, err := capture.ListenIn("/dev/null", "127.0.0.1:0"); err == nil || !strings.Contains(err.Error(), "/dev/null") {
		t.Errorf("no namespace: %v", err)
	}
	a, b := newSpace(t), newSpace(t)
	port := a.listen("127.0.0.1:0", constant("here"))
	to := fmt.Sprintf("127.0.0.1:%d", port)
	wantOutcome(t, "there", a.Dial(to), "here")
	wantOutcome(t, "elsewhere", b.Dial(to), nettest.Refused)
}

// TestNoSuchCgroup expects to be told of it.
func TestNoSuchCgroup(t *testing.T) {
	n := newNode(t)
	cfg := n.config()
	cfg.ExemptCgroups = []string{"no/such.group"}
	if err := startError(t, cfg); !strings.Contains(err.Error(), `exempt control group "no/such.group"`) {
		t.Error(err)
	}
}
