package balancer

import (
	"cmp"
	"encoding/binary"
	"math"
	"net/netip"
	"slices"

	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
)

// An agent that uses a subset of k replicas uses those that come first in an order of its own (rendezvous hashing, Thaler
// and Ravishankar 1998): every pair of agent and replica has a rank, and nothing else decides. So a replica that comes or
// goes changes no subset by more than itself and the one that makes room or fills in, and the subsets of all agents taken
// together use all replicas alike. Weights don't count here: within each subset, a replica has its share of requests by
// weight already.

// enoughInZone is how many replicas of its own zone an agent needs at least, to keep to them.
const enoughInZone = 2

// identity tells replicas apart as their IDs do, but is at hand.
type identity struct {
	service registry.ServiceName
	node    registry.NodeName
	address netip.AddrPort
	socket  string
}

func identityOf(r *registry.Endpoint) identity {
	return identity{r.Service, r.Node, r.Address, r.Socket}
}

// rank returns the place of a replica in the order of an agent, given the hash of the agent's name: the lower the better.
func rank(agent uint64, r *registry.Endpoint) uint64 {
	address := r.Address.Addr().As16()
	h := hashOf(string(r.Node)) + uint64(r.Address.Port())
	h = mix(h ^ binary.BigEndian.Uint64(address[:8]))
	h = mix(h ^ binary.BigEndian.Uint64(address[8:]))
	if r.Socket != "" {
		h = mix(h ^ hashOf(r.Socket))
	}
	return mix(h ^ agent)
}

// selection is what an agent uses of a service, by a scope. Both parts are in the order of the records.
type selection struct {
	home  []*registry.Endpoint // what it would use if all took requests, and if those of its own zone were not enough
	using []*registry.Endpoint
	ready int // of all records
}

// choose selects from records. It prefers those that usable tells to take requests, and takes any that are ready if there
// are none.
func (f *Fleet) choose(usable func(*registry.Endpoint) bool) selection {
	s := f.chooseAmong(func(r *registry.Endpoint) bool { return r.State == registry.Ready && usable(r) })
	if len(s.using) == 0 && s.ready > 0 {
		s = f.chooseAmong(func(r *registry.Endpoint) bool { return r.State == registry.Ready })
	}
	return s
}

func (f *Fleet) chooseAmong(usable func(*registry.Endpoint) bool) selection {
	k := f.scope.Subset
	ranked := k > 0 && k < len(f.records)
	if !ranked {
		k = len(f.records)
	}
	var s selection
	own, others := newZone(k), newZone(k)
	agent := hashOf(string(f.place.Node))
	for i := range f.records {
		r := &f.records[i]
		c := candidate{at: i}
		if ranked {
			c.rank = rank(agent, r)
		}
		if r.State == registry.Ready {
			s.ready++
		}
		if f.scope.Zone == policy.ZonePrefer && r.Zone != f.place.Zone {
			others.add(c, usable(r))
		} else {
			own.add(c, usable(r))
		}
	}
	s.home = f.recordsOf(own.home.first(), others.home.first())
	away := others.using.first()
	if own.enough() {
		away = nil
	}
	s.using = f.recordsOf(own.using.first(), away)
	return s
}

// recordsOf returns the records of candidates, in order.
func (f *Fleet) recordsOf(a, b []candidate) []*registry.Endpoint {
	all := slices.Concat(a, b)
	slices.SortFunc(all, func(a, b candidate) int { return cmp.Compare(a.at, b.at) })
	records := make([]*registry.Endpoint, len(all))
	for i, c := range all {
		records[i] = &f.records[c.at]
	}
	return records
}

// zone collects the replicas of one zone, or of all others.
type zone struct {
	registered, usable int
	home, using        lowest
}

func newZone(k int) *zone { return &zone{home: newLowest(k), using: newLowest(k)} }

func (z *zone) add(c candidate, usable bool) {
	z.registered++
	z.home.add(c)
	if usable {
		z.usable++
		z.using.add(c)
	}
}

// enough reports whether the zone can do without the others.
func (z *zone) enough() bool { return z.usable >= enoughInZone && 2*z.usable >= z.registered }

// candidate is the record at an index, with its rank.
type candidate struct {
	rank uint64
	at   int
}

// lowest keeps the k candidates of the lowest rank, among all that it is shown.
type lowest struct {
	k     int
	limit uint64 // what ranks above is not among them
	kept  []candidate
}

func newLowest(k int) lowest { return lowest{k: k, limit: math.MaxUint64} }

func (l *lowest) add(c candidate) {
	if c.rank > l.limit {
		return
	}
	if l.kept = append(l.kept, c); len(l.kept) >= 2*l.k+1 {
		l.cut()
	}
}

func (l *lowest) first() []candidate {
	if len(l.kept) > l.k {
		l.cut()
	}
	return l.kept
}

func (l *lowest) cut() {
	slices.SortFunc(l.kept, func(a, b candidate) int { return cmp.Compare(a.rank, b.rank) })
	l.kept = l.kept[:l.k]
	l.limit = l.kept[l.k-1].rank
}
