package inbound

import (
	"time"

	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/registry"
	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	requests *prometheus.CounterVec
	duration *prometheus.HistogramVec
	services map[registry.ServiceName]*serviceMetrics // owned by Inbound.Update
}

// serviceMetrics are the children of one service, looked up once.
type serviceMetrics struct {
	requests [3]prometheus.Counter // by load.Outcome
	duration prometheus.Observer
}

func newMetrics(r prometheus.Registerer) *metrics {
	m := &metrics{
		services: map[registry.ServiceName]*serviceMetrics{},
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

// service returns the series of a service. Requests may still be counted there after keep has dropped it; nobody sees them.
func (m *metrics) service(name registry.ServiceName) *serviceMetrics {
	if s := m.services[name]; s != nil {
		return s
	}
	s := &serviceMetrics{duration: m.duration.WithLabelValues(string(name))}
	for outcome, label := range outcomes() {
		s.requests[outcome] = m.requests.WithLabelValues(string(name), label)
	}
	m.services[name] = s
	return s
}

// keep drops the series of all other services: idle series are how proxies run out of memory.
func (m *metrics) keep(services map[registry.ServiceName]bool) {
	for name := range m.services {
		if services[name] {
			continue
		}
		delete(m.services, name)
		// By their full labels: to search all series for each service that goes would take for ever when many go at once.
		m.duration.DeleteLabelValues(string(name))
		for _, outcome := range outcomes() {
			m.requests.DeleteLabelValues(string(name), outcome)
		}
	}
}

// outcomes are the labels of load.Outcome, in its order.
func outcomes() [3]string { return [...]string{"ok", "failed", "canceled"} }

func (s *serviceMetrics) finished(outcome load.Outcome, took time.Duration) {
	s.requests[outcome].Inc()
	s.duration.Observe(took.Seconds())
}
