package outbound

import (
	"bytes"
	"net/http"
	"time"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/dataplane/balancer"
	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/headroom-mesh/headroom/registry"
	"google.golang.org/protobuf/types/known/durationpb"
)

// account notes the end of a call.
func (c *call) account(reason fault.Reason, now time.Time) {
	took := now.Sub(c.start)
	if c.service != nil {
		if c.badly(reason) {
			c.service.errors.Add(1)
		}
		c.service.metrics.finished(c.status, reason, took)
	} else {
		c.outbound.metrics.unrouted(reason)
	}
	if c.outbound.cfg.AccessLog != nil {
		c.log(reason, took)
	}
}

// badly reports whether the caller got no good answer, or only a part of one.
func (c *call) badly(reason fault.Reason) bool {
	return c.failed || c.status >= http.StatusInternalServerError || reason == fault.Reset || reason == fault.Timeout
}

func (c *call) log(reason fault.Reason, took time.Duration) {
	endpoint := ""
	if c.tries > 0 && c.left == nil {
		endpoint = string(c.tried[c.tries-1].ID)
	}
	path, _, _ := bytes.Cut(c.head.Path(nil), []byte("?"))
	c.outbound.cfg.AccessLog.Info("request", "source", c.head.Caller().ID.String(), "method", string(c.head.Method(nil)), "host", string(c.head.Authority(nil)), "path", string(path),
		"endpoint", endpoint, "status", c.status, "reason", string(reason), "tries", c.tries, "took", took)
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
		Address: record.At(),
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
