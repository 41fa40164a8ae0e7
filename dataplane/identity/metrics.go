package identity

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	reloads *prometheus.CounterVec
}

func newMetrics(r prometheus.Registerer, untilExpiry func() float64) *metrics {
	expiry := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "headroom_identity_expiry_seconds",
		Help: "Time until this agent's certificate expires; negative once it has, and other agents refuse it.",
	}, untilExpiry)
	m := &metrics{prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "headroom_identity_reloads_total",
		Help: "New certificates or roots of this agent by what became of them: loaded or refused.",
	}, []string{"result"})}
	if r != nil {
		r.MustRegister(expiry, m.reloads)
	}
	return m
}

func (m *metrics) loaded()  { m.reloads.WithLabelValues("loaded").Inc() }
func (m *metrics) refused() { m.reloads.WithLabelValues("refused").Inc() }
