// Package agent puts the parts of one node together and owns their lives: what starts when, and what ends before what.
package agent

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/headroom-mesh/headroom/agent/admin"
	"github.com/headroom-mesh/headroom/agent/gossip"
	"github.com/headroom-mesh/headroom/agent/kube"
	"github.com/headroom-mesh/headroom/agent/kube/policies"
	"github.com/headroom-mesh/headroom/agent/local"
	"github.com/headroom-mesh/headroom/agent/names"
	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/dataplane"
	"github.com/headroom-mesh/headroom/dataplane/identity"
	"github.com/headroom-mesh/headroom/dataplane/sockets"
	"github.com/headroom-mesh/headroom/dataplane/transport"
	"github.com/headroom-mesh/headroom/registry"
	"github.com/headroom-mesh/headroom/registry/etcd"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

// Agent is one node of the mesh.
type Agent struct {
	cfg        Config
	registry   *etcd.Registry
	gossip     *gossip.Gossip
	local      *local.Local
	dataplane  *dataplane.Dataplane
	kubernetes *kube.Client     // nil: there is no cluster
	nodeUID    string           // what Kubernetes tells this node by, if there is a cluster
	cluster    *kube.Watcher    // nil: there is none
	policies   *policies.Mirror // nil: there is none
	capturing  *capturing
	names      *names.Server // nil: no names are answered
	admin      *admin.Admin
	identity   *identity.Source    // nil: nobody has to prove anything (--mtls off)
	transport  transport.Transport // between agents
	metrics    *prometheus.Registry

	snapshot atomic.Pointer[registry.Snapshot] // applied to the data plane
	draining atomic.Bool
	oriented atomic.Bool // all is known of what there is
	turn     atomic.Bool // no other agent is to end first

	succession *succession
	later      []*later // addresses that another agent may still have; set before anything runs
	mesh       first    // snapshot was applied
	own        first    // set of the replicas that files declare on this node was
	known      first    // what Kubernetes says of this node is

	recapturing sync.Mutex // held while what is captured is brought up to date

	advertising sync.Mutex
	// advertising guards the fields below.

	replicas replicas // of this node
	left     bool     // the registry: nothing is to be announced any more
}

// New checks the configuration and puts the agent together. Nothing runs before Run.
func New(cfg Config) (*Agent, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	if err := os.MkdirAll(cfg.DataDir, 0o700); err != nil {
		return nil, fmt.Errorf("make the folder for the agent's data: %w; choose another with --data-dir", err)
	}
	a := &Agent{cfg: cfg, metrics: prometheus.NewRegistry(), mesh: newFirst(), own: newFirst(), known: newFirst(), succession: newSuccession(cfg)}
	a.metrics.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	a.snapshot.Store(&registry.Snapshot{})
	// All problems at once; only the last part needs the others, and all may need the zone.
	if err := errors.Join(a.newCluster(), a.newRegistry(), a.newGossip(), a.newLocal(), a.newIdentity(), a.newDataplane(), a.newCapturing(), a.newNames()); err != nil {
		return nil, err
	}
	if err := a.newAdmin(); err != nil {
		return nil, err
	}
	return a, a.newPolicies()
}

func (a *Agent) newRegistry() error {
	id, err := owner(a.cfg.DataDir, a.nodeUID)
	if err != nil {
		return err
	}
	c := etcd.Config{
		Endpoints:    etcdURLs(a.cfg),
		Username:     a.cfg.EtcdUser,
		CAFile:       a.cfg.EtcdCA,
		CertFile:     a.cfg.EtcdCert,
		KeyFile:      a.cfg.EtcdKey,
		Prefix:       a.cfg.EtcdPrefix,
		SnapshotFile: filepath.Join(a.cfg.DataDir, "snapshot.json"),
		Node:         a.cfg.Node,
		Owner:        id,
		Agent:        a.cfg.Mesh.String(),
		VirtualIPv4:  a.cfg.VirtualIPv4,
		VirtualIPv6:  a.cfg.VirtualIPv6,
		Log:          a.cfg.Log,
		Metrics:      a.metrics,
	}
	if a.cfg.EtcdPasswordFile != "" {
		password, err := readSecret("--etcd-password-file", a.cfg.EtcdPasswordFile)
		if err != nil {
			return err
		}
		c.Password = password
	}
	a.registry, err = etcd.New(c)
	return inFlags("etcd", map[string]string{
		"endpoints": "--etcd", "caFile": "--etcd-ca", "certFile": "--etcd-cert", "keyFile": "--etcd-key",
		"username": "--etcd-user", "password": "--etcd-password-file", "prefix": "--etcd-prefix",
		"virtualIPv4": "--virtual-ipv4", "virtualIPv6": "--virtual-ipv6",
	}, err)
}

