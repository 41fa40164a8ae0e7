// Package identity is who agents are to one another: SPIFFE IDs, the certificates that prove them, and the roots that
// certificates are held to.
package identity

import (
	"fmt"
	"slices"
	"strings"

	"github.com/headroom-mesh/headroom/registry"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
)

// DefaultDomain is the trust domain of a mesh that names none.
const DefaultDomain = "headroom.local"

type (
	// ID is a SPIFFE ID: spiffe://DOMAIN/node/NAME or spiffe://DOMAIN/ns/NAMESPACE/svc/SERVICE of an agent,
	// spiffe://DOMAIN/ns/NAMESPACE/sa/SERVICEACCOUNT of a workload.
	ID = spiffeid.ID
	// Domain is a trust domain: all IDs below it are vouched for by the same roots.
	Domain = spiffeid.TrustDomain
)

// ParseDomain reads the name of a trust domain.
func ParseDomain(name string) (Domain, error) {
	d, err := spiffeid.TrustDomainFromString(name)
	if err != nil || strings.Contains(name, "/") {
		return Domain{}, fmt.Errorf("trust domain %q: want a name such as %s, of a-z, 0-9, '-', '_' and '.'", name, DefaultDomain)
	}
	return d, nil
}

// NodeID returns the ID of an agent.
func NodeID(d Domain, node registry.NodeName) (ID, error) {
	id, err := spiffeid.FromSegments(d, "node", string(node))
	if err != nil {
		return ID{}, fmt.Errorf("node name %q can't be part of a SPIFFE ID: want letters, digits, '-', '_' and '.'", node)
	}
	return id, nil
}

// ServiceID returns the ID of a service, which is that of an agent whose node has no other.
func ServiceID(d Domain, namespace string, service registry.ServiceName) (ID, error) {
	id, err := spiffeid.FromSegments(d, "ns", namespace, "svc", string(service))
	if err != nil {
		return ID{}, fmt.Errorf("service %s/%s can't be part of a SPIFFE ID: want letters, digits, '-', '_' and '.'", namespace, service)
	}
	return id, nil
}

// Names are those that an agent may have. None: any of the trust domain.
type Names struct {
	Nodes    []registry.NodeName
	Services []registry.ServiceName // in any namespace
}

// Add adds a node and, unless it is empty, a service.
func (n *Names) Add(node registry.NodeName, service registry.ServiceName) {
	if !slices.Contains(n.Nodes, node) {
		n.Nodes = append(n.Nodes, node)
	}
	if service != "" && !slices.Contains(n.Services, service) {
		n.Services = append(n.Services, service)
	}
}

func (n Names) any() bool { return len(n.Nodes) == 0 && len(n.Services) == 0 }

// include reports whether an ID, whose domain is the right one, is one of them.
func (n Names) include(id ID) bool {
	if n.any() {
		return true
	}
	switch part := strings.Split(id.Path(), "/"); {
	case len(part) == 3 && part[1] == "node":
		return slices.Contains(n.Nodes, registry.NodeName(part[2]))
	case len(part) == 5 && part[1] == "ns" && part[3] == "svc":
		return slices.Contains(n.Services, registry.ServiceName(part[4]))
	}
	return false
}

// in spells them out.
func (n Names) in(d Domain) string {
	var ids []string
	for _, node := range n.Nodes {
		ids = append(ids, d.IDString()+"/node/"+string(node))
	}
	for _, service := range n.Services {
		ids = append(ids, d.IDString()+"/ns/*/svc/"+string(service))
	}
	return strings.Join(ids, " or ")
}

// Check reports whether other agents take id for that of the agent of a node.
func Check(id ID, node registry.NodeName) error {
	part := strings.Split(id.Path(), "/")
	if len(part) == 5 && part[1] == "ns" && part[3] == "svc" || (Names{Nodes: []registry.NodeName{node}}).include(id) {
		return nil
	}
	return fmt.Errorf("the certificate is that of %s: want %s/node/%s, or %[2]s/ns/NAMESPACE/svc/SERVICE on a node that has no other service",
		id, id.TrustDomain().IDString(), node)
}
