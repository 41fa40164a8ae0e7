package capture

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"
)

// Capture directs connections to the agent, from when Run is ready until it ends.
type Capture struct {
	cfg   Config
	ready chan struct{}

	mu sync.Mutex
	// mu guards the fields below.

	kernel *kernel // nil: the rules are not in place
	port   uint16  // at which captured connections arrive; zero: the configured one
	freed  bool    // by Release
	four   bool    // only IPv4 is captured
	real   Real
}

// New checks the configuration. It changes nothing yet.
func New(cfg Config) (*Capture, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("capture: %w", err)
	}
	return &Capture{cfg: cfg.withDefaults(), ready: make(chan struct{})}, nil
}

// Ready is closed when connections are captured.
func (c *Capture) Ready() <-chan struct{} { return c.ready }

// mendInterval is how soon what others have removed is put back.
const mendInterval = 10 * time.Second

// Run captures connections until ctx ends, and then removes all that it has put in place. Captured connections should have
// ended by then: their applications would not see them end later. It may be called once. If it fails at the start nothing is
// left.
func (c *Capture) Run(ctx context.Context) error {
	ns, err := openNamespace(c.cfg.Netns)
	if err != nil {
		return err
	}
	defer ns.close()
	k, err := dialKernel(ns)
	if err != nil {
		return err
	}
	defer k.close()
	r, err := openRouter(ns)
	if err != nil {
		return err
	}
	defer r.close()
	ns.close()
	if err := c.start(k, r); err != nil {
		return err
	}
	if c.cfg.RedirectDNS {
		if err := r.forgetDNS(); err != nil {
			c.cfg.Log.Warn("DNS queries of programs that have asked before may not be redirected for another half minute", "err", err)
		}
	}
	if c.cfg.Pod {
		r.close() // there are no routes to look after
	}
	close(c.ready)
	c.cfg.Log.Info("connections are captured")
	c.watch(ctx, r)
	return c.end(k, r)
}

// start claims the namespace and puts everything in place.
func (c *Capture) start(k *kernel, r *router) error {
	cgroups, err := findCgroups(c.cfg.ExemptCgroups)
	if err != nil {
		return err
	}
	if err := c.claim(k, r); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	err = c.install(k, r, cgroups)
	if err != nil {
		return errors.Join(err, c.uninstall(k, r))
	}
	c.kernel = k
	return nil
}

// claim takes a capture table, in place of what was left of those that other agents made. It fails before anything is
// changed if that can't be done, or the ranges are not free.
func (c *Capture) claim(k *kernel, r *router) error {
	left, err := k.left()
	if err != nil {
		return err
	}
	if err := left.busy(c.cfg.TakeOver); err != nil {
		return err
	}
	if err := r.free(c.cfg.ranges()); err != nil {
		return err
	}
	k.table = left.unowned()[0]
	return k.own(k.table.Name, left.orphans())
}

// install guards first: nobody must get to a virtual address by a route of which the guard doesn't know.
func (c *Capture) install(k *kernel, r *router, cgroups []cgroup) error {
	if c.cfg.Pod {
		six, err := r.looped6()
		if err != nil {
			return err
		}
		c.four = !six // what is redirected would have nowhere to go
	}
	k.guard(c.cfg)
	if err := k.fill(c.cfg, cmp.Or(c.port, c.cfg.Port), c.four, cgroups, c.real.sorted); err != nil {
		return err
	}
	if c.freed {
		k.FlushTable(k.table) // so that its rules are never in force
	}
	if err := k.flush(); err != nil {
		return fmt.Errorf("put nftables rules in place (which takes the kernel's modules nft_chain_nat, nft_redir, nft_reject_inet and nft_socket): %w", err)
	}
	if c.cfg.Pod {
		return nil
	}
	return c.route(r)
}

// route replaces what there is of routes to virtual ranges.
func (c *Capture) route(r *router) error {
	if _, err := r.remove(c.cfg.ranges()...); err != nil {
		return err
	}
	leftOut, err := r.add(c.cfg.ranges())
	if err == nil && len(leftOut) > 0 {
		c.cfg.Log.Warn("no virtual addresses of IPv6: it is off", "reason", leftOut)
	}
	return err
}

// watch mends what others break, until ctx ends.
func (c *Capture) watch(ctx context.Context, r *router) {
	t := time.NewTicker(mendInterval)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
			if err := c.mend(r); err != nil {
				c.cfg.Log.Warn("can't see whether capture is whole", "err", err)
			}
		}
	}
}

// mend puts back the guard, which a flush of all rules removes, and the routes, which go when the loopback interface does.
// What the kernel owns for the agent nobody else can remove.
func (c *Capture) mend(r *router) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	chains, err := c.kernel.chains(guardTable())
	if err != nil {
		return err
	}
	if len(chains) < len(c.cfg.guardChains()) {
		c.cfg.Log.Warn("the guard of the virtual addresses was removed, it is put back")
		c.kernel.guard(c.cfg)
		if err := c.kernel.flush(); err != nil {
			return fmt.Errorf("put the guard back: %w", err)
		}
	}
	if c.cfg.Pod {
		return nil
	}
	return c.mendRoutes(r)
}

func (c *Capture) mendRoutes(r *router) error {
	have, err := r.ranges()
	if err != nil {
		return err
	}
	lost := slices.DeleteFunc(c.cfg.ranges(), func(p netip.Prefix) bool { return slices.Contains(have, p) })
	leftOut, err := r.add(lost)
	if err == nil && len(leftOut) < len(lost) {
		c.cfg.Log.Warn("routes to virtual addresses were removed, they are put back")
	}
	return err
}

