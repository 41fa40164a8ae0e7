package balancer

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
)

// replicas returns n ready endpoints of one service.
func replicas(n int) []registry.Endpoint {
	var es []registry.Endpoint
	for i := range n {
		es = append(es, registry.Endpoint{
			Service: "s", Node: registry.NodeName(fmt.Sprintf("node%d", i/16)),
			Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 80),
			Agent:   netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, byte(i / 16), 1}), 15008),
		})
	}
	return es
}

// warm returns a balancer over n replicas with full pools.
func warm(rule policy.Balancer, n, shards int) (*Balancer, time.Time) {
	now := time.Now() // as agents do: with a monotonic reading
	p := policy.Default()
	p.Balancer = rule
	p.Prequal.MaxAge = time.Minute
	fleet := NewFleet(Place{})
	fleet.Update(now, replicas(n), policy.Scope{})
	b := New(p, fleet, shards, 1)
	for shard := range shards {
		for i := range p.Prequal.PoolSize {
			b.Idle(now, shard, nil) // lets the shard see the fleet
			e := fleet.Set(now).Endpoints[(i*61+shard)%n]
			b.Probed(now, shard, e, load.Report{RIF: int32(i % 5), Latency: time.Duration(40+i) * time.Millisecond, Known: true})
		}
	}
	return b, now
}

// BenchmarkPick places a request and ends it: what the balancer costs a request, apart from probes and questions to
// replicas. Run it with -cpu 1,2: processors must not slow each other down.
func BenchmarkPick(b *testing.B) {
	for _, rule := range policy.Balancers() {
		b.Run(string(rule), func(b *testing.B) {
			b.ReportAllocs()
			balancer, now := warm(rule, 1000, 2)
			if rule == policy.BalancerLeastLoaded {
				for _, e := range balancer.fleet.Set(now).Endpoints {
					e.counter.begin() // no replica is idle: it must look at all of them
				}
			}
			b.RunParallel(func(pb *testing.PB) {
				c := caller{balancer: balancer, now: now, key: rand.Uint64()}
				for pb.Next() {
					if err := c.request(); err != nil {
						b.Error(err)
						return
					}
				}
			})
		})
	}
}

// caller is one of several at the same balancer.
type caller struct {
	balancer *Balancer
	now      time.Time
	key      uint64
	targets  [16]*Endpoint
	answers  [16]Answer
}

func (c *caller) request() error {
	c.key++
	picked, err := c.place(Request{Key: mix(c.key), Keyed: c.balancer.Policy.Balancer.NeedsKey()})
	if err != nil {
		return err
	}
	picked.Done(c.now, Succeeded)
	if c.balancer.Policy.Balancer == policy.BalancerJoinIdleQueue {
		c.balancer.Idled(c.now, picked.Endpoint)
	}
	if c.key%3 == 0 { // keep the pool full, as answers to probes do
		if due := picked.Due(c.targets[:0]); len(due) > 0 {
			c.balancer.Probed(c.now, picked.Shard(), due[0], c.report())
		}
	}
	return nil
}

func (c *caller) place(req Request) (Picked, error) {
	targets, enough, asks := c.balancer.Inquire(c.now, req, c.targets[:0])
	if !asks {
		return c.balancer.Pick(c.now, req)
	}
	answers := c.answers[:0]
	for _, e := range targets[:enough] {
		answers = append(answers, Answer{e, c.report()})
	}
	return c.balancer.Choose(c.now, req, answers)
}

func (c *caller) report() load.Report {
	return load.Report{RIF: int32(c.key % 5), Latency: time.Duration(c.key%64) * time.Millisecond, Known: true}
}

// BenchmarkEach looks over the replicas that an agent uses, as agents do ten times a second.
func BenchmarkEach(b *testing.B) {
	for _, n := range []int{100, 10_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			fleet := NewFleet(Place{})
			now := time.Unix(1_000_000, 0)
			fleet.Update(now, replicas(n), policy.Scope{})
			b.ReportAllocs()
			seen := 0
			for b.Loop() {
				fleet.Each(now, func(*Endpoint, Avoidance) { seen++ })
			}
		})
	}
}
