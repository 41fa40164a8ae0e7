package registry_test

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
	"google.golang.org/protobuf/testing/protocmp"
	"pgregory.net/rapid"
)

var compare = cmp.Options{
	protocmp.Transform(),
	cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b }),
	cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
	cmpopts.IgnoreUnexported(registry.Snapshot{}),
}

// value is what a key of the store holds.
type value struct {
	endpoint registry.Endpoint
	timeout  string // of a policy
	slot     int    // of addresses
	released bool
	complete bool // of a node
	revision int64
	created  int64 // 0: not known
	bad      bool
}

func (v value) record(key string) registry.Record {
	kind, name, _ := strings.Cut(key, "/")
	text := `{"name":"` + name + `"}`
	switch {
	case v.bad:
		text = `{"name":"other"}`
	case kind == "endpoints":
		encoded, err := registry.Encode(v.endpoint.Proto())
		if err != nil {
			panic(err)
		}
		text = string(encoded)
	case kind == "addresses":
		text = fmt.Sprintf(`{"service":%q,"ipv4":"240.64.0.%d","ipv6":"fd68:6561:6472::%x"}`, name, v.slot, v.slot)
		if v.released {
			text = strings.TrimSuffix(text, "}") + `,"released":"2026-01-02T03:04:05Z"}`
		}
	case kind == "nodes":
		text = fmt.Sprintf(`{"node":%q,"registered":%v}`, name, v.complete)
	case kind == "policies":
		text = fmt.Sprintf(`{"apiVersion":"headroom.dev/v1","kind":"ServicePolicy","metadata":{"name":%q},`+
			`"spec":{"timeout":%q}}`, name, v.timeout)
	}
	return registry.Record{Key: key, Value: []byte(text), Revision: v.revision, Created: v.created}
}

// change is an entry in the history of a service's endpoints.
type change struct {
	at      time.Time
	id      registry.EndpointID
	lapsed  *registry.Endpoint // the record went away without having been draining
	removed bool
	node    registry.NodeName // a node that has no other endpoints
	expire  bool              // Expire was called
}

// model is a Builder that remembers everything and thinks slowly.
type model struct {
	known   map[string]value
	history map[registry.ServiceName][]change
}

func (m *model) put(now time.Time, key string, v value) {
	if v.bad {
		return
	}
	if node, ok := strings.CutPrefix(key, "nodes/"); ok {
		if v.complete {
			m.note(change{at: now, node: registry.NodeName(node)})
		}
		return
	}
	m.known[key] = v
	if e := v.endpoint; e.Service != "" {
		m.history[e.Service] = append(m.history[e.Service], change{at: now, id: e.ID()})
	}
}

// note adds a change to the history of every service.
func (m *model) note(c change) {
	for service := range m.history {
		m.history[service] = append(m.history[service], c)
	}
}

func (m *model) delete(now time.Time, key string) {
	v, ok := m.known[key]
	if !ok {
		return
	}
	delete(m.known, key)
	if e := v.endpoint; e.Service != "" {
		c := change{at: now, id: e.ID(), removed: true}
		if e.State != registry.Draining {
			c.lapsed = &e
		}
		m.history[e.Service] = append(m.history[e.Service], c)
	}
}

