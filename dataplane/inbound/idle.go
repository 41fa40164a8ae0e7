package inbound

import (
	"math/rand/v2"
	"slices"
	"sync"

	"github.com/headroom-mesh/headroom/registry"
)

// listeners are the agents that want to hear of idle replicas, by service.
type listeners struct {
	mu sync.Mutex
	// mu guards the field below.

	of map[registry.ServiceName][]*listener
}

type listener struct {
	tell func(registry.EndpointID)
}

// ListenIdle lets tell be called with the replicas of a service that have slots free, as often as they have one, and later
// whenever a slot gets free: then one of those who listen is told, chosen at random. It must be quick. It may still be
// called while stop is.
func (in *Inbound) ListenIdle(service registry.ServiceName, tell func(registry.EndpointID)) (stop func()) {
	l := &listener{tell}
	in.listeners.add(service, l)
	in.Each(func(r *Replica) {
		if r.Endpoint.Service == service {
			r.tellFree(l)
		}
	})
	return func() { in.listeners.remove(service, l) }
}

// mostFree bounds how often a replica is named to one listener at once.
const mostFree = 64

// tellFree tells of all slots that are free.
func (r *Replica) tellFree(l *listener) {
	if r.Endpoint.State != registry.Ready {
		return
	}
	for range min(r.line.free(), mostFree) {
		l.tell(r.Endpoint.ID())
	}
}

func (ls *listeners) add(service registry.ServiceName, l *listener) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if ls.of == nil {
		ls.of = map[registry.ServiceName][]*listener{}
	}
	ls.of[service] = append(ls.of[service], l)
}

func (ls *listeners) remove(service registry.ServiceName, l *listener) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	left := slices.DeleteFunc(ls.of[service], func(o *listener) bool { return o == l })
	if ls.of[service] = left; len(left) == 0 {
		delete(ls.of, service)
	}
}

// one returns one of those who listen for a service, nil if nobody does.
func (ls *listeners) one(service registry.ServiceName) *listener {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	all := ls.of[service]
	if len(all) == 0 {
		return nil
	}
	return all[rand.IntN(len(all))]
}

// idle tells somebody that a replica, if it is still here, has one more slot free.
func (in *Inbound) idle(r *Replica) {
	l := in.listeners.one(r.Endpoint.Service)
	if l == nil {
		return
	}
	id := r.Endpoint.ID()
	if r := in.Replica(id); r != nil && r.Endpoint.State == registry.Ready {
		l.tell(id)
	}
}
