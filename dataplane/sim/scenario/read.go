package scenario

import (
	"fmt"
	"slices"
	"strings"
	"time"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/dataplane/sim"
	"github.com/headroom-mesh/headroom/policy/document"
)

const (
	day      = 24 * time.Hour
	mostRate = 1e7     // requests a second
	mostMany = 100_000 // replicas, or agents
)

// read returns what a spec means, but for its rules.
func read(spec *meshv1.ScenarioSpec, problems *document.Problems) sim.Config {
	r := reader{problems}
	c := sim.Config{
		Load:      r.load(orEmpty(spec.Load)),
		Agents:    r.agents(spec.Agents),
		Replicas:  r.replicas(spec.Replicas),
		Machines:  r.machines(orEmpty(spec.Machines)),
		Network:   r.network(orEmpty(spec.Network)),
		Registry:  r.registry(orEmpty(spec.Registry)),
		Caller:    r.caller(orEmpty(spec.Caller)),
		Probes:    r.probes(orEmpty(spec.Probes)),
		Warmup:    r.duration("spec.warmup", spec.Warmup, document.Span{Min: time.Millisecond, Max: day, Off: true}),
		Threshold: r.duration("spec.threshold", spec.Threshold, document.Span{Min: time.Microsecond, Max: day}),
	}
	c.Load.Work = r.work("spec.work", orEmpty(spec.Work))
	c.Load.Items, c.Load.Zipf, c.Load.CacheHit = r.keys(spec.Keys)
	c.Faults = r.faults(spec.Faults, c.Replicas)
	c.Duration = r.length(spec.Duration, c)
	r.capacity(c)
	return c
}

// orEmpty returns m, or an empty one if there is none.
func orEmpty[M any](m *M) *M {
	if m == nil {
		return new(M)
	}
	return m
}

// reader reads the parts of a spec. What is left out is read as 0, for which a sim.Config has the documented default.
type reader struct{ *document.Problems }

func (r reader) count(path string, n *uint32, most int) int { return r.Count(path, n, 0, 1, most) }

func (r reader) number(path string, x *float64, most float64) float64 {
	return r.Number(path, x, 0, document.Range{Max: most})
}

func (r reader) above0(path string, x *float64, most float64) float64 {
	return r.Number(path, x, 0, document.Range{Max: most, Above: true})
}

func (r reader) duration(path, text string, bounds document.Span) time.Duration {
	return r.Duration(path, text, 0, bounds)
}

// short reads a duration that may be shorter than others.
func (r reader) short(path, text string, most time.Duration) time.Duration {
	return r.duration(path, text, document.Span{Min: time.Microsecond, Max: most, Off: true})
}

// word refuses all words but those that are known, and none.
func word[W ~string](r reader, path, got string, known ...W) W {
	if got == "" || slices.Contains(known, W(got)) {
		return W(got)
	}
	var names []string
	for _, k := range known {
		names = append(names, string(k))
	}
	r.Add(path, "want one of %s, got %q", strings.Join(names, ", "), got)
	return ""
}

// length returns the duration, which stages can imply.
func (r reader) length(text string, c sim.Config) time.Duration {
	if text != "" {
		return r.duration("spec.duration", text, document.Span{Min: time.Millisecond, Max: day})
	}
	var stages time.Duration
	for _, s := range c.Load.Stages {
		stages += s.Lasts
	}
	if stages <= c.Warmup {
		r.Add("spec.duration", "required, such as 60s, unless the load has stages that go on after the warm-up")
	}
	return stages - c.Warmup
}

// capacity refuses a load in parts of a capacity that there isn't.
func (r reader) capacity(c sim.Config) {
	if !c.Load.OfCapacity {
		return
	}
	if !slices.ContainsFunc(c.Replicas, func(g sim.Group) bool { return !g.Absent }) {
		r.Add("spec.load", "want a rate: no replica is there at the start, of whose capacity a utilization is a part")
	}
	for i, g := range c.Replicas {
		if g.Serve == sim.Delay {
			r.Add(fmt.Sprintf("spec.replicas[%d].serve", i), "replicas of kind delay have no capacity, of which a utilization "+
				"is a part: give the load as a rate")
		}
	}
}

