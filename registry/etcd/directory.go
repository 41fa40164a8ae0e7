package etcd

import (
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/headroom-mesh/headroom/registry"
)

// keepReleased is how long addresses wait for their service to come back: callers may still know them as its own.
const keepReleased = 24 * time.Hour

// directory is what the watch saw in etcd of services and their virtual addresses.
type directory struct {
	pool pool
	wake chan struct{} // something below is news

	// mu guards the fields below
	mu       sync.Mutex
	revision int64 // up to which etcd was seen
	services map[registry.ServiceName]bool
	records  map[registry.ServiceName]addressRecord
	slots    map[uint32]slot
	owners   map[netip.Addr]registry.ServiceName         // of the addresses in records
	former   map[registry.ServiceName]registry.Addresses // that services had, should etcd have lost them
	news     bool                                        // since the last snapshot
	snapshot *registry.Snapshot                          // nil before etcd was listed
}

// addressRecord holds the zero Addresses if it is bad: then it stays for somebody to see to it.
type addressRecord struct {
	registry.Addresses
	revision int64
}

type slot struct {
	service  registry.ServiceName
	revision int64
}

func newDirectory(p pool) *directory {
	d := &directory{pool: p, wake: make(chan struct{}, 1), former: map[registry.ServiceName]registry.Addresses{}}
	d.clear()
	return d
}

func (d *directory) clear() {
	d.services = map[registry.ServiceName]bool{}
	d.records = map[registry.ServiceName]addressRecord{}
	d.slots = map[uint32]slot{}
	d.owners = map[netip.Addr]registry.ServiceName{}
}

// remember has services get the addresses again that they have in a snapshot, unless etcd knows better.
func (d *directory) remember(s *registry.Snapshot) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for name, service := range s.Services {
		d.former[name] = registry.Addresses{Service: name, IPv4: service.IPv4, IPv6: service.IPv6}
	}
}

// listed takes all that etcd holds.
func (d *directory) listed(records []registry.Record, revision int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for name, r := range d.records {
		d.former[name] = r.Addresses
	}
	d.clear()
	for _, r := range records {
		d.put(r)
	}
	d.revision, d.news = revision, true
}

// changed takes a key that was written.
func (d *directory) changed(r registry.Record) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.news = d.put(r) || d.news
	d.revision = max(d.revision, r.Revision)
}

// deleted takes a key that is gone.
func (d *directory) deleted(key string, revision int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.news = d.remove(key) || d.news
	d.revision = max(d.revision, revision)
}

// taken is how many services have slots of the ranges.
func (d *directory) taken() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.slots)
}

// published takes the snapshot that shows all that was seen.
func (d *directory) published(s *registry.Snapshot) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.snapshot = s
	if !d.news {
		return
	}
	d.news = false
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

// put reports whether the key concerns addresses.
func (d *directory) put(r registry.Record) bool {
	kind, rest, _ := strings.Cut(r.Key, "/")
	switch kind + "/" {
	case registry.ServiceKeys:
		d.services[registry.ServiceName(rest)] = true
	case registry.AddressKeys:
		d.assign(registry.ServiceName(rest), r)
	case registry.SlotKeys:
		if n, ok := parseSlot(rest); ok {
			d.slots[n] = slot{service: registry.ServiceName(r.Value), revision: r.Revision}
		}
	default:
		return false
	}
	return true
}

func (d *directory) assign(name registry.ServiceName, r registry.Record) {
	d.disown(name)
	a, err := registry.AddressesFromValue(r.Value)
	if err != nil || a.Service != name {
		a = registry.Addresses{}
	}
	d.records[name] = addressRecord{Addresses: a, revision: r.Revision}
	if a.Service == name {
		d.owners[a.IPv4], d.owners[a.IPv6] = name, name
	}
}

func (d *directory) disown(name registry.ServiceName) {
	r := d.records[name]
	for _, addr := range []netip.Addr{r.IPv4, r.IPv6} {
		if d.owners[addr] == name {
			delete(d.owners, addr)
		}
	}
	delete(d.records, name)
}

// remove reports whether the key concerns addresses.
func (d *directory) remove(key string) bool {
	kind, rest, _ := strings.Cut(key, "/")
	switch kind + "/" {
	case registry.ServiceKeys:
		delete(d.services, registry.ServiceName(rest))
	case registry.AddressKeys:
		d.disown(registry.ServiceName(rest))
	case registry.SlotKeys:
		if n, ok := parseSlot(rest); ok {
			delete(d.slots, n)
		}
	default:
		return false
	}
	return true
}

func slotKey(n uint32) string { return registry.SlotKeys + strconv.FormatUint(uint64(n), 10) }

// parseSlot takes only what slotKey writes.
func parseSlot(text string) (n uint32, ok bool) {
	parsed, err := strconv.ParseUint(text, 10, 32)
	n = uint32(parsed)
	return n, err == nil && slotKey(n) == registry.SlotKeys+text
}

