package outbound

import (
	"net/http"
	"time"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/dataplane/balancer"
	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/headroom-mesh/headroom/registry"
	"google.golang.org/protobuf/types/known/durationpb"
)

// account notes the end of a request.
func (o *Outbound) account(r *http.Request, x *exchange) {
	took := time.Since(x.start)
	if x.service != nil {
		if x.failed() {
			x.service.errors.Add(1)
		}
		x.service.metrics.finished(x.status, x.reason, took)
	} else {
		o.metrics.unrouted(x.reason)
	}
	if o.cfg.AccessLog != nil {
		o.cfg.AccessLog.Info("request", "method", r.Method, "host", r.Host, "path", r.URL.Path, "endpoint", string(x.endpoint),
			"status", x.status, "reason", string(x.reason), "tries", x.tries, "took", took)
	}
}

// failed reports whether the caller got no good answer, or only a part of one.
func (x *exchange) failed() bool {
	return x.status >= http.StatusInternalServerError || x.reason == fault.Reset || x.reason == fault.Timeout
}

// Observe describes services as the balancer sees them: one, or all if service is empty.
func (o *Outbound) Observe(now time.Time, service registry.ServiceName) []*meshv1.OutboundView {
	var views []*meshv1.OutboundView
	for name, s := range *o.services.Load() {
		if service == "" || service == name {
			views = append(views, s.observe(now))
		}
	}
	return views
}

func (s *service) observe(now time.Time) *meshv1.OutboundView {
	p, seen := s.policy.Load(), s.balancer.Load().View(now)
	v := &meshv1.OutboundView{
		Service:        string(s.name),
		Balancer:       string(p.Balancer),
		PolicyRevision: p.revision,
		Requests:       s.requests.Load(),
		Errors:         s.errors.Load(),
		Retries:        s.retries.Load(),
		RetryBalance:   p.budget.Balance(now),
		Probes:         s.probes.Load(),
		ProbeAnswers:   s.answers.Load(),
		Pooled:         uint32(seen.Pooled),
		PoolCapacity:   uint32(seen.PoolCapacity),
	}
	if seen.HasThreshold {
		v.HotThreshold = new(int32(seen.Threshold))
	}
	if seen.HasIdleSlots {
		v.IdleSlots = new(uint32(seen.IdleSlots))
	}
	s.fleet.Each(now, func(e *balancer.Endpoint, why balancer.Avoidance) {
		v.Endpoints = append(v.Endpoints, endpointView(e, why, seen))
	})
	return v
}

func endpointView(e *balancer.Endpoint, why balancer.Avoidance, seen balancer.View) *meshv1.EndpointView {
	record := e.Record()
	v := &meshv1.EndpointView{
		Id:      string(e.ID),
		Node:    string(record.Node),
		Zone:    record.Zone,
		Address: record.Address.String(),
		State:   record.State.Proto(),
		Avoided: string(why),
		Picks:   e.Picks(),
		Errors:  e.Errors(),
		OwnRif:  int32(e.RIF()),
	}
	if p, ok := seen.FreshestProbes[e]; ok {
		v.Probe = &meshv1.ProbeView{Rif: p.Report.RIF, Age: durationpb.New(p.Age), Hot: p.Hot}
		if p.Report.Known {
			v.Probe.Latency = durationpb.New(p.Report.Latency)
		}
	}
	if w, ok := seen.Weights[e]; ok {
		v.Weight = &w
	}
	if c, ok := seen.Costs[e]; ok {
		v.Cost = durationpb.New(c)
	}
	return v
}