func (r reader) load(l *meshv1.ScenarioLoad) sim.Load {
	var set []string
	for _, name := range loads() {
		if fields := l.ProtoReflect(); fields.Has(fields.Descriptor().Fields().ByJSONName(name)) {
			set = append(set, name)
		}
	}
	if len(set) != 1 {
		r.Add("spec.load", "want exactly one of %s, got %s", strings.Join(loads(), ", "), orNothing(set))
		return sim.Load{}
	}
	load := sim.Load{Even: l.Even, Users: r.count("spec.load.users", l.Users, 1_000_000)}
	if l.Think != nil {
		load.Think = r.work("spec.load.think", l.Think)
	}
	switch set[0] {
	case "rate":
		load.Stages = []sim.Stage{{Rate: r.above0("spec.load.rate", l.Rate, mostRate)}}
	case "utilization":
		load.OfCapacity = true
		load.Stages = []sim.Stage{{Rate: r.above0("spec.load.utilization", l.Utilization, 100)}}
	case "stages":
		load.OfCapacity = l.Stages[0].Utilization != nil
		load.Stages = r.stages(l.Stages, load.OfCapacity)
	}
	return load
}

func orNothing(set []string) string {
	if len(set) == 0 {
		return "none"
	}
	return strings.Join(set, " and ")
}

func (r reader) stages(docs []*meshv1.ScenarioStage, ofCapacity bool) (stages []sim.Stage) {
	for i, s := range docs {
		path := fmt.Sprintf("spec.load.stages[%d]", i)
		if s.Lasts == "" {
			r.Add(path+".lasts", "required, such as 30s")
		}
		stage := sim.Stage{Lasts: r.duration(path+".lasts", s.Lasts, document.Span{Min: time.Millisecond, Max: day})}
		hasRate, hasUtilization := s.Rate != nil || s.ToRate != nil, s.Utilization != nil || s.ToUtilization != nil
		switch {
		case hasRate == hasUtilization || hasUtilization != ofCapacity:
			r.Add(path, "want a rate, or else a utilization, and the same in all stages")
		case ofCapacity:
			stage.Rate = r.number(path+".utilization", s.Utilization, 100)
			stage.To = r.above0(path+".toUtilization", s.ToUtilization, 100)
		default:
			stage.Rate = r.number(path+".rate", s.Rate, mostRate)
			stage.To = r.above0(path+".toRate", s.ToRate, mostRate)
		}
		stages = append(stages, stage)
	}
	return stages
}

func (r reader) work(path string, w *meshv1.ScenarioWork) sim.Work {
	if len(w.Mix) == 0 {
		return r.simpleWork(path, w.Distribution, w.Mean, w.Spread)
	}
	if w.Distribution != "" || w.Mean != "" || w.Spread != nil {
		r.Add(path, "want a mix, or else a distribution, mean and spread, got both")
	}
	var work sim.Work
	for i, c := range w.Mix {
		path := fmt.Sprintf("%s.mix[%d]", path, i)
		if c.Share == nil {
			r.Add(path+".share", "required: the share of the requests that are of this class")
		}
		work.Mix = append(work.Mix, sim.Class{
			Share: r.above0(path+".share", c.Share, 1e6),
			Work:  r.simpleWork(path, c.Distribution, c.Mean, c.Spread),
		})
	}
	return work
}

func (r reader) simpleWork(path, distribution, mean string, spread *float64) sim.Work {
	if mean == "" {
		r.Add(path+".mean", "required, such as 50ms")
	}
	w := sim.Work{
		Distribution: word(r, path+".distribution", distribution, sim.Fixed, sim.Exponential, sim.Normal, sim.Uniform, sim.LogNormal),
		Mean:         r.duration(path+".mean", mean, document.Span{Min: time.Microsecond, Max: day}),
		Spread:       r.number(path+".spread", spread, 10),
	}
	if w.Distribution == sim.Uniform && w.Spread > 1 {
		r.Add(path+".spread", "want a number from 0 to 1 for a uniform distribution, got %v", w.Spread)
	}
	return w
}

func (r reader) keys(k *meshv1.ScenarioKeys) (items int, zipf, hit float64) {
	if k == nil {
		return 0, 0, 0
	}
	if k.Items == nil {
		r.Add("spec.keys.items", "required: the number of items")
	}
	items = r.count("spec.keys.items", k.Items, 10_000_000)
	zipf = r.number("spec.keys.zipf", k.Zipf, 10)
	return items, zipf, r.Number("spec.keys.cacheHit", k.CacheHit, 0, document.Range{Min: 1, Max: 1e6})
}

