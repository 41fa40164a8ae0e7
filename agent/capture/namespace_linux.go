package capture

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// namespace is a network namespace. Without a file it is that of this process.
type namespace struct{ *os.File }

func openNamespace(path string) (namespace, error) {
	if path == "" {
		return namespace{}, nil
	}
	f, err := os.Open(path)
	if err != nil {
		return namespace{}, fmt.Errorf("open network namespace: %w", err)
	}
	return namespace{f}, nil
}

// fd returns zero for that of this process.
func (n namespace) fd() int {
	if n.File == nil {
		return 0
	}
	return int(n.Fd())
}

func (n namespace) close() {
	if n.File != nil {
		_ = n.Close()
	}
}

// Listen listens at all addresses to which captured connections come. It may be called before Run, not at the same time.
func (c *Capture) Listen() ([]net.Listener, error) {
	all, err := c.listenAt(c.cfg.Port)
	if !c.cfg.Pod || !errors.Is(err, unix.EADDRINUSE) {
		return all, err
	}
	left, lookErr := leftIn(c.cfg.Netns)
	switch {
	case lookErr != nil:
		return nil, errors.Join(err, lookErr)
	case len(left.owners()) == 0:
		return c.listenAt(c.cfg.Port) // unless it was that of an agent that has just ended, it is none's
	}
	if err := left.busy(c.cfg.TakeOver); err != nil {
		return nil, err
	}
	return c.listenAt(c.cfg.Port + 1)
}

// leftIn returns what there is in a network namespace.
func leftIn(netns string) (left, error) {
	ns, err := openNamespace(netns)
	if err != nil {
		return left{}, err
	}
	defer ns.close()
	k, err := dialKernel(ns)
	if err != nil {
		return left{}, err
	}
	defer k.close()
	return k.left()
}

// Port returns where captured connections come to. Before Listen that is what the configuration says.
func (c *Capture) Port() uint16 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return cmp.Or(c.port, c.cfg.Port)
}

func (c *Capture) listenAt(port uint16) ([]net.Listener, error) {
	var all []net.Listener
	for _, at := range c.cfg.addresses(port) {
		l, err := listenIn(c.cfg.Netns, at.String(), freely)
		if at.Addr().Is6() && (errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EADDRNOTAVAIL)) {
			continue // nor can anything come
		}
		if err != nil {
			for _, l := range all {
				_ = l.Close()
			}
			return nil, fmt.Errorf("listen for captured connections: %w", err)
		}
		all = append(all, l)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.port = port
	return all, nil
}

// Waiting returns how many connections wait to be accepted.
func Waiting(l net.Listener) int {
	var waiting uint32
	if c, ok := l.(syscall.Conn); ok {
		if raw, err := c.SyscallConn(); err == nil {
			_ = raw.Control(func(fd uintptr) {
				if info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
					waiting = info.Unacked // which is this, of a socket that listens
				}
			})
		}
	}
	return int(waiting)
}

// freely lets a socket have an address that this node has not yet.
func freely(network, _ string, c syscall.RawConn) error {
	level, option := unix.SOL_IP, unix.IP_FREEBIND
	if network == "tcp6" {
		level, option = unix.SOL_IPV6, unix.IPV6_FREEBIND
	}
	var err error
	if controlErr := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), level, option, 1) }); controlErr != nil {
		return controlErr
	}
	return os.NewSyscallError("setsockopt", err)
}

// ListenIn listens for TCP connections at an address, not a name, in a network namespace, given as in Config. Connections
// are never of MPTCP, whose original destination the kernel doesn't tell.
func ListenIn(netns, addr string) (net.Listener, error) { return listenIn(netns, addr, nil) }

func listenIn(netns, addr string, control func(network, addr string, c syscall.RawConn) error) (net.Listener, error) {
	var l net.Listener
	listen := func() (err error) {
		c := net.ListenConfig{Control: control}
		c.SetMultipathTCP(false)
		l, err = c.Listen(context.Background(), "tcp", addr)
		return err
	}
	if netns == "" {
		err := listen()
		return l, err
	}
	ns, err := openNamespace(netns)
	if err != nil {
		return nil, err
	}
	defer ns.close()
	if err := ns.do(listen); err != nil {
		return nil, fmt.Errorf("listen in network namespace %s: %w", netns, err)
	}
	return l, nil
}

// do runs f in the namespace, on a thread that nothing else uses meanwhile. If the thread can't be brought back it ends.
func (n namespace) do(f func() error) (err error) {
	var wg sync.WaitGroup
	wg.Go(func() {
		runtime.LockOSThread()
		var back *os.File
		if back, err = os.Open("/proc/thread-self/ns/net"); err != nil {
			runtime.UnlockOSThread()
			return
		}
		defer back.Close()
		if err = unix.Setns(n.fd(), unix.CLONE_NEWNET); err == nil {
			err = f()
		}
		if unix.Setns(int(back.Fd()), unix.CLONE_NEWNET) == nil {
			runtime.UnlockOSThread()
		}
	})
	wg.Wait()
	return err
}
