package transport

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	connections *prometheus.CounterVec
}

func newMetrics(r prometheus.Registerer) *metrics {
	m := &metrics{prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "headroom_transport_accepted_connections_total",
		Help: "Connections from other agents by protocol and by what became of them: accepted, refused (nobody takes them as fast as they come) or failed (the handshake).",
	}, []string{"protocol", "result"})}
	if r != nil {
		r.MustRegister(m.connections)
	}
	return m
}

func (m *metrics) accepted(p Protocol) { m.connections.WithLabelValues(string(p), "accepted").Inc() }
func (m *metrics) refused(p Protocol)  { m.connections.WithLabelValues(string(p), "refused").Inc() }
func (m *metrics) failed()             { m.connections.WithLabelValues("unknown", "failed").Inc() }
