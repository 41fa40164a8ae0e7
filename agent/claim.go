package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"syscall"

	"github.com/headroom-mesh/headroom/agent/admin"
	"github.com/headroom-mesh/headroom/dataplane"
)

// claims are what no two agents can have at once, unless one takes over from the other.
type claims struct {
	folder      *os.File // locked while open
	proxy, mesh net.Listener
	services    []dataplane.Listener
	admin       admin.Listeners

	predecessor *predecessor // nil: there is none
	begin       func()       // it is this agent's turn
}

// release gives up what the parts of the agent have not given up already.
func (c claims) release() {
	for _, l := range []net.Listener{c.proxy, c.mesh} {
		if l != nil {
			_ = l.Close()
		}
	}
	for _, l := range c.services {
		_ = l.Close()
	}
	c.admin.Close()
	if c.folder != nil {
		_ = c.folder.Close()
	}
	if c.predecessor != nil {
		c.predecessor.hangUp()
	}
}

// listen is how an address is claimed, which a flag names.
type listen func(at netip.AddrPort, flag string) (net.Listener, error)

// claim takes the data folder and the ports, and tries those that other parts open later, so that an agent that can't
// have them fails before it takes part in anything. One that takes over has them when it is its turn.
func (a *Agent) claim(ctx context.Context) (c claims, err error) {
	defer func() {
		if err != nil {
			c.release()
		}
	}()
	if c.folder, err = lockFolder(a.cfg.DataDir); err != nil {
		return c, err
	}
	listen := listenOn
	turn := make(chan struct{})
	c.begin = sync.OnceFunc(func() { close(turn) })
	if a.cfg.TakeOver != "" {
		listen = func(at netip.AddrPort, flag string) (net.Listener, error) { return a.listenLater(at, flag, turn) }
		if c.predecessor, err = a.findPredecessor(ctx); err != nil {
			return c, err
		}
	}
	if c.proxy, err = listen(a.cfg.Proxy, "--proxy"); err != nil {
		return c, err
	}
	if c.mesh, err = listen(a.cfg.Mesh, "--mesh"); err != nil {
		return c, err
	}
	if c.services, err = a.listenServices(listen); err != nil {
		return c, err
	}
	if a.cfg.TakeOver == "" {
		if err = a.tryPorts(); err != nil {
			return c, err
		}
	}
	flags := map[netip.AddrPort]string{a.cfg.Admin: "--admin", a.cfg.AdminHTTP: "--admin-http", a.cfg.Metrics: "--metrics"}
	if c.admin, err = a.admin.Listen(func(at netip.AddrPort) (net.Listener, error) { return listen(at, flags[at]) }); err != nil {
		return c, fmt.Errorf("%w (--admin-socket)", err)
	}
	return c, nil
}

// listenLater claims an address for the time when it is this agent's turn. If it can't be had for another reason than that
// somebody has it, it fails at once.
func (a *Agent) listenLater(at netip.AddrPort, flag string, turn <-chan struct{}) (net.Listener, error) {
	l, err := listenOn(at, flag)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
	case err != nil:
		return nil, err
	default:
		if err := l.Close(); err != nil {
			return nil, err
		}
	}
	later := newLater(at, turn, a.cfg.Log)
	a.later = append(a.later, later)
	return later, nil
}

// listenServices returns what it has also if it fails.
func (a *Agent) listenServices(listen listen) (all []dataplane.Listener, err error) {
	for _, text := range a.cfg.Listen {
		service, at, err := parseListen(text)
		if err != nil {
			return all, err
		}
		l, err := listen(at, "--listen")
		if err != nil {
			return all, err
		}
		all = append(all, dataplane.Listener{Service: service, Listener: l})
	}
	captured, err := a.listenCaptured()
	return append(all, captured...), err
}

// lockFolder keeps other agents away from the data folder as long as the returned file is open.
func lockFolder(dir string) (*os.File, error) {
	file, err := os.OpenFile(filepath.Join(dir, "agent.lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the data folder: %w; choose another with --data-dir", err)
	}
	err = syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if err == nil {
		return file, nil
	}
	_ = file.Close() // nothing was written
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return nil, fmt.Errorf("data folder %s is in use by another agent: %s is locked; choose another with --data-dir", dir, file.Name())
	}
	return nil, fmt.Errorf("lock the data folder: %s: %w; choose another with --data-dir", file.Name(), err)
}

func (a *Agent) tryPorts() error {
	type port struct {
		at   netip.AddrPort
		flag string
	}
	ports := []port{{a.cfg.Gossip, "--gossip"}, {a.cfg.Admin, "--admin"}, {a.cfg.AdminHTTP, "--admin-http"}}
	if a.cfg.Metrics.IsValid() {
		ports = append(ports, port{a.cfg.Metrics, "--metrics"})
	}
	if a.cfg.EtcdEmbedded != "" {
		ports = append(ports, port{a.cfg.EtcdListen, "--etcd-listen"}, port{a.cfg.EtcdPeerListen, "--etcd-peer-listen"})
	}
	for _, p := range ports {
		l, err := listenOn(p.at, p.flag)
		if err != nil {
			return err
		}
		if err := l.Close(); err != nil {
			return err
		}
	}
	l, err := net.ListenPacket("udp", a.cfg.Gossip.String())
	if err != nil {
		return inUse(err, "--gossip")
	}
	if err := l.Close(); err != nil || a.names == nil {
		return err
	}
	if err := a.names.Try(); err != nil {
		return fmt.Errorf("%w (--dns-listen)", err)
	}
	return nil
}

func listenOn(at netip.AddrPort, flag string) (net.Listener, error) {
	l, err := net.Listen("tcp", at.String())
	if err != nil {
		return nil, inUse(err, flag)
	}
	return l, nil
}

func inUse(err error, flag string) error {
	return fmt.Errorf("%w; choose another address with %s, or another --bind for a second agent on this machine", err, flag)
}
