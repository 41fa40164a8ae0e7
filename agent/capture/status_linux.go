package capture

import (
	"fmt"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
)

// Status reads what is in the kernel. It does so whether or not this Capture runs.
func (c *Capture) Status() (Status, error) {
	s := Status{Exempt: c.cfg.exempt()}
	ns, err := openNamespace(c.cfg.Netns)
	if err != nil {
		return s, err
	}
	defer ns.close()
	k, err := dialKernel(ns)
	if err != nil {
		return s, err
	}
	defer k.close()
	left, err := k.left()
	if err != nil {
		return s, err
	}
	own := c.of(left)
	k.table, s.Owner = table(own.name), own.owner
	if err := k.describe(&s, left.after(own)); err != nil {
		return s, err
	}
	if own.name != "" && !c.cfg.Pod { // all pods have the same
		if err := k.describeSets(&s); err != nil {
			return s, err
		}
	}
	r, err := openRouter(ns)
	if err != nil {
		return s, err
	}
	defer r.close()
	s.Routes, err = r.ranges()
	return s, err
}

// of returns the capture table of this agent; if it has none, that of the agent that decides.
func (c *Capture) of(all left) (t owned) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, other := range all.capture {
		switch {
		case c.kernel != nil && other.name == c.kernel.table.Name:
			return other
		case c.kernel == nil && (t.owner == 0 || other.owner != 0 && other.handle > t.handle):
			t = other
		}
	}
	return t
}

// after returns the names of the capture tables whose rules come before those of one, as they were made after it.
func (l left) after(t owned) (names []string) {
	for _, other := range l.capture {
		if other.handle > t.handle {
			names = append(names, other.name)
		}
	}
	return names
}

// describe tells of this agent's chains, and of those that come before them, such as those of tables of a successor.
func (k *kernel) describe(s *Status, successors []string) error {
	chains, err := k.ListChains()
	if err != nil {
		return fmt.Errorf("list nftables chains: %w", err)
	}
	for _, c := range chains {
		switch {
		case same(c.Table, k.table), same(c.Table, guardTable()):
			err = k.describeChain(s, c)
		case isCapture(c.Table) && !slices.Contains(successors, c.Table.Name):
		case before(c):
			k.describeForeign(s, c)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func isCapture(t *nftables.Table) bool {
	return slices.ContainsFunc(captureTables(), func(c *nftables.Table) bool { return same(t, c) })
}

func same(a, b *nftables.Table) bool { return a.Name == b.Name && a.Family == b.Family }

// before reports whether a chain may direct connections elsewhere before this package's chains see them.
func before(c *nftables.Chain) bool {
	if c.Type != nftables.ChainTypeNAT || c.Hooknum == nil || c.Priority == nil {
		return false
	}
	hooked := *c.Hooknum == *nftables.ChainHookOutput || *c.Hooknum == *nftables.ChainHookPrerouting
	return hooked && *c.Priority <= *firstOfNAT()
}

func (k *kernel) describeChain(s *Status, c *nftables.Chain) error {
	rules, err := k.rules(c)
	if err != nil {
		return err
	}
	chain := described(c, len(rules))
	s.Chains = append(s.Chains, chain)
	for _, r := range rules {
		what, version := readComment(r)
		s.Version = max(s.Version, version)
		line := Rule{Table: chain.Table, Chain: chain.Name, What: what}
		for _, e := range r.Exprs {
			if n, ok := e.(*expr.Counter); ok {
				line.Packets, line.Bytes = n.Packets, n.Bytes
			}
		}
		s.Rules = append(s.Rules, line)
	}
	return nil
}

// describeForeign leaves out chains without rules. If the rules can't be read, there are some.
func (k *kernel) describeForeign(s *Status, c *nftables.Chain) {
	rules, err := k.rules(c)
	if err == nil && len(rules) == 0 {
		return
	}
	s.Before = append(s.Before, described(c, len(rules)))
}

func (k *kernel) describeSets(s *Status) error {
	for _, set := range []*nftables.Set{uidSet(k.table), portSet(k.table), realSet(k.table, true), realSet(k.table, false)} {
		elements, err := k.GetSetElements(set)
		if err != nil {
			return fmt.Errorf("list nftables set %s: %w", set.Name, err)
		}
		s.Sets = append(s.Sets, Set{tableName(set.Table), set.Name, len(elements)})
	}
	return nil
}

func described(c *nftables.Chain, rules int) Chain {
	d := Chain{Table: tableName(c.Table), Name: c.Name, Rules: rules}
	if c.Hooknum != nil {
		d.Hook = hookName(*c.Hooknum)
	}
	if c.Priority != nil {
		d.Priority = int(*c.Priority)
	}
	return d
}

func tableName(t *nftables.Table) string {
	switch t.Family {
	case nftables.TableFamilyINet:
		return "inet " + t.Name
	case nftables.TableFamilyIPv4:
		return "ip " + t.Name
	case nftables.TableFamilyIPv6:
		return "ip6 " + t.Name
	}
	return fmt.Sprintf("family %d %s", t.Family, t.Name)
}

func hookName(h nftables.ChainHook) string {
	names := []string{"prerouting", "input", "forward", "output", "postrouting"}
	if int(h) < len(names) {
		return names[h]
	}
	return fmt.Sprintf("hook %d", h)
}
