package registry

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/policy"
	"google.golang.org/protobuf/proto"
)

const (
	// lapseMemory is how long an endpoint whose lease expired may still count as lost together with others.
	lapseMemory = time.Minute
	// returnTime is how long endpoints that were lost together may take to register again, from the first to the last.
	returnTime = 15 * time.Second
)

// Builder makes Snapshots from the records of a store. A bad record is reported and changes nothing: what its key held
// before stays in force. Records under keys that the Builder doesn't know are left to later versions.
//
// An endpoint that was draining when its record went away was taken out on purpose. Any other has lapsed: the lease of
// its agent expired. A service that has no endpoint left keeps showing those that lapsed within a minute, so that agents
// that lose the store together don't take a service away. When one registers again, the others stay until each does, or
// its node says that it has no more endpoints, or Expire finds that their time is over: else the first one back would
// get the requests of all.
type Builder struct {
	bad       func(key string, err error)
	services  map[ServiceName]*state
	changed   map[ServiceName]bool      // since the current snapshot
	returning map[ServiceName]time.Time // services that await lapsed endpoints, and until when
	revision  int64
	current   *Snapshot
}

// state is what a Builder knows of one service.
type state struct {
	recorded  bool
	endpoints map[EndpointID]Endpoint
	lapsed    map[EndpointID]lapse
	document  *meshv1.ServicePolicy // nil: none
	policy    policy.Policy
	revision  int64     // of the policy
	addresses Addresses // the zero Addresses if none are stored
}

type lapse struct {
	endpoint Endpoint
	at       time.Time
	awaited  bool // shown beside endpoints that have registered again
}

// NewBuilder returns a Builder that knows what is in a snapshot; nil is the empty one. bad is called for each bad
// record; nil ignores them.
func NewBuilder(from *Snapshot, bad func(key string, err error)) *Builder {
	if from == nil {
		from = &Snapshot{Services: map[ServiceName]*Service{}}
	}
	if bad == nil {
		bad = func(string, error) {}
	}
	b := &Builder{
		bad:       bad,
		services:  map[ServiceName]*state{},
		changed:   map[ServiceName]bool{},
		returning: map[ServiceName]time.Time{},
		revision:  from.Revision,
		current:   from,
	}
	for name, service := range from.Services {
		s := b.service(name)
		s.recorded, s.document, s.policy, s.revision = true, service.Document, service.Policy, service.PolicyRevision
		s.addresses = service.addresses()
		for _, e := range service.Endpoints {
			s.endpoints[e.ID()] = e
		}
	}
	return b
}

// Put applies a record that was written.
func (b *Builder) Put(now time.Time, r Record) {
	if err := b.put(now, r); err != nil {
		b.bad(r.Key, err)
	}
	b.Advance(r.Revision)
}

// Delete applies the deletion of a key.
func (b *Builder) Delete(now time.Time, key string, revision int64) {
	b.remove(now, key)
	b.Advance(revision)
}

// Replace applies a complete list of the records of the store at a revision, which may be lower than the last one if
// the store lost data. An endpoint whose key came into being after the last revision was gone in between: it has
// registered again.
func (b *Builder) Replace(now time.Time, records []Record, revision int64) {
	kept := make(map[string]bool, len(records))
	for _, r := range records {
		again := r.Created > 0 && (r.Created > b.revision || revision < b.revision)
		kept[r.Key] = !again || !strings.HasPrefix(r.Key, EndpointKeys)
	}
	for _, key := range b.keys() {
		if !kept[key] {
			b.remove(now, key)
		}
	}
	isNode := func(r Record) bool { return strings.HasPrefix(r.Key, NodeKeys) }
	for _, nodes := range []bool{false, true} { // nodes speak of the endpoints in the list
		for _, r := range records {
			if isNode(r) == nodes {
				b.Put(now, r)
			}
		}
	}
	b.revision = revision
}

// Expire forgets the endpoints whose time to register again is over.
func (b *Builder) Expire(now time.Time) {
	for name, until := range b.returning {
		if !now.Before(until) {
			b.services[name].forget(func(l lapse) bool { return l.awaited })
			b.changed[name] = true
			delete(b.returning, name)
		}
	}
}

// NextExpiry returns when Expire will have something to do; the zero time if no endpoint is awaited.
func (b *Builder) NextExpiry() time.Time {
	var next time.Time
	for _, until := range b.returning {
		if next.IsZero() || until.Before(next) {
			next = until
		}
	}
	return next
}

// Advance notes that everything up to a revision has been applied.
func (b *Builder) Advance(revision int64) { b.revision = max(b.revision, revision) }

