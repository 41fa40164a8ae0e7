// Package gossip tells which agents are in the mesh. Agents find one another through seeds, notice the dead ones by
// themselves, and need no store for it.
package gossip

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/headroom-mesh/headroom/registry"
)

// DefaultPort is where agents gossip, over UDP and TCP.
const DefaultPort = 7946

// streamTimeout bounds a dial and each exchange on a stream.
const streamTimeout = 5 * time.Second

// Config says who the agent is and how it meets the others.
type Config struct {
	// Node is the name of this agent, unique in the mesh. Required.
	Node registry.NodeName
	// Zone and Version are told to the other agents. They may be empty.
	Zone    string
	Version string
	// Bind is where to listen, over UDP and TCP. Default 127.0.0.1:7946. Port 0 takes any free one.
	Bind netip.AddrPort
	// Wait waits for Bind while another agent has it. Default: Run fails.
	Wait bool
	// Advertise is the address at which other agents reach Bind. Default Bind; if that is 0.0.0.0 or [::], the one
	// address that this machine has besides loopback. Port 0 means the port of Bind.
	Advertise netip.AddrPort
	// Mesh is where this agent takes traffic from other agents. It is told to them.
	Mesh netip.AddrPort
	// Key encrypts the gossip: 16, 24 or 32 bytes, the same on all agents. Without one it goes in clear.
	Key []byte
	// Join lists agents to meet, HOST:PORT. One that answers is enough; this agent itself may be among them.
	Join []string
	// Log takes what operators should know. Default: nothing is logged.
	Log *slog.Logger
	// Metrics registers the metrics of this package. Default: they are kept and not shown.
	Metrics prometheus.Registerer
}

func (c Config) withDefaults() Config {
	if !c.Bind.IsValid() {
		c.Bind = netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), DefaultPort)
	}
	if !c.Advertise.IsValid() && !c.Bind.Addr().IsUnspecified() {
		c.Advertise = c.Bind
	}
	if c.Advertise.IsValid() && c.Advertise.Port() == 0 {
		c.Advertise = netip.AddrPortFrom(c.Advertise.Addr(), c.Bind.Port())
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

// Validate reports all that is wrong with the configuration.
func (c Config) Validate() error {
	c = c.withDefaults()
	errs := []error{c.Node.Validate()}
	if c.Advertise.IsValid() && c.Advertise.Addr().IsUnspecified() {
		errs = append(errs, fmt.Errorf("advertise: %s is no address that others can reach: name one of this machine", c.Advertise))
	}
	if err := checkKey(c.Key); err != nil {
		errs = append(errs, fmt.Errorf("key: %w", err))
	}
	for i, seed := range c.Join {
		if err := checkSeed(seed); err != nil {
			errs = append(errs, fmt.Errorf("join[%d]: %w", i, err))
		}
	}
	return errors.Join(append(errs, checkMetadata(c))...)
}

func checkSeed(seed string) error {
	host, port, err := splitSeed(seed)
	if err != nil || port == 0 || host == "" || strings.ContainsAny(host, "/ ") {
		return fmt.Errorf("%q: want HOST:PORT, such as 10.0.0.1:%d or [fd00::1]:%d", seed, DefaultPort, DefaultPort)
	}
	return nil
}

func splitSeed(seed string) (host string, port uint16, err error) {
	host, text, err := net.SplitHostPort(seed)
	if err != nil {
		return "", 0, err
	}
	n, err := strconv.ParseUint(text, 10, 16)
	return host, uint16(n), err
}

func checkKey(key []byte) error {
	if n := len(key); n != 0 && n != 16 && n != 24 && n != 32 {
		return fmt.Errorf("%d bytes: want 16, 24 or 32, as from: head -c 32 /dev/urandom | base64", n)
	}
	return nil
}

// ParseKey reads a gossip key as files and flags hold it: base64 of 16, 24 or 32 bytes.
func ParseKey(s string) ([]byte, error) {
	s = strings.TrimSpace(s)
	key, err := base64.StdEncoding.DecodeString(s)
	if err != nil {
		return nil, errors.New("gossip key: not base64: make one with: head -c 32 /dev/urandom | base64")
	}
	if len(key) == 0 {
		return nil, errors.New("gossip key: empty: make one with: head -c 32 /dev/urandom | base64")
	}
	if err := checkKey(key); err != nil {
		return nil, fmt.Errorf("gossip key: %w", err)
	}
	return key, nil
}

// advertise chooses among the addresses of this machine when only "all of them" was given to listen on.
func advertise(bind netip.AddrPort, local []netip.Addr) (netip.AddrPort, error) {
	var candidates []netip.Addr
	for _, a := range local {
		if a.IsGlobalUnicast() && (a.Is4() || bind.Addr().Is6()) {
			candidates = append(candidates, a)
		}
	}
	if len(candidates) != 1 {
		return netip.AddrPort{}, fmt.Errorf("advertise: listening on %s, and this machine has %d addresses that others might reach %v: name one", bind, len(candidates), candidates)
	}
	return netip.AddrPortFrom(candidates[0], bind.Port()), nil
}

func localAddrs() ([]netip.Addr, error) {
	all, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("list the addresses of this machine: %w", err)
	}
	var local []netip.Addr
	for _, a := range all {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			local = append(local, p.Addr().Unmap())
		}
	}
	return local, nil
}

