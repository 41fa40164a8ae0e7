package admin

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/headroom-mesh/headroom/agent/gossip"
	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/registry"
)

const (
	statusInterval = 100 * time.Millisecond
	statusTimeout  = 500 * time.Millisecond
	observeTimeout = time.Second
	// atOnce bounds the calls under way when all members are asked.
	atOnce = 64
	// maxAnswer bounds what one member may answer.
	maxAnswer = 64 << 20
)

// peerServer answers other agents.
type peerServer struct {
	*Admin
	meshv1.UnimplementedPeerServer
}

func (s *peerServer) Status(context.Context, *meshv1.StatusRequest) (*meshv1.StatusResponse, error) {
	return s.status(), nil
}

func (s *peerServer) Observe(_ context.Context, r *meshv1.ObserveRequest) (*meshv1.Observation, error) {
	return s.cfg.Observe(registry.ServiceName(r.Service)), nil
}

func (s *peerServer) Reserve(r *meshv1.ReserveRequest, stream grpc.ServerStreamingServer[meshv1.Grant]) error {
	if s.cfg.Lines == nil {
		return s.UnimplementedPeerServer.Reserve(r, stream)
	}
	return s.cfg.Lines.Reserve(r, stream)
}

func (s *peerServer) ListenIdle(r *meshv1.ListenIdleRequest, stream grpc.ServerStreamingServer[meshv1.IdleReplica]) error {
	if s.cfg.Lines == nil {
		return s.UnimplementedPeerServer.ListenIdle(r, stream)
	}
	return s.cfg.Lines.ListenIdle(r, stream)
}

func (a *Admin) status() *meshv1.StatusResponse {
	return &meshv1.StatusResponse{
		Node: string(a.cfg.Node), Version: a.cfg.Version,
		AppliedRevision: a.cfg.AppliedRevision(), RegistryConnected: a.cfg.Connected(),
	}
}

// others returns the live members besides this agent, by name.
func (a *Admin) others() []gossip.Member {
	return slices.DeleteFunc(slices.Clone(a.cfg.Members()), func(m gossip.Member) bool {
		return m.Node == a.cfg.Node || m.State != gossip.Alive
	})
}

// ask calls f for all members at the same time. A member that can't be asked gets an error without a call.
func (a *Admin) ask(ctx context.Context, members []gossip.Member, timeout time.Duration, f func(ctx context.Context, i int, c meshv1.PeerClient) error) []error {
	a.peers.keep(a.others())
	errs := make([]error, len(members))
	var g errgroup.Group
	g.SetLimit(atOnce)
	for i, m := range members {
		g.Go(func() error {
			ctx, cancel := context.WithTimeout(ctx, timeout)
			defer cancel()
			c, err := a.peers.client(m.Mesh)
			if err == nil {
				err = f(ctx, i, c)
			}
			if err != nil {
				errs[i] = errors.New(reason(err, timeout))
			}
			return nil
		})
	}
	_ = g.Wait() // no function fails
	return errs
}

// reason says in a few words why a member gave no answer.
func reason(err error, timeout time.Duration) string {
	s := status.Convert(err)
	if s.Code() == codes.DeadlineExceeded {
		return fmt.Sprintf("no answer within %v", timeout)
	}
	if _, cause, ok := strings.Cut(s.Message(), "Error while dialing: "); ok {
		return strings.TrimSuffix(cause, `"`)
	}
	return s.Message()
}

// WaitApplied asks those members again and again that have not applied the revision yet.
func (s *adminServer) WaitApplied(r *meshv1.WaitAppliedRequest, stream grpc.ServerStreamingServer[meshv1.WaitAppliedResponse]) error {
	ctx := stream.Context()
	tick := time.NewTicker(statusInterval)
	defer tick.Stop()
	applied := map[registry.NodeName]bool{}
	var last *meshv1.WaitAppliedResponse
	for {
		now := s.progress(ctx, r.Revision, applied)
		if err := ctx.Err(); err != nil {
			return status.FromContextError(err).Err()
		}
		if last == nil || !proto.Equal(now, last) {
			if err := stream.Send(now); err != nil {
				return err
			}
			last = now
		}
		if now.Applied == now.Members {
			return nil
		}
		select {
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		case <-s.closing:
			return status.Error(codes.Unavailable, "the agent is stopping")
		case <-tick.C:
		}
	}
}