// Snapshot returns the state as of now. It shares with earlier snapshots all services that are the same.
func (b *Builder) Snapshot() *Snapshot {
	if len(b.changed) == 0 && b.revision == b.current.Revision {
		return b.current
	}
	services, at := b.current.Services, b.current.at
	if len(b.changed) > 0 {
		services = maps.Clone(services)
	}
	var settled []*Service // where there was none
	for name := range b.changed {
		before := services[name].addresses()
		b.apply(name, services)
		switch after := services[name]; {
		case after.addresses() == before:
		case before == Addresses{}:
			settled = append(settled, after)
		default:
			at = nil
		}
	}
	at = withAddresses(at, settled, services)
	clear(b.changed)
	b.current = &Snapshot{Revision: b.revision, Services: services, at: at}
	return b.current
}

// apply brings a service up to date in services. The addresses of one that is gone are remembered for its return.
func (b *Builder) apply(name ServiceName, services map[ServiceName]*Service) {
	s := b.services[name]
	if s.known() {
		if next := s.snapshot(name); !next.equal(services[name]) {
			services[name] = next
		}
		return
	}
	delete(services, name)
	delete(b.returning, name)
	if s.addresses == (Addresses{}) {
		delete(b.services, name)
	}
}

func (b *Builder) service(name ServiceName) *state {
	s := b.services[name]
	if s == nil {
		s = &state{
			endpoints: map[EndpointID]Endpoint{},
			lapsed:    map[EndpointID]lapse{},
			policy:    policy.Default(),
		}
		b.services[name] = s
	}
	return s
}

// keys returns those of all records that are in force.
func (b *Builder) keys() []string {
	var keys []string
	for name, s := range b.services {
		if s.recorded {
			keys = append(keys, name.Key())
		}
		if s.document != nil {
			keys = append(keys, name.PolicyKey())
		}
		if s.addresses != (Addresses{}) {
			keys = append(keys, name.AddressKey())
		}
		for id := range s.endpoints {
			keys = append(keys, EndpointKeys+string(id))
		}
	}
	return keys
}

func (b *Builder) put(now time.Time, r Record) error {
	if name, ok := strings.CutPrefix(r.Key, ServiceKeys); ok {
		return b.putServiceRecord(name, r.Value)
	}
	if id, ok := strings.CutPrefix(r.Key, EndpointKeys); ok {
		return b.putEndpointRecord(now, EndpointID(id), r.Value)
	}
	if name, ok := strings.CutPrefix(r.Key, NodeKeys); ok {
		return b.putNodeRecord(NodeName(name), r.Value)
	}
	if name, ok := strings.CutPrefix(r.Key, PolicyKeys); ok {
		return b.putPolicyRecord(name, r)
	}
	if name, ok := strings.CutPrefix(r.Key, AddressKeys); ok {
		return b.putAddressRecord(name, r.Value)
	}
	return nil
}

func (b *Builder) putServiceRecord(name string, value []byte) error {
	record := new(meshv1.ServiceRecord)
	if err := decode(value, record); err != nil {
		return err
	}
	if record.GetName() != name {
		return fmt.Errorf("the record under this key is that of service %q", record.GetName())
	}
	return b.putService(ServiceName(name))
}

func (b *Builder) putService(name ServiceName) error {
	if err := name.Validate(); err != nil {
		return err
	}
	if s := b.service(name); !s.recorded {
		s.recorded = true
		b.changed[name] = true
	}
	return nil
}

func (b *Builder) putEndpointRecord(now time.Time, id EndpointID, value []byte) error {
	e, err := EndpointFromValue(value)
	if err != nil {
		return err
	}
	if e.ID() != id {
		return fmt.Errorf("the record under this key is that of endpoint %q", e.ID())
	}
	b.putEndpoint(now, e)
	return nil
}

func (b *Builder) putEndpoint(now time.Time, e Endpoint) {
	s := b.service(e.Service)
	first := len(s.endpoints) == 0
	if !s.register(e) {
		return
	}
	b.changed[e.Service] = true
	if first && len(s.lapsed) > 0 {
		b.returning[e.Service] = now.Add(returnTime)
	}
	b.checkReturning(e.Service, s)
}

// putNodeRecord drops what a node would have registered again if it still had it.
func (b *Builder) putNodeRecord(node NodeName, value []byte) error {
	record, err := NodeFromValue(value)
	if err != nil {
		return err
	}
	if NodeName(record.GetNode()) != node {
		return fmt.Errorf("the record under this key is that of node %q", record.GetNode())
	}
	if !record.GetRegistered() {
		return nil
	}
	for name, s := range b.services {
		if s.forget(func(l lapse) bool { return l.endpoint.Node == node }) {
			b.changed[name] = true
			b.checkReturning(name, s)
		}
	}
	return nil
}

// checkReturning ends the wait for lapsed endpoints when there are none left, or no other endpoint.
func (b *Builder) checkReturning(name ServiceName, s *state) {
	for _, l := range s.lapsed {
		if l.awaited && len(s.endpoints) > 0 {
			return
		}
	}
	delete(b.returning, name)
}

