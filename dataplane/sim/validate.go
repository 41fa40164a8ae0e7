package sim

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/headroom-mesh/headroom/policy"
)

// withDefaults fills in what is left out.
func (c Config) withDefaults() Config {
	if c.Policy.Balancer == "" {
		c.Policy = policy.Default()
	}
	otherwise(&c.SampleEvery, 100*time.Millisecond)
	otherwise(&c.Bucket, time.Second)
	otherwise(&c.Load.CacheHit, 1)
	otherwise(&c.Caller.Timeout, c.Policy.Timeout)
	otherwise(&c.Probes.IdleEvery, 100*time.Millisecond)
	c.Agents = mapped(c.Agents, Agents.withDefaults)
	c.Replicas = mapped(c.Replicas, Group.withDefaults)
	c.Faults = mapped(c.Faults, Fault.withDefaults)
	c.Machines = c.Machines.withDefaults()
	c.Network = c.Network.withDefaults()
	return c
}

func (a Agents) withDefaults() Agents {
	otherwise(&a.Count, 1)
	otherwise(&a.Shards, 1)
	return a
}

func (g Group) withDefaults() Group {
	otherwise(&g.Count, 1)
	otherwise(&g.Weight, 1)
	otherwise(&g.Speed, 1)
	otherwise(&g.Serve, CPU)
	otherwise(&g.Slots, 1)
	return g
}

func (f Fault) withDefaults() Fault {
	otherwise(&f.Share, 1)
	return f
}

func (m Machines) withDefaults() Machines {
	otherwise(&m.Cores, 64)
	otherwise(&m.Allocation, m.Cores/10)
	otherwise(&m.Most, m.Cores)
	otherwise(&m.Hobble, 1)
	otherwise(&m.InterferenceFrom, 1)
	otherwise(&m.Antagonists.HeavyLasts, m.Antagonists.LightLasts)
	return m
}

func (n Network) withDefaults() Network {
	otherwise(&n.Delay, 250*time.Microsecond)
	n.Delay = max(n.Delay, 0)
	otherwise(&n.ZoneDelay, n.Delay)
	return n
}

func otherwise[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

func mapped[T any](all []T, f func(T) T) []T {
	out := make([]T, 0, len(all))
	for _, x := range all {
		out = append(out, f(x))
	}
	return out
}

// problems collects what is wrong, each with the path of the field.
type problems struct{ errs []error }

func (p *problems) check(ok bool, format string, args ...any) {
	if !ok {
		p.errs = append(p.errs, fmt.Errorf(format, args...))
	}
}

// positive wants a number above 0, or 0 for the default.
func (p *problems) positive(path string, x float64) {
	p.check(x >= 0 && !math.IsInf(x, 1), "%s: want a number above 0, or 0 for the default, got %v", path, x)
}

func (p *problems) span(path string, d time.Duration) {
	p.check(d >= 0, "%s: want a time that is not negative, got %v", path, d)
}

func (p *problems) share(path string, x float64) {
	p.check(x >= 0 && x <= 1, "%s: want a share from 0 to 1, got %v", path, x)
}

// Validate reports all that is wrong.
func (c Config) Validate() error {
	p := new(problems)
	p.check(c.Duration > 0, "Duration: want a time above 0, got %v", c.Duration)
	p.span("Warmup", c.Warmup)
	p.span("SampleEvery", c.SampleEvery)
	p.span("Bucket", c.Bucket)
	return errors.Join(p.errs...)
}
