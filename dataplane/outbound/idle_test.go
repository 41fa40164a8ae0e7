package outbound

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/balancer"
	"github.com/headroom-mesh/headroom/dataplane/inbound"
	"github.com/headroom-mesh/headroom/dataplane/relay"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
)

// node is an agent that has replicas of the service web, which is balanced by a rule.
type node struct {
	*Outbound
	inbound *inbound.Inbound
	rule    policy.Balancer
}

func newNode(rule policy.Balancer) node {
	in := inbound.New(inbound.Config{Relay: relay.New(relay.Config{})})
	return node{New(Config{Node: "here", Inbound: in, Prober: &scripted{}, Seed: 1}), in, rule}
}

func local(port uint16, state registry.State) registry.Endpoint {
	return registry.Endpoint{Service: "web", Node: "here", State: state, Address: netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port)}
}

// registered is what the registry says.
func (n node) registered(replicas ...registry.Endpoint) *service {
	p := policy.Default()
	p.Balancer = n.rule
	n.Update(time.Now(), &registry.Snapshot{Services: map[registry.ServiceName]*registry.Service{"web": {Name: "web", Policy: p, Endpoints: replicas}}})
	return n.service("web")
}

// Replicas that say that they are idle before the balancer has seen any request are not forgotten.
func TestIdleReplicasAreHeardByANewBalancer(t *testing.T) {
	n := newNode(policy.BalancerJoinIdleQueue)
	replicas := []registry.Endpoint{local(1, registry.Ready), local(2, registry.Ready), local(3, registry.Ready)}
	n.inbound.Update(replicas)
	s := n.registered(replicas...)
	s.use(time.Now())
	l := listening{outbound: n.Outbound, to: map[source]context.CancelFunc{}}
	l.review(t.Context(), time.Now())
	defer l.end()
	if v := s.balancer.Load().View(time.Now()); v.IdleSlots != 3 {
		t.Errorf("%d idle slots are known, want 3", v.IdleSlots)
	}
}

// A replica that joins others on its node takes its turns, whether it is healthy at once or not: its agent knows it before
// the registry does, and speaks of it when nobody knows it yet.
func TestIdleReplicasThatJoinTakeTurns(t *testing.T) {
	for _, first := range []registry.State{registry.Ready, registry.Unhealthy} {
		n := newNode(policy.BalancerJoinIdleQueue)
		apply := func(replicas ...registry.Endpoint) *service {
			n.inbound.Update(replicas)
			return n.registered(replicas...)
		}
		s := apply(local(1, registry.Ready))
		b := s.balancer.Load()
		s.use(time.Now())
		l := listening{outbound: n.Outbound, to: map[source]context.CancelFunc{}}
		l.review(t.Context(), time.Now())
		defer l.end()
		apply(local(1, registry.Ready), local(2, first))
		b.Idle(time.Now(), 0, nil) // sees it
		apply(local(1, registry.Ready), local(2, registry.Ready))
		picks := map[registry.EndpointID]int{}
		for range 100 { // one at a time
			picked, err := b.Pick(time.Now(), balancer.Request{})
			if err != nil {
				t.Fatal(err)
			}
			id := picked.Endpoint.ID
			picks[id]++
			picked.Done(time.Now(), balancer.Succeeded)
			source{service: s, balancer: b}.idled(id)
		}
		for id, got := range picks {
			if got != 50 || len(picks) != 2 {
				t.Errorf("%s when it joins: %s got %d of 100 requests; want 50 each", first, id, got)
			}
		}
	}
}

// A replica here that refuses is no reason not to ask the others.
func TestReserveGoesOnAfterARefusal(t *testing.T) {
	n := newNode(policy.BalancerLateBinding)
	n.inbound.Update([]registry.Endpoint{local(1, registry.Unhealthy), local(2, registry.Ready)})
	s := n.registered(local(1, registry.Ready), local(2, registry.Ready)) // the registry is behind
	h, err := n.reserve(t.Context(), s, s.balancer.Load(), s.fleet.Set(time.Now()).Endpoints)
	if err != nil || h == nil {
		t.Fatalf("got %v, %v; want the slot that is free", h, err)
	}
	if got := h.endpoint.Record().Address.Port(); got != 2 {
		t.Errorf("got a slot of replica %d, want 2", got)
	}
}