// progress asks the members that are not in applied, and adds to it.
func (s *adminServer) progress(ctx context.Context, revision int64, applied map[registry.NodeName]bool) *meshv1.WaitAppliedResponse {
	others := s.others()
	var pending []gossip.Member
	for _, m := range others {
		if !applied[m.Node] {
			pending = append(pending, m)
		}
	}
	answers := make([]*meshv1.StatusResponse, len(pending))
	errs := s.ask(ctx, pending, statusTimeout, func(ctx context.Context, i int, c meshv1.PeerClient) (err error) {
		answers[i], err = c.Status(ctx, &meshv1.StatusRequest{})
		return err
	})
	progress := &meshv1.WaitAppliedResponse{Members: uint32(len(others) + 1)}
	note := func(node registry.NodeName, answer *meshv1.StatusResponse) {
		if answer.AppliedRevision >= revision {
			applied[node] = true
			return
		}
		progress.Waiting = append(progress.Waiting, string(node)+": "+lag(answer))
	}
	note(s.cfg.Node, s.status())
	for i, m := range pending {
		if errs[i] != nil {
			progress.Waiting = append(progress.Waiting, string(m.Node)+": "+errs[i].Error())
			continue
		}
		note(m.Node, answers[i])
	}
	progress.Applied = progress.Members - uint32(len(progress.Waiting))
	return progress
}

// Statuses asks all live agents, this one among them, how far they have come. Of those that give no answer, missing says why.
func (a *Admin) Statuses(ctx context.Context) (answers []*meshv1.StatusResponse, missing []string) {
	others := a.others()
	told := make([]*meshv1.StatusResponse, len(others))
	errs := a.ask(ctx, others, statusTimeout, func(ctx context.Context, i int, c meshv1.PeerClient) (err error) {
		told[i], err = c.Status(ctx, &meshv1.StatusRequest{})
		return err
	})
	answers = append(answers, a.status())
	for i, m := range others {
		if errs[i] != nil {
			missing = append(missing, string(m.Node)+": "+errs[i].Error())
			continue
		}
		answers = append(answers, told[i])
	}
	return answers, missing
}

func lag(answer *meshv1.StatusResponse) string {
	text := fmt.Sprintf("at revision %d", answer.AppliedRevision)
	if !answer.RegistryConnected {
		text += ", without connection to the registry"
	}
	return text
}

func (s *adminServer) Top(ctx context.Context, r *meshv1.TopRequest) (*meshv1.TopResponse, error) {
	if r.Service != "" {
		if err := s.known(registry.ServiceName(r.Service)); err != nil {
			return nil, err
		}
	}
	others := s.others()
	answers := make([]*meshv1.Observation, len(others))
	errs := s.ask(ctx, others, observeTimeout, func(ctx context.Context, i int, c meshv1.PeerClient) (err error) {
		answers[i], err = c.Observe(ctx, &meshv1.ObserveRequest{Service: r.Service})
		return err
	})
	top := &meshv1.TopResponse{Agents: []*meshv1.Observation{s.cfg.Observe(registry.ServiceName(r.Service))}}
	for i, m := range others {
		if errs[i] != nil {
			top.Missing = append(top.Missing, string(m.Node)+": "+errs[i].Error())
			continue
		}
		top.Agents = append(top.Agents, answers[i])
	}
	return top, nil
}

// peers keeps one connection to each member that was asked.
type peers struct {
	dial func(context.Context, netip.AddrPort) (net.Conn, error)

	// mu guards the fields below.
	mu    sync.Mutex
	conns map[netip.AddrPort]*grpc.ClientConn
}

func newPeers(dial func(context.Context, netip.AddrPort) (net.Conn, error)) *peers {
	return &peers{dial: dial, conns: map[netip.AddrPort]*grpc.ClientConn{}}
}

func (p *peers) client(mesh netip.AddrPort) (meshv1.PeerClient, error) {
	if !mesh.IsValid() {
		return nil, errors.New("its mesh address is unknown")
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if c, ok := p.conns[mesh]; ok {
		return meshv1.NewPeerClient(c), nil
	}
	c, err := grpc.NewClient("passthrough:///"+mesh.String(),
		// Who the two ends are is settled below gRPC.
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return p.dial(ctx, mesh) }),
		// A member that was away is asked again at once when it is back.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: statusInterval, Multiplier: 1.5, Jitter: 0.2, MaxDelay: time.Second},
			MinConnectTimeout: observeTimeout,
		}),
		grpc.WithIdleTimeout(time.Minute),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer)),
		grpc.WithDisableServiceConfig(),
	)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", mesh, err)
	}
	p.conns[mesh] = c
	return meshv1.NewPeerClient(c), nil
}

// keep closes the connections to all but these members.
func (p *peers) keep(members []gossip.Member) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for mesh, c := range p.conns {
		if !slices.ContainsFunc(members, func(m gossip.Member) bool { return m.Mesh == mesh }) {
			_ = c.Close()
			delete(p.conns, mesh)
		}
	}
}

func (p *peers) close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var errs []error
	for _, c := range p.conns {
		errs = append(errs, c.Close())
	}
	clear(p.conns)
	return errors.Join(errs...)
}
