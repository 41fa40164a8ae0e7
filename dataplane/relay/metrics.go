package relay

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	accepted  prometheus.Counter
	open      prometheus.Gauge
	connected prometheus.Counter
}

func newMetrics(r prometheus.Registerer) *metrics {
	m := &metrics{
		accepted: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headroom_relay_accepted_total",
			Help: "Connections taken from callers on this node and from other agents.",
		}),
		open: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "headroom_relay_callers",
			Help: "Open connections of callers on this node and of other agents.",
		}),
		connected: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headroom_relay_connected_total",
			Help: "Connections made to replicas and to other agents.",
		}),
	}
	if r != nil {
		r.MustRegister(m.accepted, m.open, m.connected)
	}
	return m
}
