package etcd

import (
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/registry"
	"github.com/headroom-mesh/headroom/registry/registrytest"
	clientv3 "go.etcd.io/etcd/client/v3"
	"pgregory.net/rapid"
)

func awaitAddresses(t *testing.T, a *registrytest.Agent, services ...registry.ServiceName) *registry.Snapshot {
	t.Helper()
	return a.AwaitThat(t, fmt.Sprintf("%v have addresses", services), func(s *registry.Snapshot) bool {
		for _, name := range services {
			if s.Services[name] == nil || !s.Services[name].IPv4.IsValid() {
				return false
			}
		}
		return true
	})
}

// pairs returns the addresses of all services.
func pairs(s *registry.Snapshot) map[registry.ServiceName]string {
	all := map[registry.ServiceName]string{}
	for name, service := range s.Services {
		all[name] = fmt.Sprint(service.IPv4, " ", service.IPv6)
	}
	return all
}

// wantDistinct wants no two services to have an address in common, and all to be found by theirs.
func wantDistinct(t *testing.T, s *registry.Snapshot) {
	t.Helper()
	for name, service := range s.Services {
		for _, addr := range []netip.Addr{service.IPv4, service.IPv6} {
			if got, ok := s.ServiceAt(addr); got != name || !ok {
				t.Errorf("at %s, an address of %s, there is %q, %v", addr, name, got, ok)
			}
		}
	}
}

// stored returns what is stored below a prefix of keys.
func (s *store) stored(below string) map[string]string {
	values := map[string]string{}
	prefix := s.config("x").Prefix + "/" + below
	response, err := s.direct.Get(s.t.Context(), prefix, clientv3.WithPrefix())
	if err != nil {
		s.t.Fatal(err)
	}
	for _, kv := range response.Kvs {
		values[strings.TrimPrefix(string(kv.Key), prefix)] = string(kv.Value)
	}
	return values
}

func (s *store) remove(key string) {
	if _, err := s.direct.Delete(s.t.Context(), s.config("x").Prefix+"/"+key); err != nil {
		s.t.Errorf("delete %s: %v", key, err)
	}
}

// small is a configuration in which the first choices of services collide.
func small(s *store, node registry.NodeName) Config {
	cfg := s.config(node)
	cfg.VirtualIPv4 = netip.MustParsePrefix("10.20.30.0/24")
	return cfg
}

func endpoints(n int, node registry.NodeName) []registry.Endpoint {
	var list []registry.Endpoint
	for i := range n {
		list = append(list, registrytest.Endpoint(registry.ServiceName(fmt.Sprintf("s%d", i)), node))
	}
	return list
}

func names(list []registry.Endpoint) []registry.ServiceName {
	var services []registry.ServiceName
	for _, e := range list {
		services = append(services, e.Service)
	}
	return services
}

// All services get one address of each kind, whoever is first to allocate it, and all agents agree.
func TestAddressesAreGivenOnce(t *testing.T) {
	t.Parallel()
	const many = 200
	s := newStore(t)
	a, b := registrytest.Start(t, mustNew(t, small(s, "a"))), registrytest.Start(t, mustNew(t, small(s, "b")))
	a.Advertise(endpoints(many, "a"))
	b.Advertise(endpoints(many, "b"))
	all := names(endpoints(many, "a"))
	first, second := awaitAddresses(t, a, all...), awaitAddresses(t, b, all...)
	wantDistinct(t, first)
	if got, want := pairs(second), pairs(first); !maps.Equal(got, want) {
		t.Errorf("b sees %v, a sees %v", got, want)
	}
	records, slots := s.stored(registry.AddressKeys), s.stored(registry.SlotKeys)
	if len(records) != many || len(slots) != many {
		t.Errorf("%d records of addresses and %d slots for %d services", len(records), len(slots), many)
	}
	for n, name := range slots {
		if want := fmt.Sprintf(`{"service":%q,"ipv4":"10.20.30.%s",`, name, n); !strings.HasPrefix(records[name], want) {
			t.Errorf("slot %s is that of %s, whose addresses are %s", n, name, records[name])
		}
	}
}

