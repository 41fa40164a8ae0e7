package kube

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	objects   *prometheus.GaugeVec
	connected *prometheus.GaugeVec
	answer    *prometheus.GaugeVec
	failures  *prometheus.CounterVec
	duration  prometheus.Histogram
}

func newMetrics(r prometheus.Registerer) *metrics {
	kind := []string{"kind"}
	m := &metrics{
		objects: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "headroom_kubernetes_objects",
			Help: "Objects of Kubernetes that are known: namespaces and services of the cluster, pods of this node, and its node.",
		}, kind),
		connected: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "headroom_kubernetes_connected",
			Help: "Whether the API server answered when it was last asked for objects of the kind: 1 or 0.",
		}, kind),
		answer: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "headroom_kubernetes_last_answer_timestamp_seconds",
			Help: "When the API server last let objects of the kind be listed or watched.",
		}, kind),
		failures: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headroom_kubernetes_failures_total",
			Help: "Attempts to list or watch objects of the kind that the API server did not answer, or refused.",
		}, kind),
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "headroom_kubernetes_compute_duration_seconds",
			Help:    "Time to compute from the objects of Kubernetes what they are to the mesh.",
			Buckets: prometheus.ExponentialBuckets(0.0001, 2, 14), // 0.1 ms to 0.8 s
		}),
	}
	for _, k := range []string{nodes, namespaces, services, pods} {
		m.connected.WithLabelValues(k)
		m.failures.WithLabelValues(k)
	}
	if r != nil {
		r.MustRegister(m.objects, m.connected, m.answer, m.failures, m.duration)
	}
	return m
}

func (m *metrics) computed(o objects, took time.Duration) {
	m.objects.WithLabelValues(nodes).Set(float64(len(o.nodes)))
	m.objects.WithLabelValues(namespaces).Set(float64(len(o.namespaces)))
	m.objects.WithLabelValues(services).Set(float64(len(o.services)))
	m.objects.WithLabelValues(pods).Set(float64(len(o.pods)))
	m.duration.Observe(took.Seconds())
}

func (m *metrics) answered(kind string, err error) {
	if err != nil {
		m.connected.WithLabelValues(kind).Set(0)
		m.failures.WithLabelValues(kind).Inc()
		return
	}
	m.connected.WithLabelValues(kind).Set(1)
	m.answer.WithLabelValues(kind).SetToCurrentTime()
}
