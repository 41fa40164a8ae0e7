package outbound

import (
	"log/slog"
	"strings"
	"sync/atomic"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/balancer"
	"github.com/headroom-mesh/headroom/dataplane/relay"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/policy/budget"
	"github.com/headroom-mesh/headroom/registry"
)

// service is a destination as this agent sees it. It lives as long as the service is registered; policies come and go
// without a request noticing.
type service struct {
	name     registry.ServiceName
	seed     uint64
	record   *registry.Service // as last applied
	fleet    *balancer.Fleet
	balancer atomic.Pointer[balancer.Balancer]
	policy   atomic.Pointer[inForce]
	metrics  *serviceMetrics
	absence  absence

	requests, errors, retries, probes, answers atomic.Uint64
	lastUse                                    atomic.Int64 // Unix nanoseconds
	lastOutside                                atomic.Int64 // Unix nanoseconds; 0: requests stay in the mesh
}

// inForce is a policy with the state that hangs on it, apart from the balancer's.
type inForce struct {
	policy.Policy
	revision int64
	budget   *budget.Budget
	protocol relay.Protocol // that all replicas are declared to speak
}

func newService(name registry.ServiceName, place balancer.Place, seed uint64, m *serviceMetrics) *service {
	return &service{name: name, seed: seed, fleet: balancer.NewFleet(place), metrics: m}
}

// update applies what the registry says of the service. A balancer, or a retry budget, whose part of the policy did not
// change keeps what it has learnt.
func (s *service) update(now time.Time, record *registry.Service) {
	if s.record == record {
		return
	}
	s.record = record
	s.fleet.Update(now, record.Endpoints, record.Policy.Scope)
	next := &inForce{Policy: record.Policy, revision: record.PolicyRevision, protocol: protocolOf(record.Endpoints)}
	if key := &next.Hash.Key; key.Source == policy.KeyHeader {
		key.Name = strings.ToLower(key.Name) // as fields are looked up
	}
	if old := s.policy.Load(); old != nil && old.RetryBudget == next.RetryBudget {
		next.budget = old.budget
	} else {
		next.budget = budget.New(next.RetryBudget)
	}
	if b := s.balancer.Load(); b == nil || balancingDiffers(b.Policy, next.Policy) {
		s.balancer.Store(balancer.New(next.Policy, s.fleet, shards(next.Policy), s.seed))
	}
	s.policy.Store(next)
}

// protocolOf returns what replicas are declared to speak, if they agree.
func protocolOf(replicas []registry.Endpoint) relay.Protocol {
	for _, e := range replicas {
		if e.Protocol != replicas[0].Protocol {
			return relay.Unknown
		}
	}
	if len(replicas) == 0 {
		return relay.Unknown
	}
	return relay.Declared(replicas[0].Protocol)
}

// balancingDiffers compares what a balancer goes by: all but what bounds requests, how they are passed on, and what the fleet itself takes in.
func balancingDiffers(a, b policy.Policy) bool {
	a.Timeout, a.RetryBudget, a.WaitForReady, a.Scope = b.Timeout, b.RetryBudget, b.WaitForReady, b.Scope
	a.Forwarded, a.ProxyProtocol, a.DetectTimeout = b.Forwarded, b.ProxyProtocol, b.DetectTimeout
	a.CaptureReal, a.CaptureInbound = b.CaptureReal, b.CaptureInbound
	return a != b
}

// declined notes that a replica takes no requests, as its own agent says.
func (s *service) declined(now time.Time, b *balancer.Balancer, e *balancer.Endpoint) {
	s.fleet.Decline(now, e)
	b.Forget(e)
}

func (s *service) use(now time.Time) {
	s.requests.Add(1)
	s.lastUse.Store(now.UnixNano())
	s.policy.Load().budget.Deposit(now)
}

func (s *service) usedSince(t time.Time) bool { return s.lastUse.Load() > t.UnixNano() }

// backAfter is how long requests must have stayed in the mesh for it to be said: where one in a few leaves, that is no news.
const backAfter = 10 * time.Second

// leaves notes that a request goes to where the service is to be had without the mesh.
func (s *service) leaves(now time.Time, log *slog.Logger) {
	if s.lastOutside.Swap(now.UnixNano()) == 0 {
		log.Warn("requests leave the mesh, as no replica in it takes them: they go to the cluster IP, without the mesh's TLS", "service", s.name)
	}
}

// stays notes that a request, which began at a time, was answered in the mesh.
func (s *service) stays(began time.Time, log *slog.Logger) {
	left := s.lastOutside.Load()
	if left == 0 || began.UnixNano()-left < int64(backAfter) {
		return
	}
	if s.lastOutside.CompareAndSwap(left, 0) {
		log.Info("requests are in the mesh again", "service", s.name)
	}
}
