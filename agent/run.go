package agent

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/headroom-mesh/headroom/agent/admin"
	"github.com/headroom-mesh/headroom/agent/names"
	"github.com/headroom-mesh/headroom/dataplane/sockets"
	"github.com/headroom-mesh/headroom/registry"
	"github.com/headroom-mesh/headroom/registry/embedded"
)

// leaveTimeout bounds each farewell: to the registry and to the other agents.
const leaveTimeout = 5 * time.Second

// orientation bounds the time before the agent takes traffic though it doesn't know where to send it.
const orientation = 2 * time.Second

// Run runs the agent until ctx ends, then takes the node out of the mesh:
//
//  1. new connections are no longer captured; callers are asked to make new ones; all replicas here are announced as draining, in the registry and in the answers to
//     probes; readiness ends;
//  2. after the drain delay, when others have stopped sending, they leave the registry, and the agent leaves the gossip;
//  3. no new requests are taken, and those in flight finish;
//  4. everything else ends, the embedded etcd last.
//
// If another agent of this node is ready to take over, or becomes so soon, the first two steps are left out: it serves, then
// callers are asked to make new connections, which get to that one.
//
// If a part fails, the agent ends in the same way and returns the error.
func (a *Agent) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	claimed, err := a.claim(ctx)
	if err != nil && ctx.Err() != nil {
		return nil // it has to end before it has begun
	}
	if err != nil {
		return err
	}
	defer claimed.release()
	store := newStage(ctx, cancel)
	if !a.startEtcd(ctx, store) {
		return store.end()
	}
	a.turn.Store(claimed.predecessor == nil)
	parts, doors, traffic, capturing := newStage(ctx, cancel), newStage(ctx, cancel), newStage(ctx, cancel), newStage(ctx, cancel)
	parts.run(func(ctx context.Context) error { return a.registry.Run(ctx, a.apply) })
	if a.identity != nil {
		parts.run(a.identity.Run)
	}
	parts.run(func(ctx context.Context) error { return a.local.Run(ctx, a.applyLocal) })
	if a.cluster != nil {
		parts.run(func(ctx context.Context) error { return a.cluster.Run(ctx, a.applyCluster) })
	}
	doors.run(func(ctx context.Context) error { return a.admin.Run(ctx, claimed.admin) })
	if !a.awaitTurn(ctx, claimed) {
		return errors.Join(doors.end(), parts.end(), store.end())
	}
	doors.run(a.gossip.Run)
	if a.policies != nil {
		doors.run(a.policies.Run)
	}
	traffic.run(func(ctx context.Context) error {
		return a.dataplane.Run(ctx, claimed.proxy, claimed.mesh, claimed.services...)
	})
	if a.names != nil {
		parts.run(a.names.Run)
	} else {
		names.Undo(names.Config{Control: sockets.Mark(a.cfg.mark()), Log: a.cfg.Log})
	}
	capturing.run(a.capturing.run)
	if claimed.predecessor != nil {
		a.takeOver(ctx, claimed.predecessor, claimed.mesh)
	}
	if ctx.Err() == nil {
		a.cfg.Log.Info("agent started", "node", a.cfg.Node, "proxy", a.cfg.Proxy, "mesh", a.cfg.Mesh, "admin", a.cfg.Admin, "metrics", a.cfg.AdminHTTP)
		a.introduce()
	}

	<-ctx.Done()
	a.cfg.Log.Info("draining", "reason", context.Cause(ctx))
	ending := a.end(context.WithoutCancel(ctx), doors)
	err = errors.Join(traffic.end(), capturing.end())
	ending()
	return errors.Join(err, doors.end(), parts.end(), store.end())
}

// end takes the node out of the mesh, or leaves it to the next agent. The returned function ends the wait for one.
func (a *Agent) end(ctx context.Context, doors *stage) (ended func()) {
	if a.cfg.TakeOver != "" {
		a.succession.await(ctx)
	}
	if a.handOver(ctx) {
		a.retire(doors)
		time.Sleep(a.cfg.DrainDelay)
		return a.succession.close
	}
	ctx, cancel := context.WithCancel(ctx)
	var waiting sync.WaitGroup
	waiting.Go(func() { a.handOverLate(ctx, doors) })
	a.capturing.release()
	a.farewell(ctx)
	return func() {
		cancel()
		waiting.Wait()
		a.succession.close()
	}
}

// awaitTurn returns when this agent may do what no other one does. It reports false if ctx ends while another one still does.
func (a *Agent) awaitTurn(ctx context.Context, claimed claims) bool {
	if claimed.predecessor != nil {
		a.standBy(ctx, claimed.predecessor)
		if ctx.Err() != nil {
			return false
		}
		a.turn.Store(true)
		a.applyReplicas(func(*replicas) {})
	}
	claimed.begin()
	a.orient(ctx)
	return true
}

// orient gives it some time until it is known which replicas there are, here and elsewhere. Until then callers wait for their
// connection to be taken: an agent that has just been restarted would refuse what it can serve a moment later.
func (a *Agent) orient(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, orientation)
	defer cancel()
	a.await(ctx, nil)
}

