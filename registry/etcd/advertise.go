package etcd

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/headroom-mesh/headroom/registry"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// endpointsPerTxn makes two operations each at most, and etcd's default limit is 128.
const endpointsPerTxn = 60

// stored is the record of an endpoint in etcd.
type stored struct {
	endpoint registry.Endpoint // the zero Endpoint if the record is bad
	lease    clientv3.LeaseID
}

// advertisement is what the agent wants etcd to hold, and what the watch saw of it there.
type advertisement struct {
	wake chan struct{} // something below is news

	// mu guards the fields below
	mu      sync.Mutex
	wanted  map[string]registry.Endpoint // by key; nil before the first Advertise
	version int                          // of wanted
	held    int                          // version that etcd holds; 0 after it lost something
	changed chan struct{}                // closed when held changes
	found   map[string]stored            // under the name of this node in etcd, by key; nil if there is no news
	lost    []string                     // keys that were deleted in etcd
	seen    bool                         // etcd was listed at least once
	claim   claim
}

func newAdvertisement() *advertisement {
	return &advertisement{
		wake:    make(chan struct{}, 1),
		changed: make(chan struct{}),
	}
}

// Advertise implements registry.Registry. Endpoints that can't be stored are logged and left out.
func (r *Registry) Advertise(list []registry.Endpoint) {
	wanted := map[string]registry.Endpoint{}
	for _, e := range list {
		err := e.Validate()
		if e.Node != r.cfg.Node {
			err = errors.Join(err, fmt.Errorf("node %q: want %q, the node of this agent", e.Node, r.cfg.Node))
		}
		if err != nil {
			r.log.Error("endpoint can't be registered", "endpoint", e.ID(), "err", err)
			continue
		}
		wanted[e.Key()] = e
	}
	r.advertise.set(wanted)
}

// Flush implements registry.Registry. It does not wait for another agent to give the name of the node up, nor for what is handed
// over to one.
func (r *Registry) Flush(ctx context.Context) error {
	for {
		done, claim, changed := r.advertise.done()
		switch {
		case done:
			return nil
		case claim == foreign:
			return errForeign
		}
		select {
		case <-changed:
		case <-r.handingOver.Done():
			return nil
		case <-ctx.Done():
			if r.Connected() {
				return fmt.Errorf("wait until the endpoints are registered: %w", ctx.Err())
			}
			return fmt.Errorf("wait until the endpoints are registered: %w", r.absence(ctx))
		}
	}
}

func (a *advertisement) set(wanted map[string]registry.Endpoint) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.wanted = wanted
	a.version++
	a.signal()
}

// listed takes all endpoints that etcd holds under the name of this node.
func (a *advertisement) listed(found map[string]stored) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.found, a.seen = found, true
	for key := range a.wanted {
		if _, ok := found[key]; !ok {
			a.held = 0
		}
	}
	a.signal()
}

// deleted notes that a key is gone from etcd.
func (a *advertisement) deleted(key string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if _, ok := a.wanted[key]; ok {
		a.lost = append(a.lost, key)
		a.held = 0
		a.signal()
	}
}

func (a *advertisement) signal() {
	select {
	case a.wake <- struct{}{}:
	default:
	}
}

// ready reports whether it is known what is wanted and what is there.
func (a *advertisement) ready() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.wanted != nil && a.seen
}

func (a *advertisement) done() (done bool, claim claim, changed <-chan struct{}) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.held == a.version, a.claim, a.changed
}

// services returns those that have endpoints here.
func (a *advertisement) services() map[registry.ServiceName]bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	services := make(map[registry.ServiceName]bool, len(a.wanted))
	for _, e := range a.wanted {
		services[e.Service] = true
	}
	return services
}

// news is what an advertisement has learned.
type news struct {
	wanted  map[string]registry.Endpoint
	version int
	found   map[string]stored
	lost    []string
}

// take returns what came in since the last call.
func (a *advertisement) take() news {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := news{wanted: a.wanted, version: a.version, found: a.found, lost: a.lost}
	a.found, a.lost = nil, nil
	return n
}

// holds notes that etcd holds a version, if it has lost nothing meanwhile.
func (a *advertisement) holds(version int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.lost) > 0 || a.found != nil {
		return
	}
	a.held = version
	a.notify()
}

func (a *advertisement) notify() {
	close(a.changed)
	a.changed = make(chan struct{})
}

// forsake notes that etcd holds nothing any more.
func (a *advertisement) forsake() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.held = 0
	if a.claim == ours {
		a.claim = open
	}
}

// registrar makes etcd hold what is advertised. It belongs to the goroutine of keepRegistered.
type registrar struct {
	*Registry
	client   *clientv3.Client
	lease    clientv3.LeaseID
	holder   string                        // owner of the name of this node that was last complained of
	complete bool                          // the record of the node says that all is registered
	services map[registry.ServiceName]bool // that have a record, as we wrote it
	stored   map[string]stored             // under the name of this node in etcd, by key
}

// keepRegistered takes one lease after the other until ctx ends, or what is registered is handed over.
func (r *Registry) keepRegistered(ctx context.Context, client *clientv3.Client) {
	defer close(r.released)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(r.handingOver, cancel)()
	for !r.advertise.ready() {
		select {
		case <-ctx.Done():
			return
		case <-r.advertise.wake:
		}
	}
	g := &registrar{Registry: r, client: client, stored: map[string]stored{}}
	var retry backoff
	for {
		began := time.Now()
		err := g.holdLease(ctx)
		if ctx.Err() != nil {
			return
		}
		r.advertise.forsake()
		r.report(ctx, "no lease in the registry; will take a new one", err)
		if time.Since(began) > maxBackoff {
			retry = 0
		}
		retry.wait(ctx)
	}
}

