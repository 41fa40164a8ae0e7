package agent

import (
	"cmp"
	"fmt"
	"net/netip"
	"time"

	"github.com/headroom-mesh/headroom/agent/gossip"
	"github.com/headroom-mesh/headroom/dataplane/identity"
	"github.com/headroom-mesh/headroom/dataplane/identity/ca"
	"github.com/headroom-mesh/headroom/dataplane/transport"
)

// newIdentity finds out who this agent is to others, and how to connect to them.
func (a *Agent) newIdentity() error {
	if a.cfg.MTLS == MTLSOff {
		a.transport = transport.Plain{Mark: a.cfg.mark()}
		return nil
	}
	load, err := a.cfg.certificates(time.Now())
	if err != nil {
		return err
	}
	a.identity, err = identity.New(identity.Config{Load: load, Log: a.cfg.Log, Metrics: a.metrics})
	if err != nil {
		return err
	}
	a.transport = transport.NewMutual(transport.MutualConfig{
		Identity: a.identity, Permissive: a.cfg.MTLS == MTLSPermissive, NamesAt: a.namesAt, Mark: a.cfg.mark(), Metrics: a.metrics,
	})
	return nil
}

// certificates returns what loads those of this agent.
func (c Config) certificates(now time.Time) (identity.Loader, error) {
	flag, load := "--tls", identity.Folder(c.TLS)
	if c.CA != "" {
		flag = "--ca"
		id, err := c.certified(now)
		if err != nil {
			return nil, err
		}
		load = ca.Loader(c.CA, id)
	}
	return func(now time.Time) (*identity.Set, error) {
		set, err := load(now)
		if err == nil {
			err = c.checkIdentity(set.ID)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", flag, err)
		}
		return set, nil
	}, nil
}

// certified returns the ID to have certified by the CA, which it makes if there is none.
func (c Config) certified(now time.Time) (id identity.ID, err error) {
	domain, err := identity.ParseDomain(cmp.Or(c.TrustDomain, identity.DefaultDomain))
	if err != nil {
		return id, err
	}
	authority, made, err := ca.OpenOrInit(c.CA, ca.Options{Domain: domain}, now)
	if err != nil {
		return id, fmt.Errorf("--ca: %w; want a CA with its key, or --tls for a certificate from elsewhere", err)
	}
	if made {
		c.Log.Info("made a CA: other agents need certificates of it, by --ca with a copy of the folder, or by --tls with files of 'meshctl ca issue'", "ca", c.CA)
	}
	id, err = identity.NodeID(authority.Domain, c.Node)
	if err != nil {
		return id, fmt.Errorf("--node: %w; or have --mtls off", err)
	}
	return id, nil
}

func (c Config) checkIdentity(id identity.ID) error {
	if c.TrustDomain != "" && id.TrustDomain().Name() != c.TrustDomain {
		return fmt.Errorf("the certificate is that of %s: want one of --trust-domain %s", id, c.TrustDomain)
	}
	return identity.Check(id, c.Node)
}

// namesAt returns the names of the agent at an address, as far as gossip and registry know them. They are looked for at
// each new connection: that takes less than the handshake does.
func (a *Agent) namesAt(agent netip.AddrPort) identity.Names {
	var names identity.Names
	for _, m := range a.gossip.Members() {
		if m.Mesh == agent && m.State == gossip.Alive {
			names.Add(m.Node, "")
		}
	}
	for _, s := range a.snapshot.Load().Services {
		for _, e := range s.Endpoints {
			if e.Agent == agent {
				names.Add(e.Node, e.Service)
			}
		}
	}
	return names
}

// introduce logs who this agent is.
func (a *Agent) introduce() {
	if a.identity == nil {
		a.cfg.Log.Info("connections between agents are in the clear", "mtls", a.cfg.MTLS)
		return
	}
	set := a.identity.Current()
	a.cfg.Log.Info("connections between agents use TLS", "mtls", a.cfg.MTLS, "identity", set.ID, "issuer", set.Issuer, "until", set.Expires.UTC().Format(time.RFC3339))
}
