package sim_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/sim"
	"github.com/headroom-mesh/headroom/policy"
)

const ms = time.Millisecond

func TestWalk(t *testing.T) {
	for _, b := range []policy.Balancer{policy.BalancerPrequal, policy.BalancerRandom, policy.BalancerRoundRobin} {
		p := policy.Default()
		p.Balancer = b
		p.Timeout = 5 * time.Second
		c := sim.Config{
			Policy:   p,
			Load:     sim.Load{Stages: []sim.Stage{{Rate: 6000}}, Work: sim.Work{Distribution: sim.Normal, Mean: 80 * ms, Spread: 1}},
			Agents:   []sim.Agents{{Count: 100}},
			Replicas: []sim.Group{{Count: 100}},
			Machines: sim.Machines{Antagonists: sim.Antagonists{Light: sim.Range{Min: .2, Max: .8}, Heavy: sim.Range{Min: 1, Max: 1.2}, HeavyShare: .1, LightLasts: 5 * time.Second}},
			Warmup:   10 * time.Second,
			Duration: 60 * time.Second,
		}
		began := time.Now()
		r, err := sim.Run(c)
		if err != nil {
			t.Fatal(err)
		}
		r.Series = nil
		fmt.Printf("%v %+v\n", time.Since(began), r)
	}
}
