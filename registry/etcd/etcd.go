// Package etcd keeps the registry in etcd: endpoints live under the lease of their agent, all keys are followed by one
// watch, and policies and virtual addresses are written by compare-and-swap.
package etcd

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/headroom-mesh/headroom/registry"
	"github.com/prometheus/client_golang/prometheus"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	grpcbackoff "google.golang.org/grpc/backoff"
)

const (
	// callTimeout bounds every call whose caller sets no earlier deadline.
	callTimeout = 5 * time.Second
	// A connection that is silent for pingAfter is asked whether it lives; pingAfter is above what etcd tolerates.
	pingAfter   = 10 * time.Second
	pingTimeout = 5 * time.Second
	// etcd itself rounds shorter leases up.
	minLeaseTTL = 2 * time.Second
)

// Config says where the registry is. The zero value of every field is its default.
type Config struct {
	// Endpoints are the members of the cluster: http://HOST:PORT, or https://HOST:PORT for TLS. Default
	// http://127.0.0.1:2379.
	Endpoints []string
	// Username and Password log in to a cluster that has authentication switched on. Default: none.
	Username, Password string
	// CAFile holds the certificates, in PEM, that the members' must be signed by. Default: those that the system trusts.
	CAFile string
	// CertFile and KeyFile hold the agent's own certificate, in PEM. They are read again for every connection. Default:
	// none.
	CertFile, KeyFile string
	// Prefix starts all keys of this mesh. Default /headroom/v1.
	Prefix string
	// LeaseTTL is how long endpoints outlive the last sign of life of their agent: whole seconds, at least 2s. Short
	// times take endpoints out sooner, also when etcd is away for a moment. Default 15s.
	LeaseTTL time.Duration
	// SnapshotFile keeps a copy of the registry for a start while etcd is away. Default: none is kept.
	SnapshotFile string
	// Node is the name of this agent's node. Required.
	Node registry.NodeName
	// Owner tells this agent from others whose node has the same name, by mistake. It should be the same whenever the
	// agent starts, or the name can be claimed only when the last lease has expired. Default: a random one.
	Owner string
	// Agent is the address of this agent in the mesh, for messages about the name of its node. Default: none.
	Agent string
	// VirtualIPv4 and VirtualIPv6 are the ranges of the virtual addresses, of which each service gets one in both. All
	// agents should have the same. The smaller range bounds how many services get addresses. If the ranges change,
	// services keep the addresses that they have. Default 240.64.0.0/12 and fd68:6561:6472::/64.
	VirtualIPv4, VirtualIPv6 netip.Prefix
	// Log gets what operators should know. Default: nothing is logged.
	Log *slog.Logger
	// Metrics is where metrics are registered. Default: nowhere.
	Metrics prometheus.Registerer
}

