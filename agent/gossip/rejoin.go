package gossip

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
)

const (
	dialsPerRound = 3
	firstRetry    = time.Second
	roundInterval = 10 * time.Second
	// Beyond this many members rounds get rarer, so that the mesh as a whole never dials faster than this many do.
	roundScale = 32
)

// round is one attempt to meet those whom this agent should know and doesn't.
type round struct {
	dialled   int
	answered  int
	revived   bool // one that counted as dead answered
	contested bool // others may still know our name at another address, where nobody answers
	err       error
}

// keepJoined meets seeds while this agent is alone. Later it goes on with seeds that are no members, and with members
// that died: two halves of a mesh that lost each other would otherwise never meet again.
func (g *Gossip) keepJoined(ctx context.Context, list *memberlist.Memberlist, self netip.AddrPort) {
	var pause time.Duration
	warned := false
	for {
		r := g.meet(ctx, list, self)
		if ctx.Err() != nil {
			return
		}
		alive := len(addresses(g.Members()))
		warned = g.report(r, alive, warned)
		pause = nextRound(r, alive, pause)
		select {
		case <-ctx.Done():
			return
		case <-g.rivals.noticed:
		case <-time.After(jitter(g.rand, pause)):
		}
	}
}

// report logs the first of several rounds in which nobody was met.
func (g *Gossip) report(r round, alive int, warned bool) bool {
	lonely := alive <= 1 && r.answered == 0 && r.err != nil
	if lonely && !warned {
		g.cfg.Log.Warn("no seed answers; this agent is alone and keeps trying", "err", r.err)
	} else if r.err != nil {
		g.cfg.Log.Debug("not all could be met", "err", r.err)
	}
	return lonely
}

// nextRound returns the pause before the next round. A member that has come back needs a second exchange before both
// sides believe it, and a name in dispute is to be settled soon.
func nextRound(r round, alive int, last time.Duration) time.Duration {
	switch {
	case r.revived, r.contested:
		return firstRetry
	case alive <= 1 && (r.dialled > 0 || r.err != nil):
		return min(max(2*last, firstRetry), roundInterval)
	}
	return roundInterval * time.Duration(1+alive/roundScale)
}

// jitter spreads d over 75 to 125 %.
func jitter(r *rand.Rand, d time.Duration) time.Duration {
	return d*3/4 + time.Duration(r.Int64N(int64(d/2)+1))
}

// target is an address to meet somebody at.
type target struct {
	addr netip.AddrPort
	dead bool
}

func (g *Gossip) meet(ctx context.Context, list *memberlist.Memberlist, self netip.AddrPort) round {
	if g.leaving.Load() {
		return round{}
	}
	seeds, lookup := resolve(ctx, g.cfg.Join)
	all := g.Members()
	targets := missing(g.rand, all, seeds, self)
	rival, contested := g.rivals.take()
	if contested {
		// Timeout ends the wait for the news to spread, which goes on.
		_ = list.UpdateNode(time.Nanosecond)
		targets = append(someAlive(g.rand, all, self), targets...)
	}
	if rival.IsValid() {
		targets = append([]target{{addr: rival}}, targets...)
	}
	targets = targets[:min(len(targets), dialsPerRound)]
	errs := g.dial(list, targets)
	r := summarize(targets, errs)
	r.err = errors.Join(lookup, r.err)
	r.contested = contested && g.rivals.goOn(rival.IsValid() && errs[0] == nil)
	return r
}

// dial exchanges the state of the mesh with all targets at the same time.
func (g *Gossip) dial(list *memberlist.Memberlist, targets []target) []error {
	var wg sync.WaitGroup
	errs := make([]error, len(targets))
	for i, t := range targets {
		wg.Go(func() { _, errs[i] = list.Join([]string{t.addr.String()}) })
	}
	wg.Wait()
	for _, err := range errs {
		g.metrics.dialled(err)
	}
	return errs
}

func summarize(targets []target, errs []error) round {
	r := round{dialled: len(targets)}
	for i, t := range targets {
		if errs[i] != nil {
			r.err = errors.Join(r.err, explain(errs[i]))
			continue
		}
		r.answered++
		r.revived = r.revived || t.dead
	}
	return r
}

// missing lists in random order whom this agent should meet: seeds that are no members, and members that died.
func missing(r *rand.Rand, all []Member, seeds []netip.AddrPort, self netip.AddrPort) []target {
	known := append(addresses(all), self)
	var targets []target
	add := func(addr netip.AddrPort, dead bool) {
		if !slices.Contains(known, addr) {
			known = append(known, addr)
			targets = append(targets, target{addr, dead})
		}
	}
	for _, m := range all {
		if m.State == Dead && time.Since(m.Since) < keepGone {
			add(m.Gossip, true)
		}
	}
	for _, s := range seeds {
		add(s, false)
	}
	r.Shuffle(len(targets), func(i, j int) { targets[i], targets[j] = targets[j], targets[i] })
	return targets
}

// addresses collects those of the members that are alive.
func addresses(all []Member) []netip.AddrPort {
	var alive []netip.AddrPort
	for _, m := range all {
		if m.State == Alive {
			alive = append(alive, m.Gossip)
		}
	}
	return alive
}

// someAlive picks one live member besides this agent, if there is one.
func someAlive(r *rand.Rand, all []Member, self netip.AddrPort) []target {
	others := slices.DeleteFunc(addresses(all), func(a netip.AddrPort) bool { return a == self })
	if len(others) == 0 {
		return nil
	}
	return []target{{addr: others[r.IntN(len(others))]}}
}

// resolve looks up the seeds. A name may stand for many agents.
func resolve(ctx context.Context, seeds []string) ([]netip.AddrPort, error) {
	var found []netip.AddrPort
	var errs []error
	for _, seed := range seeds {
		addrs, err := resolveOne(ctx, seed)
		found = append(found, addrs...)
		if err != nil {
			errs = append(errs, fmt.Errorf("look up seed %s: %w", seed, err))
		}
	}
	return found, errors.Join(errs...)
}

func resolveOne(ctx context.Context, seed string) ([]netip.AddrPort, error) {
	if a, err := netip.ParseAddrPort(seed); err == nil {
		return []netip.AddrPort{netip.AddrPortFrom(a.Addr().Unmap(), a.Port())}, nil
	}
	host, port, err := splitSeed(seed)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, streamTimeout)
	defer cancel()
	ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return nil, err
	}
	var addrs []netip.AddrPort
	for _, ip := range ips {
		addrs = append(addrs, netip.AddrPortFrom(ip.Unmap(), port))
	}
	return addrs, nil
}
