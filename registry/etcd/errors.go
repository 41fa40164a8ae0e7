package etcd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/headroom-mesh/headroom/registry"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	minBackoff = 100 * time.Millisecond
	maxBackoff = 3 * time.Second
)

var (
	errNoAnswer     = errors.New("it has not answered yet")
	errDisconnected = errors.New("the connection broke")
)

// backoff is the time to wait before the next attempt; it doubles with each.
type backoff time.Duration

// next is spread by half so that agents that failed together don't come back together.
func (b *backoff) next() time.Duration {
	wait := max(time.Duration(*b), minBackoff)
	*b = backoff(min(2*wait, maxBackoff))
	return wait/2 + rand.N(wait)
}

func (b *backoff) wait(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-time.After(b.next()):
	}
}

// explain says in an operator's words why a call failed. The error is a registry.ErrUnavailable if etcd can't answer.
func (r *Registry) explain(ctx context.Context, err error) error {
	where := strings.Join(r.cfg.Endpoints, ", ")
	answer, isAnswer := errors.AsType[rpctypes.EtcdError](err)
	switch {
	case ctx.Err() != nil && !errors.Is(ctx.Err(), context.DeadlineExceeded):
		return ctx.Err()
	case errors.Is(err, rpctypes.ErrAuthFailed):
		return fmt.Errorf("etcd refused the user name or password (user %q): %w", r.cfg.Username, err)
	case errors.Is(err, rpctypes.ErrUserEmpty):
		return fmt.Errorf("etcd wants a user name and a password, and none are set: %w", err)
	case errors.Is(err, rpctypes.ErrPermissionDenied):
		return fmt.Errorf("etcd user %q may not read and write the keys below %s: %w", r.cfg.Username, r.cfg.Prefix, err)
	case isAnswer && answer.Code() != codes.Unavailable:
		return fmt.Errorf("etcd at %s refused: %w", where, err)
	case isTLSFailure(err):
		return fmt.Errorf("%w: TLS with etcd at %s failed: %s", registry.ErrUnavailable, where, reason(err))
	case errors.Is(err, context.DeadlineExceeded) || status.Code(err) == codes.DeadlineExceeded:
		return fmt.Errorf("%w: etcd at %s gave no answer in time", registry.ErrUnavailable, where)
	}
	return fmt.Errorf("%w: etcd at %s: %s%s", registry.ErrUnavailable, where, reason(err), r.hint(err))
}

// hint guesses: an agent whose certificate is refused, as TLS 1.3 has it, often sees only a connection that breaks.
func (r *Registry) hint(err error) string {
	text := err.Error()
	refused := strings.Contains(text, "broken pipe") || strings.Contains(text, "connection reset") ||
		strings.Contains(text, "EOF")
	if refused && r.cfg.usesTLS() {
		return " (it may have refused this agent's certificate: see certFile and keyFile)"
	}
	return ""
}

// isTLSFailure goes by the text, as gRPC hands over nothing else.
func isTLSFailure(err error) bool {
	text := err.Error()
	return strings.Contains(text, "authentication handshake failed") || strings.Contains(text, "tls: ") ||
		strings.Contains(text, "x509: ")
}

// reason takes the wrapping of gRPC away.
func reason(err error) string {
	text := err.Error()
	if s, ok := status.FromError(err); ok {
		text = s.Message()
	}
	for _, wrapping := range []string{"last connection error: ", "connection error: desc = ", "transport: ", "Error while dialing: "} {
		text = strings.TrimPrefix(strings.Trim(text, `"`), wrapping)
	}
	return strings.Trim(text, `"`)
}

// complain tells why etcd does not answer, once for each reason.
func (r *Registry) complain(err error) {
	err = r.explain(context.Background(), err)
	r.mu.Lock()
	news := r.trouble == nil || r.trouble.Error() != err.Error()
	r.trouble = err
	r.mu.Unlock()
	r.disconnected()
	if news {
		r.log.Warn("registry is away; will try again", "err", err)
	}
}

// report warns of what else fails, but for what follows from etcd being away, as complain tells that.
func (r *Registry) report(ctx context.Context, message string, err error) {
	level := slog.LevelWarn
	if !r.Connected() {
		level = slog.LevelDebug
	}
	r.log.Log(ctx, level, message, "err", r.explain(ctx, err))
}

func (r *Registry) disconnected() {
	r.connected.Store(false)
	r.metrics.connected.Set(0)
}

func (r *Registry) settled(revision int64) {
	r.mu.Lock()
	r.trouble = nil
	r.mu.Unlock()
	r.connected.Store(true)
	r.metrics.connected.Set(1)
	r.log.Info("registry connected", "revision", revision)
}

// absence says why etcd can't be asked.
func (r *Registry) absence(ctx context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case errors.Is(ctx.Err(), context.Canceled):
		return ctx.Err()
	case r.trouble == nil:
		return r.explain(context.Background(), errNoAnswer)
	}
	return r.trouble
}
