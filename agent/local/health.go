package local

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/headroom-mesh/headroom/policy/localservice"
)

// health is what a row of checks says of a replica.
type health struct {
	known   bool // whether there was a check
	healthy bool
	streak  int // checks in a row that said otherwise
}

// after returns the health after one more check. The first one decides alone; later it takes rise good ones, or fall
// bad ones, in a row to change the verdict.
func (h health) after(ok bool, rise, fall int) health {
	if !h.known {
		return health{known: true, healthy: ok}
	}
	if ok == h.healthy {
		return health{known: true, healthy: ok}
	}
	need := fall
	if ok {
		need = rise
	}
	if h.streak+1 >= need {
		return health{known: true, healthy: ok}
	}
	h.streak++
	return h
}

// maxStartDelay bounds how long the first check is put off, so that those of many replicas don't coincide.
const maxStartDelay = 500 * time.Millisecond

// checker checks replicas.
type checker struct {
	control func(network, address string, c syscall.RawConn) error // that of a net.Dialer
}

// repeat checks until ctx ends.
func (k checker) repeat(ctx context.Context, c localservice.HealthCheck, address localservice.Address, report func(error)) {
	select {
	case <-ctx.Done():
		return
	case <-time.After(rand.N(min(c.Interval, maxStartDelay))):
	}
	tick := time.NewTicker(c.Interval)
	defer tick.Stop()
	for {
		report(k.check(ctx, c, address))
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// check runs one check, on a connection of its own: a replica that takes no new ones is not healthy.
func (k checker) check(ctx context.Context, c localservice.HealthCheck, address localservice.Address) error {
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	err := k.of(c.Kind)(ctx, address, c.Target)
	if err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return fmt.Errorf("%s check: no answer within %v", c.Kind, c.Timeout)
	}
	if err != nil {
		return fmt.Errorf("%s check: %w", c.Kind, err)
	}
	return nil
}

func (k checker) of(kind localservice.CheckKind) func(context.Context, localservice.Address, string) error {
	switch kind {
	case localservice.TCP:
		return k.tcp
	case localservice.GRPC:
		return k.grpc
	}
	return k.http
}

func (k checker) dial(ctx context.Context, at localservice.Address) (net.Conn, error) {
	network, address := at.Network()
	var d net.Dialer
	if at.Socket == "" {
		d.Control = k.control
	}
	return d.DialContext(ctx, network, address)
}

// hostOf is how a request names its server.
func hostOf(at localservice.Address) string {
	if at.Socket != "" {
		return "localhost"
	}
	return at.String()
}

func (k checker) tcp(ctx context.Context, address localservice.Address, _ string) error {
	c, err := k.dial(ctx, address)
	if err != nil {
		return err
	}
	return c.Close()
}

func (k checker) http(ctx context.Context, address localservice.Address, path string) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+hostOf(address)+path, nil)
	if err != nil {
		return err
	}
	r.Header.Set("User-Agent", "headroom-check")
	// Used directly, the transport follows no redirects: they count as an answer.
	t := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return k.dial(ctx, address)
	}}
	answer, err := t.RoundTrip(r)
	if err != nil {
		return err
	}
	_ = answer.Body.Close() // only the status counts
	if answer.StatusCode < 200 || answer.StatusCode > 399 {
		return fmt.Errorf("GET %s: status %d, want 200 to 399", path, answer.StatusCode)
	}
	return nil
}

func (k checker) grpc(ctx context.Context, address localservice.Address, service string) error {
	conn, err := grpc.NewClient("passthrough:///"+hostOf(address),
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithNoProxy(),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return k.dial(ctx, address) }))
	if err != nil {
		return err
	}
	answer, err := healthv1.NewHealthClient(conn).Check(ctx, &healthv1.HealthCheckRequest{Service: service})
	_ = conn.Close() // used up
	if s := status.Convert(err); err != nil {
		return fmt.Errorf("%s: %s", s.Code(), s.Message())
	}
	if answer.Status != healthv1.HealthCheckResponse_SERVING {
		return fmt.Errorf("status %s, want SERVING", answer.Status)
	}
	return nil
}

// sameCheck reports whether two checks, nil for none, are the same.
func sameCheck(a, b *localservice.HealthCheck) bool {
	if a == nil || b == nil {
		return a == b
	}
	return *a == *b
}
