package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/cmd/meshctl/cluster"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

const (
	dialTimeout = 5 * time.Second
	callTimeout = 15 * time.Second
)

// place is where an agent is to be found.
type place struct {
	name     string // for people
	patience time.Duration
	dial     func(context.Context) (net.Conn, error)
	through  *cluster.Cluster // nil: it is reached directly
	any      bool             // of several agents: another does as well
}

// client is a connection to one agent.
type client struct {
	meshv1.AdminClient
	place
	conn *grpc.ClientConn
	last atomic.Pointer[attempt]
}

// at names the agent for people.
func (c *client) at() string {
	if last := c.last.Load(); c.through != nil && last.connected() {
		return last.RemoteAddr().String()
	}
	return c.name
}

// hangUp ends a connection whose agent does not answer, so that the next call connects anew: to another agent, if any does.
func (c *client) hangUp(why error) {
	if last := c.last.Load(); last.connected() && c.conn.GetState() == connectivity.Ready {
		last.note(why)
		last.Close()
	}
}

// attempt is one to connect, and the connection that came of it. It notes why that failed or ended, which a Kubernetes
// cluster tells late.
type attempt struct {
	net.Conn // nil: none came of it
	failure  atomic.Pointer[error]
}

func (a *attempt) connected() bool { return a != nil && a.Conn != nil }

// over reports whether there is no connection, or none any more.
func (a *attempt) over() bool { return a == nil || a.failure.Load() != nil }

// err returns why it is over; nil: it is not, or the other end has ended it.
func (a *attempt) err() error {
	if a == nil || !a.over() || errors.Is(*a.failure.Load(), io.EOF) {
		return nil
	}
	return *a.failure.Load()
}

func (a *attempt) Read(p []byte) (int, error) {
	read, err := a.Conn.Read(p)
	a.note(err)
	return read, err
}

func (a *attempt) Write(p []byte) (int, error) {
	written, err := a.Conn.Write(p)
	a.note(err)
	return written, err
}

// note keeps the first error: what follows, follows from it.
func (a *attempt) note(err error) {
	if err != nil {
		a.failure.CompareAndSwap(nil, &err)
	}
}

// ask connects to the agent and lets f talk to it.
func (a *app) ask(ctx context.Context, f func(context.Context, *client) error) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return a.converse(ctx, f)
}

// converse is ask without a limit in time.
func (a *app) converse(ctx context.Context, f func(context.Context, *client) error) error {
	c, err := a.reach(ctx)
	if err != nil {
		return err
	}
	defer c.conn.Close()
	return c.explain(f(ctx, c))
}

// directly is the place of an agent whose address is known.
func directly(address string) (place, error) {
	network, target, err := splitAddress(address)
	return place{name: address, patience: dialTimeout, dial: func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, target)
	}}, err
}

// dial returns once the agent answers.
func dial(ctx context.Context, p place) (*client, error) {
	c := &client{place: p}
	var err error
	c.conn, err = grpc.NewClient("passthrough:///agent",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithNoProxy(),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, MaxDelay: time.Second},
			MinConnectTimeout: p.patience,
		}),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			conn, err := p.dial(ctx)
			made := &attempt{Conn: conn}
			made.note(err)
			c.last.Store(made)
			return made, err
		}))
	if err != nil {
		return nil, fmt.Errorf("prepare a connection to %s: %w", p.name, err)
	}
	c.AdminClient = meshv1.NewAdminClient(c.conn)
	if err := c.connect(ctx); err != nil {
		c.conn.Close()
		return nil, err
	}
	return c, nil
}

func splitAddress(address string) (network, target string, err error) {
	if path, found := strings.CutPrefix(address, "unix:"); found {
		return "unix", strings.TrimPrefix(path, "//"), nil
	}
	if _, port, err := net.SplitHostPort(address); err != nil || port == "" {
		return "", "", misused("the address of the agent: want HOST:PORT or unix:///PATH, got %q", address)
	}
	return "tcp", address, nil
}

func (c *client) connect(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, c.patience)
	defer cancel()
	c.conn.Connect()
	for {
		state := c.conn.GetState()
		if state == connectivity.Ready {
			return nil
		}
		if state == connectivity.TransientFailure || !c.conn.WaitForStateChange(ctx, state) {
			return c.noAnswer(ctx.Err())
		}
	}
}

func (c *client) noAnswer(ended error) error {
	if errors.Is(ended, context.Canceled) {
		return errors.New("interrupted")
	}
	if err := c.last.Load().err(); c.through != nil && err != nil {
		return err // says where, and what to do
	}
	if c.through != nil {
		return fmt.Errorf("no agent of %s answers (%s): see 'kubectl get pods -A -l app.kubernetes.io/name=headroom'", c.name, c.why(ended))
	}
	return fmt.Errorf("no agent answers at %s (%s): is it running? set --agent or HEADROOM_AGENT", c.name, c.why(ended))
}

// ended says why there is no connection any more.
func (c *client) ended() error {
	if last := c.last.Load(); last.connected() && last.err() == nil {
		return fmt.Errorf("the agent at %s has ended the connection: is it being replaced?", c.at())
	}
	return c.noAnswer(nil)
}

// why says in few words why there is no connection.
func (c *client) why(ended error) string {
	failure := c.last.Load().err()
	if number, ok := errors.AsType[syscall.Errno](failure); ok {
		return number.Error()
	}
	switch {
	case ended != nil:
		return fmt.Sprintf("nothing heard for %v", c.patience)
	case failure != nil:
		return failure.Error()
	}
	return "what listens there is no agent"
}

// explain turns the error of a call into what a user can act on.
func (c *client) explain(err error) error {
	s, isStatus := status.FromError(err)
	if err == nil || !isStatus {
		return err
	}
	lost := c.conn.GetState() != connectivity.Ready || c.last.Load().over() // which the state tells late
	switch {
	case s.Code() == codes.Unavailable && lost:
		return c.ended()
	case s.Code() == codes.DeadlineExceeded && lost:
		return c.noAnswer(context.DeadlineExceeded)
	case s.Code() == codes.Unimplemented && strings.Contains(s.Message(), "unknown service"):
		return fmt.Errorf("%s is not a Headroom agent: set --agent or HEADROOM_AGENT to the admin address of one", c.at())
	case s.Code() == codes.Unimplemented:
		return fmt.Errorf("the agent at %s does not know this command: is it older than meshctl?", c.at())
	case s.Code() == codes.DeadlineExceeded:
		return fmt.Errorf("the agent at %s took too long", c.at())
	case s.Code() == codes.Canceled:
		return errors.New("interrupted")
	case s.Code() == codes.InvalidArgument && strings.Contains(s.Message(), "\n"):
		return listed("the agent refused", errors.New(s.Message()))
	}
	return answerError{s.Code(), s.Message()}
}

// answerError is an agent's answer that something can't be done.
type answerError struct {
	code codes.Code
	text string
}

func (e answerError) Error() string { return e.text }
