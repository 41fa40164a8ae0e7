package gossip

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/headroom-mesh/headroom/registry"
)

type metrics struct {
	members *prometheus.GaugeVec
	dials   *prometheus.CounterVec
	refused prometheus.Counter
}

func newMetrics(r prometheus.Registerer) *metrics {
	m := &metrics{
		members: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "headroom_gossip_members",
			Help: "Agents known by gossip, this one included; dead ones and those that left for a day.",
		}, []string{"state"}),
		dials: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headroom_gossip_dials_total",
			Help: "Attempts to meet seeds and members that count as dead.",
		}, []string{"result"}),
		refused: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headroom_gossip_refused_messages_total",
			Help: "Messages refused because they are encrypted with another key or not as they should be.",
		}),
	}
	for _, result := range []string{"ok", "error"} {
		m.dials.WithLabelValues(result)
	}
	if r != nil {
		r.MustRegister(m.members, m.dials, m.refused)
	}
	return m
}

func (m *metrics) count(all map[registry.NodeName]Member) {
	var n [3]int
	for _, member := range all {
		n[member.State]++
	}
	for s, count := range n {
		m.members.WithLabelValues(State(s).String()).Set(float64(count))
	}
}

func (m *metrics) dialled(err error) {
	result := "ok"
	if err != nil {
		result = "error"
	}
	m.dials.WithLabelValues(result).Inc()
}
