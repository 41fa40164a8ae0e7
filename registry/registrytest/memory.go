// Package registrytest tests implementations of registry.Registry, and has one that keeps everything in memory for
// tests of what uses a registry.
package registrytest

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
	"google.golang.org/protobuf/proto"
)

// Memory is a store that any number of agents can connect to. It can be made to fail as a real one does.
type Memory struct {
	// mu guards the fields below, and those of the agents
	mu       sync.Mutex
	records  map[string]record
	events   []event // all there ever were
	revision int64
	away     bool
	changed  chan struct{} // closed when any of these changes
}

type record struct {
	registry.Record
	owner registry.NodeName // whose lease it is under; empty: none
}

type event struct {
	registry.Record
	deleted bool
}

// NewMemory returns an empty store.
func NewMemory() *Memory {
	return &Memory{records: map[string]record{}, revision: 1, changed: make(chan struct{})}
}

// Connect returns the connection of the agent on a node.
func (m *Memory) Connect(node registry.NodeName) registry.Registry {
	return &agent{store: m, node: node}
}

// SetAway makes the store unreachable, or reachable again.
func (m *Memory) SetAway(away bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.away = away
	m.notify()
}

// Expire deletes what is under the lease of the agent on a node.
func (m *Memory) Expire(node registry.NodeName) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, key := range slices.Sorted(maps.Keys(m.records)) {
		if m.records[key].owner == node {
			m.delete(key)
		}
	}
}

// Put writes a record that may be anything.
func (m *Memory) Put(key string, value []byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.put(key, value, "")
}

func (m *Memory) put(key string, value []byte, owner registry.NodeName) int64 {
	m.revision++
	r := registry.Record{Key: key, Value: value, Revision: m.revision}
	m.records[key] = record{Record: r, owner: owner}
	m.events = append(m.events, event{Record: r})
	m.notify()
	return m.revision
}

func (m *Memory) putMessage(key string, message proto.Message, owner registry.NodeName) {
	value, err := registry.Encode(message)
	if err != nil {
		panic(fmt.Sprintf("encode %v: %v", message, err)) // only text that isn't UTF-8 can do that
	}
	m.put(key, value, owner)
}

func (m *Memory) delete(key string) int64 {
	m.revision++
	delete(m.records, key)
	m.events = append(m.events, event{Record: registry.Record{Key: key, Revision: m.revision}, deleted: true})
	m.notify()
	return m.revision
}

func (m *Memory) holds(e registry.Endpoint) bool {
	stored, err := registry.EndpointFromValue(m.records[e.Key()].Value)
	return err == nil && stored == e
}

func (m *Memory) notify() {
	close(m.changed)
	m.changed = make(chan struct{})
}

// agent implements registry.Registry.
type agent struct {
	store *Memory
	node  registry.NodeName

	// store.mu guards the fields below
	wanted    map[string]registry.Endpoint // by key; nil before the first Advertise
	connected bool
	complete  bool // the store was told that all is registered
}

// Run implements registry.Registry.
func (a *agent) Run(ctx context.Context, publish func(*registry.Snapshot)) error {
	f := &follower{agent: a}
	for {
		snapshot, changed := f.catchUp()
		if snapshot != nil {
			publish(snapshot)
		}
		select {
		case <-changed:
		case now := <-f.expiry():
			f.builder.Expire(now)
		case <-ctx.Done():
			a.store.mu.Lock()
			a.connected = false
			a.store.mu.Unlock()
			return nil
		}
	}
}

// follower is what one Run of an agent has seen of the store.
type follower struct {
	*agent
	builder   *registry.Builder // nil before the store was first read
	next      int               // event that is still to be applied
	published *registry.Snapshot
}

// catchUp returns a snapshot if there is a new one, and what tells that there may be more.
func (f *follower) catchUp() (*registry.Snapshot, <-chan struct{}) {
	m := f.store
	m.mu.Lock()
	defer m.mu.Unlock()
	f.connected = !m.away
	if m.away {
		return nil, m.changed
	}
	f.register()
	if f.builder == nil {
		f.list()
	}
	for ; f.next < len(m.events); f.next++ {
		f.apply(m.events[f.next])
	}
	snapshot := f.builder.Snapshot()
	if snapshot == f.published {
		return nil, m.changed
	}
	f.published = snapshot
	return snapshot, m.changed
}

// expiry tells when endpoints that were lost are awaited no longer. It is nil if none are.
func (f *follower) expiry() <-chan time.Time {
	if f.builder == nil || f.builder.NextExpiry().IsZero() {
		return nil
	}
	return time.After(time.Until(f.builder.NextExpiry()))
}

func (f *follower) list() {
	m := f.store
	var records []registry.Record
	for _, r := range m.records {
		records = append(records, r.Record)
	}
	f.builder = registry.NewBuilder(nil, nil)
	f.builder.Replace(time.Now(), records, m.revision)
	f.next = len(m.events)
}

func (f *follower) apply(e event) {
	if e.deleted {
		f.builder.Delete(time.Now(), e.Key, e.Revision)
		return
	}
	f.builder.Put(time.Now(), e.Record)
}