func (r reader) agents(docs []*meshv1.ScenarioAgents) []sim.Agents {
	if len(docs) == 0 {
		return []sim.Agents{{}}
	}
	var all []sim.Agents
	for i, a := range docs {
		path := fmt.Sprintf("spec.agents[%d].", i)
		all = append(all, sim.Agents{
			Count:  r.count(path+"count", a.Count, mostMany),
			Shards: r.count(path+"shards", a.Shards, 1024),
			Zone:   a.Zone,
		})
	}
	return all
}

func (r reader) replicas(docs []*meshv1.ScenarioReplicas) []sim.Group {
	if len(docs) == 0 {
		r.Add("spec.replicas", "required, such as [{count: 10}]")
	}
	names := map[string]bool{}
	var groups []sim.Group
	for i, g := range docs {
		path := fmt.Sprintf("spec.replicas[%d].", i)
		if len(docs) > 1 && (!document.IsLabel(g.Name) || names[g.Name]) || g.Name != "" && !document.IsLabel(g.Name) {
			r.Add(path+"name", "want a DNS label that no other group has, got %q", g.Name)
		}
		names[g.Name] = true
		groups = append(groups, r.group(path, g))
	}
	return groups
}

func (r reader) group(path string, g *meshv1.ScenarioReplicas) sim.Group {
	serve := word(r, path+"serve", g.Serve, sim.CPU, sim.Slots, sim.Delay)
	if serve != sim.Slots && (g.Slots != nil || g.Queue != nil) {
		r.Add(path+"serve", "want slots, as there are slots or a queue, got %q", g.Serve)
	}
	return sim.Group{
		Name:   g.Name,
		Count:  r.count(path+"count", g.Count, mostMany),
		Weight: r.count(path+"weight", g.Weight, 1000),
		Zone:   g.Zone,
		Speed:  r.above0(path+"speed", g.Speed, 1000),
		Serve:  serve,
		Slots:  r.count(path+"slots", g.Slots, 10_000),
		Queue:  r.count(path+"queue", g.Queue, 1_000_000),
		Cache:  r.count(path+"cache", g.Cache, 1_000_000),
		Absent: g.Absent,
	}
}

func (r reader) machines(m *meshv1.ScenarioMachines) sim.Machines {
	const at, most = "spec.machines.", 4096
	return sim.Machines{
		Cores:            r.above0(at+"cores", m.Cores, most),
		Allocation:       r.above0(at+"allocation", m.Allocation, most),
		Most:             r.above0(at+"most", m.Most, most),
		Hobble:           r.above0(at+"hobble", m.Hobble, 1),
		HobbleLoses:      r.number(at+"hobbleLoses", m.HobbleLoses, 1),
		HobbleAfter:      r.duration(at+"hobbleAfter", m.HobbleAfter, document.Span{Min: time.Millisecond, Max: day, Off: true}),
		Interference:     r.number(at+"interference", m.Interference, 0.99),
		InterferenceFrom: r.above0(at+"interferenceFrom", m.InterferenceFrom, 1),
		Antagonists:      r.antagonists(at+"antagonists.", orEmpty(m.Antagonists)),
	}
}

func (r reader) antagonists(path string, a *meshv1.ScenarioAntagonists) sim.Antagonists {
	if n := len(a.Levels); n > mostLevels {
		r.Add(path+"levels", "want %d levels at most, got %d", mostLevels, n)
	}
	var levels []sim.Level
	for i, l := range a.Levels {
		at := fmt.Sprintf("%slevels[%d].", path, i)
		if l.Share == nil {
			r.Add(at+"share", "required")
		}
		levels = append(levels, sim.Level{Share: r.above0(at+"share", l.Share, 1000), Demand: r.interval(at+"demand", orEmpty(l.Demand))})
	}
	return sim.Antagonists{
		Levels: levels,
		Lasts:  r.duration(path+"lasts", a.Lasts, document.Span{Min: time.Millisecond, Max: day, Off: true}),
		Stay:   a.Stay,
	}
}

// mostLevels bounds the levels of antagonists.
const mostLevels = 8

func (r reader) interval(path string, i *meshv1.ScenarioRange) sim.Range {
	least := r.number(path+".min", i.Min, 16)
	return sim.Range{Min: least, Max: r.Number(path+".max", i.Max, least, document.Range{Min: least, Max: 16})}
}

