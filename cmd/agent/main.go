// Agent runs one node of a Headroom mesh.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/bits"
	"net/netip"
	"os"
	"os/signal"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/headroom-mesh/headroom/agent"
	"github.com/spf13/cobra"
)

// errUsage marks errors in how the program was called.
var errUsage = errors.New("usage")

func main() {
	command := newCommand()
	err := command.Execute()
	if err == nil {
		return
	}
	fmt.Fprintf(os.Stderr, "agent: %s\n", strings.TrimSuffix(err.Error(), "\n"+errUsage.Error()))
	if errors.Is(err, errUsage) {
		fmt.Fprintln(os.Stderr, "Run `agent --help` for all flags.")
		os.Exit(2)
	}
	os.Exit(1)
}

func usage(err error) error { return errors.Join(err, errUsage) }

func newCommand() *cobra.Command {
	cfg := agent.Config{Version: version()}
	logging := logFlags{level: "info", format: "text"}
	c := &cobra.Command{
		Use:   "agent",
		Short: "Run one node of a Headroom mesh",
		Long: `Run one node of a Headroom mesh.

The agent finds other agents by gossip, registers the services of its node in etcd, and proxies the node's traffic: it
sends each request to the replica with the most headroom. Send HTTP requests for http://SERVICE.mesh/ through --proxy.

On SIGTERM or SIGINT the agent takes its node out of the mesh, finishes the requests in flight, and ends. A second
signal ends it at once.`,
		Example: `  agent --node a --etcd-embedded ./data --ca ./ca --services ./services.d
  agent --node b --bind 127.0.0.2 --join 127.0.0.1:7946 --etcd 127.0.0.1:2379 --ca ./ca`,
		Version:       cfg.Version,
		Args:          func(c *cobra.Command, args []string) error { return noArgs(args) },
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(c *cobra.Command, _ []string) error {
			log, err := logging.logger()
			if err != nil {
				return usage(err)
			}
			cfg.Log = log
			if logging.access {
				cfg.AccessLog = slog.New(slog.NewJSONHandler(os.Stdout, nil))
			}
			if err := cfg.Validate(); err != nil {
				return usage(err)
			}
			return run(cfg)
		},
	}
	c.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usage(err) })
	addFlags(c, &cfg, &logging)
	return c
}

// version returns what the build says of itself.
func version() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "unknown"
}

func noArgs(args []string) error {
	if len(args) == 0 {
		return nil
	}
	return usage(fmt.Errorf("unexpected argument %q: everything is given by flags", args[0]))
}

// run runs the agent until a signal comes.
func run(cfg agent.Config) error {
	a, err := agent.New(cfg)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	ended := make(chan struct{})
	var obeying sync.WaitGroup
	obeying.Go(func() { obey(signals, ended, cancel, cfg.Log) })
	defer obeying.Wait()
	defer close(ended)
	return a.Run(ctx)
}

// obey ends the agent in good order at the first signal, and the process at the second. The usual effect of a signal
// can't be relied on for that: a shell starts background jobs with SIGINT ignored.
func obey(signals <-chan os.Signal, ended <-chan struct{}, cancel context.CancelCauseFunc, log *slog.Logger) {
	select {
	case s := <-signals:
		cancel(fmt.Errorf("signal: %s", s))
	case <-ended:
		return
	}
	select {
	case s := <-signals:
		log.Warn("second signal: ending at once", "reason", s)
		os.Exit(1)
	case <-ended:
	}
}

