package admin

import (
	"context"
	"path"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
)

type metrics struct {
	calls *prometheus.CounterVec
}

func newMetrics(r prometheus.Registerer) *metrics {
	m := &metrics{calls: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "headroom_admin_calls_total",
		Help: "Calls of the admin API that have ended.",
	}, []string{"method", "code"})}
	if r != nil {
		r.MustRegister(m.calls)
	}
	return m
}

func (m *metrics) ended(method string, err error) {
	m.calls.WithLabelValues(path.Base(method), status.Code(err).String()).Inc()
}

func (m *metrics) unary(ctx context.Context, r any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	answer, err := handle(ctx, r)
	m.ended(info.FullMethod, err)
	return answer, err
}

func (m *metrics) stream(server any, s grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	err := handle(server, s)
	m.ended(info.FullMethod, err)
	return err
}