func (m *model) replace(now time.Time, store map[string]value, seen, revision int64) {
	for _, key := range slices.Sorted(maps.Keys(m.known)) {
		v, ok := store[key]
		again := strings.HasPrefix(key, "endpoints/") && v.created > 0 && (v.created > seen || revision < seen)
		if !ok || again {
			m.delete(now, key)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(store)) {
		m.put(now, key, store[key])
	}
}

// liveBefore reports how many endpoints are registered before each change, and after the last.
func liveBefore(history []change) []int {
	live, counts := map[registry.EndpointID]bool{}, []int{0}
	for _, c := range history {
		switch {
		case c.removed:
			delete(live, c.id)
		case c.id != "":
			live[c.id] = true
		}
		counts = append(counts, len(live))
	}
	return counts
}

// lapsedButShown returns the endpoints that a service shows although they are not registered.
func lapsedButShown(history []change) map[registry.EndpointID]registry.Endpoint {
	live, last := liveBefore(history), map[registry.EndpointID]int{}
	for i, c := range history {
		if c.id != "" {
			last[c.id] = i
		}
	}
	shown := map[registry.EndpointID]registry.Endpoint{}
	for id, i := range last {
		if e := history[i].lapsed; e != nil && staysShown(history[i:], live[i:]) {
			shown[id] = *e
		}
	}
	return shown
}

// staysShown follows the lapse that starts history. Until an endpoint registers with a service that has none, it counts
// if it was at most a minute before the last removal; then it stays until its node is complete or its time is over.
func staysShown(history []change, live []int) bool {
	lapse, lastRemoval, awaited := history[0], history[0].at, false
	var from time.Time // when the first endpoint of the service came back last
	for i, c := range history[1:] {
		switch empty := live[i+1] == 0; {
		case c.node != "" && c.node == lapse.lapsed.Node:
			return false
		case c.expire && awaited && !empty && c.at.Sub(from) >= 15*time.Second:
			return false
		case c.removed && !awaited:
			lastRemoval = c.at
		case c.id != "" && !c.removed && empty:
			awaited, from = true, c.at
		}
		if lastRemoval.Sub(lapse.at) > time.Minute {
			return false
		}
	}
	return awaited || live[len(history)] == 0
}

func (m *model) snapshot() map[registry.ServiceName]*registry.Service {
	services := map[registry.ServiceName]*registry.Service{}
	service := func(name registry.ServiceName) *registry.Service {
		if services[name] == nil {
			services[name] = &registry.Service{Name: name, Policy: policy.Default()}
		}
		return services[name]
	}
	for _, key := range slices.Sorted(maps.Keys(m.known)) {
		kind, rest, _ := strings.Cut(key, "/")
		name, _, _ := strings.Cut(rest, "/")
		if kind == "addresses" {
			continue // they make no service
		}
		s, v := service(registry.ServiceName(name)), m.known[key]
		switch kind {
		case "endpoints":
			s.Endpoints = append(s.Endpoints, v.endpoint)
		case "policies":
			s.PolicyRevision = v.revision
			s.Policy.Timeout, _ = time.ParseDuration(v.timeout)
			s.Document, _ = registry.PolicyFromValue(v.record(key).Value, v.revision)
		}
	}
	for name, history := range m.history {
		for _, e := range lapsedButShown(history) {
			service(name).Endpoints = append(service(name).Endpoints, e)
		}
		if s := services[name]; s != nil {
			slices.SortFunc(s.Endpoints, func(a, b registry.Endpoint) int { return strings.Compare(string(a.ID()), string(b.ID())) })
		}
	}
	for name, s := range services {
		if v := m.known[name.AddressKey()]; v.slot != 0 {
			s.IPv4, s.IPv6 = addresses(v.slot)
		}
	}
	return services
}

func addresses(slot int) (ipv4, ipv6 netip.Addr) {
	return netip.AddrFrom4([4]byte{240, 64, 0, byte(slot)}), netip.MustParseAddr(fmt.Sprintf("fd68:6561:6472::%x", slot))
}

// wantLookup compares ServiceAt with a search.
func wantLookup(t interface{ Errorf(string, ...any) }, s *registry.Snapshot) {
	for slot := range 4 {
		ipv4, ipv6 := addresses(slot)
		for _, addr := range []netip.Addr{ipv4, ipv6} {
			var want registry.ServiceName
			for _, name := range slices.Sorted(maps.Keys(s.Services)) {
				if service := s.Services[name]; want == "" && (service.IPv4 == addr || service.IPv6 == addr) {
					want = name
				}
			}
			if got, ok := s.ServiceAt(addr); got != want || ok != (want != "") {
				t.Errorf("at %s there is %q, %v; want %q", addr, got, ok, want)
			}
		}
	}
}

// keys and values that the property is tried with: few, so that they meet.
func anyKey() *rapid.Generator[string] {
	return rapid.Custom(func(t *rapid.T) string {
		name := registry.ServiceName(rapid.SampledFrom([]string{"web", "web", "web", "db"}).Draw(t, "service"))
		switch rapid.IntRange(0, 10).Draw(t, "kind") {
		case 0:
			return name.Key()
		case 1:
			return name.PolicyKey()
		case 10:
			return name.AddressKey()
		case 2:
			return rapid.SampledFrom([]registry.NodeName{"a", "b", "c"}).Draw(t, "node").Key()
		}
		return endpoint(name, rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "node"), registry.Ready).Key()
	})
}