func addFlags(c *cobra.Command, cfg *agent.Config, logging *logFlags) {
	f := c.Flags()
	f.SortFlags = false
	f.StringVar((*string)(&cfg.Node), "node", "", "`NAME` of this node, unique in the mesh (default: the machine's)")
	f.StringVar(&cfg.Zone, "zone", "", "`ZONE` of this node, told to the others")
	f.TextVar(&cfg.Bind, "bind", netip.Addr{}, "`IP` at which other nodes reach this one (default 127.0.0.1)")
	f.StringSliceVar(&cfg.Join, "join", nil, "`HOST:PORT` of other agents' gossip; one that answers is enough")
	f.StringVar(&cfg.GossipKeyFile, "gossip-key-file", "", "`FILE` with the gossip key: 16, 24 or 32 bytes in base64")

	f.StringSliceVar(&cfg.Etcd, "etcd", nil, "`HOST:PORT` or URL of the members of the etcd cluster")
	f.StringVar(&cfg.EtcdUser, "etcd-user", "", "`USER` name for etcd")
	f.StringVar(&cfg.EtcdPasswordFile, "etcd-password-file", "", "`FILE` with the password for etcd")
	f.StringVar(&cfg.EtcdCA, "etcd-ca", "", "PEM `FILE` with the CA of etcd (turns on TLS)")
	f.StringVar(&cfg.EtcdCert, "etcd-cert", "", "PEM `FILE` with this agent's certificate for etcd")
	f.StringVar(&cfg.EtcdKey, "etcd-key", "", "PEM `FILE` with the key of --etcd-cert")
	f.StringVar(&cfg.EtcdPrefix, "etcd-prefix", "", "`PREFIX` of all keys in etcd (default /headroom/v1)")
	f.StringVar(&cfg.EtcdEmbedded, "etcd-embedded", "", "`DIR` for the data of an etcd that runs inside this agent; with --etcd, it runs for others and this agent uses --etcd")
	addr(c, &cfg.EtcdListen, "etcd-listen", "`IP:PORT` of the embedded etcd for clients (default: --bind, port 2379)")
	addr(c, &cfg.EtcdPeerListen, "etcd-peer-listen", "`IP:PORT` of the embedded etcd for members (default: --bind, port 2380)")

	f.TextVar(&cfg.VirtualIPv4, "virtual-ipv4", netip.Prefix{}, "`PREFIX` of the virtual IPv4 addresses of services, the same for all agents (default 240.64.0.0/12)")
	f.TextVar(&cfg.VirtualIPv6, "virtual-ipv6", netip.Prefix{}, "`PREFIX` of the virtual IPv6 addresses of services, the same for all agents (default fd68:6561:6472::/64)")

	f.StringVar(&cfg.TLS, "tls", "", "`DIR` with this agent's certificate for other agents: tls.crt, tls.key and the roots ca.crt; read again when they change")
	f.StringVar(&cfg.CA, "ca", "", "`DIR` of a CA with its key, of which the agent makes its own certificates; made if there is none (default with --etcd-embedded: ca in --data-dir)")
	f.StringVar(&cfg.MTLS, "mtls", "", "`MODE` of connections between agents: strict (TLS only), permissive (in the clear too) or off (default strict with --tls or --ca, else off)")
	f.StringVar(&cfg.TrustDomain, "trust-domain", "", "`NAME` of the trust domain that certificates must be of (default: what they are of; for a CA that is new or does not say headroom.local)")

	f.BoolVar(&cfg.Capture, "capture", false, "lead connections to virtual addresses here, by nftables: applications need no setting (Linux, CAP_NET_ADMIN)")
	f.Uint16Var(&cfg.CapturePort, "capture-port", 0, "`PORT` where captured connections arrive (default 15006)")
	f.StringSliceVar(&cfg.CaptureNetns, "capture-netns", nil, "`PATH` of a further network namespace to capture in, such as /proc/PID/ns/net")
	f.VarP((*numbers[uint32])(&cfg.CaptureExemptUIDs), "capture-exempt-uids", "", "`UID` of users whose connections are left alone")
	f.VarP((*numbers[uint16])(&cfg.CaptureExemptPorts), "capture-exempt-ports", "", "`PORT`s: connections to them are left alone")
	f.StringSliceVar(&cfg.CaptureExemptCgroups, "capture-exempt-cgroups", nil, "`PATH` of control groups (version 2) whose connections are left alone")

	f.StringVar(&cfg.DNS, "dns", "", "`MODE` by which applications get to the agent's DNS server: redirect (port 53 is captured), resolv.conf, resolved, listen or off (default redirect with --capture, else off)")
	f.Var((*addresses)(&cfg.DNSListen), "dns-listen", "`IP:PORT` of the DNS server (default: loopback, port 15053; with --dns resolv.conf, port 53)")
	f.StringSliceVar(&cfg.DNSSuffixes, "dns-suffix", nil, "`NAME` that ends the names of services: SERVICE.NAME (default mesh)")
	f.Var((*addresses)(&cfg.DNSUpstreams), "dns-upstream", "`IP:PORT` of resolvers for all other names (default: those of the node)")

	f.BoolVar(&cfg.Kubernetes, "kubernetes", false, "take services, replicas of this node, and pods to capture, from Kubernetes")
	f.StringVar(&cfg.Kubeconfig, "kubeconfig", "", "`FILE` that says how to reach the API server (default: what Kubernetes gives every pod)")

	f.StringVar(&cfg.Services, "services", "", "`DIR` of LocalService files, watched")
	f.StringVar(&cfg.DataDir, "data-dir", "", "`DIR` for what outlives the agent (default /var/lib/headroom/NODE, or ~/.local/state/headroom/NODE)")

	addr(c, &cfg.Proxy, "proxy", "`IP:PORT` of the HTTP proxy for this node's applications (default: loopback, port 15001)")
	f.StringSliceVar(&cfg.Listen, "listen", nil, "`SERVICE=IP:PORT` where applications reach one service, whatever protocol they speak")
	addr(c, &cfg.Mesh, "mesh", "`IP:PORT` for the traffic of other agents (default: --bind, port 15008)")
	addr(c, &cfg.Gossip, "gossip", "`IP:PORT` for gossip, TCP and UDP (default: --bind, port 7946)")
	addr(c, &cfg.Admin, "admin", "`IP:PORT` of the admin API, gRPC (default: loopback, port 15010)")
	addr(c, &cfg.AdminHTTP, "admin-http", "`IP:PORT` of metrics, health and pprof (default: loopback, port 15000)")
	addr(c, &cfg.Metrics, "metrics", "`IP:PORT` of the metrics alone, for others (default: none; the IP is that of --bind)")
	f.StringVar(&cfg.AdminSocket, "admin-socket", "", "`PATH` of the admin API's Unix socket (default: admin.sock in --data-dir)")

	f.StringVar(&cfg.TakeOver, "take-over", "", "stand by while another agent of this node with the same `NAME` here is still to end, and then go on in its place without a gap")
	f.DurationVar(&cfg.DrainDelay, "drain-delay", 0, "time between announcing the end and taking no more requests (default 1s)")
	f.DurationVar(&cfg.DrainTimeout, "drain-timeout", 0, "longest time for requests in flight at the end (default 30s)")
	f.BoolVar(&cfg.Stay, "stay", false, "keep this node's name in the gossip at the end, as for a restart")
	f.StringVar(&logging.level, "log-level", logging.level, "`LEVEL`: debug, info, warn or error")
	f.StringVar(&logging.format, "log-format", logging.format, "`FORMAT`: text or json")
	f.BoolVar(&logging.access, "access-log", false, "write a JSON line to standard output per request that is made or delivered here")
}

