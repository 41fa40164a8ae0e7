package main

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
)

// topView is what all agents see, merged. Its JSON form is stable.
type topView struct {
	Asked string `json:"asked"` // node of the agent that was asked
	// Interval is the time between the two samples that rates are taken from. It is 0 if there is but one: then rates
	// are averages since the agents started.
	Interval float64       `json:"intervalSeconds"`
	Agents   []string      `json:"agents"`  // nodes of those that answered
	Missing  []string      `json:"missing"` // the others, and why
	Services []serviceView `json:"services"`
}

type serviceView struct {
	Service   string  `json:"service"`
	Requests  float64 `json:"requestsPerSecond"`
	Errors    float64 `json:"errorsPerSecond"`
	Retries   float64 `json:"retriesPerSecond"`
	Callers   int     `json:"callers"`         // agents that have called the service
	Revisions []int64 `json:"policyRevisions"` // in force at callers, each once; 0 stands for the defaults
	// ProbesPerRequest is absent without requests.
	ProbesPerRequest *float64      `json:"probesPerRequest"`
	Seen             *seenView     `json:"seen"` // absent if no agent calls the service
	Replicas         []replicaView `json:"replicas"`
}

// seenView is a service as one balancer sees it: that of the agent that was asked, if it calls the service.
type seenView struct {
	By           string  `json:"by"`
	Balancer     string  `json:"balancer"`
	HotThreshold *int32  `json:"hotThreshold"`
	Pooled       uint32  `json:"pooled"`
	PoolCapacity uint32  `json:"poolCapacity"`
	IdleSlots    *uint32 `json:"idleSlots"` // known to be free; absent unless the rule goes by them
	RetryBalance float64 `json:"retryBalance"`
}

type replicaView struct {
	ID        string   `json:"id"`
	Node      string   `json:"node"`
	Zone      string   `json:"zone"`
	Address   string   `json:"address"`
	State     string   `json:"state"`
	Avoided   string   `json:"avoided"`   // why callers leave it out, if any does
	AvoidedBy []string `json:"avoidedBy"` // the nodes of those callers
	Requests  float64  `json:"requestsPerSecond"`
	Errors    float64  `json:"errorsPerSecond"`
	Share     *float64 `json:"share"`          // of the picks of all callers; absent without picks
	RIF       *int32   `json:"rif"`            // as its own agent counts it; absent if that gave no answer
	Latency   *float64 `json:"latencySeconds"` // as its own agent estimates it; absent if unknown
	Hot       *bool    `json:"hot"`            // as the balancer in seen has it; absent without a probe
	ProbeAge  *float64 `json:"probeAgeSeconds"`
	// Weight is a multiple of the mean, and Cost what one more request costs, as the balancer in seen has it; absent
	// unless the rule goes by it.
	Weight *float64 `json:"weight"`
	Cost   *float64 `json:"costSeconds"`
	// Slots is absent unless the rule goes by slots.
	Slots      *slotsView `json:"slots"`
	CheckError string     `json:"checkError"`
}

// slotsView is the line for a replica, as its own agent sees it.
type slotsView struct {
	Slots   uint32 `json:"slots"`
	InUse   uint32 `json:"inUse"`
	Waiting uint32 `json:"waiting"`
}

// merge computes the view from two successive samples; before is nil if there is but one.
func merge(before, now *meshv1.TopResponse) topView {
	m := merger{
		before:   byNode(before),
		services: map[string]*serviceView{},
		replicas: map[string]*replicaView{},
		picks:    map[string]float64{},
		probes:   map[string]float64{},
	}
	for _, agent := range now.Agents {
		m.observe(agent)
	}
	view := topView{
		Asked:    asked(now),
		Interval: interval(before, now),
		Agents:   []string{},
		Missing:  append([]string{}, now.Missing...),
		Services: m.result(),
	}
	for _, agent := range now.Agents {
		view.Agents = append(view.Agents, agent.Node)
	}
	slices.Sort(view.Missing)
	return view
}

