package relay

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	accepted  prometheus.Counter
	open      prometheus.Gauge
	connected prometheus.Counter
	unknown   prometheus.Counter
}

// newMetrics takes what counts the connections to upstreams.
func newMetrics(r prometheus.Registerer, upstreams func() int) *metrics {
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
		unknown: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headroom_relay_unknown_total",
			Help: "Connections of callers that speak neither HTTP nor TLS, where only that tells which service they are for.",
		}),
	}
	open := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "headroom_relay_upstreams",
		Help: "Open connections to replicas and to other agents, those included that are kept for the next call.",
	}, func() float64 { return float64(upstreams()) })
	if r != nil {
		r.MustRegister(m.accepted, m.open, m.connected, m.unknown, open)
	}
	return m
}