// change is one of the addresses of a service. It is made if the keys that it rests upon still have their revisions.
type change struct {
	service registry.ServiceName
	seen    map[string]int64 // revisions by key; 0: there is no such key
	puts    map[string][]byte
	deletes []string
}

// due returns the changes that are due, in no order. With used, services were left out, as no addresses are left.
func (d *directory) due(now time.Time) (changes []change, used bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.snapshot == nil {
		return nil, false
	}
	slotsOf := sync.OnceValue(d.slotsByService) // most of the time nobody asks
	for name, r := range d.records {
		if c, ok := d.review(name, r, now, slotsOf); ok {
			changes = append(changes, c)
		}
	}
	taken := map[uint32]bool{}
	for name := range d.services {
		if _, has := d.records[name]; has || d.snapshot.Services[name] == nil {
			continue
		}
		n, ok := d.choose(name, taken)
		if !ok {
			return changes, true
		}
		taken[n] = true
		changes = append(changes, d.give(name, n))
	}
	return changes, false
}

// review compares a record with whether its service is there. A service whose record was deleted is there as long as it
// has endpoints.
func (d *directory) review(name registry.ServiceName, r addressRecord, now time.Time, slotsOf func() map[registry.ServiceName][]uint32) (change, bool) {
	away := !d.services[name] && !d.hasEndpoints(name)
	switch released := !r.Released.IsZero(); {
	case r.Service == "":
	case away && !released:
		r.Released = now.UTC().Truncate(time.Second)
		return r.rewrite(), true
	case away && now.Sub(r.Released) >= keepReleased:
		return takeBack(name, r, slotsOf()[name]), true
	case d.services[name] && released:
		r.Released = time.Time{}
		return r.rewrite(), true
	}
	return change{}, false
}

func (d *directory) hasEndpoints(name registry.ServiceName) bool {
	service := d.snapshot.Services[name]
	return service != nil && len(service.Endpoints) > 0
}

// choose looks for a free slot, first for the one that the service had. An address may be in use without its slot where
// the range of addresses was another once.
func (d *directory) choose(name registry.ServiceName, taken map[uint32]bool) (uint32, bool) {
	free := func(n uint32) bool {
		ipv4, ipv6 := d.pool.at(n)
		owner, owned := d.slots[n]
		return !taken[n] && (!owned || owner.service == name) && d.owners[ipv4] == "" && d.owners[ipv6] == ""
	}
	former := d.former[name]
	if n, ok := d.pool.slotOf(former.IPv4, former.IPv6); ok && free(n) {
		return n, true
	}
	for n := range d.pool.slots(name) {
		if free(n) {
			return n, true
		}
	}
	return 0, false
}

// give allocates a slot. The slot may be the service's already, if somebody deleted its addresses by hand.
func (d *directory) give(name registry.ServiceName, n uint32) change {
	a := registry.Addresses{Service: name}
	a.IPv4, a.IPv6 = d.pool.at(n)
	return change{
		service: name,
		seen:    map[string]int64{name.AddressKey(): 0, slotKey(n): d.slots[n].revision},
		puts:    map[string][]byte{name.AddressKey(): encode(a), slotKey(n): []byte(name)},
	}
}

// rewrite notes that the service went away or came back.
func (r addressRecord) rewrite() change {
	c := change{
		service: r.Service,
		seen:    map[string]int64{r.Service.AddressKey(): r.revision},
		puts:    map[string][]byte{r.Service.AddressKey(): encode(r.Addresses)},
	}
	if !r.Released.IsZero() {
		c.seen[r.Service.Key()] = 0
	}
	return c
}

// slotsByService returns the slots of each service: more than one if somebody deleted its addresses by hand.
func (d *directory) slotsByService() map[registry.ServiceName][]uint32 {
	all := make(map[registry.ServiceName][]uint32, len(d.slots))
	for n, s := range d.slots {
		all[s.service] = append(all[s.service], n)
	}
	return all
}

// takeBack frees the addresses of a service that is long gone, and its slots.
func takeBack(name registry.ServiceName, r addressRecord, slots []uint32) change {
	c := change{
		service: name,
		seen:    map[string]int64{name.Key(): 0, name.AddressKey(): r.revision},
		deletes: []string{name.AddressKey()},
	}
	for _, n := range slots {
		c.deletes = append(c.deletes, slotKey(n))
	}
	return c
}

func encode(a registry.Addresses) []byte {
	value, _ := registry.Encode(a.Proto()) // fails only with text that isn't UTF-8, which no name of a service is
	return value
}

// done takes a change that was made, unless the watch has seen it already.
func (d *directory) done(c change, revision int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if revision <= d.revision {
		return
	}
	for key, value := range c.puts {
		d.put(registry.Record{Key: key, Value: value, Revision: revision})
	}
	for _, key := range c.deletes {
		d.remove(key)
	}
}