func anyValue(key string) *rapid.Generator[value] {
	return rapid.Custom(func(t *rapid.T) value {
		if rapid.IntRange(0, 9).Draw(t, "bad") == 0 {
			return value{bad: true}
		}
		part := strings.Split(key, "/")
		switch part[0] {
		case "endpoints":
			state := rapid.SampledFrom([]registry.State{registry.Ready, registry.Unhealthy, registry.Draining}).Draw(t, "state")
			e := endpoint(registry.ServiceName(part[1]), part[2], state)
			e.Weight = rapid.Int32Range(0, 2).Draw(t, "weight")
			return value{endpoint: e}
		case "nodes":
			return value{complete: rapid.Bool().Draw(t, "complete")}
		case "addresses":
			return value{slot: rapid.IntRange(1, 3).Draw(t, "slot"), released: rapid.Bool().Draw(t, "released")}
		case "policies":
			return value{timeout: rapid.SampledFrom([]string{"1s", "2s"}).Draw(t, "timeout")}
		}
		return value{}
	})
}

func endpoint(service registry.ServiceName, node string, state registry.State) registry.Endpoint {
	return registry.Endpoint{
		Service: service,
		Node:    registry.NodeName(node),
		Address: netip.MustParseAddrPort("10.0.0.1:80"),
		State:   state,
	}
}

func TestBuilder(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		now := time.Unix(0, 0)
		var revision, seen int64
		away := false // changes of the store go unseen
		store := map[string]value{}
		m := &model{known: map[string]value{}, history: map[registry.ServiceName][]change{}}
		b := registry.NewBuilder(nil, nil)
		last, copyOfLast := b.Snapshot(), ""

		put := func(t *rapid.T) {
			revision++
			key := anyKey().Draw(t, "key")
			v := anyValue(key).Draw(t, "value")
			v.revision, v.created = revision, store[key].created
			if _, ok := store[key]; !ok {
				v.created = revision
			}
			store[key] = v
			if !away {
				seen = revision
				b.Put(now, v.record(key))
				m.put(now, key, v)
			}
		}
		remove := func(t *rapid.T, key string) {
			revision++
			delete(store, key)
			if !away {
				seen = revision
				b.Delete(now, key, revision)
				m.delete(now, key)
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"put":         put,
			"put another": put,
			"delete":      func(t *rapid.T) { remove(t, anyKey().Draw(t, "key")) },
			"delete what exists": func(t *rapid.T) {
				if len(store) > 0 {
					remove(t, rapid.SampledFrom(slices.Sorted(maps.Keys(store))).Draw(t, "key"))
				}
			},
			"wait": func(t *rapid.T) {
				now = now.Add(time.Duration(rapid.SampledFrom([]int{1, 14, 20, 60, 61}).Draw(t, "seconds")) * time.Second)
			},
			"expire": func(t *rapid.T) {
				if next := b.NextExpiry(); !next.IsZero() && rapid.Bool().Draw(t, "when due") && next.After(now) {
					now = next
				}
				b.Expire(now)
				m.note(change{at: now, expire: true})
				if next := b.NextExpiry(); !next.IsZero() && !next.After(now) {
					t.Fatalf("the next expiry is %v, though that is over at %v", next, now)
				}
			},
			"lose the watch": func(*rapid.T) { away = true },
			"list": func(*rapid.T) {
				away = false
				var records []registry.Record
				for key, v := range store {
					records = append(records, v.record(key))
				}
				b.Replace(now, records, revision)
				m.replace(now, store, seen, revision)
				seen = revision
			},
			"come back from a backup": func(t *rapid.T) {
				away = true
				revision = rapid.Int64Range(0, revision).Draw(t, "revision")
				clear(store)
			},
			"": func(t *rapid.T) {
				if copyOfLast != "" && fmt.Sprint(describe(last)) != copyOfLast {
					t.Fatal("an earlier snapshot was changed")
				}
				s := b.Snapshot()
				if diff := cmp.Diff(m.snapshot(), s.Services, compare); diff != "" {
					t.Fatalf("snapshot (-model +builder):\n%s", diff)
				}
				if !away && s.Revision != revision {
					t.Fatalf("revision %d, want %d", s.Revision, revision)
				}
				wantLookup(t, s)
				for name, service := range s.Services {
					if old := last.Services[name]; old != nil && old != service && cmp.Equal(old, service, compare) {
						t.Fatalf("%s was copied without a change", name)
					}
				}
				last, copyOfLast = s, describe(s)
			},
		})
	})
}