// etcdURLs returns the members to talk to. HOST:PORT means TLS if any file for TLS is given.
func etcdURLs(c Config) []string {
	if len(c.Etcd) == 0 {
		return []string{"http://" + c.EtcdListen.String()}
	}
	scheme := "http://"
	if c.EtcdCA != "" || c.EtcdCert != "" {
		scheme = "https://"
	}
	var urls []string
	for _, member := range c.Etcd {
		if !strings.Contains(member, "://") {
			member = scheme + member
		}
		urls = append(urls, member)
	}
	return urls
}

func readSecret(flag, file string) (string, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return "", fmt.Errorf("%s: %w", flag, err)
	}
	return strings.TrimSpace(string(b)), nil
}

func (a *Agent) newGossip() error {
	c := gossip.Config{
		Node: a.cfg.Node, Zone: a.cfg.Zone, Version: a.cfg.Version,
		Bind: a.cfg.Gossip, Wait: a.cfg.TakeOver != "", Mesh: a.cfg.Mesh, Join: a.cfg.Join,
		Log: a.cfg.Log, Metrics: a.metrics,
	}
	if a.cfg.GossipKeyFile != "" {
		secret, err := readSecret("--gossip-key-file", a.cfg.GossipKeyFile)
		if err != nil {
			return err
		}
		if c.Key, err = gossip.ParseKey(secret); err != nil {
			return fmt.Errorf("--gossip-key-file %s: %w", a.cfg.GossipKeyFile, err)
		}
	}
	var err error
	a.gossip, err = gossip.New(c)
	return inFlags("gossip", map[string]string{
		"join": "--join", "key": "--gossip-key-file", "advertise": "--gossip", "zone": "--zone",
	}, err)
}

func (a *Agent) newLocal() error {
	registered := filepath.Join(a.cfg.DataDir, "services")
	if err := os.MkdirAll(registered, 0o700); err != nil {
		return err
	}
	var err error
	a.local, err = local.New(local.Config{
		Node: a.cfg.Node, Zone: a.cfg.Zone, Mesh: a.cfg.Mesh,
		Services: a.cfg.Services, Registered: registered, Control: sockets.Mark(a.cfg.mark()),
		Log: a.cfg.Log, Metrics: a.metrics,
	})
	return inFlags("local services", map[string]string{"services": "--services", "registered": "--services", "mesh": "--mesh"}, err)
}

func (a *Agent) newDataplane() error {
	var err error
	a.dataplane, err = dataplane.New(dataplane.Config{
		Node: a.cfg.Node, Zone: a.cfg.Zone, Transport: a.transport, Identity: a.identity, Mark: a.cfg.mark(), DrainTimeout: a.cfg.DrainTimeout,
		Log: a.cfg.Log, AccessLog: a.cfg.AccessLog, Metrics: a.metrics,
	})
	return err
}

func (a *Agent) newAdmin() error {
	var err error
	a.admin, err = admin.New(admin.Config{
		Node: a.cfg.Node, Version: a.cfg.Version,
		Socket: a.cfg.AdminSocket, Addr: a.cfg.Admin, HTTP: a.cfg.AdminHTTP, MetricsAddr: a.cfg.Metrics,
		Registry:        a.registry,
		Connected:       a.registry.Connected,
		Snapshot:        a.snapshot.Load,
		AppliedRevision: func() int64 { return a.snapshot.Load().Revision },
		Members:         a.gossip.Members,
		Local:           a.local,
		Lines:           a.dataplane,
		Capture:         a.capturing,
		Observe:         a.observe,
		DialPeer:        a.dataplane.DialPeer,
		PeerListener:    a.dataplane.PeerListener(),
		TakeOver:        a.succession.serve,
		Ready:           a.readiness(),
		Metrics:         a.metrics,
		Log:             a.cfg.Log,
	})
	return inFlags("admin", map[string]string{"addr": "--admin", "http": "--admin-http", "socket": "--admin-socket"}, err)
}

func (a *Agent) observe(service registry.ServiceName) *meshv1.Observation {
	o := a.dataplane.Observe(service)
	failing := a.local.CheckErrors()
	for _, replica := range o.Inbound {
		replica.CheckError = failing[registry.EndpointID(replica.Id)]
	}
	return o
}

// apply takes in a snapshot of the registry.
func (a *Agent) apply(s *registry.Snapshot) {
	a.dataplane.Update(s)
	a.snapshot.Store(s)
	if a.policies != nil {
		a.policies.Update(s)
	}
	a.recapture()
	a.mesh.happened()
}

// recapture brings up to date which addresses are captured. Who asks first might else set last what is no longer so.
func (a *Agent) recapture() {
	a.recapturing.Lock()
	defer a.recapturing.Unlock()
	a.capturing.setReal(a.dataplane.CapturedAddresses())
}

// withdraw takes the replicas of this node out of the registry for good: they may still change while the last requests
// are answered.
func (a *Agent) withdraw() {
	a.advertising.Lock()
	defer a.advertising.Unlock()
	a.left = true
	a.registry.Advertise(nil)
}

// first tells when something happened for the first time.
type first struct {
	done     chan struct{}
	happened func()
}

func newFirst() first {
	done := make(chan struct{})
	return first{done: done, happened: sync.OnceFunc(func() { close(done) })}
}