func TestServiceComesBackToItsAddresses(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	a := registrytest.Start(t, mustNew(t, small(s, "a")))
	s.Put("services/web", []byte(`{"name":"web"}`)) // nobody's: any agent sees to it
	before := pairs(awaitAddresses(t, a, "web"))["web"]
	s.remove("services/web")
	released := func() bool { return strings.Contains(s.stored(registry.AddressKeys)["web"], `"released"`) }
	awaitTrue(t, "the addresses are released", released)
	if latest, _ := a.Latest(); latest.Services["web"] != nil {
		t.Errorf("web is still shown as %+v", latest.Services["web"])
	}
	s.Put("services/web", []byte(`{"name":"web"}`))
	if got := pairs(awaitAddresses(t, a, "web"))["web"]; got != before {
		t.Errorf("web came back to %s, want %s", got, before)
	}
	awaitTrue(t, "the addresses are not released any more", func() bool { return !released() })
}

// In a range for 239 services the addresses of one that is gone are given to another as soon as, and not before, a day
// is over.
func TestReleasedAddresses(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	put := func(n int, name string, released time.Duration) {
		at := time.Now().Add(-released).UTC().Format(time.RFC3339)
		s.Put(fmt.Sprintf("slots/%d", n), []byte(name))
		s.Put("addresses/"+name, fmt.Appendf(nil, `{"service":%q,"ipv4":"10.20.30.%d","ipv6":"fd68:6561:6472::%x","released":%q}`, name, n, n, at))
	}
	for n := 16; n < 255; n++ {
		put(n, fmt.Sprintf("old%d", n), 23*time.Hour)
	}
	log := new(logText)
	cfg := small(s, "a")
	cfg.Log = slog.New(slog.NewTextHandler(log, nil))
	a := registrytest.Start(t, mustNew(t, cfg))
	a.Register(t, registrytest.Endpoint("web", "a"))
	awaitTrue(t, "it is told that no addresses are left", func() bool { return len(log.lines("no virtual addresses are left")) > 0 })
	a.Register(t, registrytest.Endpoint("web", "a"), registrytest.Endpoint("db", "a"))
	latest := a.Await(t, "db", "a ready")
	if web := latest.Services["web"]; web.IPv4.IsValid() {
		t.Errorf("web has %s, which was another's 23 hours ago", web.IPv4)
	}
	put(99, "old99", 25*time.Hour)
	put(100, "old100", 25*time.Hour)
	got := awaitAddresses(t, a, "web", "db")
	wantDistinct(t, got)
	for _, ipv4 := range []string{"10.20.30.99", "10.20.30.100"} {
		if _, ok := got.ServiceAt(netip.MustParseAddr(ipv4)); !ok {
			t.Errorf("nobody got %s", ipv4)
		}
	}
	if records := s.stored(registry.AddressKeys); records["old99"] != "" || records["old98"] == "" {
		t.Errorf("stored are %v, want old98 kept and old99 gone", records)
	}
	if lines := log.lines("no virtual addresses are left"); len(lines) != 1 {
		t.Errorf("%d complaints, want one: %v", len(lines), lines)
	}
}