// Steps are: +a registers a, ~a makes it drain, -a deletes it, a duration passes, =ab is a list that has only a and b,
// =AB one to which both came just now, !a says that node a has no other endpoints. The time of what is awaited is ended
// as soon as it is over.
func TestLapses(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ name, steps, want string }{
		{"one of two", "+a +b -a", "b"},
		{"all together", "+a +b -a 30s -b", "a b"},
		{"for as long as it takes", "+a +b -a 30s -b 1h", "a b"},
		{"at the edge", "+a +b -a 60s -b", "a b"},
		{"one long before the other", "+a +b -a 61s -b", "b"},
		{"until all are back", "+a +b +c -a -b -c 1h +a 14s +b", "a b c"},
		{"until their time is over", "+a +b +c -a -b -c 1h +a 14s +b 1s", "a b"},
		{"until their node is back without", "+a +b +c -a -b -c +a !b", "a c"},
		{"one of those that are back", "+a +b +c -a -b -c +a +b -a", "b c"},
		{"and lost again", "+a +b -a -b +a -a", "a b"},
		{"and lost again later", "+a +b -a -b +a 15s -a", "a"},
		{"back, and its node is complete", "+a -a +a !a", "a"},
		{"the last one, and its node is back without", "+a -a !a", ""},
		{"the last of another node", "+a -a !b", "a"},
		{"its node is complete before", "+a !a -a", "a"},
		{"on purpose", "+a ~a -a", ""},
		{"the last one on purpose", "+a +b -a 30s ~b -b", "a"},
		{"the last one on purpose, long after", "+a +b -a 61s ~b -b", ""},
		{"back, and then on purpose", "+a +b -a +a ~a -a -b", "b"},
		{"unseen", "+a +b =", "a b"},
		{"unseen, one on purpose", "+a +b ~b =", "a"},
		{"unseen, another took over", "+a +b =c", "a b c"},
		{"unseen, another took over for good", "+a +b =c 15s", "c"},
		{"unseen, one of two", "+a +b =a", "a"},
		{"unseen, all, and one is back", "+a +b =A", "a b"},
		{"unseen, all, and one is back for good", "+a +b =A 15s", "a"},
		{"unseen, one of two, and one is back", "+a +b +c =aB", "a b"},
		{"unseen, then the rest", "+a +b =b 30s -b", "a b"},
	} {
		now := time.Unix(0, 0)
		b := registry.NewBuilder(nil, nil)
		for step := range strings.FieldsSeq(test.steps) {
			rest := step[1:]
			switch step[0] {
			case '+':
				b.Put(now, webOn(rest, registry.Ready))
			case '~':
				b.Put(now, webOn(rest, registry.Draining))
			case '-':
				b.Delete(now, webOn(rest, registry.Ready).Key, 0)
			case '=':
				var records []registry.Record
				for _, node := range rest {
					r := webOn(strings.ToLower(string(node)), registry.Ready)
					if unicode.IsUpper(node) {
						r.Created = 1
					}
					records = append(records, r)
				}
				b.Replace(now, records, 0)
			case '!':
				b.Put(now, value{complete: true}.record("nodes/"+rest))
			default:
				d, err := time.ParseDuration(step)
				if err != nil {
					t.Fatal(err)
				}
				now = now.Add(d)
			}
			if next := b.NextExpiry(); !next.IsZero() && !next.After(now) {
				b.Expire(now)
			}
			b.Snapshot()
		}
		var got []string
		if web := b.Snapshot().Services["web"]; web != nil {
			for _, e := range web.Endpoints {
				got = append(got, string(e.Node))
			}
		}
		if strings.Join(got, " ") != test.want {
			t.Errorf("%s: %q, want %q", test.name, got, test.want)
		}
	}
}

func webOn(node string, state registry.State) registry.Record {
	e := endpoint("web", node, state)
	return value{endpoint: e}.record(e.Key())
}

func describe(s *registry.Snapshot) string {
	var text strings.Builder
	for _, name := range slices.Sorted(maps.Keys(s.Services)) {
		service := s.Services[name]
		fmt.Fprintln(&text, name, service.Endpoints, service.Policy, service.PolicyRevision, service.Document == nil, service.IPv4, service.IPv6)
	}
	return text.String()
}

