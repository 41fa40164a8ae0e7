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

var everyBalancer = []policy.Balancer{
	policy.BalancerPrequal, policy.BalancerRoundRobin, policy.BalancerRandom, policy.BalancerP2C,
	policy.BalancerRingHash, policy.BalancerLeastLoaded,
	policy.BalancerWeightedRoundRobin, policy.BalancerYARP, policy.BalancerLinear, policy.BalancerC3, policy.BalancerPeakEWMA,
	policy.BalancerMaglev, policy.BalancerPrequalSync, policy.BalancerLateBinding, policy.BalancerJoinIdleQueue,
}

// warm returns a balancer over n replicas with full pools.
func warm(rule policy.Balancer, n, shards int) (*Balancer, time.Time) {
	now := time.Unix(1_000_000, 0)
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

// BenchmarkPick places a request and ends it: what the balancer costs a request, but for probes. Run it with -cpu 1,2:
// processors must not slow each other down.
func BenchmarkPick(b *testing.B) {
	for _, rule := range everyBalancer {
		b.Run(string(rule), func(b *testing.B) {
			b.ReportAllocs()
			balancer, now := warm(rule, 1000, 2)
			if rule == policy.BalancerLeastLoaded {
				for _, e := range balancer.fleet.Set(now).Endpoints {
					e.counter.begin() // no replica is idle: it must look at all of them
				}
			}
			b.RunParallel(func(pb *testing.PB) {
				key := rand.Uint64()
				var probes [4]*Endpoint
				for pb.Next() {
					key++
					picked, err := balancer.Pick(now, Request{Key: mix(key), Keyed: rule == policy.BalancerRingHash || rule == policy.BalancerMaglev})
					if err != nil {
						b.Error(err)
						return
					}
					picked.Done(now, Succeeded)
					if key%3 == 0 {
						// Keep the pool full, as answers to probes do.
						for i, e := range picked.Due(probes[:0]) {
							if i == 0 {
								balancer.Probed(now, picked.Shard(), e, load.Report{RIF: int32(key % 5), Latency: time.Duration(key%64) * time.Millisecond, Known: true})
							}
						}
					}
				}
			})
		})
	}
}