// Gossip is this agent's part in the gossip of the mesh.
type Gossip struct {
	cfg     Config
	members *members
	rivals  *rivals
	metrics *metrics
	rand    *rand.Rand // of the goroutine in Run

	newTransport func(context.Context) (memberlist.NodeAwareTransport, netip.AddrPort, error)

	leaving atomic.Bool

	// running is held for reading while list is in use.
	running sync.RWMutex
	list    *memberlist.Memberlist // nil unless running
}

// New checks the configuration. Nothing is started before Run.
func New(cfg Config) (*Gossip, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("gossip: %w", err)
	}
	cfg = cfg.withDefaults()
	if !cfg.Advertise.IsValid() {
		local, err := localAddrs()
		if err != nil {
			return nil, fmt.Errorf("gossip: %w", err)
		}
		if cfg.Advertise, err = advertise(cfg.Bind, local); err != nil {
			return nil, fmt.Errorf("gossip: %w", err)
		}
	}
	m := newMetrics(cfg.Metrics)
	g := &Gossip{
		cfg:     cfg,
		members: newMembers(cfg.Node, cfg.Log, m),
		rivals:  newRivals(cfg.Node, cfg.Log),
		metrics: m,
		rand:    rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())),
	}
	g.newTransport = g.listen
	return g, nil
}

// Run takes part in the gossip until ctx ends. It fails at once if it can't listen; seeds that are away are no failure.
// It does not tell the others that this agent goes: see Leave. Unlike elsewhere, a few goroutines of the library may
// outlast Run, none for longer than its timeouts of some seconds.
func (g *Gossip) Run(ctx context.Context) error {
	transport, advertised, err := g.newTransport(ctx)
	if err != nil {
		return fmt.Errorf("gossip: %w", err)
	}
	list, err := memberlist.Create(g.listConfig(transport, advertised))
	if err != nil {
		return fmt.Errorf("gossip: start on %s: %w", advertised, errors.Join(err, transport.Shutdown()))
	}
	g.setList(list)
	g.cfg.Log.Info("gossip started", "peer", advertised)
	g.keepJoined(ctx, list, advertised)
	g.setList(nil)
	if err := list.Shutdown(); err != nil {
		return fmt.Errorf("gossip: stop: %w", err)
	}
	return nil
}

// Listens reports whether this agent can be reached by the others.
func (g *Gossip) Listens() bool {
	g.running.RLock()
	defer g.running.RUnlock()
	return g.list != nil
}

func (g *Gossip) setList(list *memberlist.Memberlist) {
	g.running.Lock()
	defer g.running.Unlock()
	g.list = list
}

func (g *Gossip) listConfig(transport memberlist.NodeAwareTransport, advertised netip.AddrPort) *memberlist.Config {
	c := memberlist.DefaultLANConfig()
	c.Name = string(g.cfg.Node)
	c.Transport = transport
	c.AdvertiseAddr = advertised.Addr().String()
	c.AdvertisePort = int(advertised.Port())
	c.SecretKey = g.cfg.Key
	c.TCPTimeout = streamTimeout
	// Packets are small and sent at most a few times a second: compressing them costs more than it saves.
	c.EnableCompression = false
	// A node that restarts on another address gets its name back at the moment the old one counts as dead.
	c.DeadNodeReclaimTime = time.Nanosecond
	c.Delegate = delegate{g}
	c.Events = g.members
	c.Conflict = g.rivals
	c.Merge = past{g.rivals, advertised}
	c.Logger = newLibraryLog(g.cfg.Log, g.metrics)
	return c
}

// Leave tells the others that this agent goes for good. An agent that restarts must not leave: hundreds of agents that
// do so in an upgrade fill the gossip with nothing else. Run goes on until its context ends.
func (g *Gossip) Leave(ctx context.Context) error {
	g.running.RLock()
	defer g.running.RUnlock()
	if g.list == nil {
		return nil
	}
	g.leaving.Store(true)
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(streamTimeout)
	}
	// The first message carries the news that what follows is no failure; the second ends the membership.
	err := g.list.UpdateNode(max(time.Until(deadline)/2, time.Millisecond))
	if err := errors.Join(err, g.list.Leave(max(time.Until(deadline), time.Millisecond))); err != nil {
		return fmt.Errorf("gossip: tell the others that this node leaves: %w", err)
	}
	return nil
}

// Members returns all members known, this agent included, sorted by name: those that died or left too, for a day.
func (g *Gossip) Members() []Member { return g.members.all() }

// Changed returns a channel that is closed at the next change of Members. Ask for it before reading Members.
func (g *Gossip) Changed() <-chan struct{} { return g.members.changed() }

// delegate gives memberlist the metadata of this agent. The rest of its interface is for messages of our own, of which
// there are none.
type delegate struct{ *Gossip }

func (d delegate) NodeMeta(int) []byte { return encodeMetadata(d.cfg, d.leaving.Load()) }

func (delegate) NotifyMsg([]byte)                  {}
func (delegate) GetBroadcasts(int, int) [][]byte   { return nil }
func (delegate) LocalState(bool) []byte            { return nil }
func (delegate) MergeRemoteState(_ []byte, _ bool) {}