// A snapshot survives the disk, and a Builder goes on from it.
func TestSnapshotFromDisk(t *testing.T) {
	t.Parallel()
	now := time.Unix(0, 0)
	b := registry.NewBuilder(nil, nil)
	for key, v := range map[string]value{
		"services/empty":              {},
		"policies/web":                {timeout: "3s"},
		"addresses/web":               {slot: 1},
		"addresses/empty":             {slot: 2, released: true},
		"addresses/gone":              {slot: 3, released: true},
		"endpoints/web/a/10.0.0.1:80": {endpoint: endpoint("web", "a", registry.Ready)},
		"endpoints/web/b/10.0.0.1:80": {endpoint: endpoint("web", "b", registry.Draining)},

		"endpoints/db/a/unix:/run/db.sock": {endpoint: registry.Endpoint{Service: "db", Node: "a", Socket: "/run/db.sock", Protocol: policy.ProtocolTCP}},
	} {
		v.revision = 7
		b.Put(now, v.record(key))
	}
	want := b.Snapshot()
	got, err := registry.SnapshotFromProto(want.Proto())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got, compare); diff != "" {
		t.Errorf("from disk (-want +got):\n%s", diff)
	}
	wantLookup(t, got)

	next := registry.NewBuilder(got, nil)
	if next.Snapshot() != got {
		t.Error("a Builder without news doesn't return what it started from")
	}
	next.Replace(now, nil, 3)
	web := next.Snapshot().Services["web"]
	if web == nil || len(web.Endpoints) != 1 || web.Endpoints[0].Node != "a" || web.Document != nil {
		t.Errorf("after the store lost everything: %+v, want endpoint a, which did not leave on purpose", web)
	}
	if next.Snapshot().Services["empty"] != nil || next.Snapshot().Revision != 3 {
		t.Errorf("after the store lost everything: %+v", next.Snapshot())
	}
}

func TestBadPartsOfDiskCopy(t *testing.T) {
	t.Parallel()
	good := registry.NewBuilder(nil, nil)
	good.Put(time.Unix(0, 0), value{endpoint: endpoint("web", "a", registry.Ready)}.record("endpoints/web/a/10.0.0.1:80"))
	record := good.Snapshot().Proto()
	record.Endpoints = append(record.Endpoints, endpoint("web", "b/c", registry.Ready).Proto())
	record.Services = append(record.Services, registry.ServiceName("no label").Proto())
	record.Addresses = append(record.Addresses, &meshv1.AddressRecord{Service: "db", Ipv4: "240.64.0.1"})
	got, err := registry.SnapshotFromProto(record)
	for _, part := range []string{"no label", "b/c", `addresses of "db": ipv6`} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("error %v, want %s in it", err, part)
		}
	}
	if want := good.Snapshot().Services; !cmp.Equal(want, got.Services, compare) {
		t.Errorf("got %v, want the good parts", describe(got))
	}
}

func TestEndpointProblems(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ value, want string }{
		{`{"service":"web","node":"a","address":"10.0.0.1:80","state":"READY"}`, ""},
		{`{"service":"web","node":"a","address":"[fe80::1%eth0]:80","state":"DRAINING","future":{"x":1}}`, ""},
		{`{"service":"Web","node":"a","address":"10.0.0.1:80","state":"READY"}`, `service "Web"`},
		{`{"service":"web","node":"","address":"10.0.0.1:80","state":"READY"}`, `node ""`},
		{`{"service":"web","node":"a b","address":"10.0.0.1:80","state":"READY"}`, `node "a b"`},
		{`{"service":"web","node":"a","address":"10.0.0.1","state":"READY"}`, "address"},
		{`{"service":"web","node":"a","address":"10.0.0.1:0","state":"READY"}`, "address"},
		{`{"service":"web","node":"a","address":"10.0.0.1:80","agent":"x","state":"READY"}`, "agent"},
		{`{"service":"web","node":"a","address":"10.0.0.1:80"}`, "state"},
		{`{"service":"web","node":"a","address":"10.0.0.1:80","state":"SLEEPING"}`, "state"},
		{`{"service":"web","node":"a","address":"10.0.0.1:80","state":"READY","weight":100}`, ""},
		{`{"service":"web","node":"a","address":"10.0.0.1:80","state":"READY","weight":101}`, "weight 101"},
		{`{"service":"web","node":"a","address":"10.0.0.1:80","state":"READY","weight":4294967295}`, "weight"},
		{`{"service":"web","node":"a","address":"unix:/run/a.sock","state":"READY","protocol":"http2"}`, ""},
		{`{"service":"web","node":"a","address":"unix:/run/a.sock","state":"READY","protocol":"of the future"}`, ""},
		{`{"service":"web","node":"a","address":"unix:run/a.sock","state":"READY"}`, `address "unix:run/a.sock": want unix: and the absolute path`},
		{`{"service":"web","node":"a","address":"unix:/run//a.sock","state":"READY"}`, "absolute path"},
		{`{"service":"web","node":"a","address":"unix:/run/a b.sock","state":"READY"}`, "without spaces"},
		{`{"service":"web","node":"a","address":"unix:","state":"READY"}`, "want IP:PORT or unix:/PATH"},
		{`{"service":"web`, "unexpected EOF"},
		{``, "syntax"},
	} {
		_, err := registry.EndpointFromValue([]byte(test.value))
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %q", test.value, err, test.want)
		}
	}
}

