package local

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/headroom-mesh/headroom/registry"
)

type metrics struct {
	endpoints *prometheus.GaugeVec
	checks    *prometheus.CounterVec
	badFiles  prometheus.Gauge
}

func newMetrics(r prometheus.Registerer) *metrics {
	m := &metrics{
		endpoints: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "headroom_local_endpoints",
			Help: "Replicas on this node whose state is known.",
		}, []string{"state"}),
		checks: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headroom_local_checks_total",
			Help: "Health checks of replicas on this node.",
		}, []string{"result"}),
		badFiles: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "headroom_local_bad_files",
			Help: "Files of services that are refused, so that what they declared before holds.",
		}),
	}
	for _, result := range []string{"ok", "error"} {
		m.checks.WithLabelValues(result)
	}
	if r != nil {
		r.MustRegister(m.endpoints, m.checks, m.badFiles)
	}
	return m
}

func (m *metrics) count(n map[registry.State]int) {
	for _, s := range []registry.State{registry.Ready, registry.Unhealthy, registry.Draining} {
		m.endpoints.WithLabelValues(s.String()).Set(float64(n[s]))
	}
}

func (m *metrics) checked(err error) {
	result := "ok"
	if err != nil {
		result = "error"
	}
	m.checks.WithLabelValues(result).Inc()
}
