package agent

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/headroom-mesh/headroom/agent/names"
	"github.com/headroom-mesh/headroom/dataplane/identity"
	"github.com/headroom-mesh/headroom/registry"
)

// The ports of an agent. docs/architecture.md explains them.
const (
	GossipPort     = 7946
	ProxyPort      = 15001
	MeshPort       = 15008
	CapturePort    = 15006
	DNSPort        = 15053
	AdminPort      = 15010
	AdminHTTPPort  = 15000
	EtcdClientPort = 2379
	EtcdPeerPort   = 2380
)

// Values of Config.MTLS.
const (
	MTLSOff        = "off"        // in the clear
	MTLSPermissive = "permissive" // TLS where the other end has it, and else in the clear
	MTLSStrict     = "strict"     // TLS, or not at all
)

// Config configures an agent. The zero value of every field is its default.
type Config struct {
	// Node is this agent's name, unique in the mesh. Default: the name of the machine.
	Node registry.NodeName
	// Zone is where the node stands; it is told to others. Default none.
	Zone string
	// Version is told to others.
	Version string

	// Bind is the address on which other nodes reach this one. Default 127.0.0.1: a mesh on one machine.
	Bind netip.Addr
	// Gossip, Mesh, Proxy, Admin and AdminHTTP are listen addresses. Default: Bind (gossip, mesh), or loopback
	// (proxy, admin), with the usual port. If Bind is a loopback address, it is used for all of them. A port without an
	// address changes the port only.
	Gossip, Mesh, Proxy, Admin, AdminHTTP netip.AddrPort
	// Metrics is where others read the metrics, and nothing else. Default: nowhere. The default of its address is Bind.
	Metrics netip.AddrPort
	// Listen are addresses where callers get to one service, whatever they speak. Default none.
	Listen []string // SERVICE=IP:PORT
	// AdminSocket is the path of the Unix socket of the admin API. Default admin.sock in DataDir.
	AdminSocket string

	// Join lists other agents' gossip addresses, HOST:PORT.
	Join []string
	// GossipKeyFile holds the key that encrypts gossip, in base64. Default: no encryption.
	GossipKeyFile string

	// Etcd lists the members of an etcd cluster, HOST:PORT or URLs. Either this or EtcdEmbedded is required; if both
	// are given, the embedded one is served and the listed ones are used.
	Etcd []string
	// EtcdUser and EtcdPasswordFile log in to etcd.
	EtcdUser, EtcdPasswordFile string
	// EtcdCA, EtcdCert and EtcdKey are PEM files for TLS to etcd.
	EtcdCA, EtcdCert, EtcdKey string
	// EtcdPrefix starts all keys in etcd. Default /headroom/v1.
	EtcdPrefix string
	// EtcdEmbedded is the folder of an etcd inside this agent. Default: none runs.
	EtcdEmbedded string
	// EtcdListen and EtcdPeerListen are where the embedded etcd listens. Default: Bind with 2379 and 2380.
	EtcdListen, EtcdPeerListen netip.AddrPort

	// VirtualIPv4 and VirtualIPv6 are the ranges from which every service of the mesh gets a virtual address each. Default
	// 240.64.0.0/12 and fd68:6561:6472::/64.
	VirtualIPv4, VirtualIPv6 netip.Prefix

	// TLS is a folder with this agent's certificate, its key and the roots to hold others to: tls.crt, tls.key and ca.crt.
	// They are read again when they change. Default none.
	TLS string
	// CA is a folder with a CA and its key, with which the agent issues its own certificates; a missing or empty folder
	// gets a new CA. Default none; with EtcdEmbedded, and without TLS, ca in DataDir.
	CA string
	// MTLS says which connections between agents are wanted: MTLSOff, MTLSPermissive or MTLSStrict. Default MTLSStrict if
	// there are certificates, else MTLSOff.
	MTLS string
	// TrustDomain is what the certificates must be of, and what a CA is for that is new or doesn't say. Default: whatever they
	// are of, and identity.DefaultDomain.
	TrustDomain string

	// Capture leads the connections of this node's applications here that they make to virtual addresses. Default: they have to
	// use Proxy or Listen.
	Capture bool
	// CapturePort is where captured connections arrive. Default 15006.
	CapturePort uint16
	// CaptureNetns are paths of more network namespaces, such as those of containers, whose connections are captured inside
	// them. Default none.
	CaptureNetns []string
	// CaptureExemptUIDs, CaptureExemptPorts and CaptureExemptCgroups are users, ports and control groups (version 2) whose
	// connections are left alone. Default none.
	CaptureExemptUIDs    []uint32
	CaptureExemptPorts   []uint16
	CaptureExemptCgroups []string

	// DNS says how applications get to the agent's DNS server: DNSOff, or a names.Mode. Default: redirect with Capture, else off.
	DNS string
	// DNSListen are the addresses of the DNS server. Default: loopback, port 15053; in mode resolv.conf, port 53. In mode redirect,
	// with an unspecified address, queries of other network namespaces that come through this one are redirected, too.
	DNSListen []netip.AddrPort
	// DNSSuffixes end the names of services. Default mesh.
	DNSSuffixes []string
	// DNSUpstreams are the resolvers for all other names. Default: those of the node.
	DNSUpstreams []netip.AddrPort

	// Kubernetes says that this is a node of a cluster: services, this node's replicas and the pods to capture are those that
	// Kubernetes has. Default: they are not.
	Kubernetes bool
	// Kubeconfig is a file that says how to reach the API server. Default: what Kubernetes gives every pod.
	Kubeconfig string

	// Services is a folder of LocalService files to watch. Default none.
	Services string
	// DataDir holds what must outlive the agent: registrations and the last snapshot of the registry. Default: a
	// folder for the node under the system's or the user's state folder.
	DataDir string

	// TakeOver says that there may be another agent of this node, which is to end soon: this one stands by until then, and goes on
	// from there. It is a name that both have, lest an agent of another mesh take over. They must share no files. It is not for
	// agents with Capture, DNS or EtcdEmbedded. Default: no two agents may have the same addresses.
	TakeOver string

	// DrainDelay is the time between announcing the end and taking no more requests. Default 1s.
	DrainDelay time.Duration
	// DrainTimeout bounds the time for requests in flight. Default 30s.
	DrainTimeout time.Duration
	// Stay keeps the agent's name in the gossip when it ends, as for a restart. Default: it leaves.
	Stay bool

	Log       *slog.Logger // nil: no logs
	AccessLog *slog.Logger // nil: no access log
}

