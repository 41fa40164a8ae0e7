package outbound

import (
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/balancer"
	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/headroom-mesh/headroom/registry"
	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	requests        *prometheus.CounterVec
	duration        *prometheus.HistogramVec
	picks           *prometheus.CounterVec
	retries         *prometheus.CounterVec
	budgetExhausted *prometheus.CounterVec
	outside         *prometheus.CounterVec
	waits           *prometheus.CounterVec
	refused         *prometheus.CounterVec
}

// serviceMetrics are the children of one service, looked up once.
type serviceMetrics struct {
	all             *metrics
	name            string
	duration        prometheus.Observer
	picks           [balancer.Overflow + 1]prometheus.Counter
	retries         prometheus.Counter
	budgetExhausted prometheus.Counter
	outside         prometheus.Counter
	waits           prometheus.Counter
	answered        [6]atomic.Pointer[prometheus.Counter] // by class of status, those without a reason
	requests        sync.Map                              // outcome -> prometheus.Counter

	mu sync.Mutex
	// mu guards gone, and that nothing enters requests once it is true.
	gone bool
}

// outcome is what tells the series of a service's requests apart. Both parts come from short, closed lists.
type outcome struct {
	code   int // 2 for 2xx
	reason fault.Reason
}

func (o outcome) class() string { return strconv.Itoa(o.code) + "xx" }

func newMetrics(r prometheus.Registerer) *metrics {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	}
	m := &metrics{
		requests: counter("headroom_outbound_requests_total",
			"Requests of this node to services, by class of status, and by reason where the mesh itself answered.",
			"service", "code", "reason"),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "headroom_outbound_request_duration_seconds",
			Help:    "Time from the arrival of a request to the end of its response, retries included.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 15),
		}, []string{"service"}),
		picks: counter("headroom_balancer_picks_total",
			"Replicas picked, by how: cold or hot (Prequal), rule, overflow (past a full replica) or fallback (random).",
			"service", "class"),
		retries:         counter("headroom_outbound_retries_total", "Requests sent to another replica because the first could not be connected to.", "service"),
		budgetExhausted: counter("headroom_outbound_retry_budget_exhausted_total", "Retries that the retry budget did not allow.", "service"),
		outside: counter("headroom_outbound_outside_total",
			"Requests that the mesh had no replica for, sent to where Kubernetes has the service.", "service"),
		waits:   counter("headroom_outbound_waits_total", "Requests that waited for a replica, since there was none.", "service"),
		refused: counter("headroom_outbound_refused_total", "Requests that name no service of the mesh, by reason.", "reason"),
	}
	if r != nil {
		r.MustRegister(m.requests, m.duration, m.picks, m.retries, m.budgetExhausted, m.outside, m.waits, m.refused)
	}
	return m
}

func (m *metrics) service(name registry.ServiceName) *serviceMetrics {
	s := &serviceMetrics{
		all:             m,
		name:            string(name),
		duration:        m.duration.WithLabelValues(string(name)),
		retries:         m.retries.WithLabelValues(string(name)),
		budgetExhausted: m.budgetExhausted.WithLabelValues(string(name)),
		outside:         m.outside.WithLabelValues(string(name)),
		waits:           m.waits.WithLabelValues(string(name)),
	}
	for class := range s.picks {
		s.picks[class] = m.picks.WithLabelValues(s.name, balancer.Class(class).String())
	}
	return s
}

// forget drops the series of a service that is gone. Its last requests are still to end.
func (s *serviceMetrics) forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gone = true
	// By their full labels: to search all series for each service that goes would take for ever when many go at once.
	s.all.duration.DeleteLabelValues(s.name)
	s.all.retries.DeleteLabelValues(s.name)
	s.all.budgetExhausted.DeleteLabelValues(s.name)
	s.all.outside.DeleteLabelValues(s.name)
	s.all.waits.DeleteLabelValues(s.name)
	for class := range s.picks {
		s.all.picks.DeleteLabelValues(s.name, balancer.Class(class).String())
	}
	s.requests.Range(func(key, _ any) bool {
		o := key.(outcome)
		return s.all.requests.DeleteLabelValues(s.name, o.class(), string(o.reason))
	})
}

func (m *metrics) unrouted(reason fault.Reason) { m.refused.WithLabelValues(string(reason)).Inc() }

func (s *serviceMetrics) finished(status int, reason fault.Reason, took time.Duration) {
	s.duration.Observe(took.Seconds())
	class := status / 100
	if reason != fault.None || class >= len(s.answered) {
		s.counter(outcome{class, reason}).Inc()
		return
	}
	c := s.answered[class].Load()
	if c == nil {
		c = new(s.counter(outcome{class, reason}))
		s.answered[class].Store(c)
	}
	(*c).Inc()
}

// counter returns the series of an outcome.
func (s *serviceMetrics) counter(o outcome) prometheus.Counter {
	if c, ok := s.requests.Load(o); ok {
		return c.(prometheus.Counter)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gone {
		return prometheus.NewCounter(prometheus.CounterOpts{}) // seen by nobody
	}
	c := s.all.requests.WithLabelValues(s.name, o.class(), string(o.reason))
	s.requests.Store(o, c)
	return c
}
