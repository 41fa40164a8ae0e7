package inbound

import (
	"sync"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/registry"
	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	requests *prometheus.CounterVec
	duration *prometheus.HistogramVec
	services sync.Map // registry.ServiceName -> *serviceMetrics
}

// serviceMetrics are the children of one service, looked up once.
type serviceMetrics struct {
	requests [3]prometheus.Counter // by load.Outcome
	duration prometheus.Observer
}

func newMetrics(r prometheus.Registerer) *metrics {
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headroom_inbound_requests_total",
			Help: "Requests delivered to replicas on this node, by outcome: ok, failed or canceled.",
		}, []string{"service", "outcome"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "headroom_inbound_request_duration_seconds",
			Help:    "Time from handing a request to a replica on this node to the end of its response.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 15),
		}, []string{"service"}),
	}
	if r != nil {
		r.MustRegister(m.requests, m.duration)
	}
	return m
}

func (m *metrics) finished(service registry.ServiceName, outcome load.Outcome, took time.Duration) {
	s := m.service(service)
	s.requests[outcome].Inc()
	s.duration.Observe(took.Seconds())
}

func (m *metrics) service(name registry.ServiceName) *serviceMetrics {
	if s, ok := m.services.Load(name); ok {
		return s.(*serviceMetrics)
	}
	s := &serviceMetrics{duration: m.duration.WithLabelValues(string(name))}
	for outcome, label := range [...]string{"ok", "failed", "canceled"} {
		s.requests[outcome] = m.requests.WithLabelValues(string(name), label)
	}
	m.services.Store(name, s)
	return s
}

// forget drops the series of services that have left this node: idle series are how proxies run out of memory.
func (m *metrics) forget(before, after map[registry.EndpointID]*Replica) {
	remain := map[registry.ServiceName]bool{}
	for _, r := range after {
		remain[r.Endpoint.Service] = true
	}
	for _, r := range before {
		if name := r.Endpoint.Service; !remain[name] {
			m.services.Delete(name)
			m.requests.DeletePartialMatch(prometheus.Labels{"service": string(name)})
			m.duration.DeletePartialMatch(prometheus.Labels{"service": string(name)})
		}
	}
}
