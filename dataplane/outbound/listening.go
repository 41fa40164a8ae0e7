package outbound

import (
	"context"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/balancer"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
)

// listening hears from agents which replicas are idle, for the services in use that are balanced by that (join idle queue).
// It belongs to Run.
type listening struct {
	outbound *Outbound
	to       map[source]context.CancelFunc
	wg       sync.WaitGroup
}

// source is an agent that tells a balancer of idle replicas. A new balancer knows nothing, and so listens anew.
type source struct {
	service  *service
	balancer *balancer.Balancer
	agent    netip.AddrPort // zero: this one
}

// review begins to listen where that is wanted now, and ends it where it no longer is.
func (l *listening) review(ctx context.Context, now time.Time) {
	wanted := l.wanted(now)
	for at, stop := range l.to {
		if !wanted[at] {
			stop()
			delete(l.to, at)
		}
	}
	for at := range wanted {
		if l.to[at] == nil {
			l.to[at] = l.listen(ctx, at)
		}
	}
}

func (l *listening) wanted(now time.Time) map[source]bool {
	var wanted map[source]bool
	for _, s := range *l.outbound.services.Load() {
		b := s.balancer.Load()
		if b.Policy.Balancer != policy.BalancerJoinIdleQueue || !s.usedSince(now.Add(-inUse)) {
			continue
		}
		if wanted == nil {
			wanted = map[source]bool{}
		}
		for _, e := range s.fleet.Set(now).Endpoints {
			at := source{service: s, balancer: b}
			if record := e.Record(); record.Node != l.outbound.cfg.Node {
				at.agent = record.Agent
			}
			wanted[at] = true
		}
	}
	return wanted
}

// listen listens to one agent until stop is called.
func (l *listening) listen(ctx context.Context, at source) (stop context.CancelFunc) {
	if !at.agent.IsValid() {
		return l.outbound.cfg.Inbound.ListenIdle(at.service.name, at.idled)
	}
	ctx, stop = context.WithCancel(ctx)
	l.wg.Go(func() {
		for pause := minBackoff; ctx.Err() == nil; pause = min(2*pause, maxBackoff) {
			began := time.Now()
			err := l.outbound.lines.listenIdle(ctx, at.agent, at.service.name, at.idled)
			if ctx.Err() == nil {
				l.outbound.cfg.Log.Debug("not told which replicas are idle", "service", at.service.name, "peer", at.agent, "err", err)
			}
			if time.Since(began) > maxBackoff {
				pause = minBackoff
			}
			select {
			case <-ctx.Done():
			case <-time.After(pause):
			}
		}
	})
	return stop
}

// idled takes in that a replica has a slot free.
func (at source) idled(id registry.EndpointID) {
	now := time.Now()
	all := at.service.fleet.Set(now).Endpoints
	i, found := slices.BinarySearchFunc(all, id, func(e *balancer.Endpoint, id registry.EndpointID) int {
		return strings.Compare(string(e.ID), string(id))
	})
	if found {
		at.balancer.Idled(now, all[i])
	}
}

// end stops listening altogether.
func (l *listening) end() {
	for _, stop := range l.to {
		stop()
	}
	l.wg.Wait()
}