// holdLease returns when the lease is lost, or none was granted.
func (g *registrar) holdLease(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if err := g.grant(ctx); err != nil {
		return err
	}
	renewed, err := g.client.KeepAlive(ctx, g.lease)
	if err != nil {
		return err
	}
	if err := g.claimNode(ctx, renewed); err != nil {
		return err
	}
	var retry backoff
	for {
		var again <-chan time.Time
		err := g.store(ctx, g.advertise.take())
		switch {
		case err == nil:
			retry = 0
		case errors.Is(err, rpctypes.ErrLeaseNotFound), errors.Is(err, errClaimLost):
			return err
		case ctx.Err() == nil: // what is registered stays so
			g.report(ctx, "endpoints are not registered; will try again", err)
			again = time.After(retry.next())
		}
		if err := g.idle(ctx, renewed, again); err != nil {
			return err
		}
	}
}

func (g *registrar) grant(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	lease, err := g.client.Grant(ctx, int64(g.cfg.LeaseTTL/time.Second))
	if err != nil {
		return err
	}
	g.metrics.leases.Inc()
	g.lease, g.services, g.complete = lease.ID, map[registry.ServiceName]bool{}, false
	return nil
}

// idle returns nil when there is something to store.
func (g *registrar) idle(ctx context.Context, renewed <-chan *clientv3.LeaseKeepAliveResponse,
	again <-chan time.Time) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case _, ok := <-renewed:
			if !ok {
				return rpctypes.ErrLeaseNotFound
			}
			g.metrics.renewals.Inc()
		case <-g.advertise.wake:
			return nil
		case <-again:
			return nil
		}
	}
}

// store writes and deletes what differs. What was seen in etcd may be older than our last write: then we write once
// more, which does no harm.
func (g *registrar) store(ctx context.Context, n news) error {
	if n.found != nil {
		g.stored = n.found
	}
	for _, key := range n.lost {
		delete(g.stored, key)
	}
	if err := g.put(ctx, g.missing(n.wanted)); err != nil {
		return err
	}
	if err := g.remove(ctx, g.surplus(n.wanted)); err != nil {
		return err
	}
	if err := g.sayComplete(ctx); err != nil {
		return err
	}
	g.advertise.holds(n.version)
	return nil
}

func (g *registrar) missing(wanted map[string]registry.Endpoint) []registry.Endpoint {
	var missing []registry.Endpoint
	for key, e := range wanted {
		if g.stored[key] != (stored{endpoint: e, lease: g.lease}) {
			missing = append(missing, e)
		}
	}
	return missing
}

// surplus returns the keys of what was advertised before, by this process or by an earlier one.
func (g *registrar) surplus(wanted map[string]registry.Endpoint) []string {
	var keys []string
	for key := range g.stored {
		if _, ok := wanted[key]; !ok {
			keys = append(keys, key)
		}
	}
	return keys
}

func (g *registrar) put(ctx context.Context, list []registry.Endpoint) error {
	for part := range slices.Chunk(list, endpointsPerTxn) {
		ops, err := g.putOps(part)
		if err != nil {
			return err
		}
		if err := g.commit(ctx, ops); err != nil {
			return err
		}
		for _, e := range part {
			g.stored[e.Key()] = stored{endpoint: e, lease: g.lease}
			g.services[e.Service] = true
		}
	}
	return nil
}

func (g *registrar) putOps(list []registry.Endpoint) ([]clientv3.Op, error) {
	var ops []clientv3.Op
	services := map[registry.ServiceName]bool{}
	for _, e := range list {
		value, err := registry.Encode(e.Proto())
		if err != nil {
			return nil, fmt.Errorf("endpoint %s: %w", e.ID(), err)
		}
		ops = append(ops, clientv3.OpPut(g.key(e.Key()), string(value), clientv3.WithLease(g.lease)))
		services[e.Service] = !g.services[e.Service]
	}
	for service, unsure := range services {
		if unsure {
			op, err := g.createService(service)
			if err != nil {
				return nil, err
			}
			ops = append(ops, op)
		}
	}
	return ops, nil
}

func (g *registrar) createService(service registry.ServiceName) (clientv3.Op, error) {
	key := g.key(service.Key())
	value, err := registry.Encode(service.Proto())
	absent := clientv3.Compare(clientv3.CreateRevision(key), "=", 0)
	return clientv3.OpTxn([]clientv3.Cmp{absent}, []clientv3.Op{clientv3.OpPut(key, string(value))}, nil), err
}

// remove deletes keys. Records that are not yet draining become so first, which tells all who watch that they go on
// purpose.
func (g *registrar) remove(ctx context.Context, keys []string) error {
	var leaving []registry.Endpoint
	for _, key := range keys {
		e := g.stored[key].endpoint
		if e != (registry.Endpoint{}) && e.State != registry.Draining {
			e.State = registry.Draining
			leaving = append(leaving, e)
		}
	}
	if err := g.put(ctx, leaving); err != nil {
		return err
	}
	for part := range slices.Chunk(keys, endpointsPerTxn) {
		var ops []clientv3.Op
		for _, key := range part {
			ops = append(ops, clientv3.OpDelete(g.key(key)))
		}
		if err := g.commit(ctx, ops); err != nil {
			return err
		}
		for _, key := range part {
			delete(g.stored, key)
		}
	}
	return nil
}

// commit does nothing if the name of the node isn't ours any more.
func (g *registrar) commit(ctx context.Context, ops []clientv3.Op) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	response, err := g.client.Txn(ctx).If(g.ours()).Then(ops...).Commit()
	if err == nil && !response.Succeeded {
		err = errClaimLost
	}
	return err
}