func byNode(sample *meshv1.TopResponse) map[string]*meshv1.Observation {
	if sample == nil {
		return nil
	}
	nodes := map[string]*meshv1.Observation{}
	for _, agent := range sample.Agents {
		nodes[agent.Node] = agent
	}
	return nodes
}

func asked(sample *meshv1.TopResponse) string {
	if len(sample.Agents) == 0 {
		return ""
	}
	return sample.Agents[0].Node
}

// interval is the time between the samples by the clock of the agent that was asked.
func interval(before, now *meshv1.TopResponse) float64 {
	if before == nil || len(now.Agents) == 0 {
		return 0
	}
	if earlier, found := byNode(before)[asked(now)]; found {
		return max(0, since(earlier.Time.AsTime(), now.Agents[0]))
	}
	return 0
}

func since(t time.Time, agent *meshv1.Observation) float64 {
	return agent.Time.AsTime().Sub(t).Seconds()
}

type merger struct {
	before   map[string]*meshv1.Observation // nil: there is but one sample
	services map[string]*serviceView
	replicas map[string]*replicaView
	picks    map[string]float64 // a second, for each service
	probes   map[string]float64 // a second, for each service
}

// baseline is where the counters of one agent stood, and how long ago.
type baseline struct {
	seconds  float64
	outbound map[string]*meshv1.OutboundView
	picks    map[string]*meshv1.EndpointView
}

// baselineOf finds the counters of an agent at the sample before. An agent that has restarted since began at 0 then.
// ok is false if the agent was not in the sample: it is unknown how much it counted when.
func (m *merger) baselineOf(agent *meshv1.Observation) (b baseline, ok bool) {
	if m.before == nil {
		return baseline{seconds: since(agent.Started.AsTime(), agent)}, true
	}
	before, found := m.before[agent.Node]
	if !found {
		return baseline{}, false
	}
	if !before.Started.AsTime().Equal(agent.Started.AsTime()) {
		return baseline{seconds: since(agent.Started.AsTime(), agent)}, true
	}
	b = baseline{
		seconds:  since(before.Time.AsTime(), agent),
		outbound: map[string]*meshv1.OutboundView{},
		picks:    map[string]*meshv1.EndpointView{},
	}
	for _, o := range before.Outbound {
		b.outbound[o.Service] = o
		for _, e := range o.Endpoints {
			b.picks[e.Id] = e
		}
	}
	return b, true
}

// rate is growth a second. A counter that shrank has begun anew.
func (b baseline) rate(before, now uint64) float64 {
	if b.seconds <= 0 {
		return 0
	}
	if now < before {
		before = 0
	}
	return float64(now-before) / b.seconds
}

func (m *merger) observe(agent *meshv1.Observation) {
	b, known := m.baselineOf(agent)
	for _, o := range agent.Outbound {
		s := m.service(o.Service)
		s.Callers++
		s.Revisions = append(s.Revisions, o.PolicyRevision)
		first := s.Seen == nil
		if first {
			s.Seen = seen(agent.Node, o)
		}
		if known {
			s.count(b, b.outbound[o.Service], o)
			m.probes[o.Service] += b.rate(b.outbound[o.Service].GetProbes(), o.Probes)
		}
		for _, e := range o.Endpoints {
			m.outbound(agent.Node, e)
			if first {
				m.replica(e.Id).judged(o.Balancer, e)
			}
			if known {
				m.count(b, b.picks[e.Id], e)
			}
		}
	}
	for _, i := range agent.Inbound {
		m.inbound(agent.Node, i)
	}
}

func seen(node string, o *meshv1.OutboundView) *seenView {
	return &seenView{By: node, Balancer: o.Balancer, HotThreshold: o.HotThreshold, Pooled: o.Pooled,
		PoolCapacity: o.PoolCapacity, IdleSlots: o.IdleSlots, RetryBalance: o.RetryBalance}
}

