package registry_test

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
	"google.golang.org/protobuf/testing/protocmp"
	"pgregory.net/rapid"
)

var compare = cmp.Options{
	protocmp.Transform(),
	cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b }),
}

// value is what a key of the store holds.
type value struct {
	endpoint registry.Endpoint
	timeout  string // of a policy
	revision int64
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
	case kind == "policies":
		text = fmt.Sprintf(`{"apiVersion":"headroom.dev/v1","kind":"ServicePolicy","metadata":{"name":%q},`+
			`"spec":{"timeout":%q}}`, name, v.timeout)
	}
	return registry.Record{Key: key, Value: []byte(text), Revision: v.revision}
}

// change is an entry in the history of a service's endpoints.
type change struct {
	at      time.Time
	id      registry.EndpointID
	lapsed  *registry.Endpoint // the record went away without having been draining
	removed bool
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
	m.known[key] = v
	if e := v.endpoint; e.Service != "" {
		m.history[e.Service] = append(m.history[e.Service], change{at: now, id: e.ID()})
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

func (m *model) replace(now time.Time, store map[string]value) {
	for _, key := range slices.Sorted(maps.Keys(m.known)) {
		if _, ok := store[key]; !ok {
			m.delete(now, key)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(store)) {
		m.put(now, key, store[key])
	}
}

// lastKnown returns the endpoints that a service without any still shows: of those registered since the service last
// came up from nothing, the ones whose last change was to lapse, within a minute of the end.
func lastKnown(history []change) map[registry.EndpointID]registry.Endpoint {
	live, last := map[registry.EndpointID]bool{}, map[registry.EndpointID]change{}
	for _, c := range history {
		if len(live) == 0 {
			clear(last)
		}
		last[c.id] = c
		live[c.id] = true
		if c.removed {
			delete(live, c.id)
		}
	}
	shown := map[registry.EndpointID]registry.Endpoint{}
	for id, c := range last {
		if end := history[len(history)-1].at; c.lapsed != nil && end.Sub(c.at) <= time.Minute {
			shown[id] = *c.lapsed
		}
	}
	return shown
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
		if services[name] != nil && len(services[name].Endpoints) > 0 {
			continue
		}
		shown := lastKnown(history)
		for _, id := range slices.Sorted(maps.Keys(shown)) {
			service(name).Endpoints = append(service(name).Endpoints, shown[id])
		}
	}
	return services
}

// keys and values that the property is tried with: few, so that they meet.
func anyKey() *rapid.Generator[string] {
	return rapid.Custom(func(t *rapid.T) string {
		name := registry.ServiceName(rapid.SampledFrom([]string{"web", "web", "web", "db"}).Draw(t, "service"))
		switch rapid.IntRange(0, 9).Draw(t, "kind") {
		case 0:
			return name.Key()
		case 1:
			return name.PolicyKey()
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
			return value{endpoint: endpoint(registry.ServiceName(part[1]), part[2], state)}
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
		var revision int64
		away := false // changes of the store go unseen
		store := map[string]value{}
		m := &model{known: map[string]value{}, history: map[registry.ServiceName][]change{}}
		b := registry.NewBuilder(nil, nil)
		last, copyOfLast := b.Snapshot(), ""

		put := func(t *rapid.T) {
			revision++
			key := anyKey().Draw(t, "key")
			v := anyValue(key).Draw(t, "value")
			v.revision = revision
			store[key] = v
			if !away {
				b.Put(v.record(key))
				m.put(now, key, v)
			}
		}
		remove := func(t *rapid.T, key string) {
			revision++
			delete(store, key)
			if !away {
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
				now = now.Add(time.Duration(rapid.SampledFrom([]int{1, 20, 60, 61}).Draw(t, "seconds")) * time.Second)
			},
			"lose the watch": func(*rapid.T) { away = true },
			"list": func(*rapid.T) {
				away = false
				var records []registry.Record
				for key, v := range store {
					records = append(records, v.record(key))
				}
				b.Replace(now, records, revision)
				m.replace(now, store)
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

// Steps are: +a registers a, ~a makes it drain, -a deletes it, a duration passes, =ab is a list that has only a and b.
func TestLapses(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ name, steps, want string }{
		{"one of two", "+a +b -a", "b"},
		{"all together", "+a +b -a 30s -b", "a b"},
		{"for as long as it takes", "+a +b -a 30s -b 1h", "a b"},
		{"at the edge", "+a +b -a 60s -b", "a b"},
		{"one long before the other", "+a +b -a 61s -b", "b"},
		{"until one is back", "+a +b -a -b +a", "a"},
		{"and lost again", "+a +b -a -b +a -a", "a"},
		{"on purpose", "+a ~a -a", ""},
		{"the last one on purpose", "+a +b -a 30s ~b -b", "a"},
		{"the last one on purpose, long after", "+a +b -a 61s ~b -b", ""},
		{"back, and then on purpose", "+a +b -a +a ~a -a -b", "b"},
		{"unseen", "+a +b =", "a b"},
		{"unseen, one on purpose", "+a +b ~b =", "a"},
		{"unseen, another took over", "+a +b =c", "c"},
		{"unseen, then the rest", "+a +b =b 30s -b", "a b"},
	} {
		now := time.Unix(0, 0)
		b := registry.NewBuilder(nil, nil)
		for step := range strings.FieldsSeq(test.steps) {
			rest := step[1:]
			switch step[0] {
			case '+':
				b.Put(webOn(rest, registry.Ready))
			case '~':
				b.Put(webOn(rest, registry.Draining))
			case '-':
				b.Delete(now, webOn(rest, registry.Ready).Key, 0)
			case '=':
				var records []registry.Record
				for _, node := range rest {
					records = append(records, webOn(string(node), registry.Ready))
				}
				b.Replace(now, records, 0)
			default:
				d, err := time.ParseDuration(step)
				if err != nil {
					t.Fatal(err)
				}
				now = now.Add(d)
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
		fmt.Fprintln(&text, name, service.Endpoints, service.Policy, service.PolicyRevision, service.Document == nil)
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
		"endpoints/web/a/10.0.0.1:80": {endpoint: endpoint("web", "a", registry.Ready)},
		"endpoints/web/b/10.0.0.1:80": {endpoint: endpoint("web", "b", registry.Draining)},
	} {
		v.revision = 7
		b.Put(v.record(key))
	}
	want := b.Snapshot()
	got, err := registry.SnapshotFromProto(want.Proto())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got, compare); diff != "" {
		t.Errorf("from disk (-want +got):\n%s", diff)
	}

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
	good.Put(value{endpoint: endpoint("web", "a", registry.Ready)}.record("endpoints/web/a/10.0.0.1:80"))
	record := good.Snapshot().Proto()
	record.Endpoints = append(record.Endpoints, endpoint("web", "b/c", registry.Ready).Proto())
	record.Services = append(record.Services, registry.ServiceName("no label").Proto())
	got, err := registry.SnapshotFromProto(record)
	if err == nil || !strings.Contains(err.Error(), "no label") || !strings.Contains(err.Error(), "b/c") {
		t.Errorf("error %v, want both problems", err)
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
		{`{"service":"web`, "unexpected EOF"},
		{``, "syntax"},
	} {
		_, err := registry.EndpointFromValue([]byte(test.value))
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %q", test.value, err, test.want)
		}
	}
}

// Whatever somebody writes into the store, it does no harm to the rest.
func FuzzRecord(f *testing.F) {
	for _, seed := range []string{"services/web", "policies/web", "endpoints/web/a/10.0.0.1:80", "services/", "x", "/", ""} {
		f.Add(seed, []byte(`{"name":"web"}`))
	}
	f.Add("endpoints/web/b/10.0.0.1:80", value{endpoint: endpoint("web", "b", registry.Ready)}.record("endpoints/").Value)
	f.Fuzz(func(t *testing.T, key string, content []byte) {
		web := endpoint("web", "a", registry.Ready)
		b := registry.NewBuilder(nil, nil)
		b.Put(value{endpoint: web, revision: 1}.record(web.Key()))
		b.Put(registry.Record{Key: key, Value: content, Revision: 2})
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
