package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

const (
	// comingTimeout is how long an agent that has to end waits for the next one to be ready: Kubernetes may start it only then.
	comingTimeout = 5 * time.Second
	// takeOverTimeout bounds the time for the next agent to serve once it is its turn.
	takeOverTimeout = 10 * time.Second
	// greetingTimeout bounds the time for the agent before this one to say who it is.
	greetingTimeout = 5 * time.Second
	// lookAgain is how often it is looked for that something of the agent before this one has gone.
	lookAgain = 50 * time.Millisecond
)

// succession is who comes after this agent on its node.
type succession struct {
	greeting *meshv1.TakeOverResponse
	over     chan struct{} // closed when nobody is waited for any more
	close    func()
	readied  chan struct{} // holds one when somebody may have become ready

	mu   sync.Mutex
	next *successor // guarded by mu; nil: nobody
}

// successor is an agent that waits for this one to end.
type successor struct {
	ready   chan struct{} // closed when it knows all that it needs
	turn    chan struct{} // closed when it is its turn
	begin   func()        // makes it so
	serving chan struct{} // closed when it serves
	gone    <-chan struct{}
}

func newSuccessor(gone <-chan struct{}) *successor {
	n := &successor{ready: make(chan struct{}), turn: make(chan struct{}), serving: make(chan struct{}), gone: gone}
	n.begin = sync.OnceFunc(func() { close(n.turn) })
	return n
}

func newSuccession(cfg Config) *succession {
	greeting := &meshv1.TakeOverResponse{Node: string(cfg.Node), TakeOver: cfg.TakeOver}
	s := &succession{greeting: greeting, over: make(chan struct{}), readied: make(chan struct{}, 1)}
	s.close = sync.OnceFunc(func() { close(s.over) })
	return s
}

// serve answers an agent that is to come after this one, until it serves.
func (s *succession) serve(stream grpc.BidiStreamingServer[meshv1.TakeOverRequest, meshv1.TakeOverResponse]) error {
	next := newSuccessor(stream.Context().Done())
	if !s.enter(next) {
		return status.Error(codes.FailedPrecondition, "another agent waits already to come after this one")
	}
	defer s.leave()
	if err := stream.Send(s.greeting); err != nil {
		return err
	}
	if err := awaitStage(stream, meshv1.TakeOverRequest_STAGE_READY); err != nil {
		return err
	}
	close(next.ready)
	select {
	case s.readied <- struct{}{}:
	default:
	}
	select {
	case <-next.turn:
	case <-s.over:
		return status.Error(codes.Unavailable, "this agent ends")
	case <-next.gone:
		return stream.Context().Err()
	}
	if err := stream.Send(&meshv1.TakeOverResponse{Begin: true}); err != nil {
		return err
	}
	if err := awaitStage(stream, meshv1.TakeOverRequest_STAGE_SERVING); err != nil {
		return err
	}
	close(next.serving)
	return nil
}

func awaitStage(stream grpc.BidiStreamingServer[meshv1.TakeOverRequest, meshv1.TakeOverResponse], want meshv1.TakeOverRequest_Stage) error {
	r, err := stream.Recv()
	if errors.Is(err, io.EOF) || err == nil && r.Stage != want {
		return status.Errorf(codes.InvalidArgument, "want %v", want)
	}
	return err
}

func (s *succession) enter(next *successor) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.next != nil {
		return false
	}
	s.next = next
	return true
}

func (s *succession) leave() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.next = nil
}

// ready returns the one that is ready to come next; nil: there is none.
func (s *succession) ready() *successor {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.next == nil {
		return nil
	}
	select {
	case <-s.next.ready:
		return s.next
	default:
		return nil
	}
}

// await waits until one is ready, for a while.
func (s *succession) await(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, comingTimeout)
	defer cancel()
	for s.ready() == nil {
		select {
		case <-s.readied:
		case <-ctx.Done():
			return
		}
	}
}

// take lets it begin, and reports whether it serves. If it was too slow the first time, it may be asked again.
func (n *successor) take(ctx context.Context) bool {
	n.begin()
	select {
	case <-n.serving:
		return true
	case <-n.gone:
		// It has hung up, which those do who have said that they serve.
		select {
		case <-n.serving:
			return true
		default:
			return false
		}
	case <-ctx.Done():
		return false
	}
}

// handOver leaves the node to the agent that is ready to come next, and reports whether there was one, and it serves.
func (a *Agent) handOver(ctx context.Context) bool {
	next := a.succession.ready()
	if next == nil {
		return false
	}
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, takeOverTimeout)
	defer cancel()
	a.registry.HandOver(ctx)
	if !next.take(ctx) {
		a.cfg.Log.Warn("the next agent of this node does not serve", "took", time.Since(began))
		return false
	}
	a.cfg.Log.Info("the next agent of this node serves", "took", time.Since(began))
	return true
}

// retire gives up what the next agent waits for, and asks callers to go there.
func (a *Agent) retire(doors *stage) {
	a.draining.Store(true)
	a.capturing.release()
	a.dataplane.Rest()
	_ = doors.end() // it is told in the end
}