// parseListen reads an element of Listen.
func parseListen(text string) (registry.ServiceName, netip.AddrPort, error) {
	name, address, _ := strings.Cut(text, "=")
	at, err := netip.ParseAddrPort(address)
	service := registry.ServiceName(name)
	if err != nil || service.Validate() != nil {
		return service, at, fmt.Errorf("--listen %q: want SERVICE=IP:PORT, such as web=127.0.0.1:8080", text)
	}
	return service, at, nil
}

func (c Config) withDefaults() Config {
	if c.Node == "" {
		host, _ := os.Hostname()
		c.Node = registry.NodeName(host)
	}
	if !c.Bind.IsValid() {
		c.Bind = netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}
	local := c.loopback()
	c.Gossip = orListen(c.Gossip, c.Bind, GossipPort)
	c.Mesh = orListen(c.Mesh, c.Bind, MeshPort)
	c.Proxy = orListen(c.Proxy, local, ProxyPort)
	c.Admin = orListen(c.Admin, local, AdminPort)
	c.AdminHTTP = orListen(c.AdminHTTP, local, AdminHTTPPort)
	if c.Metrics.Port() != 0 {
		c.Metrics = orListen(c.Metrics, c.Bind, 0)
	}
	c.EtcdListen = orListen(c.EtcdListen, c.Bind, EtcdClientPort)
	c.EtcdPeerListen = orListen(c.EtcdPeerListen, c.Bind, EtcdPeerPort)
	c.DataDir = cmp.Or(c.DataDir, stateDir(c.Node))
	c.AdminSocket = cmp.Or(c.AdminSocket, filepath.Join(c.DataDir, "admin.sock"))
	if c.EtcdEmbedded != "" && !c.hasCertificates() && c.MTLS != MTLSOff {
		c.CA = filepath.Join(c.DataDir, "ca")
	}
	if c.MTLS == "" {
		c.MTLS = MTLSOff
		if c.hasCertificates() {
			c.MTLS = MTLSStrict
		}
	}
	c.VirtualIPv4, c.VirtualIPv6 = registry.VirtualRanges(c.VirtualIPv4, c.VirtualIPv6)
	c.CapturePort = cmp.Or(c.CapturePort, CapturePort)
	if c.DNS == "" {
		c.DNS = DNSOff
		if c.Capture {
			c.DNS = string(names.Redirect)
		}
	}
	if len(c.DNSSuffixes) == 0 {
		c.DNSSuffixes = []string{"mesh"}
	}
	c.DrainDelay = cmp.Or(c.DrainDelay, time.Second)
	c.DrainTimeout = cmp.Or(c.DrainTimeout, 30*time.Second)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

func (c Config) hasCertificates() bool { return c.TLS != "" || c.CA != "" }

// loopback is where only this machine gets to.
func (c Config) loopback() netip.Addr {
	switch {
	case c.Bind.IsLoopback():
		return c.Bind
	case c.Bind.Is6():
		return netip.IPv6Loopback()
	default:
		return netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}
}

func orListen(a netip.AddrPort, ip netip.Addr, port uint16) netip.AddrPort {
	if a.IsValid() {
		return a
	}
	return netip.AddrPortFrom(ip, cmp.Or(a.Port(), port))
}

// stateDir is where a program of this system or user keeps what must outlive it (/var/lib, XDG_STATE_HOME).
func stateDir(node registry.NodeName) string {
	if os.Getuid() == 0 {
		return filepath.Join("/var/lib/headroom", string(node))
	}
	base := os.Getenv("XDG_STATE_HOME")
	if base == "" {
		home, _ := os.UserHomeDir()
		base = filepath.Join(home, ".local", "state")
	}
	return filepath.Join(base, "headroom", string(node))
}

// Validate reports every problem at once, in the words of the command line.
func (c Config) Validate() error {
	var problems []error
	problem := func(format string, args ...any) { problems = append(problems, fmt.Errorf(format, args...)) }
	if err := c.withDefaults().Node.Validate(); err != nil {
		problem("--node: %w", err)
	}
	for _, text := range c.Listen {
		if _, _, err := parseListen(text); err != nil {
			problems = append(problems, err)
		}
	}
	if len(c.Etcd) == 0 && c.EtcdEmbedded == "" {
		problem("no registry: give --etcd HOST:PORT for an existing etcd, or --etcd-embedded DIR to run one inside this agent")
	}
	if c.Bind.IsUnspecified() {
		problem("--bind %s: want the one address at which other nodes reach this node", c.Bind)
	}
	for _, l := range []struct {
		flag string
		at   netip.AddrPort
	}{{"--admin", c.Admin}, {"--admin-http", c.AdminHTTP}} {
		if l.at.IsValid() && !l.at.Addr().IsLoopback() {
			problem("%s %s: want a loopback address, as nobody has to log in there", l.flag, l.at)
		}
	}
	if (c.EtcdUser == "") != (c.EtcdPasswordFile == "") {
		problem("--etcd-user and --etcd-password-file: want both or neither")
	}
	if (c.EtcdCert == "") != (c.EtcdKey == "") {
		problem("--etcd-cert and --etcd-key: want both or neither")
	}
	plain := func(member string) bool { return strings.HasPrefix(member, "http://") }
	if (c.EtcdCA != "" || c.EtcdCert != "") && (len(c.Etcd) == 0 || slices.ContainsFunc(c.Etcd, plain)) {
		problem("--etcd-ca, --etcd-cert and --etcd-key: want --etcd members with https://, or as HOST:PORT")
	}
	if c.Kubeconfig != "" && !c.Kubernetes {
		problem("--kubeconfig %s: want --kubernetes, too", c.Kubeconfig)
	}
	if c.TakeOver != "" && (c.Capture || c.EtcdEmbedded != "" || c.DNS != "" && c.DNS != DNSOff) {
		problem("--take-over %s: not with --capture, --dns or --etcd-embedded, of which a node has one", c.TakeOver)
	}
	problems = append(problems, c.validateMTLS(), c.validateCapture())
	for flag, d := range map[string]time.Duration{"--drain-delay": c.DrainDelay, "--drain-timeout": c.DrainTimeout} {
		if d < 0 {
			problem("%s %s: want a positive duration", flag, d)
		}
	}
	return errors.Join(problems...)
}

func (c Config) validateCapture() error {
	var problems []error
	if !c.Capture && len(c.CaptureNetns)+len(c.CaptureExemptUIDs)+len(c.CaptureExemptPorts)+len(c.CaptureExemptCgroups) > 0 {
		problems = append(problems, errors.New("--capture-netns and --capture-exempt-...: want --capture, too"))
	}
	modes := []string{"", DNSOff, string(names.Listen), string(names.Redirect), string(names.ResolvConf), string(names.Resolved)}
	switch {
	case !slices.Contains(modes, c.DNS):
		problems = append(problems, fmt.Errorf("--dns %q: want %s", c.DNS, strings.Join(modes[1:], ", ")))
	case c.DNS == string(names.Redirect) && !c.Capture:
		problems = append(problems, errors.New("--dns redirect: want --capture, too, as its rules redirect the queries"))
	}
	return errors.Join(problems...)
}

func (c Config) validateMTLS() error {
	var problems []error
	problem := func(format string, args ...any) { problems = append(problems, fmt.Errorf(format, args...)) }
	switch {
	case !slices.Contains([]string{"", MTLSOff, MTLSPermissive, MTLSStrict}, c.MTLS):
		problem("--mtls %q: want %s, %s or %s", c.MTLS, MTLSOff, MTLSPermissive, MTLSStrict)
	case c.MTLS != "" && c.MTLS != MTLSOff && !c.withDefaults().hasCertificates():
		problem("--mtls %s: want a certificate, too: --tls DIR with its files, or --ca DIR with a CA that issues it", c.MTLS)
	}
	if c.TLS != "" && c.CA != "" {
		problem("--tls and --ca: want one of them, as an agent has one certificate: that in the files, or the one that it issues")
	}
	if c.TrustDomain != "" {
		if _, err := identity.ParseDomain(c.TrustDomain); err != nil {
			problem("--trust-domain: %w", err)
		}
	}
	return errors.Join(problems...)
}
