// Package names answers the names of the mesh's services by DNS, and forwards all other queries to the node's resolvers.
package names

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/headroom-mesh/headroom/policy/document"
	"github.com/headroom-mesh/headroom/registry"
)

const (
	// DefaultPort is where to listen, unless it must be 53.
	DefaultPort = 15053
	dnsPort     = 53
)

// Mode says how clients get to the server.
type Mode string

const (
	// Listen only listens: clients are configured to ask here.
	Listen Mode = "listen"
	// Redirect only listens, too: somebody else redirects to here what goes to port 53.
	Redirect Mode = "redirect"
	// ResolvConf makes the server the first one in resolv.conf, as long as it runs.
	ResolvConf Mode = "resolv.conf"
	// Resolved makes systemd-resolved ask here for the names of the mesh, as long as the server runs.
	Resolved Mode = "resolved"
)

// Config says what is answered, and to whom. The zero value of every field is its default.
type Config struct {
	// Mode is how clients get here. Default Listen.
	Mode Mode
	// Addrs are where to listen, by UDP and TCP. Default 127.0.0.1:15053; in mode ResolvConf, which knows no ports,
	// 127.0.0.1:53. Port 0 takes any free one. Whoever reaches them may ask for everything, so let that be this node.
	Addrs []netip.AddrPort
	// Suffixes end the names of services: SERVICE.SUFFIX. Default mesh.
	Suffixes []string
	// Lookup tells the addresses at which a service is reached; one of a family that it lacks is the zero Addr.
	// Required. It is called for each query, from many goroutines, so it should not wait.
	Lookup func(service registry.ServiceName) (ipv4, ipv6 netip.Addr, found bool)
	// LookupAddr tells which service has an address, for PTR queries. Default nil: they are forwarded like others.
	LookupAddr func(netip.Addr) (service registry.ServiceName, found bool)

	// Upstreams are the resolvers for all other names, in the order in which they are asked. Default: those in
	// ResolvConf, also when it changes.
	Upstreams []netip.AddrPort
	// ResolvConf is the file with the node's resolvers. Default etc/resolv.conf in Root.
	ResolvConf string
	// Root is the folder in which the system's files are. Default /.
	Root string
	// Control is called with every socket to an upstream before it is connected, to mark it as not to be redirected.
	// Default nil: the sockets are left alone.
	Control func(network, address string, c syscall.RawConn) error

	// Log takes what operators should know. Default: nothing is logged.
	Log *slog.Logger
	// Metrics registers the metrics of this package. Default: they are kept and not shown.
	Metrics prometheus.Registerer
}

