package outbound

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/registry"
)

const (
	minBackoff = 100 * time.Millisecond
	maxBackoff = 1600 * time.Millisecond
	// connectTimeout bounds a connection, the first words of both ends included.
	connectTimeout = 3 * time.Second
)

// lines are the connections by which other agents are asked for slots of their replicas.
type lines struct {
	dial func(ctx context.Context, agent netip.AddrPort) (net.Conn, error)

	mu sync.Mutex
	// mu guards the fields below.

	open    map[netip.AddrPort]*grpc.ClientConn
	waiting map[netip.AddrPort]int // requests in line there
}

func newLines(dial func(ctx context.Context, agent netip.AddrPort) (net.Conn, error)) *lines {
	return &lines{dial: dial, open: map[netip.AddrPort]*grpc.ClientConn{}, waiting: map[netip.AddrPort]int{}}
}

// errDeclined means that the agent of a replica says that it takes no requests.
var errDeclined = errors.New("the replica takes no requests")

// reserve waits for a slot of a replica. It returns the reservation, which lasts until ctx ends or a request claims it.
func (ls *lines) reserve(ctx context.Context, agent netip.AddrPort, id registry.EndpointID) (reservation string, err error) {
	client, err := ls.client(agent)
	if err != nil {
		return "", err
	}
	ls.wait(agent, +1)
	defer ls.wait(agent, -1)
	stream, err := client.Reserve(ctx, &meshv1.ReserveRequest{Endpoint: string(id)})
	if err != nil {
		return "", err
	}
	grant, err := stream.Recv()
	switch status.Code(err) {
	case codes.OK:
		return grant.Reservation, nil
	case codes.NotFound, codes.FailedPrecondition:
		return "", fmt.Errorf("%w: %w", errDeclined, err)
	}
	return "", err
}

// listenIdle calls tell with the replicas that another agent says are idle, until ctx ends or the connection fails.
func (ls *lines) listenIdle(ctx context.Context, agent netip.AddrPort, service registry.ServiceName, tell func(registry.EndpointID)) error {
	client, err := ls.client(agent)
	if err != nil {
		return err
	}
	stream, err := client.ListenIdle(ctx, &meshv1.ListenIdleRequest{Service: string(service)})
	if err != nil {
		return err
	}
	for {
		idle, err := stream.Recv()
		if err != nil {
			return err
		}
		tell(registry.EndpointID(idle.Endpoint))
	}
}

func (ls *lines) client(agent netip.AddrPort) (meshv1.PeerClient, error) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if c := ls.open[agent]; c != nil {
		return meshv1.NewPeerClient(c), nil
	}
	c, err := grpc.NewClient("passthrough:///"+agent.String(),
		// Who the two ends are is settled below gRPC.
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return ls.dial(ctx, agent) }),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: minBackoff, Multiplier: 2, Jitter: 0.2, MaxDelay: maxBackoff},
			MinConnectTimeout: connectTimeout,
		}),
		grpc.WithIdleTimeout(idleTimeout),
		grpc.WithDisableServiceConfig(),
	)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", agent, err)
	}
	ls.open[agent] = c
	return meshv1.NewPeerClient(c), nil
}

func (ls *lines) wait(agent netip.AddrPort, more int) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if ls.waiting[agent] += more; ls.waiting[agent] == 0 {
		delete(ls.waiting, agent)
	}
}

// waits reports whether requests wait for replicas of an agent.
func (ls *lines) waits(agent netip.AddrPort) bool {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	return ls.waiting[agent] > 0
}

// cut ends what is under way with an agent that has fallen silent: those who wait for its replicas shall look elsewhere.
func (ls *lines) cut(agent netip.AddrPort) {
	ls.mu.Lock()
	c := ls.open[agent]
	delete(ls.open, agent)
	ls.mu.Unlock()
	if c != nil {
		_ = c.Close()
	}
}

func (ls *lines) close() {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	for agent, c := range ls.open {
		_ = c.Close()
		delete(ls.open, agent)
	}
}
