package sim_test

import (
	"testing"

	"github.com/headroom-mesh/headroom/dataplane/sim"
	"github.com/headroom-mesh/headroom/policy"
)

// BenchmarkTestbed plays a minute of 100 agents, 100 replicas and 6,000 requests a second.
func BenchmarkTestbed(b *testing.B) {
	for _, rule := range []policy.Balancer{policy.BalancerRoundRobin, policy.BalancerPrequal} {
		b.Run(string(rule), func(b *testing.B) {
			c := testbed(0, rule)
			c.Load.Stages, c.Load.OfCapacity = []sim.Stage{{Rate: 6000}}, false
			c.Agents, c.Replicas = []sim.Agents{{Count: 100}}, []sim.Group{{Count: 100}}
			c.Warmup, c.Duration = 0, 60*sec
			requests := 0
			for b.Loop() {
				requests += run(b, c).Requests
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(requests), "ns/request")
		})
	}
}

// BenchmarkThousands plays a second of 5,000 agents and 10,000 replicas, of which each agent uses 20.
func BenchmarkThousands(b *testing.B) {
	c := testbed(0.7, policy.BalancerPrequal)
	c.Policy.Scope.Subset = 20
	c.Agents, c.Replicas = []sim.Agents{{Count: 5000}}, []sim.Group{{Count: 10_000}}
	c.Warmup, c.Duration = 0, sec
	b.ReportAllocs()
	for b.Loop() {
		run(b, c)
	}
}