// await waits until that is known. It reports false if ctx or what is closed ends it first.
func (a *Agent) await(ctx context.Context, over <-chan struct{}) bool {
	for _, known := range []first{a.own, a.mesh, a.known} {
		select {
		case <-known.done:
		case <-over:
			return false
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// farewell tells the others that this node goes.
func (a *Agent) farewell(ctx context.Context) {
	a.draining.Store(true)
	a.local.Drain()
	a.dataplane.Leave()
	a.applyReplicas(func(r *replicas) { r.draining = true })
	time.Sleep(a.cfg.DrainDelay)
	a.withdraw()
	var leaving sync.WaitGroup
	leaving.Go(func() { a.leaveRegistry(ctx) })
	leaving.Go(func() { a.leaveGossip(ctx) })
	leaving.Wait()
}

func (a *Agent) leaveRegistry(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, leaveTimeout)
	defer cancel()
	if err := a.registry.Flush(ctx); err != nil {
		a.cfg.Log.Warn("could not take leave of the registry; what it has of this node ends with its lease", "err", err)
	}
}

func (a *Agent) leaveGossip(ctx context.Context) {
	if a.cfg.Stay {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, leaveTimeout)
	defer cancel()
	if err := a.gossip.Leave(ctx); err != nil {
		a.cfg.Log.Warn("could not take leave of the other agents", "err", err)
	}
}

// startEtcd starts the embedded etcd, if there is one, and reports whether it serves; if not, the stage knows why.
func (a *Agent) startEtcd(ctx context.Context, store *stage) bool {
	if a.cfg.EtcdEmbedded == "" {
		return true
	}
	ready, ended := make(chan struct{}), make(chan struct{})
	store.run(func(ctx context.Context) error {
		defer close(ended)
		return embedded.Run(ctx, embedded.Config{
			Dir: a.cfg.EtcdEmbedded, ClientAddr: a.cfg.EtcdListen.String(), PeerAddr: a.cfg.EtcdPeerListen.String(), Log: a.cfg.Log,
		}, func(string) { close(ready) })
	})
	select {
	case <-ready:
		return true
	case <-ended:
	case <-ctx.Done():
	}
	return false
}

// readiness lists what must hold before the node's traffic should come here.
func (a *Agent) readiness() []admin.Check {
	checks := []admin.Check{
		{Name: "registry", Func: func() (string, error) {
			return registryReady(a.snapshot.Load().Revision, a.registry.Connected())
		}},
		{Name: "node", Func: a.nodeReady},
		{Name: "addresses", Func: func() (string, error) { return "", a.addressesReady() }},
		{Name: "draining", Func: func() (string, error) {
			if a.draining.Load() {
				return "", errors.New("this node is leaving the mesh")
			}
			return "", nil
		}},
	}
	if a.cluster != nil {
		checks = append(checks, admin.Check{Name: "kubernetes", Func: a.cluster.Ready})
	}
	if a.identity != nil {
		checks = append(checks, admin.Check{Name: "identity", Func: func() (string, error) { return a.identity.Ready(time.Now()) }})
	}
	return checks
}

// registryReady judges by what the data plane has, which serves on when the registry is away.
func registryReady(revision int64, connected bool) (note string, err error) {
	switch {
	case revision == 0:
		return "", errors.New("no snapshot of the registry yet")
	case !connected:
		return "not connected: serving the last snapshot", nil
	}
	return "", nil
}

// nodeReady reports whether the node is this agent's, or might be.
func (a *Agent) nodeReady() (note string, err error) {
	switch {
	case a.turn.Load():
		return "", nameReady(a.cfg.Node, a.registry.Connected(), a.registry.Claimed())
	case a.oriented.Load():
		return "standing by: another agent of this node is still to end", nil
	}
	return "", errors.New("not all is known yet of what there is, here and elsewhere")
}

// addressesReady reports whether this agent has all its addresses, if it is its turn.
func (a *Agent) addressesReady() error {
	if !a.turn.Load() {
		return nil
	}
	var missing []string
	for _, l := range a.later {
		if !l.isBound() {
			missing = append(missing, l.at.String())
		}
	}
	if !a.gossip.Listens() {
		missing = append(missing, a.cfg.Gossip.String())
	}
	if len(missing) > 0 {
		return fmt.Errorf("not to be had yet, as somebody has them: %s", strings.Join(missing, ", "))
	}
	return nil
}

// nameReady judges only while the registry is at hand: without it, what is registered goes on to be served.
func nameReady(node registry.NodeName, connected, claimed bool) error {
	if connected && !claimed {
		return fmt.Errorf("nothing here is registered: another agent holds the name %q, or the registry has not given it to this one yet", node)
	}
	return nil
}

// stage is a group of parts that end together. A part that fails ends the agent.
type stage struct {
	ctx   context.Context
	stop  context.CancelFunc
	fail  context.CancelCauseFunc
	parts sync.WaitGroup

	mu     sync.Mutex
	errors []error // guarded by mu
}

// newStage returns a stage that does not end with ctx, but with end. fail is called if a part fails.
func newStage(ctx context.Context, fail context.CancelCauseFunc) *stage {
	s := &stage{fail: fail}
	s.ctx, s.stop = context.WithCancel(context.WithoutCancel(ctx))
	return s
}

// run starts a part, whose errors say where they come from.
func (s *stage) run(part func(context.Context) error) {
	s.parts.Go(func() {
		err := part(s.ctx)
		if err == nil {
			return
		}
		s.mu.Lock()
		s.errors = append(s.errors, err)
		s.mu.Unlock()
		s.fail(err)
	})
}

// end stops the parts, waits for them, and returns their errors.
func (s *stage) end() error {
	s.stop()
	s.parts.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	return errors.Join(s.errors...)
}