func (r reader) network(n *meshv1.ScenarioNetwork) sim.Network {
	const at = "spec.network."
	network := sim.Network{
		Delay:     r.short(at+"delay", n.Delay, time.Minute),
		Jitter:    r.short(at+"jitter", n.Jitter, time.Minute),
		ZoneDelay: r.duration(at+"zoneDelay", n.ZoneDelay, document.Span{Min: time.Microsecond, Max: time.Minute}),
	}
	if n.Delay != "" && network.Delay == 0 {
		network.Delay = -1 // none, rather than the default
	}
	return network
}

func (r reader) registry(g *meshv1.ScenarioRegistry) sim.Registry {
	const at = "spec.registry."
	bounds := document.Span{Min: time.Millisecond, Max: time.Hour, Off: true}
	return sim.Registry{Delay: r.duration(at+"delay", g.Delay, bounds), Spread: r.duration(at+"spread", g.Spread, bounds)}
}

func (r reader) caller(c *meshv1.ScenarioCaller) sim.Caller {
	const at = "spec.caller."
	return sim.Caller{
		Timeout:         r.duration(at+"timeout", c.Timeout, document.Span{Min: time.Millisecond, Max: day}),
		FinishAbandoned: c.FinishAbandoned,
		Retries:         r.Count(at+"retries", c.Retries, 0, 0, 100),
		Budgeted:        c.Budgeted,
	}
}

func (r reader) probes(p *meshv1.ScenarioProbes) sim.Probes {
	const at = "spec.probes."
	return sim.Probes{
		IdleEvery:   r.duration(at+"idleEvery", p.IdleEvery, document.Span{Min: time.Millisecond, Max: time.Minute}),
		Cost:        r.short(at+"cost", p.Cost, time.Second),
		RequestCost: r.short(at+"requestCost", p.RequestCost, time.Second),
	}
}

func (r reader) faults(docs []*meshv1.ScenarioFault, groups []sim.Group) []sim.Fault {
	var faults []sim.Fault
	for i, doc := range docs {
		path := fmt.Sprintf("spec.faults[%d].", i)
		f := r.fault(path, doc)
		r.misplaced(path, doc, groups)
		faults = append(faults, f)
	}
	return faults
}

func (r reader) fault(path string, f *meshv1.ScenarioFault) sim.Fault {
	span := document.Span{Min: time.Millisecond, Max: 2 * day, Off: true}
	kinds := []sim.FaultKind{sim.Stall, sim.Freeze, sim.Slow, sim.Fail, sim.Crash, sim.Unhealthy, sim.Drain, sim.Leave, sim.Join, sim.Restart}
	if f.Kind == "" {
		r.Add(path+"kind", "required: what happens, such as stall or crash")
	}
	return sim.Fault{
		Kind:    word(r, path+"kind", f.Kind, kinds...),
		At:      r.duration(path+"at", f.At, span),
		Lasts:   r.duration(path+"lasts", f.Lasts, span),
		Group:   f.Group,
		First:   r.Count(path+"first", f.First, 0, 0, mostMany),
		Count:   r.count(path+"count", f.Count, mostMany),
		Factor:  r.above0(path+"factor", f.Factor, 1000),
		Share:   r.above0(path+"share", f.Share, 1),
		Latency: r.short(path+"latency", f.Latency, time.Hour),
		Every:   r.duration(path+"every", f.Every, document.Span{Min: time.Millisecond, Max: time.Hour, Off: true}),
	}
}

// misplaced refuses what makes no sense for the kind of fault, or for what it happens to.
func (r reader) misplaced(path string, f *meshv1.ScenarioFault, groups []sim.Group) {
	kind := sim.FaultKind(f.Kind)
	if (kind == sim.Slow) != (f.Factor != nil) {
		r.Add(path+"factor", "want a factor with kind slow, and only there")
	}
	if kind != sim.Fail && (f.Share != nil || f.Latency != "") {
		r.Add(path+"kind", "want fail, as there is a share or a latency, got %q", f.Kind)
	}
	if kind == sim.Restart && f.Group != "" {
		r.Add(path+"group", "want none: restart happens to agents")
	}
	if kind == sim.Restart || f.Group == "" {
		return
	}
	i := slices.IndexFunc(groups, func(g sim.Group) bool { return g.Name == f.Group })
	if i < 0 {
		r.Add(path+"group", "there is no group %q of replicas", f.Group)
		return
	}
	if count := max(groups[i].Count, 1); int(f.GetFirst()) >= count {
		r.Add(path+"first", "want a number below %d, the replicas of the group, got %d", count, f.GetFirst())
	}
}