func TestAddressProblems(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ value, want string }{
		{`{"service":"web","ipv4":"240.64.0.17","ipv6":"fd68:6561:6472::11"}`, ""},
		{`{"service":"web","ipv4":"10.1.2.3","ipv6":"2001:db8::1","released":"2026-01-02T03:04:05Z","future":1}`, ""},
		{`{"service":"Web","ipv4":"240.64.0.17","ipv6":"fd68:6561:6472::11"}`, `service "Web"`},
		{`{"service":"web","ipv4":"240.64.0.17"}`, "ipv6"},
		{`{"service":"web","ipv4":"240.64.0.256","ipv6":"fd68:6561:6472::11"}`, "ipv4"},
		{`{"service":"web","ipv4":"fd68:6561:6472::11","ipv6":"fd68:6561:6472::11"}`, "want an IPv4 address"},
		{`{"service":"web","ipv4":"240.64.0.17","ipv6":"240.64.0.17"}`, "want an IPv6 address"},
		{`{"service":"web","ipv4":"240.64.0.17","ipv6":"fd68:6561:6472::11%eth0"}`, "without a zone"},
		{`{"service":"web","ipv4":"127.0.0.1","ipv6":"fd68:6561:6472::11"}`, "127.0.0.1/32 overlaps 127.0.0.0/8"},
		{`{"service":"web","ipv4":"240.64.0.17","ipv6":"::1"}`, "::1/128 overlaps ::/127"},
		{`{"service":"web","ipv4":"240.64.0.17","ipv6":"::ffff:240.64.0.17"}`, "overlaps ::ffff:0"},
		{`{"service":"web","ipv4":"240.64.0.17","ipv6":"fd68:6561:6472::11","released":"yesterday"}`, "Timestamp"},
		{`?`, "syntax"},
	} {
		_, err := registry.AddressesFromValue([]byte(test.value))
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %q", test.value, err, test.want)
		}
	}
}

// Snapshots that somebody else made than a Builder can be asked as well.
func TestLookupWithoutBuilder(t *testing.T) {
	t.Parallel()
	ipv4, ipv6 := addresses(1)
	s := &registry.Snapshot{Services: map[registry.ServiceName]*registry.Service{
		"web": {Name: "web", IPv4: ipv4, IPv6: ipv6}, "db": {Name: "db"},
	}}
	wantLookup(t, s)
	if name, ok := s.ServiceAt(netip.Addr{}); ok {
		t.Errorf("at no address there is %q", name)
	}
	wantLookup(t, &registry.Snapshot{})
}

// Whatever somebody writes into the store, it does no harm to the rest.
func FuzzRecord(f *testing.F) {
	for _, seed := range []string{"services/web", "addresses/web", "slots/17", "policies/web", "endpoints/web/a/10.0.0.1:80", "nodes/a", "services/", "x", "/", ""} {
		f.Add(seed, []byte(`{"name":"web"}`))
	}
	f.Add("endpoints/web/b/10.0.0.1:80", value{endpoint: endpoint("web", "b", registry.Ready)}.record("endpoints/").Value)
	f.Add("addresses/web", value{slot: 1}.record("addresses/web").Value)
	f.Fuzz(func(t *testing.T, key string, content []byte) {
		web := endpoint("web", "a", registry.Ready)
		b := registry.NewBuilder(nil, nil)
		b.Put(time.Unix(0, 0), value{endpoint: web, revision: 1}.record(web.Key()))
		b.Put(time.Unix(0, 0), registry.Record{Key: key, Value: content, Revision: 2})
		got := b.Snapshot().Services["web"]
		if key != web.Key() && (got == nil || !slices.Contains(got.Endpoints, web)) {
			t.Errorf("%q took %s away", key, web.ID())
		}
		for name, service := range b.Snapshot().Services {
			if name.Validate() != nil || name != service.Name {
				t.Errorf("service %q has the name %q", name, service.Name)
			}
		}
		if _, err := registry.SnapshotFromProto(b.Snapshot().Proto()); err != nil {
			t.Errorf("the snapshot can't be kept on disk: %v", err)
		}
		b.Delete(time.Unix(0, 0), key, 3)
		b.Snapshot()
	})
}