// handOverLate does what it can for a next agent that is ready only when this one is about to end: until ctx ends.
func (a *Agent) handOverLate(ctx context.Context, doors *stage) {
	for !a.handOver(ctx) {
		select {
		case <-ctx.Done():
			return
		case <-a.succession.readied:
		}
	}
	a.retire(doors)
}

// predecessor is the agent that this one comes after, on the same node.
type predecessor struct {
	conn   *grpc.ClientConn
	stream grpc.BidiStreamingClient[meshv1.TakeOverRequest, meshv1.TakeOverResponse]
	// waits is whether it waits to hear that this agent serves.
	waits bool
}

// findPredecessor returns nil if there is no agent on this node.
func (a *Agent) findPredecessor(ctx context.Context) (*predecessor, error) {
	for {
		p, err := a.greet(ctx)
		if status.Code(err) != codes.FailedPrecondition {
			return p, err
		}
		a.cfg.Log.Info("waiting to come next on this node", "reason", status.Convert(err).Message())
		if !pause(ctx, time.Second) {
			return nil, ctx.Err()
		}
	}
}

// greet asks who is there.
func (a *Agent) greet(ctx context.Context) (*predecessor, error) {
	conn, err := grpc.NewClient("passthrough:///"+a.cfg.Admin.String(), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithNoProxy())
	if err != nil {
		return nil, err
	}
	p := &predecessor{conn: conn}
	impatience := time.AfterFunc(greetingTimeout, p.hangUp)
	var greeting *meshv1.TakeOverResponse
	p.stream, err = meshv1.NewAdminClient(conn).TakeOver(ctx)
	if err == nil {
		greeting, err = p.stream.Recv()
	}
	silent := !impatience.Stop()
	switch {
	case ctx.Err() != nil:
		err = ctx.Err()
	case silent:
		err = fmt.Errorf("what listens at %s is no agent: it says nothing; choose another address with --admin", a.cfg.Admin)
	case err == nil && a.succeeds(greeting):
		return p, nil
	case err == nil:
		err = fmt.Errorf("the agent at %s is of node %q and --take-over %q, and this one of %q and %q; choose another address with --admin",
			a.cfg.Admin, greeting.Node, greeting.TakeOver, a.cfg.Node, a.cfg.TakeOver)
	case status.Code(err) == codes.Unavailable:
		err = nil // nobody
	case status.Code(err) == codes.Unimplemented:
		p.stream = nil // it is of a version that tells nobody when it ends
		return p, nil
	}
	p.hangUp()
	return nil, err
}

// succeeds reports whether this agent may take over from one. To that it makes no difference if that one would not do so itself.
func (a *Agent) succeeds(greeting *meshv1.TakeOverResponse) bool {
	return greeting.Node == string(a.cfg.Node) && (greeting.TakeOver == a.cfg.TakeOver || greeting.TakeOver == "")
}

func (p *predecessor) hangUp() { _ = p.conn.Close() } // there is nothing to lose

// standBy waits until it is this agent's turn: the one before says so, or is gone. Then it may not know everything yet.
func (a *Agent) standBy(ctx context.Context, p *predecessor) {
	a.cfg.Log.Info("another agent of this node is still to end")
	var watching sync.WaitGroup
	defer watching.Wait()
	over := make(chan struct{})
	watching.Go(func() {
		defer close(over)
		a.watchPredecessor(ctx, p)
	})
	if !a.await(ctx, over) {
		return
	}
	a.oriented.Store(true)
	a.cfg.Log.Info("standing by")
	if p.stream != nil {
		_ = p.stream.Send(&meshv1.TakeOverRequest{Stage: meshv1.TakeOverRequest_STAGE_READY}) // if it can't be, it is gone
	}
}

// watchPredecessor returns when that one says that it is time, or is gone.
func (a *Agent) watchPredecessor(ctx context.Context, p *predecessor) {
	if p.stream == nil {
		a.awaitEnd(ctx)
		return
	}
	_, err := p.stream.Recv()
	p.waits = err == nil
	if err != nil && ctx.Err() == nil {
		a.cfg.Log.Info("the agent before this one is gone", "reason", status.Convert(err).Message())
	}
}

// awaitEnd waits until there is no agent any more.
func (a *Agent) awaitEnd(ctx context.Context) {
	for {
		c, err := net.DialTimeout("tcp", a.cfg.Admin.String(), time.Second)
		if err != nil {
			return
		}
		_ = c.Close()
		if !pause(ctx, lookAgain) {
			return
		}
	}
}

// takeOver tells the one before as soon as this agent serves.
func (a *Agent) takeOver(ctx context.Context, p *predecessor, mesh net.Listener) {
	defer p.hangUp()
	if !p.waits {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, takeOverTimeout)
	defer cancel()
	err := a.capturing.pods.Settled(ctx)
	if l, ok := mesh.(*later); ok {
		l.awaitBound(ctx, time.Second) // it may be one that does not share it
	}
	err = errors.Join(err, p.stream.Send(&meshv1.TakeOverRequest{Stage: meshv1.TakeOverRequest_STAGE_SERVING}))
	if err == nil {
		_, err = p.stream.Recv() // it has heard it
	}
	if err != nil && !errors.Is(err, io.EOF) {
		a.cfg.Log.Warn("the agent before this one may not know that its turn is over", "err", err)
	}
}

// pause reports whether ctx is still on.
func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}
