//go:build linux

package meshtest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// Check says what is missing on this machine.
func Check() error {
	if os.Getuid() != 0 {
		return errors.New("network namespaces want root: run the tests as root, or leave these out with -short")
	}
	packages := map[string]string{
		"ip": "iproute2", "nft": "nftables", "curl": "curl", "setpriv": "util-linux", "unshare": "util-linux",
	}
	var missing []error
	for program, of := range packages {
		if _, err := exec.LookPath(program); err != nil {
			missing = append(missing, fmt.Errorf("%w: install the package %s (`make deps`), or leave these tests out with -short", err, of))
		}
	}
	return errors.Join(missing...)
}

// Network is a bridge in a namespace of its own. Nothing of it is seen from outside.
type Network struct {
	t    testing.TB
	name string // starts the names of its namespaces
}

const (
	// namespaces starts the names of all namespaces. The number of the process follows, which tells those that a killed
	// test left behind from those in use.
	namespaces = "headroom-test-"
	namesDir   = "/run/netns"
	switchName = "switch"
)

// NewNetwork makes a network that is gone when the test ends.
func NewNetwork(t testing.TB) *Network {
	t.Helper()
	if err := Check(); err != nil {
		t.Fatal(err)
	}
	test := strings.ReplaceAll(t.Name(), "/", "-")
	w := &Network{t: t, name: fmt.Sprintf("%s%d-%s-", namespaces, os.Getpid(), test)}
	w.removeStale()
	w.add(switchName)
	w.onSwitch("link", "add", "name", "bridge", "type", "bridge", "mcast_snooping", "0")
	w.onSwitch("link", "set", "dev", "bridge", "up")
	return w
}

// Name returns what the names of the namespaces of the network start with.
func (w *Network) Name() string { return w.name }

// removeStale removes the namespaces of tests that were killed.
func (w *Network) removeStale() {
	all, err := os.ReadDir(namesDir)
	if err != nil {
		return // there are none yet
	}
	for _, entry := range all {
		rest, ours := strings.CutPrefix(entry.Name(), namespaces)
		number, _, _ := strings.Cut(rest, "-")
		pid, err := strconv.Atoi(number)
		if !ours || err != nil || syscall.Kill(pid, 0) == nil {
			continue
		}
		// Another test may be doing the same.
		_ = exec.Command("ip", "netns", "delete", entry.Name()).Run()
	}
}

// add makes a namespace.
func (w *Network) add(name string) {
	w.t.Helper()
	w.run("netns", "add", w.name+name)
	w.t.Cleanup(func() { w.run("netns", "delete", w.name+name) })
}

func (w *Network) onSwitch(args ...string) {
	w.run(append([]string{"-n", w.name + switchName}, args...)...)
}

func (w *Network) run(args ...string) {
	w.t.Helper()
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		w.t.Fatalf("ip %s: %v: %s", strings.Join(args, " "), err, out)
	}
}

// Node is a machine, as far as the network goes.
type Node struct {
	Name string
	Addr netip.Addr

	network   *Network
	namespace *os.File
}

// Node adds a machine with one address, on the network of that size.
func (w *Network) Node(name string, at netip.Prefix) *Node {
	w.t.Helper()
	w.add(name)
	w.onSwitch("link", "add", "name", name, "type", "veth", "peer", "name", "eth0", "netns", w.name+name)
	namespace, err := os.Open(filepath.Join(namesDir, w.name+name))
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { namespace.Close() })
	n := &Node{Name: name, Addr: at.Addr(), network: w, namespace: namespace}
	n.onNode("link", "set", "dev", "lo", "up")
	n.onNode("link", "set", "dev", "eth0", "up")
	n.Readdress(at)
	w.onSwitch("link", "set", "dev", name, "up")
	n.Heal()
	return n
}

// Netns returns the file of the machine's network namespace.
func (n *Node) Netns() string { return n.namespace.Name() }

// Pod adds a machine that reaches all others by the node, as a container does. The node has the address before each of its.
func (n *Node) Pod(name string, at ...netip.Prefix) *Node {
	w := n.network
	w.t.Helper()
	w.add(name)
	n.onNode("link", "add", "name", name, "type", "veth", "peer", "name", "eth0", "netns", w.name+name)
	namespace, err := os.Open(filepath.Join(namesDir, w.name+name))
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { namespace.Close() })
	pod := &Node{Name: name, network: w, namespace: namespace}
	n.forward()
	n.onNode("link", "set", "dev", name, "up")
	pod.onNode("link", "set", "dev", "lo", "up")
	pod.onNode("link", "set", "dev", "eth0", "up")
	for _, p := range at {
		gateway := netip.PrefixFrom(p.Addr().Prev(), p.Bits())
		n.address(gateway, name)
		pod.Readdress(p)
		pod.onNode("route", "add", "default", "via", gateway.Addr().String())
	}
	return pod
}

// forward has the machine pass on what is for others.
func (n *Node) forward() {
	err := n.Do(func() error {
		for _, kind := range []string{"ipv4", "ipv6"} {
			if err := os.WriteFile("/proc/sys/net/"+kind+"/conf/all/forwarding", []byte("1"), 0); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		n.network.t.Fatalf("forwarding on node %s: %v", n.Name, err)
	}
}

func (n *Node) onNode(args ...string) {
	n.network.run(append([]string{"-n", n.network.name + n.Name}, args...)...)
}

// IP runs the command of that name on the machine.
func (n *Node) IP(args ...string) {
	n.network.t.Helper()
	n.onNode(args...)
}

// Readdress gives the machine one more address, from now on its main one.
func (n *Node) Readdress(at netip.Prefix) {
	n.address(at, "eth0")
	n.Addr = at.Addr()
}

func (n *Node) address(at netip.Prefix, dev string) {
	args := []string{"address", "add", at.String(), "dev", dev}
	if at.Addr().Is6() {
		args = append(args, "nodad")
	}
	n.onNode(args...)
}

// Cut takes the machine off the bridge: nothing gets through either way, and neither side is told.
func (n *Node) Cut() { n.network.onSwitch("link", "set", "dev", n.Name, "nomaster") }

// Heal puts the machine on the bridge.
func (n *Node) Heal() { n.network.onSwitch("link", "set", "dev", n.Name, "master", "bridge") }

// Do runs f on a thread that is in the machine's namespace. The sockets that f opens and the processes that it starts
// stay there.
func (n *Node) Do(f func() error) error {
	runtime.LockOSThread()
	before, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		runtime.UnlockOSThread()
		return err
	}
	defer before.Close()
	if err := setNamespace(n.namespace); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("enter the namespace of node %s: %w", n.Name, err)
	}
	err = f()
	if back := setNamespace(before); back != nil {
		return errors.Join(err, back) // the thread stays locked, and so ends with the goroutine
	}
	runtime.UnlockOSThread()
	return err
}

func setNamespace(namespace *os.File) error {
	return unix.Setns(int(namespace.Fd()), unix.CLONE_NEWNET)
}

// Listen is net.Listen on the machine, for TCP.
func (n *Node) Listen(address string) (l net.Listener, err error) {
	err = n.Do(func() error {
		l, err = net.Listen("tcp", address)
		return err
	})
	return l, err
}

// DialContext is net.Dialer's, on the machine. The address must not be a name, which another thread would look up.
func (n *Node) DialContext(ctx context.Context, network, address string) (c net.Conn, err error) {
	err = n.Do(func() error {
		c, err = new(net.Dialer).DialContext(ctx, network, address)
		return err
	})
	return c, err
}