// An etcd that comes back empty gets the addresses from the agents that know them, one that comes back with them
// decides.
func TestEtcdLosesAddresses(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	full, stop := startEtcd(t, dir)
	s := newStore(t)
	s.proxy.target.Store(full)
	a, b := registrytest.Start(t, mustNew(t, small(s, "a"))), registrytest.Start(t, mustNew(t, small(s, "b")))
	list := endpoints(150, "a") // in a range for 239 most first choices are taken
	for part := 10; part <= len(list); part += 10 {
		a.Register(t, list[:part]...) // in an order that won't be the same
	}
	before := awaitAddresses(t, b, names(list)...)
	wantDistinct(t, before)
	stop()

	empty, stop := startEtcd(t, t.TempDir())
	s.proxy.target.Store(empty)
	b.AwaitThat(t, "the lower revision is taken", func(s *registry.Snapshot) bool { return s.Revision < before.Revision })
	if got, want := pairs(awaitAddresses(t, b, names(list)...)), pairs(before); !maps.Equal(got, want) {
		t.Errorf("after the loss the addresses are %v, want %v", got, want)
	}
	stop()

	full, _ = startEtcd(t, dir)
	s.proxy.target.Store(full)
	b.AwaitThat(t, "the higher revision is taken", func(s *registry.Snapshot) bool { return s.Revision >= before.Revision })
	if got, want := pairs(awaitAddresses(t, b, names(list)...)), pairs(before); !maps.Equal(got, want) {
		t.Errorf("from the old store the addresses are %v, want %v", got, want)
	}
}

// Addresses stay when the ranges change, and nobody else gets them from ranges that overlap.
func TestRangesChange(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	a := registrytest.Start(t, mustNew(t, small(s, "a")))
	list := endpoints(100, "a")
	a.Register(t, list...)
	before := pairs(awaitAddresses(t, a, names(list)...))
	a.Stop()

	cfg := s.config("a")
	cfg.VirtualIPv4, cfg.VirtualIPv6 = netip.MustParsePrefix("10.20.16.0/20"), netip.MustParsePrefix("fd00::/112")
	a = registrytest.Start(t, mustNew(t, cfg))
	list = endpoints(600, "a")
	a.Register(t, list...)
	after := awaitAddresses(t, a, names(list)...)
	wantDistinct(t, after)
	for name, want := range before {
		if got := pairs(after)[name]; got != want {
			t.Errorf("%s has %s, want %s as before", name, got, want)
		}
	}
	if got := after.Services["s150"]; !cfg.VirtualIPv4.Contains(got.IPv4) || !cfg.VirtualIPv6.Contains(got.IPv6) {
		t.Errorf("s150 has %s and %s, want them from the new ranges", got.IPv4, got.IPv6)
	}
}

// A name that only a policy knows has no addresses.
func TestOnlyRegisteredServicesHaveAddresses(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	a := start(t, s, "a")
	a.Register(t, registrytest.Endpoint("web", "a"))
	set(t, a, "later", "3s")
	awaitTimeout(t, a, "later", 3*time.Second)
	if got := awaitAddresses(t, a, "web").Services["later"]; got.IPv4.IsValid() {
		t.Errorf("later has %s, though it was never registered", got.IPv4)
	}
	a.Register(t, registrytest.Endpoint("web", "a"), registrytest.Endpoint("later", "a"))
	awaitAddresses(t, a, "later")
}

// One record that can't be read costs one service its addresses, until somebody deletes it.
func TestBadAddressRecord(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	s.Put("addresses/web", []byte("?"))
	a := start(t, s, "a")
	a.Register(t, registrytest.Endpoint("web", "a"), registrytest.Endpoint("db", "a"))
	if got := awaitAddresses(t, a, "db").Services["web"]; got.IPv4.IsValid() {
		t.Errorf("web has %s in spite of its record", got.IPv4)
	}
	s.remove("addresses/web")
	awaitAddresses(t, a, "web")
}