func (b *Builder) putPolicyRecord(name string, r Record) error {
	doc, err := PolicyFromValue(r.Value, r.Revision)
	if err != nil {
		return err
	}
	if got := doc.GetMetadata().GetName(); got != name {
		return fmt.Errorf("the policy under this key is that of service %q", got)
	}
	return b.putPolicy(doc, r.Revision)
}

func (b *Builder) putPolicy(doc *meshv1.ServicePolicy, revision int64) error {
	p, err := policy.Compile(doc)
	if err != nil {
		return err
	}
	name := ServiceName(doc.GetMetadata().GetName())
	if s := b.service(name); !proto.Equal(s.document, doc) {
		s.document, s.policy, s.revision = doc, p, revision
		b.changed[name] = true
	}
	return nil
}

func (b *Builder) putAddressRecord(name string, value []byte) error {
	a, err := AddressesFromValue(value)
	if err != nil {
		return err
	}
	if string(a.Service) != name {
		return fmt.Errorf("the record under this key is that of service %q", a.Service)
	}
	b.putAddresses(a)
	return nil
}

// putAddresses does not ask whether they are released: a service that is there keeps them.
func (b *Builder) putAddresses(a Addresses) {
	a.Released = time.Time{}
	if s := b.service(a.Service); s.addresses != a {
		s.addresses = a
		b.changed[a.Service] = true
	}
}

func (b *Builder) remove(now time.Time, key string) {
	kind, rest, _ := strings.Cut(key, "/")
	service, below, _ := strings.Cut(rest, "/")
	s := b.services[ServiceName(service)]
	if s == nil {
		return
	}
	var news bool
	switch {
	case kind+"/" == EndpointKeys:
		news = s.unregister(now, EndpointID(rest))
		b.checkReturning(ServiceName(service), s)
	case below != "":
	case kind+"/" == ServiceKeys:
		news = s.recorded
		s.recorded = false
	case kind+"/" == PolicyKeys:
		news = s.document != nil
		s.document, s.policy, s.revision = nil, policy.Default(), 0
	case kind+"/" == AddressKeys:
		news = s.addresses != Addresses{}
		s.addresses = Addresses{}
	}
	if news {
		b.changed[ServiceName(service)] = true
	}
}

// register reports whether e is news.
func (s *state) register(e Endpoint) bool {
	id := e.ID()
	if old, ok := s.endpoints[id]; ok && old == e {
		return false
	}
	delete(s.lapsed, id)
	if len(s.endpoints) == 0 {
		for id, l := range s.lapsed {
			l.awaited = true
			s.lapsed[id] = l
		}
	}
	s.endpoints[id] = e
	return true
}

// unregister reports whether that is news. Only here are earlier lapses forgotten, so that those that the last endpoint
// leaves behind stay.
func (s *state) unregister(now time.Time, id EndpointID) bool {
	e, ok := s.endpoints[id]
	if !ok {
		return false
	}
	delete(s.endpoints, id)
	if e.State != Draining {
		s.lapsed[id] = lapse{endpoint: e, at: now}
	}
	s.forget(func(l lapse) bool { return !l.awaited && now.Sub(l.at) > lapseMemory })
	return true
}

// forget reports whether there was anything to forget.
func (s *state) forget(which func(lapse) bool) bool {
	before := len(s.lapsed)
	maps.DeleteFunc(s.lapsed, func(_ EndpointID, l lapse) bool { return which(l) })
	return len(s.lapsed) < before
}

func (s *state) known() bool {
	return s.recorded || s.document != nil || len(s.endpoints) > 0 || len(s.lapsed) > 0
}

func (s *state) snapshot(name ServiceName) *Service {
	return &Service{
		Name:           name,
		Endpoints:      s.shown(),
		Policy:         s.policy,
		Document:       s.document,
		PolicyRevision: s.revision,
		IPv4:           s.addresses.IPv4,
		IPv6:           s.addresses.IPv6,
	}
}

func (s *Service) equal(o *Service) bool {
	return o != nil && slices.Equal(s.Endpoints, o.Endpoints) && s.Policy == o.Policy &&
		s.PolicyRevision == o.PolicyRevision && proto.Equal(s.Document, o.Document) && s.IPv4 == o.IPv4 && s.IPv6 == o.IPv6
}

// shown returns the endpoints that requests may go to, in the order of their IDs.
func (s *state) shown() []Endpoint {
	shown := s.endpoints
	if len(s.lapsed) > 0 {
		shown = maps.Clone(shown)
	}
	for id, l := range s.lapsed {
		if l.awaited || len(s.endpoints) == 0 {
			shown[id] = l.endpoint
		}
	}
	var endpoints []Endpoint
	for _, id := range slices.Sorted(maps.Keys(shown)) {
		endpoints = append(endpoints, shown[id])
	}
	return endpoints
}