// register makes the store hold what is wanted.
func (a *agent) register() {
	if a.wanted == nil {
		return
	}
	m := a.store
	for _, key := range a.surplus() {
		a.remove(key)
	}
	for _, key := range slices.Sorted(maps.Keys(a.wanted)) {
		e := a.wanted[key]
		if _, ok := m.records[e.Service.Key()]; !ok {
			m.putMessage(e.Service.Key(), e.Service.Proto(), "")
		}
		if !m.holds(e) {
			m.putMessage(key, e.Proto(), a.node)
		}
	}
	if _, ok := m.records[a.node.Key()]; !ok || !a.complete {
		m.putMessage(a.node.Key(), &meshv1.NodeRecord{Node: string(a.node), Registered: true}, a.node)
		a.complete = true
	}
}

// surplus returns the keys of what is not wanted any more.
func (a *agent) surplus() []string {
	var keys []string
	for key := range a.store.records {
		if _, ok := a.wanted[key]; !ok && a.owns(key) {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	return keys
}

// isRegistered reports whether the store holds what is wanted.
func (a *agent) isRegistered() bool {
	missing := func(e registry.Endpoint) bool { return !a.store.holds(e) }
	return a.wanted == nil || !slices.ContainsFunc(slices.Collect(maps.Values(a.wanted)), missing) && len(a.surplus()) == 0
}

func (a *agent) owns(key string) bool {
	part := strings.SplitN(key, "/", 4)
	return len(part) == 4 && part[0]+"/" == registry.EndpointKeys && part[2] == string(a.node)
}

func (a *agent) remove(key string) {
	e, err := registry.EndpointFromValue(a.store.records[key].Value)
	if err == nil && e.State != registry.Draining {
		e.State = registry.Draining
		a.store.putMessage(key, e.Proto(), a.node)
	}
	a.store.delete(key)
}

// Advertise implements registry.Registry.
func (a *agent) Advertise(endpoints []registry.Endpoint) {
	a.store.mu.Lock()
	defer a.store.mu.Unlock()
	a.wanted = map[string]registry.Endpoint{}
	for _, e := range endpoints {
		a.wanted[e.Key()] = e
	}
	a.store.notify()
}

// Flush implements registry.Registry.
func (a *agent) Flush(ctx context.Context) error {
	for {
		a.store.mu.Lock()
		done, changed := a.isRegistered(), a.store.changed
		a.store.mu.Unlock()
		if done {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("wait until the endpoints are registered: %w: %w", registry.ErrUnavailable, ctx.Err())
		}
	}
}

// Connected implements registry.Registry.
func (a *agent) Connected() bool {
	a.store.mu.Lock()
	defer a.store.mu.Unlock()
	return a.connected && !a.store.away
}

// Policy implements registry.Policies.
func (a *agent) Policy(_ context.Context, service registry.ServiceName) (*meshv1.ServicePolicy, error) {
	a.store.mu.Lock()
	defer a.store.mu.Unlock()
	if a.store.away {
		return nil, fmt.Errorf("read the policy of %s: %w", service, registry.ErrUnavailable)
	}
	r, ok := a.store.records[service.PolicyKey()]
	if !ok {
		return nil, fmt.Errorf("read the policy of %s: %w", service, registry.ErrNotFound)
	}
	doc, err := registry.PolicyFromValue(r.Value, r.Revision)
	if err != nil {
		return nil, fmt.Errorf("read the policy of %s: %w; `meshctl policy delete %s` removes it", service, err, service)
	}
	return doc, nil
}

// SetPolicy implements registry.Policies.
func (a *agent) SetPolicy(_ context.Context, doc *meshv1.ServicePolicy) (*meshv1.ServicePolicy, error) {
	if err := policy.Validate(doc); err != nil {
		return nil, err
	}
	value, err := registry.PolicyValue(doc)
	if err != nil {
		return nil, err
	}
	service := registry.ServiceName(doc.GetMetadata().GetName())
	a.store.mu.Lock()
	defer a.store.mu.Unlock()
	if a.store.away {
		return nil, fmt.Errorf("write the policy of %s: %w", service, registry.ErrUnavailable)
	}
	stored := a.store.records[service.PolicyKey()].Revision
	if want := doc.GetMetadata().GetResourceVersion(); want != "" && want != strconv.FormatInt(stored, 10) {
		return nil, fmt.Errorf("write the policy of %s: %w", service, registry.ErrConflict)
	}
	return registry.PolicyFromValue(value, a.store.put(service.PolicyKey(), value, ""))
}

// DeletePolicy implements registry.Policies.
func (a *agent) DeletePolicy(_ context.Context, service registry.ServiceName) (int64, error) {
	a.store.mu.Lock()
	defer a.store.mu.Unlock()
	if a.store.away {
		return 0, fmt.Errorf("delete the policy of %s: %w", service, registry.ErrUnavailable)
	}
	if _, ok := a.store.records[service.PolicyKey()]; !ok {
		return 0, fmt.Errorf("delete the policy of %s: %w", service, registry.ErrNotFound)
	}
	return a.store.delete(service.PolicyKey()), nil
}
