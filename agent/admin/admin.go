// Package admin is what an agent answers to its operator, on a Unix socket and on loopback, and to other agents.
package admin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"

	"github.com/headroom-mesh/headroom/agent/gossip"
	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/policy/localservice"
	"github.com/headroom-mesh/headroom/registry"
)

// The ports of the admin API and of its pages.
const (
	DefaultPort     = 15010
	DefaultHTTPPort = 15000
)

// stopTimeout bounds the time for calls that are under way when the agent ends.
const stopTimeout = 2 * time.Second

// Local registers replicas on this agent's node.
type Local interface {
	Register(ctx context.Context, doc *meshv1.LocalService) error
	Deregister(ctx context.Context, service registry.ServiceName, address string) ([]localservice.Address, error)
}

// Lines are the replicas here as other agents' balancers reach them: the methods of service Peer of those names.
type Lines interface {
	Reserve(*meshv1.ReserveRequest, grpc.ServerStreamingServer[meshv1.Grant]) error
	ListenIdle(*meshv1.ListenIdleRequest, grpc.ServerStreamingServer[meshv1.IdleReplica]) error
}

// Check is something that must hold before the agent is ready. Func may add a note to what holds, "" for none.
type Check struct {
	Name string
	Func func() (note string, err error)
}

// Config says where to answer, and whom to ask for the answers. All that has no default is required.
type Config struct {
	Node    registry.NodeName
	Version string

	// Socket is the path of a Unix socket for the admin API, open to the agent's own user only. Its folder is made if it
	// is missing. Default: none.
	Socket string
	// Addr is a loopback address for the admin API. Default 127.0.0.1:15010.
	Addr netip.AddrPort
	// HTTP is a loopback address for metrics, health and profiles. Default 127.0.0.1:15000.
	HTTP netip.AddrPort
	// MetricsAddr is where others read the metrics, and nothing else. Default: nowhere.
	MetricsAddr netip.AddrPort
	// PeerListener takes the connections of other agents. It is closed at the end. Default: none.
	PeerListener net.Listener
	// DialPeer connects to another agent's Peer service, given its mesh address.
	DialPeer func(ctx context.Context, mesh netip.AddrPort) (net.Conn, error)

	Registry registry.Policies
	// Snapshot returns what this agent last learned of the registry; never nil.
	Snapshot func() *registry.Snapshot
	// AppliedRevision is the revision up to which the data plane has applied the registry.
	AppliedRevision func() int64
	// Connected reports whether the registry is at hand.
	Connected func() bool
	Members   func() []gossip.Member
	Local     Local
	// Lines answers other agents that ask for slots of replicas here. Default: nobody does.
	Lines Lines
	// Observe returns what this agent sees of a service, or of all if service is empty.
	Observe func(service registry.ServiceName) *meshv1.Observation

	// Capture leads connections of applications here. Default: nothing does.
	Capture Capture

	// TakeOver answers the agent that is to come after this one. Default: nobody may.
	TakeOver func(grpc.BidiStreamingServer[meshv1.TakeOverRequest, meshv1.TakeOverResponse]) error

	// Ready lists what must hold for /readyz. Default: nothing.
	Ready []Check
	// Metrics are shown on /metrics, and get those of this package. Default: only the latter.
	Metrics *prometheus.Registry
	// Log takes what operators should know. Default: nothing is logged.
	Log *slog.Logger
}

