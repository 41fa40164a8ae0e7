package names

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	mesh      prometheus.Counter
	forwarded prometheus.Counter
	failed    prometheus.Counter
	refused   prometheus.Counter
	duration  prometheus.Histogram
}

func newMetrics(r prometheus.Registerer) *metrics {
	queries := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "headroom_dns_queries_total",
		Help: "DNS queries by who answered: mesh (the names of services), forwarded (a resolver of the node), failed (no resolver did, or too many were waiting), refused (malformed, or of a kind that is not answered).",
	}, []string{"answer"})
	m := &metrics{
		mesh:      queries.WithLabelValues("mesh"),
		forwarded: queries.WithLabelValues("forwarded"),
		failed:    queries.WithLabelValues("failed"),
		refused:   queries.WithLabelValues("refused"),
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "headroom_dns_forward_duration_seconds",
			Help:    "Time until a resolver of the node had answered a forwarded DNS query.",
			Buckets: prometheus.ExponentialBuckets(0.0005, 2, 14), // 0.5 ms to 4 s
		}),
	}
	if r != nil {
		r.MustRegister(queries, m.duration)
	}
	return m
}

func (m *metrics) passed(took time.Duration) {
	m.forwarded.Inc()
	m.duration.Observe(took.Seconds())
}
