package probe

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	sent     prometheus.Counter
	ok       prometheus.Counter
	lost     prometheus.Counter
	late     prometheus.Counter
	bad      prometheus.Counter
	refused  prometheus.Counter
	duration prometheus.Histogram
	peers    [3]prometheus.Gauge // by state
}

func newMetrics(r prometheus.Registerer) *metrics {
	results := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "headroom_probe_results_total",
		Help: "Probes by what became of them: ok (answered in time), lost (not), late (answered after it was lost), refused (not sent: the peer is down or too many are outstanding); and bad: connections closed because an answer made no sense.",
	}, []string{"result"})
	peers := prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "headroom_probe_peers",
		Help: "Agents that this one probes, by state: connecting (never heard of), up, down.",
	}, []string{"state"})
	m := &metrics{
		sent: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headroom_probe_sent_total",
			Help: "Probes sent.",
		}),
		ok:      results.WithLabelValues("ok"),
		lost:    results.WithLabelValues("lost"),
		late:    results.WithLabelValues("late"),
		bad:     results.WithLabelValues("bad"),
		refused: results.WithLabelValues("refused"),
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "headroom_probe_duration_seconds",
			Help:    "Time from sending a probe to its answer, of those answered in time.",
			Buckets: prometheus.ExponentialBuckets(50e-6, 2, 13), // 50 µs to 0.2 s
		}),
		peers: [3]prometheus.Gauge{
			connecting: peers.WithLabelValues("connecting"),
			up:         peers.WithLabelValues("up"),
			down:       peers.WithLabelValues("down"),
		},
	}
	if r != nil {
		r.MustRegister(m.sent, results, m.duration, peers)
	}
	return m
}