func (c Config) withDefaults() Config {
	loopback := netip.AddrFrom4([4]byte{127, 0, 0, 1})
	if !c.Addr.IsValid() {
		c.Addr = netip.AddrPortFrom(loopback, DefaultPort)
	}
	if !c.HTTP.IsValid() {
		c.HTTP = netip.AddrPortFrom(loopback, DefaultHTTPPort)
	}
	if c.Metrics == nil {
		c.Metrics = prometheus.NewRegistry()
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

// Validate reports all that is wrong with the configuration.
func (c Config) Validate() error {
	c = c.withDefaults()
	errs := []error{c.Node.Validate(), onlyLoopback("addr", c.Addr), onlyLoopback("http", c.HTTP)}
	if len(c.Socket) > maxSocketPath {
		errs = append(errs, fmt.Errorf("socket: %s has %d bytes, and the system takes %d: choose a shorter path", c.Socket, len(c.Socket), maxSocketPath))
	}
	for _, r := range []struct {
		field   string
		missing bool
	}{
		{"dialPeer", c.DialPeer == nil}, {"registry", c.Registry == nil}, {"snapshot", c.Snapshot == nil},
		{"appliedRevision", c.AppliedRevision == nil}, {"connected", c.Connected == nil}, {"members", c.Members == nil},
		{"local", c.Local == nil}, {"observe", c.Observe == nil},
	} {
		if r.missing {
			errs = append(errs, fmt.Errorf("%s: required", r.field))
		}
	}
	return errors.Join(errs...)
}

func onlyLoopback(field string, a netip.AddrPort) error {
	if a.Addr().IsLoopback() {
		return nil
	}
	return fmt.Errorf("%s: %s is reached from outside, and callers need no password: want a loopback address such as 127.0.0.1:%d", field, a, a.Port())
}

// Admin answers operators and other agents.
type Admin struct {
	cfg     Config
	log     *slog.Logger
	peers   *peers
	metrics *metrics
	closing chan struct{} // closed when Run ends: streams end too
}

// New checks the configuration. Nothing is started before Run.
func New(cfg Config) (*Admin, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("admin: %w", err)
	}
	cfg = cfg.withDefaults()
	return &Admin{
		cfg:     cfg,
		log:     cfg.Log,
		peers:   newPeers(cfg.DialPeer),
		metrics: newMetrics(cfg.Metrics),
		closing: make(chan struct{}),
	}, nil
}

// Listeners are the places at which an Admin answers.
type Listeners struct{ socket, rpc, http, metrics net.Listener } // socket and metrics may be nil

// Close gives them up. Run does so too.
func (l Listeners) Close() {
	for _, l := range []net.Listener{l.socket, l.rpc, l.http, l.metrics} {
		if l != nil {
			_ = l.Close()
		}
	}
}

// Listen claims the socket, and by listen the ports. Callers wait there until Run answers them.
func (a *Admin) Listen(listen func(netip.AddrPort) (net.Listener, error)) (l Listeners, err error) {
	defer func() {
		if err != nil {
			l.Close()
		}
	}()
	if a.cfg.Socket != "" {
		if l.socket, err = listenUnix(a.cfg.Socket); err != nil {
			return l, err
		}
	}
	if l.rpc, err = listen(a.cfg.Addr); err != nil {
		return l, fmt.Errorf("admin API: %w", err)
	}
	if l.http, err = listen(a.cfg.HTTP); err != nil {
		return l, fmt.Errorf("admin pages: %w", err)
	}
	if a.cfg.MetricsAddr.IsValid() {
		if l.metrics, err = listen(a.cfg.MetricsAddr); err != nil {
			return l, fmt.Errorf("metrics: %w", err)
		}
	}
	return l, nil
}

// Run answers until ctx ends, then lets calls under way finish for a moment. It is called once.
func (a *Admin) Run(ctx context.Context, l Listeners) error {
	admin, peer, pages, metrics := a.adminRPC(), a.peerRPC(), a.serverHTTP(a.pages()), a.serverHTTP(a.metricsPage())
	g, ctx := errgroup.WithContext(ctx)
	if l.socket != nil {
		g.Go(func() error { return serveRPC(admin, l.socket) })
	}
	g.Go(func() error { return serveRPC(admin, l.rpc) })
	if a.cfg.PeerListener != nil {
		g.Go(func() error { return serveRPC(peer, a.cfg.PeerListener) })
	}
	g.Go(func() error { return serveHTTP(pages, l.http) })
	if l.metrics != nil {
		g.Go(func() error { return serveHTTP(metrics, l.metrics) })
	}
	g.Go(func() error {
		<-ctx.Done()
		close(a.closing)
		var wg sync.WaitGroup
		wg.Go(func() { stopRPC(admin) })
		wg.Go(func() { stopRPC(peer) })
		wg.Go(func() { stopHTTP(pages) })
		wg.Go(func() { stopHTTP(metrics) })
		wg.Wait()
		return a.peers.close()
	})
	return g.Wait()
}

func (a *Admin) adminRPC() *grpc.Server {
	s := grpc.NewServer(grpc.UnaryInterceptor(a.metrics.unary), grpc.StreamInterceptor(a.metrics.stream))
	meshv1.RegisterAdminServer(s, &adminServer{Admin: a})
	reflection.Register(s)
	return s
}

func (a *Admin) peerRPC() *grpc.Server {
	// An agent that has fallen silent must not hold slots of replicas here, nor be told which are idle.
	s := grpc.NewServer(grpc.KeepaliveParams(keepalive.ServerParameters{Time: time.Second, Timeout: 2 * time.Second}))
	meshv1.RegisterPeerServer(s, &peerServer{Admin: a})
	return s
}

func (a *Admin) serverHTTP(pages http.Handler) *http.Server {
	return &http.Server{
		Handler: pages, ReadHeaderTimeout: 5 * time.Second,
		ErrorLog: slog.NewLogLogger(a.log.Handler(), slog.LevelDebug),
	}
}

// serveRPC serves until the server is stopped, or whoever owns the listener closes it.
func serveRPC(s *grpc.Server, l net.Listener) error {
	if err := s.Serve(l); err != nil && !errors.Is(err, grpc.ErrServerStopped) && !errors.Is(err, net.ErrClosed) {
		return fmt.Errorf("admin API: %w", err)
	}
	return nil
}

func serveHTTP(s *http.Server, l net.Listener) error {
	if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("admin pages: %w", err)
	}
	return nil
}

func stopRPC(s *grpc.Server) {
	force := time.AfterFunc(stopTimeout, s.Stop)
	defer force.Stop()
	s.GracefulStop()
}

func stopHTTP(s *http.Server) {
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	if s.Shutdown(ctx) != nil {
		_ = s.Close() // somebody reads a long profile
	}
}

// maxSocketPath is what fits into a sockaddr_un.
const maxSocketPath = 107

// listenUnix opens a socket that only the user of this process may connect to.
func listenUnix(path string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("admin socket: make its folder: %w", err)
	}
	if err := removeStale(path); err != nil {
		return nil, fmt.Errorf("admin socket %s: %w", path, err)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("admin socket: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, fmt.Errorf("admin socket: %w", errors.Join(err, l.Close()))
	}
	return l, nil
}

// removeStale removes the socket of an agent that is gone, and nothing else.
func removeStale(path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Mode().Type() != fs.ModeSocket {
		return errors.New("something that is no socket is there: remove it, or choose another path")
	}
	if c, err := net.DialTimeout("unix", path, time.Second); err == nil {
		_ = c.Close()
		return errors.New("another agent answers there: stop it, or choose another path")
	}
	return os.Remove(path)
}
