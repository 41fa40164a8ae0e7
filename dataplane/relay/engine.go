package relay

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/identity"
	"github.com/prometheus/client_golang/prometheus"
)

// Config configures an Engine.
type Config struct {
	// DrainTimeout bounds the time for calls in flight once Serve's context has ended. Default 30s.
	DrainTimeout time.Duration
	// Identity is who this agent is. Nil: nobody proves anything, and nobody knows who calls.
	Identity *identity.Source
	Log      *slog.Logger          // nil: no logs
	Metrics  prometheus.Registerer // nil: not exported
}

// Engine carries calls. It is safe for concurrent use.
type Engine struct {
	cfg     Config
	metrics *metrics
	works   sync.Pool // of *work
	watch   watch
	readers sync.WaitGroup // of connections to upstreams
	memory  memory
	leaving chan struct{} // closed by leave
	leave   func()
	resting chan struct{} // closed by rest
	rest    func()

	mu sync.Mutex
	// mu guards the field below.

	upstreams map[*Upstream]bool
}

// New returns an Engine that carries nothing yet.
func New(cfg Config) *Engine {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.DrainTimeout == 0 {
		cfg.DrainTimeout = 30 * time.Second
	}
	e := &Engine{cfg: cfg, upstreams: map[*Upstream]bool{}, leaving: make(chan struct{}), resting: make(chan struct{})}
	e.leave = sync.OnceFunc(func() { close(e.leaving) })
	e.rest = sync.OnceFunc(func() { close(e.resting) })
	e.metrics = newMetrics(cfg.Metrics, e.connections)
	e.works.New = func() any { return newWork() }
	e.watch.clock.Store(time.Now().UnixMilli())
	return e
}

// Leave tells the callers that have connections to make new ones, before the end comes: who sends a request just when its
// connection is closed doesn't know whether it was taken.
func (e *Engine) Leave() { e.leave() }

// Rest does so, and takes no new connections: somebody else does.
func (e *Engine) Rest() {
	e.rest()
	e.leave()
}

// rests reports whether Rest was called.
func (e *Engine) rests() bool {
	select {
	case <-e.resting:
		return true
	default:
		return false
	}
}

// reapEvery is how often connections are looked for that nobody has used for long.
const reapEvery = 500 * time.Millisecond

// Run looks after connections until ctx ends: those that wait for too long, and those that nobody uses.
func (e *Engine) Run(ctx context.Context) error {
	defer e.readers.Wait()
	defer e.closeIdle()
	scan, reap := time.NewTicker(scanEvery), time.NewTicker(reapEvery)
	defer scan.Stop()
	defer reap.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-scan.C:
			e.watch.scan(time.Now())
		case <-reap.C:
			e.reap(time.Now())
		}
	}
}

// NewUpstream returns an Upstream without connections.
func (e *Engine) NewUpstream(t Target) *Upstream { return &Upstream{target: t, engine: e} }

// register lets the connections of u be looked after. It is called when there is one.
func (e *Engine) register(u *Upstream) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.upstreams[u] = true
}

func (e *Engine) all() []*Upstream {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := make([]*Upstream, 0, len(e.upstreams))
	for u := range e.upstreams {
		all = append(all, u)
	}
	return all
}

// connections counts those to upstreams.
func (e *Engine) connections() int {
	n := 0
	for _, u := range e.all() {
		n += u.Connections()
	}
	return n
}

// reap closes connections that were not used for long, and forgets upstreams without any.
func (e *Engine) reap(now time.Time) {
	for _, u := range e.all() {
		u.closeIdleSince(now.Add(-u.target.IdleTimeout).UnixMilli())
		u.checkHTTP2(now)
		e.mu.Lock()
		if u.Connections() == 0 {
			delete(e.upstreams, u)
		}
		e.mu.Unlock()
	}
}

func (e *Engine) closeIdle() {
	e.memory.ended.Store(true)
	for _, u := range e.all() {
		u.CloseIdle()
	}
}
