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

type mutualMetrics struct {
	beginnings, refusals *prometheus.CounterVec
}

// The directions of connections.
const (
	inbound  = "inbound"
	outbound = "outbound"
)

func newMutualMetrics(r prometheus.Registerer) *mutualMetrics {
	m := &mutualMetrics{
		beginnings: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headroom_transport_handshakes_total",
			Help: "Connections between agents by how they began: with a full TLS handshake, with a resumed one, or in the clear (plain).",
		}, []string{"direction", "kind"}),
		refusals: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headroom_transport_refusals_total",
			Help: "Connections between agents that did not come about because one end does not take the other, by reason: missing, no_id, expired, foreign, wrong_id or unfit (certificates), refused (by the other end), plain (no TLS where it is wanted), not_tls, protocol.",
		}, []string{"direction", "reason"}),
	}
	if r != nil {
		r.MustRegister(m.beginnings, m.refusals)
	}
	return m
}

func (m *mutualMetrics) began(direction, kind string) {
	m.beginnings.WithLabelValues(direction, kind).Inc()
}

func (m *mutualMetrics) refused(direction, reason string) {
	m.refusals.WithLabelValues(direction, reason).Inc()
}
