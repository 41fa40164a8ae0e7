package policies

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	leader   prometheus.Gauge
	policies *prometheus.GaugeVec
}

func newMetrics(r prometheus.Registerer) *metrics {
	m := &metrics{
		leader: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "headroom_kubernetes_policies_leader",
			Help: "Whether this agent copies the policies of Kubernetes to the registry.",
		}),
		policies: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "headroom_kubernetes_policies",
			Help: "ServicePolicy objects by what came of them, told by the agent that copies them.",
		}, []string{"status"}),
	}
	if r != nil {
		r.MustRegister(m.leader, m.policies)
	}
	return m
}

func (m *metrics) count(n map[reason]int) {
	for _, r := range reasons() {
		m.policies.WithLabelValues(string(r)).Set(float64(n[r]))
	}
}

// leave leaves it to the next leader to count.
func (m *metrics) leave() {
	m.leader.Set(0)
	m.policies.Reset()
}
