package sim

import (
	"errors"
	"fmt"
	"math"
	"slices"
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

// Validate reports all that is wrong.
func (c Config) Validate() error {
	p := new(problems)
	p.check(c.Duration > 0, "Duration: want a time above 0, got %v", c.Duration)
	p.notNegative("Warmup", c.Warmup)
	p.notNegative("Threshold", c.Threshold)
	p.notNegative("SampleEvery", c.SampleEvery)
	p.notNegative("Bucket", c.Bucket)
	if c.Policy.Balancer != "" {
		oneOf(p, "Policy.Balancer", c.Policy.Balancer, policy.Balancers()...)
	}
	c.validateLoad(p)
	p.check(len(c.Agents) > 0, "Agents: want one group at least")
	for i, a := range c.Agents {
		p.atLeast(fmt.Sprintf("Agents[%d].Count", i), a.Count, 0)
		p.atLeast(fmt.Sprintf("Agents[%d].Shards", i), a.Shards, 0)
	}
	p.check(len(c.Replicas) > 0, "Replicas: want one group at least")
	replicas := 0
	for i, g := range c.Replicas {
		g.validate(p, fmt.Sprintf("Replicas[%d]", i))
		replicas += max(g.Count, 1)
	}
	p.check(replicas <= mostReplicas, "Replicas: want %d replicas at most, got %d", mostReplicas, replicas)
	c.Machines.validate(p)
	p.notNegative("Network.Jitter", c.Network.Jitter)
	p.notNegative("Network.ZoneDelay", c.Network.ZoneDelay)
	p.notNegative("Registry.Delay", c.Registry.Delay)
	p.notNegative("Registry.Spread", c.Registry.Spread)
	p.notNegative("Caller.Timeout", c.Caller.Timeout)
	p.atLeast("Caller.Retries", c.Caller.Retries, 0)
	p.notNegative("Probes.IdleEvery", c.Probes.IdleEvery)
	p.notNegative("Probes.Cost", c.Probes.Cost)
	p.notNegative("Probes.RequestCost", c.Probes.RequestCost)
	for i, f := range c.Faults {
		f.validate(p, fmt.Sprintf("Faults[%d]", i), c.Replicas)
	}
	return errors.Join(p.errs...)
}

func (c Config) validateLoad(p *problems) {
	l := c.Load
	p.check(l.Users >= 0, "Load.Users: want 0 or more, got %d", l.Users)
	p.check((l.Users > 0) != (len(l.Stages) > 0), "Load: want either Stages or Users")
	for i, st := range l.Stages {
		at := fmt.Sprintf("Load.Stages[%d]", i)
		p.notNegative(at+".Lasts", st.Lasts)
		p.check(st.Lasts > 0 || i == len(l.Stages)-1, "%s.Lasts: only the last stage may go on for ever", at)
		p.check(st.Lasts > 0 || st.To == 0, "%s.To: want a stage that ends", at)
		p.number(at+".Rate", st.Rate)
		p.number(at+".To", st.To)
	}
	for i, g := range c.Replicas {
		p.check(!l.OfCapacity || g.Serve != Delay, "Load.OfCapacity: the capacity of Replicas[%d] has no limit", i)
	}
	l.Work.validate(p, "Load.Work")
	p.check(l.Work.mean() > 0, "Load.Work: want a mean above 0")
	l.Think.validate(p, "Load.Think")
	p.atLeast("Load.Items", l.Items, 0)
	p.number("Load.Zipf", l.Zipf)
	p.number("Load.CacheHit", l.CacheHit)
}

func (w Work) validate(p *problems, at string) {
	oneOf(p, at+".Distribution", w.Distribution, "", Fixed, Exponential, Normal, Uniform, LogNormal)
	p.notNegative(at+".Mean", w.Mean)
	p.number(at+".Spread", w.Spread)
	p.check(w.Distribution != Uniform || w.Spread <= 1, "%s.Spread: want a share from 0 to 1, got %v", at, w.Spread)
	p.check(len(w.Mix) == 0 || w.Distribution == "" && w.Mean == 0, "%s: want either a mixture or a distribution", at)
	for i, c := range w.Mix {
		of := fmt.Sprintf("%s.Mix[%d]", at, i)
		p.check(c.Share > 0 && !math.IsInf(c.Share, 1), "%s.Share: want a number above 0, got %v", of, c.Share)
		p.check(len(c.Work.Mix) == 0, "%s.Work.Mix: a mixture can't be part of another", of)
		c.Work.validate(p, of+".Work")
	}
}

func (g Group) validate(p *problems, at string) {
	p.atLeast(at+".Count", g.Count, 0)
	p.atLeast(at+".Weight", g.Weight, 0)
	p.number(at+".Speed", g.Speed)
	oneOf(p, at+".Serve", g.Serve, "", CPU, Slots, Delay)
	p.atLeast(at+".Slots", g.Slots, 0)
	p.atLeast(at+".Queue", g.Queue, 0)
	p.check(g.Serve == Slots || g.Slots == 0 && g.Queue == 0, "%s: only replicas that serve by slots have Slots and a Queue", at)
	p.atLeast(at+".Cache", g.Cache, 0)
}

func (m Machines) validate(p *problems) {
	p.number("Machines.Cores", m.Cores)
	p.number("Machines.Allocation", m.Allocation)
	d := m.withDefaults()
	p.check(d.Allocation <= d.Cores, "Machines.Allocation: want %v cores at most, got %v", d.Cores, d.Allocation)
	p.number("Machines.Most", m.Most)
	p.share("Machines.Hobble", m.Hobble)
	p.share("Machines.HobbleLoses", m.HobbleLoses)
	p.notNegative("Machines.HobbleAfter", m.HobbleAfter)
	p.share("Machines.Interference", m.Interference)
	p.check(m.Interference < 1, "Machines.Interference: want less than 1, or nothing would be done")
	p.share("Machines.InterferenceFrom", m.InterferenceFrom)
	a := m.Antagonists
	p.check(len(a.Levels) <= 8, "Machines.Antagonists.Levels: want 8 at most, got %d", len(a.Levels))
	for i, l := range a.Levels {
		at := fmt.Sprintf("Machines.Antagonists.Levels[%d]", i)
		p.check(l.Share > 0 && !math.IsInf(l.Share, 1), "%s.Share: want a number above 0, got %v", at, l.Share)
		l.Demand.validate(p, at+".Demand")
	}
	p.notNegative("Machines.Antagonists.Lasts", a.Lasts)
}

func (g Range) validate(p *problems, at string) {
	p.check(0 <= g.Min && g.Min <= g.Max && !math.IsInf(g.Max, 1), "%s: want Min from 0 to Max, got %v to %v", at, g.Min, g.Max)
}

func (f Fault) validate(p *problems, at string, groups []Group) {
	oneOf(p, at+".Kind", f.Kind, Stall, Freeze, Slow, Fail, Crash, Unhealthy, Drain, Leave, Join, Restart)
	p.notNegative(at+".At", f.At)
	p.notNegative(at+".Lasts", f.Lasts)
	p.notNegative(at+".Every", f.Every)
	p.atLeast(at+".First", f.First, 0)
	p.atLeast(at+".Count", f.Count, 0)
	known := f.Group == "" || slices.ContainsFunc(groups, func(g Group) bool { return g.Name == f.Group })
	p.check(known, "%s.Group: no group of replicas is named %q", at, f.Group)
	p.check(f.Kind != Slow || f.Factor > 0 && !math.IsInf(f.Factor, 1), "%s.Factor: want a number above 0, got %v", at, f.Factor)
	p.share(at+".Share", f.Share)
	p.notNegative(at+".Latency", f.Latency)
}

// mostReplicas is how many numbers the names of replicas have room for.
const mostReplicas = 1_000_000

// problems collects what is wrong, each with the path of the field.
type problems struct{ errs []error }

func (p *problems) check(ok bool, format string, args ...any) {
	if !ok {
		p.errs = append(p.errs, fmt.Errorf(format, args...))
	}
}

func (p *problems) number(path string, x float64) {
	p.check(x >= 0 && !math.IsInf(x, 1), "%s: want a number that is not negative, got %v", path, x)
}

func (p *problems) share(path string, x float64) {
	p.check(x >= 0 && x <= 1, "%s: want a share from 0 to 1, got %v", path, x)
}

func (p *problems) atLeast(path string, n, least int) {
	p.check(n >= least, "%s: want %d or more, got %d", path, least, n)
}

func (p *problems) notNegative(path string, d time.Duration) {
	p.check(d >= 0, "%s: want a time that is not negative, got %v", path, d)
}

func oneOf[T ~string](p *problems, path string, got T, want ...T) {
	p.check(slices.Contains(want, got), "%s: want one of %q, got %q", path, want, got)
}
