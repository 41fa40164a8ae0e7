package etcd

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	connected prometheus.Gauge
	revision  prometheus.Gauge
	restarts  prometheus.Counter
	bad       *prometheus.CounterVec
	renewals  prometheus.Counter
	leases    prometheus.Counter
	virtual   prometheus.Gauge
	room      prometheus.Gauge
}

// newMetrics takes nil for metrics that nobody collects.
func newMetrics(to prometheus.Registerer) *metrics {
	m := &metrics{
		connected: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "headroom_registry_connected",
			Help: "Whether the registry answered last time.",
		}),
		revision: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "headroom_registry_revision",
			Help: "Revision of the registry that was read last.",
		}),
		restarts: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headroom_registry_watch_restarts_total",
			Help: "How often the watch ended and everything was read anew.",
		}),
		bad: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headroom_registry_bad_records_total",
			Help: "Records that could not be understood and were skipped.",
		}, []string{"kind"}),
		renewals: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headroom_registry_lease_renewals_total",
			Help: "Renewals of this agent's lease.",
		}),
		leases: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headroom_registry_leases_total",
			Help: "Leases taken by this agent; more than one means that one was lost.",
		}),
		virtual: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "headroom_registry_virtual_addresses",
			Help: "Services that have virtual addresses, and those that had and may come back for theirs within a day.",
		}),
		room: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "headroom_registry_virtual_addresses_limit",
			Help: "Services that can have virtual addresses at once, in the ranges of this agent.",
		}),
	}
	if to != nil {
		to.MustRegister(m.connected, m.revision, m.restarts, m.bad, m.renewals, m.leases, m.virtual, m.room)
	}
	return m
}

// badRecord counts by the first part of a key: services, endpoints, policies or addresses.
func (m *metrics) badRecord(key string) {
	kind, _, _ := strings.Cut(key, "/")
	m.bad.WithLabelValues(kind).Inc()
}
