// Package registry defines what agents share through the store: services, their endpoints and their policies.
package registry

import (
	"context"
	"errors"
	"net/netip"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/policy"
)

type (
	// ServiceName is a DNS label, or up to three with dots between them: requests name the service as NAME.mesh.
	ServiceName string
	// NodeName is unique among the agents of a mesh.
	NodeName string
	// EndpointID is SERVICE/NODE/ADDRESS; of a Unix socket, SERVICE/NODE/unix:/PATH.
	EndpointID string
)

// Endpoint is one replica of a service: one address on one node.
type Endpoint struct {
	Service ServiceName
	Node    NodeName
	Zone    string
	Address netip.AddrPort // where the replica listens, as its own agent reaches it
	Socket  string         // the path of the Unix socket on which it listens instead of Address; "": it does not
	Agent   netip.AddrPort // where the agent of its node takes traffic from other agents
	State   State
	Weight  int32 // how much it can bear, compared with others; 0 counts as 1
	// Protocol is what the replica speaks, if it was declared. Replicas of one service may differ: each is taken at its word.
	Protocol policy.Protocol
}

// maxWeight bounds the weights of endpoints.
const maxWeight = 100

// ID returns the name of the endpoint, which stays the same over restarts of its agent.
func (e Endpoint) ID() EndpointID {
	return EndpointID(string(e.Service) + "/" + string(e.Node) + "/" + e.At())
}

const unixPrefix = "unix:"

// At returns where the replica listens, as users see it: IP:PORT, or unix:/PATH.
func (e Endpoint) At() string {
	if e.Socket != "" {
		return unixPrefix + e.Socket
	}
	return e.Address.String()
}

// Network returns what its own agent dials to reach the replica.
func (e Endpoint) Network() (network, address string) {
	if e.Socket != "" {
		return "unix", e.Socket
	}
	return "tcp", e.Address.String()
}

// State says whether an endpoint takes requests.
type State int

const (
	Ready     State = iota
	Unhealthy       // fails its health check
	Draining        // about to leave: finishes what it has
)

// String returns the word that users see.
func (s State) String() string {
	switch s {
	case Ready:
		return "ready"
	case Unhealthy:
		return "unhealthy"
	case Draining:
		return "draining"
	}
	return "unknown"
}

// Snapshot is everything that the registry held at one revision. It is shared: nobody may change it.
type Snapshot struct {
	Revision int64
	Services map[ServiceName]*Service

	at map[netip.Addr]ServiceName // of the virtual addresses in Services; nil if no Builder made the snapshot
}

// Service is a service in a Snapshot.
type Service struct {
	Name      ServiceName
	Endpoints []Endpoint // sorted by ID
	Policy    policy.Policy

	// Document is the stored policy, with its revision in metadata.resourceVersion; nil if the defaults hold.
	Document       *meshv1.ServicePolicy
	PolicyRevision int64 // 0 if the defaults hold

	IPv4, IPv6 netip.Addr // the virtual addresses that stand for the service; the zero Addr if it has none yet
}

var (
	// ErrConflict means that somebody else wrote the policy first.
	ErrConflict = errors.New("the policy was changed by somebody else meanwhile")
	// ErrNotFound means that no such policy is stored.
	ErrNotFound = errors.New("no policy is stored")
	// ErrUnavailable means that the store can't be reached now.
	ErrUnavailable = errors.New("the registry is unreachable")
)

// Policies reads and writes the policy documents of the mesh. All methods may be called at any time, and fail with
// ErrUnavailable (wrapped) while the store is away.
type Policies interface {
	// Policy returns the stored document, with its revision in metadata.resourceVersion, or ErrNotFound.
	Policy(ctx context.Context, service ServiceName) (*meshv1.ServicePolicy, error)
	// SetPolicy validates and stores a document and returns it with its new revision. metadata.resourceVersion decides
	// as documented in policy.proto; ErrConflict if it isn't the current one.
	SetPolicy(ctx context.Context, doc *meshv1.ServicePolicy) (*meshv1.ServicePolicy, error)
	// DeletePolicy returns the revision of the deletion, or ErrNotFound.
	DeletePolicy(ctx context.Context, service ServiceName) (int64, error)
}

// Registry is an agent's connection to the store.
type Registry interface {
	Policies

	// Run watches the store and keeps this agent's endpoints registered until ctx ends; it returns when all that it
	// started has ended. It calls publish from one goroutine with complete snapshots, the latest winning, and first as
	// soon as any snapshot is known.
	Run(ctx context.Context, publish func(*Snapshot)) error
	// Advertise replaces the set of endpoints that this agent registers. It does not wait. Endpoints that leave the set
	// are removed, those that stay are re-registered whenever the store has lost them.
	Advertise(endpoints []Endpoint)
	// Flush waits until the store holds what was last advertised.
	Flush(ctx context.Context) error
	// Connected reports whether the store answered last time.
	Connected() bool
}