func (c Config) withDefaults() Config {
	if c.Mode == "" {
		c.Mode = Listen
	}
	if len(c.Addrs) == 0 {
		port := uint16(DefaultPort)
		if c.Mode == ResolvConf {
			port = dnsPort
		}
		c.Addrs = []netip.AddrPort{netip.AddrPortFrom(loopback4(), port)}
	}
	if len(c.Suffixes) == 0 {
		c.Suffixes = []string{"mesh"}
	}
	if c.Root == "" {
		c.Root = "/"
	}
	if c.ResolvConf == "" {
		c.ResolvConf = filepath.Join(c.Root, "etc/resolv.conf")
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

func loopback4() netip.Addr { return netip.AddrFrom4([4]byte{127, 0, 0, 1}) }

// Validate reports all that is wrong with the configuration.
func (c Config) Validate() error {
	c = c.withDefaults()
	var problems []error
	problem := func(format string, args ...any) { problems = append(problems, fmt.Errorf(format, args...)) }
	if !slices.Contains([]Mode{Listen, Redirect, ResolvConf, Resolved}, c.Mode) {
		problem("mode: want %s, %s, %s or %s, got %q", Listen, Redirect, ResolvConf, Resolved, c.Mode)
	}
	for i, at := range c.Addrs {
		if !at.IsValid() {
			problem("addrs[%d]: want IP:PORT, such as 127.0.0.1:%d", i, DefaultPort)
		}
	}
	if first := c.Addrs[0]; c.Mode == ResolvConf && first.Port() != dnsPort && first.Port() != 0 {
		problem("addrs[0]: want port %d in mode %s, as that file names no ports, got %s", dnsPort, c.Mode, first)
	}
	for i, suffix := range c.Suffixes {
		if !isSuffix(suffix) {
			problem("suffixes[%d]: want a domain below which services are named, such as mesh or mesh.example.com, got %q", i, suffix)
		}
	}
	if c.Lookup == nil {
		problem("lookup: missing: want a function that knows the services")
	}
	for i, at := range c.Upstreams {
		if !at.IsValid() || at.Port() == 0 {
			problem("upstreams[%d]: want IP:PORT of a resolver, such as 10.0.0.2:%d, got %s", i, dnsPort, at)
		}
	}
	return errors.Join(problems...)
}

// isSuffix leaves room for the longest names of services, and for _http._tcp before them.
func isSuffix(s string) bool {
	s = strings.ToLower(strings.TrimSuffix(s, "."))
	notLabel := func(label string) bool { return !document.IsLabel(label) }
	return len(s) <= 175 && s != "arpa" && !slices.ContainsFunc(strings.Split(s, "."), notLabel)
}

// Server answers queries. Its methods may be called at any time.
type Server struct {
	cfg       Config
	zone      zone
	forwarder *forwarder
	log       *slog.Logger
	metrics   *metrics

	ready chan struct{}
	addrs []netip.AddrPort // set before ready is closed

	resolvers resolvers // only Run uses it
}

// New checks the configuration. The server answers while Run runs.
func New(cfg Config) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	m := newMetrics(cfg.Metrics)
	return &Server{
		cfg:       cfg,
		zone:      newZone(cfg),
		forwarder: newForwarder(cfg.Control),
		log:       cfg.Log,
		metrics:   m,
		ready:     make(chan struct{}),
		resolvers: resolvers{logged: map[string]string{}},
	}, nil
}

// Ready is closed as soon as queries are answered and clients get here.
func (s *Server) Ready() <-chan struct{} { return s.ready }

// Addrs returns where the server listens, once it is ready.
func (s *Server) Addrs() []netip.AddrPort { return s.addrs }

// Try fails if Run could not listen now.
func (s *Server) Try() error {
	sockets, err := listenAll(s.cfg.Addrs)
	closeAll(sockets)
	return err
}

// Run answers queries until ctx ends. What it changed in the system's files is undone when it returns. Run it once.
func (s *Server) Run(ctx context.Context) error {
	sockets, err := listenAll(s.cfg.Addrs)
	if err != nil {
		return err
	}
	for _, l := range sockets {
		s.addrs = append(s.addrs, l.at)
	}
	s.readResolvers()

	// Queries are answered until clients no longer get here, which is after ctx has ended.
	serving, stop := context.WithCancel(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	for _, l := range sockets {
		wg.Go(func() { s.serveUDP(serving, &wg, l.udp) })
		wg.Go(func() { s.serveTCP(serving, &wg, l.tcp) })
	}
	err = s.divert(ctx)
	stop()
	closeAll(sockets)
	wg.Wait()
	return err
}

// divert lets clients get here until ctx ends.
func (s *Server) divert(ctx context.Context) error {
	if err := s.begin(); err != nil {
		return err
	}
	close(s.ready)
	s.watchResolvers(ctx)
	return s.end()
}

// handle answers one query by calling reply once, or, if there is nothing to say, not at all: at once, or later from a
// goroutine of wg. It keeps nothing of query.
func (s *Server) handle(ctx context.Context, wg *sync.WaitGroup, network string, query []byte, reply func(answer []byte)) {
	answer, verdict := s.zone.answer(query, network)
	switch verdict {
	case elsewhere:
		s.forward(ctx, wg, network, query, reply)
		return
	case refused:
		s.metrics.refused.Inc()
	case answered:
		s.metrics.mesh.Inc()
	}
	if answer != nil {
		reply(answer)
	}
}

func (s *Server) forward(ctx context.Context, wg *sync.WaitGroup, network string, query []byte, reply func([]byte)) {
	release, ok := s.forwarder.reserve()
	if !ok {
		s.metrics.failed.Inc()
		reply(refusal(query, dns.RcodeServerFailure))
		return
	}
	query = slices.Clone(query)
	wg.Go(func() {
		defer release()
		answer, took := s.forwarder.forward(ctx, network, query)
		if answer == nil {
			s.metrics.failed.Inc()
			answer = refusal(query, dns.RcodeServerFailure)
		} else {
			s.metrics.passed(took)
		}
		reply(answer)
	})
}