// Release lets new connections go where they would without an agent: those to virtual addresses are refused. Those that are
// captured go on until Run ends. It is for agents that drain. Before Run is ready, none will be captured.
func (c *Capture) Release() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.freed = true
	if c.kernel == nil {
		return nil
	}
	c.kernel.FlushTable(c.kernel.table)
	if err := c.kernel.flush(); err != nil {
		return fmt.Errorf("release new connections: %w", err)
	}
	return nil
}

func (c *Capture) end(k *kernel, r *router) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.kernel = nil
	err := c.uninstall(k, r)
	c.cfg.Log.Info("connections are captured no more")
	return err
}

// uninstall guards until there are no routes.
func (c *Capture) uninstall(k *kernel, r *router) error {
	k.DelTable(k.table)
	ownErr := k.flush()
	var routesErr error
	if !c.cfg.Pod {
		_, routesErr = r.remove()
	}
	if err := errors.Join(ownErr, routesErr, k.leaveGuard()); err != nil {
		return fmt.Errorf("remove nftables rules and routes: %w", err)
	}
	return nil
}

// leaveGuard removes the guard, unless another agent needs it: one that captures here, or just begins to.
func (k *kernel) leaveGuard() error {
	for {
		generation, err := k.generation()
		if err != nil {
			return err
		}
		tables, err := k.tables()
		if err != nil {
			return err
		}
		if left := leftOf(tables); !left.guard || len(left.owners()) > 0 {
			return nil
		}
		if err = k.send(generation, tableMessage(delTable, acked, guardTable().Name)); !errors.Is(err, unix.ERESTART) {
			return err
		}
	}
}

// SetReal says which addresses of replicas are captured though they are real. Until connections are captured this is only
// noted. Those that can't be captured are left out, and named in the error.
func (c *Capture) SetReal(addrs []netip.AddrPort) error {
	real, bad := RealOf(addrs)
	return errors.Join(c.ShareReal(real), bad)
}

// ShareReal does so with addresses that others share.
func (c *Capture) ShareReal(want Real) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.kernel != nil {
		if err := c.kernel.change(c.real.without(want), want.without(c.real)); err != nil {
			return err
		}
		if err := c.kernel.flush(); err != nil {
			return fmt.Errorf("change the real addresses that are captured: %w", err)
		}
	}
	c.real = want
	return nil
}

// left is what there is of this package's tables.
type left struct {
	capture []owned
	guard   bool
}

// owners returns the capture tables of agents that run.
func (l left) owners() []owned {
	return slices.DeleteFunc(slices.Clone(l.capture), func(t owned) bool { return t.owner == 0 })
}

// orphans returns the names of capture tables that nobody owns.
func (l left) orphans() (names []string) {
	for _, t := range l.capture {
		if t.owner == 0 {
			names = append(names, t.name)
		}
	}
	return names
}

// unowned returns the capture tables that can be had.
func (l left) unowned() []*nftables.Table {
	return slices.DeleteFunc(captureTables(), func(t *nftables.Table) bool {
		return slices.ContainsFunc(l.owners(), func(o owned) bool { return o.name == t.Name })
	})
}

// busy fails if another agent captures, or if so do an agent and its successor.
func (l left) busy(takeOver bool) error {
	owners := l.owners()
	switch {
	case len(owners) > 1 && takeOver:
		return fmt.Errorf("%w, and so does its successor: wait until one of the processes at netlink ports %d and %d, which are mostly their IDs, has ended",
			errBusy, owners[0].owner, owners[1].owner)
	case len(owners) > 0 && !takeOver:
		return fmt.Errorf("%w: the process at netlink port %d, which is mostly its ID: stop it, or give one of them another network namespace",
			errBusy, owners[0].owner)
	}
	return nil
}

// left fails if there are tables of these names that are not of this package. One with an owner is not looked into, as it may
// have no rules at the moment.
func (k *kernel) left() (left, error) {
	tables, err := k.tables()
	if err != nil {
		return left{}, err
	}
	l := leftOf(tables)
	names := l.orphans()
	if l.guard {
		names = append(names, guardTable().Name)
	}
	for _, name := range names {
		err = errors.Join(err, k.made(table(name)))
	}
	return l, err
}

func leftOf(tables []owned) (l left) {
	for _, t := range tables {
		l.guard = l.guard || t.name == guardTable().Name
		if isCapture(table(t.name)) {
			l.capture = append(l.capture, t)
		}
	}
	return l
}

// made fails if a table has chains, but no rule of this package.
func (k *kernel) made(t *nftables.Table) error {
	for range 2 { // it may be removed between a look at its chains and one at their rules
		chains, err := k.chains(t)
		if err != nil || len(chains) == 0 {
			return err
		}
		if found, err := k.hasRules(chains); err != nil || found {
			return err
		}
	}
	return fmt.Errorf("there is an nftables table inet %s that was not made by an agent: rename or remove it", t.Name)
}

// hasRules reports whether a rule of this package is in one of the chains.
func (k *kernel) hasRules(chains []*nftables.Chain) (bool, error) {
	for _, c := range chains {
		rules, err := k.rules(c)
		if err != nil {
			return false, err
		}
		for _, r := range rules {
			if _, version := readComment(r); version > 0 {
				return true, nil
			}
		}
	}
	return false, nil
}