func TestVirtualRanges(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ ipv4, ipv6, want string }{
		{"10.0.0.0/24", "fd00::/112", ""},
		{"10.0.0.0/25", "fd00::/112", "virtualIPv4: want an IPv4 prefix of 256 addresses (/24) or more"},
		{"10.0.0.0/24", "fd00::/113", "virtualIPv6: want an IPv6 prefix of 65536 addresses (/112) or more"},
		{"fd00::/24", "fd00::/64", "virtualIPv4: want an IPv4 prefix"},
		{"10.0.0.0/8", "10.0.0.0/8", "virtualIPv6: want an IPv6 prefix"},
		{"126.0.0.0/7", "fd00::/64", "virtualIPv4: 126.0.0.0/7 overlaps 127.0.0.0/8"},
		{"169.254.1.0/24", "fd00::/64", "overlaps 169.254.0.0/16"},
		{"192.0.0.0/2", "fd00::/64", "overlaps 224.0.0.0/4"},
		{"10.0.0.0/8", "fe80::/64", "virtualIPv6: fe80::/64 overlaps fe80::/10"},
		{"10.0.0.0/8", "::/0", "virtualIPv6: ::/0 overlaps"},
	} {
		cfg := Config{Node: "a", VirtualIPv4: netip.MustParsePrefix(tt.ipv4), VirtualIPv6: netip.MustParsePrefix(tt.ipv6)}
		err := cfg.Validate()
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s and %s: %v, want %q", tt.ipv4, tt.ipv6, err, tt.want)
		}
	}
}

// Every slot has addresses of its own inside the ranges, that lead back to it; the first sixteen and the last are never
// among them.
func TestPool(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		bits4, bits6 := rapid.IntRange(18, 24).Draw(t, "bits of IPv4"), rapid.IntRange(56, 112).Draw(t, "bits of IPv6")
		p := newPool(netip.PrefixFrom(netip.MustParseAddr("10.99.77.0"), bits4), netip.PrefixFrom(netip.MustParseAddr("fd12::aaaa:bbbb:0:0"), bits6))
		size := uint32(1) << min(32-bits4, 128-bits6)
		seen := map[netip.Addr]bool{}
		for n := range p.slots(registry.ServiceName(rapid.StringMatching(`[a-z]{1,9}`).Draw(t, "service"))) {
			ipv4, ipv6 := p.at(n)
			if n < 16 || n > size-2 || !p.ipv4.Contains(ipv4) || !p.ipv6.Contains(ipv6) || seen[ipv4] || seen[ipv6] {
				t.Fatalf("slot %d of %d has %s and %s", n, size, ipv4, ipv6)
			}
			seen[ipv4], seen[ipv6] = true, true
			if back, ok := p.slotOf(ipv4, ipv6); back != n || !ok {
				t.Fatalf("%s and %s lead to slot %d, %v; want %d", ipv4, ipv6, back, ok, n)
			}
		}
		if len(seen) != 2*int(size-17) || p.room() != size-17 {
			t.Fatalf("%d addresses in %d slots of which %d are to give away", len(seen), size, p.room())
		}
		for _, n := range []uint32{0, 15, size - 1} {
			ipv4, ipv6 := p.at(n)
			if _, ok := p.slotOf(ipv4, ipv6); ok {
				t.Fatalf("slot %d counts as one for services", n)
			}
		}
	})
}