// numbers is the value of a flag that may be given more than once.
type numbers[N uint16 | uint32] []N

func (n *numbers[N]) String() string {
	if len(*n) == 0 {
		return ""
	}
	return strings.Trim(strings.ReplaceAll(fmt.Sprint(*n), " ", ","), "[]")
}

func (n *numbers[N]) Type() string { return "numbers" }

func (n *numbers[N]) Set(text string) error {
	for part := range strings.SplitSeq(text, ",") {
		v, err := strconv.ParseUint(strings.TrimSpace(part), 10, bits.Len64(uint64(^N(0))))
		if err != nil {
			return fmt.Errorf("%q: want a number up to %d", part, ^N(0))
		}
		*n = append(*n, N(v))
	}
	return nil
}

// addresses is the value of a flag that may be given more than once.
type addresses []netip.AddrPort

func (a *addresses) String() string {
	if len(*a) == 0 {
		return ""
	}
	return strings.Trim(strings.ReplaceAll(fmt.Sprint(*a), " ", ","), "[]")
}

func (a *addresses) Type() string { return "addresses" }

func (a *addresses) Set(text string) error {
	for part := range strings.SplitSeq(text, ",") {
		at, err := netip.ParseAddrPort(strings.TrimSpace(part))
		if err != nil {
			return fmt.Errorf("%q: want IP:PORT", part)
		}
		*a = append(*a, at)
	}
	return nil
}

// listenAt is the value of a flag for an address that has a default. Without an IP it changes the port only.
type listenAt netip.AddrPort

func (l *listenAt) String() string {
	switch a := netip.AddrPort(*l); {
	case a == netip.AddrPort{}:
		return ""
	case !a.Addr().IsValid():
		return fmt.Sprintf(":%d", a.Port())
	default:
		return a.String()
	}
}

func (l *listenAt) Type() string { return "address" }

func (l *listenAt) Set(text string) error {
	digits, only := strings.CutPrefix(text, ":")
	if port, err := strconv.ParseUint(digits, 10, 16); only && err == nil {
		*l = listenAt(netip.AddrPortFrom(netip.Addr{}, uint16(port)))
		return nil
	}
	at, err := netip.ParseAddrPort(text)
	if err != nil {
		return errors.New("want IP:PORT, or :PORT for another port at the usual IP")
	}
	*l = listenAt(at)
	return nil
}

func addr(c *cobra.Command, p *netip.AddrPort, name, help string) {
	c.Flags().Var((*listenAt)(p), name, help)
}

type logFlags struct {
	level, format string
	access        bool
}

func (l logFlags) logger() (*slog.Logger, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(l.level)); err != nil {
		return nil, fmt.Errorf("--log-level %q: want debug, info, warn or error", l.level)
	}
	options := &slog.HandlerOptions{Level: level}
	switch l.format {
	case "text":
		return slog.New(slog.NewTextHandler(os.Stderr, options)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(os.Stderr, options)), nil
	}
	return nil, fmt.Errorf("--log-format %q: want text or json", l.format)
}