func (c Config) withDefaults() Config {
	if len(c.Endpoints) == 0 {
		c.Endpoints = []string{"http://127.0.0.1:2379"}
	}
	if c.Prefix == "" {
		c.Prefix = "/headroom/v1"
	}
	if c.LeaseTTL == 0 {
		c.LeaseTTL = 15 * time.Second
	}
	if c.Owner == "" {
		c.Owner = rand.Text()
	}
	c.VirtualIPv4, c.VirtualIPv6 = registry.VirtualRanges(c.VirtualIPv4, c.VirtualIPv6)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

// Validate reports all that is wrong.
func (c Config) Validate() error {
	c = c.withDefaults()
	problems := []error{c.Node.Validate()}
	problem := func(format string, args ...any) { problems = append(problems, fmt.Errorf(format, args...)) }
	for i, endpoint := range c.Endpoints {
		if err := checkEndpoint(endpoint); err != nil {
			problem("endpoints[%d]: %w", i, err)
		}
	}
	if c.usesTLS() != c.allTLS() {
		problem("endpoints: want https:// for all of them or for none")
	}
	if c.hasTLSFiles() && !c.allTLS() {
		problem("endpoints: caFile, certFile and keyFile have an effect with https:// only")
	}
	if (c.Username == "") != (c.Password == "") {
		problem("username, password: want both or neither")
	}
	if (c.CertFile == "") != (c.KeyFile == "") {
		problem("certFile, keyFile: want both or neither")
	}
	if !strings.HasPrefix(c.Prefix, "/") || strings.HasSuffix(c.Prefix, "/") {
		problem("prefix: want a path that starts with '/' and ends without, got %q", c.Prefix)
	}
	if c.LeaseTTL < minLeaseTTL || c.LeaseTTL%time.Second != 0 {
		problem("leaseTTL: want whole seconds, at least %v, got %v", minLeaseTTL, c.LeaseTTL)
	}
	if _, err := c.tls(); err != nil {
		problems = append(problems, err)
	}
	problems = append(problems, validateRanges(c.VirtualIPv4, c.VirtualIPv6))
	return errors.Join(problems...)
}

func checkEndpoint(endpoint string) error {
	u, err := url.Parse(endpoint)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Port() == "" || strings.Trim(u.Path, "/") != "" {
		return fmt.Errorf("want http://HOST:PORT or https://HOST:PORT, got %q", endpoint)
	}
	return nil
}

func isTLS(endpoint string) bool { return strings.HasPrefix(endpoint, "https://") }

func (c Config) usesTLS() bool { return slices.ContainsFunc(c.Endpoints, isTLS) }

func (c Config) allTLS() bool {
	return !slices.ContainsFunc(c.Endpoints, func(endpoint string) bool { return !isTLS(endpoint) })
}

func (c Config) hasTLSFiles() bool { return c.CAFile != "" || c.CertFile != "" || c.KeyFile != "" }

// tls returns nil if no endpoint wants TLS.
func (c Config) tls() (*tls.Config, error) {
	if !c.usesTLS() {
		return nil, nil
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if c.CAFile != "" {
		pem, err := os.ReadFile(c.CAFile)
		if err != nil {
			return nil, fmt.Errorf("caFile: %w", err)
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("caFile: want certificates in PEM, found none in %s", c.CAFile)
		}
	}
	if c.CertFile != "" && c.KeyFile != "" {
		if _, err := c.certificate(nil); err != nil {
			return nil, err
		}
		config.GetClientCertificate = c.certificate
	}
	return config, nil
}

func (c Config) certificate(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
	certificate, err := tls.LoadX509KeyPair(c.CertFile, c.KeyFile)
	if err != nil {
		return nil, fmt.Errorf("certFile, keyFile: %w", err)
	}
	return &certificate, nil
}

// Registry is an agent's connection to etcd. It implements registry.Registry.
type Registry struct {
	cfg       Config
	log       *slog.Logger
	metrics   *metrics
	advertise *advertisement
	directory *directory
	connected atomic.Bool

	client atomic.Pointer[clientv3.Client] // nil before and after Run, and while etcd takes no login
	dialed chan struct{}                   // closed after the first attempt to get a client

	handingOver context.Context // ended by HandOver
	handOver    func()
	released    chan struct{} // closed when this agent registers nothing any more

	// mu guards the fields below
	mu      sync.Mutex
	trouble error // why etcd did not answer last time
}

// New checks cfg. It neither starts nor connects anything.
func New(cfg Config) (*Registry, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("etcd: %w", err)
	}
	cfg = cfg.withDefaults()
	metrics, pool := newMetrics(cfg.Metrics), newPool(cfg.VirtualIPv4, cfg.VirtualIPv6)
	metrics.room.Set(float64(pool.room()))
	r := &Registry{
		cfg:       cfg,
		log:       cfg.Log,
		metrics:   metrics,
		advertise: newAdvertisement(),
		directory: newDirectory(pool),
		dialed:    make(chan struct{}),
		released:  make(chan struct{}),
	}
	r.handingOver, r.handOver = context.WithCancel(context.Background())
	return r, nil
}

// HandOver leaves the endpoints that are registered to the agent that comes next on this node: nothing is registered or removed
// any more. It returns when that is so, or ctx ends. It must not be called before Run.
func (r *Registry) HandOver(ctx context.Context) {
	r.handOver()
	select {
	case <-r.released:
	case <-ctx.Done():
	}
}

// Run implements registry.Registry. It may be called once. Endpoints that are still advertised when it ends stay in
// etcd until their lease expires, so that an agent can restart unnoticed.
func (r *Registry) Run(ctx context.Context, publish func(*registry.Snapshot)) error {
	file := newFile(r.cfg.SnapshotFile, r.log)
	start := file.load()
	feed := newFeed(r, start, publish, file)
	if start != nil {
		r.directory.remember(start)
		publish(start)
	}
	client := r.connect(ctx)
	if client == nil {
		close(r.released)
		return nil
	}
	var group sync.WaitGroup
	group.Go(func() { r.watch(ctx, client, feed) })
	group.Go(func() { r.keepRegistered(ctx, client) })
	group.Go(func() { r.keepAddresses(ctx, client) })
	group.Go(func() { file.run(ctx) })
	group.Wait()
	file.flush()
	r.client.Store(nil)
	client.Close() // fails only with what ended ctx
	r.disconnected()
	return nil
}

// Claimed reports whether the name of the node is this agent's. If not, none of its endpoints are registered.
func (r *Registry) Claimed() bool { return r.advertise.isClaimed() }

// Connected implements registry.Registry.
func (r *Registry) Connected() bool { return r.connected.Load() }

// connect returns nil if ctx ends first. It waits for etcd only if there is a password to log in with.
func (r *Registry) connect(ctx context.Context) *clientv3.Client {
	tried := sync.OnceFunc(func() { close(r.dialed) })
	var retry backoff
	for {
		client, err := r.dial(ctx)
		if err == nil {
			r.client.Store(client)
			tried()
			return client
		}
		if ctx.Err() != nil {
			return nil
		}
		r.complain(err)
		tried()
		retry.wait(ctx)
	}
}

func (r *Registry) dial(ctx context.Context) (*clientv3.Client, error) {
	tlsConfig, err := r.cfg.tls()
	if err != nil {
		return nil, err
	}
	return clientv3.New(clientv3.Config{
		Context:              ctx,
		Endpoints:            r.cfg.Endpoints,
		Username:             r.cfg.Username,
		Password:             r.cfg.Password,
		TLS:                  tlsConfig,
		DialTimeout:          callTimeout,
		DialKeepAliveTime:    pingAfter,
		DialKeepAliveTimeout: pingTimeout,
		MaxUnaryRetries:      10,
		Logger:               zap.NewNop(),
		DialOptions: []grpc.DialOption{
			grpc.WithChainUnaryInterceptor(failFast),
			grpc.WithConnectParams(grpc.ConnectParams{
				Backoff: grpcbackoff.Config{
					BaseDelay: minBackoff, Multiplier: 2, Jitter: 0.2, MaxDelay: maxBackoff,
				},
				MinConnectTimeout: callTimeout,
			}),
		},
	})
}

// failFast makes a call fail with the reason why no connection can be had, instead of running out of time.
func failFast(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker,
	opts ...grpc.CallOption) error {
	return invoke(ctx, method, req, reply, cc, append(opts, grpc.WaitForReady(false))...)
}

// call bounds the time of one call.
func (r *Registry) call(ctx context.Context, do func(ctx context.Context, client *clientv3.Client) error) error {
	inTime, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	select {
	case <-r.dialed:
	case <-inTime.Done():
	}
	client := r.client.Load()
	if client == nil {
		return r.absence(ctx)
	}
	if err := do(inTime, client); err != nil {
		return r.explain(ctx, err)
	}
	return nil
}

// key returns where a key of the registry is in etcd.
func (r *Registry) key(key string) string { return r.cfg.Prefix + "/" + key }