// What is due depends on what etcd holds, and on the time.
func TestDueChanges(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	at := func(ago time.Duration) string { return "@" + now.Add(-ago).Format(time.RFC3339) }
	for _, tt := range []struct{ name, records, want string }{
		{"in use", "services/web addresses/web slots/20", ""},
		{"new", "services/web", "put addresses/web slots/38"},
		{"new, and its slot is another's", "services/web slots/38=db", "put addresses/web slots/39"},
		{"new, and the address in its slot is another's", `services/web services/db addresses/db={"service":"db","ipv4":"10.0.0.38","ipv6":"fd00::9999"}`, "put addresses/web slots/39"},
		{"its slot is left over", "services/web slots/38", "put addresses/web slots/38"},
		{"a service that the snapshot doesn't show", "services/db", ""},
		{"gone", "addresses/web slots/20", "put addresses/web"},
		{"gone for less than a day", "addresses/web" + at(24*time.Hour-time.Second) + " slots/20", ""},
		{"gone for a day", "addresses/web" + at(24*time.Hour) + " slots/20 slots/21 slots/22=db", "delete addresses/web slots/20 slots/21"},
		{"gone, without a slot", "addresses/web" + at(25*time.Hour), "delete addresses/web"},
		{"gone by a clock that is ahead", "addresses/web" + at(-time.Hour) + " slots/20", ""},
		{"back", "services/web addresses/web" + at(time.Hour) + " slots/20", "put addresses/web"},
		{"back at the last moment", "services/web addresses/web" + at(25*time.Hour) + " slots/20", "put addresses/web"},
		{"a record that can't be read", "services/web addresses/web=?", ""},
		{"a record that can't be read, of a service that is gone", "addresses/web=?", ""},
	} {
		d := newDirectory(newPool(netip.MustParsePrefix("10.0.0.0/24"), netip.MustParsePrefix("fd00::/112")))
		for text := range strings.FieldsSeq(tt.records) {
			d.changed(addressRecordOf(text))
		}
		web := &registry.Service{Name: "web"}
		d.published(&registry.Snapshot{Services: map[registry.ServiceName]*registry.Service{"web": web}})
		if got := describeChanges(d.due(now)); got != tt.want {
			t.Errorf("%s: %q is due, want %q", tt.name, got, tt.want)
		}
		web.Endpoints = []registry.Endpoint{registrytest.Endpoint("web", "a")}
		if got := describeChanges(d.due(now)); strings.HasPrefix(tt.name, "gone") && got != "" {
			t.Errorf("%s, but for an endpoint: %q is due, want nothing", tt.name, got)
		}
	}
}

// TestManyAreGone wants the watch not to be held up for long by a day on which many services went away.
func TestManyAreGone(t *testing.T) {
	const many = 20_000
	d := newDirectory(newPool(netip.MustParsePrefix("10.0.0.0/12"), netip.MustParsePrefix("fd00::/64")))
	now := time.Now()
	for n := range uint32(many) {
		name := registry.ServiceName(fmt.Sprintf("web-%d", n))
		a := registry.Addresses{Service: name, Released: now.Add(-25 * time.Hour)}
		a.IPv4, a.IPv6 = d.pool.at(reserved + n)
		d.changed(registry.Record{Key: name.AddressKey(), Value: encode(a), Revision: 7})
		d.changed(registry.Record{Key: slotKey(reserved + n), Value: []byte(name), Revision: 7})
	}
	d.published(&registry.Snapshot{})
	began := time.Now()
	changes, _ := d.due(now)
	if took := time.Since(began); len(changes) != many || took > 2*time.Second {
		t.Errorf("%d changes are found in %v, want %d in less than 2s", len(changes), took, many)
	}
}

// addressRecordOf reads KEY, KEY=VALUE or KEY@TIME, which is that of a release. Slots are those of web, and all addresses
// those in slot 20.
func addressRecordOf(text string) registry.Record {
	key, released, _ := strings.Cut(text, "@")
	key, content, ok := strings.Cut(key, "=")
	if kind, name, _ := strings.Cut(key, "/"); !ok && kind == "addresses" {
		content = fmt.Sprintf(`{"service":%q,"ipv4":"10.0.0.20","ipv6":"fd00::14"}`, name)
		if released != "" {
			content = strings.TrimSuffix(content, "}") + fmt.Sprintf(`,"released":%q}`, released)
		}
	} else if !ok {
		content = "web"
	}
	return registry.Record{Key: key, Value: []byte(content), Revision: 7}
}

func describeChanges(changes []change, _ bool) string {
	var words []string
	for _, c := range changes {
		if len(c.puts) > 0 {
			words = append(append(words, "put"), slices.Sorted(maps.Keys(c.puts))...)
		}
		if len(c.deletes) > 0 {
			words = append(append(words, "delete"), slices.Sorted(slices.Values(c.deletes))...)
		}
	}
	return strings.Join(words, " ")
}