func (m *merger) service(name string) *serviceView {
	if m.services[name] == nil {
		m.services[name] = &serviceView{Service: name, Revisions: []int64{}, Replicas: []replicaView{}}
	}
	return m.services[name]
}

func (s *serviceView) count(b baseline, before, now *meshv1.OutboundView) {
	s.Requests += b.rate(before.GetRequests(), now.Requests)
	s.Errors += b.rate(before.GetErrors(), now.Errors)
	s.Retries += b.rate(before.GetRetries(), now.Retries)
}

func (m *merger) replica(id string) *replicaView {
	if m.replicas[id] == nil {
		m.replicas[id] = &replicaView{ID: id, AvoidedBy: []string{}}
	}
	return m.replicas[id]
}

// outbound adds what one caller says of a replica.
func (m *merger) outbound(caller string, e *meshv1.EndpointView) {
	r := m.replica(e.Id)
	r.Node, r.Zone, r.Address = e.Node, cmp.Or(r.Zone, e.Zone), e.Address
	r.State = cmp.Or(r.State, stateWord(e.State))
	if e.Avoided != "" {
		r.Avoided = cmp.Or(r.Avoided, e.Avoided)
		r.AvoidedBy = append(r.AvoidedBy, caller)
	}
}

// judged adds what the balancer that is shown makes of the replica.
func (r *replicaView) judged(balancer string, e *meshv1.EndpointView) {
	if e.Probe != nil {
		r.ProbeAge = new(e.Probe.Age.AsDuration().Seconds())
		if balancer == "prequal" {
			r.Hot = &e.Probe.Hot
		}
	}
	r.Weight = e.Weight
	if e.Cost != nil {
		r.Cost = new(e.Cost.AsDuration().Seconds())
	}
}

func (m *merger) count(b baseline, before, now *meshv1.EndpointView) {
	r := m.replica(now.Id)
	picks := b.rate(before.GetPicks(), now.Picks)
	r.Requests += picks
	r.Errors += b.rate(before.GetErrors(), now.Errors)
	m.picks[serviceOf(now.Id)] += picks
}

// inbound adds what the agent of a replica says of it. It knows the state best.
func (m *merger) inbound(node string, i *meshv1.InboundView) {
	m.service(serviceOf(i.Id))
	r := m.replica(i.Id)
	r.Node = cmp.Or(r.Node, node)
	r.Address = cmp.Or(r.Address, addressOf(i.Id))
	if i.State != meshv1.EndpointRecord_UNKNOWN {
		r.State = stateWord(i.State)
	}
	r.RIF, r.CheckError = &i.Rif, i.CheckError
	if s := i.Slots; s != nil {
		r.Slots = &slotsView{s.Slots, s.InUse, s.Waiting}
	}
	if i.Latency != nil {
		seconds := i.Latency.AsDuration().Seconds()
		r.Latency = &seconds
	}
}

// serviceOf takes the service out of the name of a replica: service/node/address.
func serviceOf(id string) string {
	service, _, _ := strings.Cut(id, "/")
	return service
}

// addressOf takes the address out of it, which may be the path of a socket.
func addressOf(id string) string {
	part := strings.SplitN(id, "/", 3)
	return part[len(part)-1]
}

func (m *merger) result() []serviceView {
	for _, id := range slices.Sorted(maps.Keys(m.replicas)) {
		r, total := m.replicas[id], m.picks[serviceOf(id)]
		if total > 0 {
			share := r.Requests / total
			r.Share = &share
		}
		s := m.service(serviceOf(id))
		s.Replicas = append(s.Replicas, *r)
	}
	services := []serviceView{}
	for _, name := range slices.Sorted(maps.Keys(m.services)) {
		s := m.services[name]
		slices.Sort(s.Revisions)
		s.Revisions = slices.Compact(s.Revisions)
		if s.Requests > 0 {
			probes := m.probes[name] / s.Requests
			s.ProbesPerRequest = &probes
		}
		services = append(services, *s)
	}
	return services
}
