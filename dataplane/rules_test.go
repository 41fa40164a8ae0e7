package dataplane_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
)

// crowd counts how many requests a replica has at once.
type crowd struct {
	endpoint  registry.Endpoint
	now, most atomic.Int32
	served    atomic.Int32
}

func (c *crowd) enter() {
	n := c.now.Add(1)
	for most := c.most.Load(); n > most && !c.most.CompareAndSwap(most, n); most = c.most.Load() {
	}
}

// crowds starts replicas on each node whose answers take some time.
func (m *mesh) crowds(service registry.ServiceName, each int, take time.Duration, nodes ...registry.NodeName) []*crowd {
	var all []*crowd
	for _, at := range nodes {
		for range each {
			c := &crowd{}
			_, c.endpoint = m.serve(service, at, func(w http.ResponseWriter, r *http.Request) {
				c.enter()
				defer c.now.Add(-1)
				select {
				case <-time.After(take):
				case <-r.Context().Done():
				}
				c.served.Add(1)
				io.WriteString(w, string(c.endpoint.ID()))
			})
			all = append(all, c)
		}
	}
	return all
}

// getAll sends n requests at once from each node, and fails the test unless all are answered.
func (m *mesh) getAll(n int, target string, nodes ...registry.NodeName) {
	m.t.Helper()
	var sending sync.WaitGroup
	for _, from := range nodes {
		for range n {
			sending.Go(func() {
				resp, err := m.nodes[from].client.Get(target)
				if err != nil {
					m.t.Error(err)
					return
				}
				defer resp.Body.Close()
				if body, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != http.StatusOK {
					m.t.Errorf("from %s: %s: %q, %v", from, resp.Status, body, err)
				}
			})
		}
	}
	sending.Wait()
}

// picks returns how many requests of a node were placed in a way.
func (m *mesh) picks(from registry.NodeName, service, class string) float64 {
	m.t.Helper()
	families, err := m.nodes[from].metrics.Gather()
	if err != nil {
		m.t.Fatal(err)
	}
	for _, f := range families {
		for _, c := range f.Metric {
			// labels come sorted: class, service
			if f.GetName() == "headroom_balancer_picks_total" && c.Label[0].GetValue() == class && c.Label[1].GetValue() == service {
				return c.Counter.GetValue()
			}
		}
	}
	return 0
}

// TestLateBinding has two nodes send far more requests than there are slots: no replica ever has more than its slots.
func TestLateBinding(t *testing.T) {
	for _, slots := range []int{1, 2} {
		t.Run(fmt.Sprint(slots), func(t *testing.T) {
			m := newMesh(t, "a", "b", "c")
			all := m.crowds("web", 2, 5*time.Millisecond, "a", "b", "c")
			m.setPolicy("web", func(p *policy.Policy) { p.Balancer, p.Slots = policy.BalancerLateBinding, slots })
			m.getAll(50, "http://web.mesh/", "a", "b")
			for _, c := range all {
				if most := c.most.Load(); most > int32(slots) || most == 0 {
					t.Errorf("%s had %d requests at once, want %d at most", c.endpoint.ID(), most, slots)
				}
			}
			for _, from := range []registry.NodeName{"a", "b"} {
				if n := m.picks(from, "web", "fallback"); n > 0 {
					t.Errorf("%s placed %v requests without a slot", from, n)
				}
			}
			m.quiet()
		})
	}
}

// TestLateBindingGivesUp lets callers go away, and time run out, while requests wait for the only slot.
func TestLateBindingGivesUp(t *testing.T) {
	for _, at := range []registry.NodeName{"a", "b"} { // here and elsewhere
		t.Run("replica on "+string(at), func(t *testing.T) {
			m := newMesh(t, "a", "b")
			release := make(chan struct{})
			first := make(chan struct{}, 1)
			m.serve("web", at, func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == "/long" {
					first <- struct{}{}
					<-release
				}
				io.WriteString(w, "ok")
			})
			timeout := 200 * time.Millisecond
			m.setPolicy("web", func(p *policy.Policy) { p.Balancer = policy.BalancerLateBinding })
			var long sync.WaitGroup
			long.Go(func() {
				if resp, err := m.nodes["a"].client.Get("http://web.mesh/long"); err == nil {
					resp.Body.Close()
				}
			})
			within(t, "the long request", first)

			ctx, cancel := context.WithCancel(t.Context())
			r := request(t, http.MethodGet, "http://web.mesh/canceled", nil).WithContext(ctx)
			var canceled sync.WaitGroup
			canceled.Go(func() {
				if _, err := m.nodes["a"].client.Do(r); err == nil {
					t.Error("a request was answered without a slot")
				}
			})
			cancel()
			canceled.Wait()

			m.setPolicy("web", func(p *policy.Policy) { p.Balancer, p.Timeout = policy.BalancerLateBinding, timeout })
			resp, body := m.nodes["a"].get(t, "http://web.mesh/late")
			wantFault(t, resp, body, fault.Timeout)

			close(release)
			long.Wait()
			if resp, body := m.nodes["a"].get(t, "http://web.mesh/"); resp.StatusCode != http.StatusOK {
				t.Errorf("after the slot is free: %s %q", resp.Status, body)
			}
			m.quiet()
		})
	}
}

// TestLateBindingAmongOthers counts requests that come without a reservation as slots in use.
func TestLateBindingAmongOthers(t *testing.T) {
	m := newMesh(t, "a", "b")
	release := make(chan struct{})
	arrived := make(chan string, 10)
	m.serve("web", "b", func(w http.ResponseWriter, r *http.Request) {
		arrived <- r.URL.Path
		if r.URL.Path != "/bound" {
			<-release
		}
		if r.Header.Get("Headroom-Reservation") != "" || r.Header.Get("Headroom-Key") != "" {
			t.Error("the replica sees what is between agents")
		}
	})
	m.setPolicy("web", func(p *policy.Policy) { p.Balancer = policy.BalancerRandom })
	var sending sync.WaitGroup
	send := func(path string) {
		sending.Go(func() {
			resp, err := m.nodes["a"].client.Get("http://web.mesh" + path)
			if err != nil {
				t.Error(err)
				return
			}
			resp.Body.Close()
		})
	}
	send("/1")
	within(t, "an unbound request", arrived)
	send("/2")
	within(t, "another one", arrived)
	m.setPolicy("web", func(p *policy.Policy) { p.Balancer = policy.BalancerLateBinding })
	send("/bound")
	release <- struct{}{}
	select {
	case path := <-arrived:
		t.Errorf("%s arrived while the slot was in use", path)
	case <-time.After(50 * time.Millisecond):
	}
	close(release)
	if path := within(t, "the bound request", arrived); path != "/bound" {
		t.Errorf("%s arrived", path)
	}
	sending.Wait()
	m.quiet()
}

// TestLateBindingWithoutLines asks agents that know no such replica, or have fallen silent.
func TestLateBindingWithoutLines(t *testing.T) {
	m := newMesh(t, "a", "b", "c")
	m.crowds("web", 1, 0, "b", "c")
	m.setPolicy("web", func(p *policy.Policy) { p.Balancer = policy.BalancerLateBinding })
	m.getAll(5, "http://web.mesh/", "a")
	m.nodes["b"].silent.Store(true)
	m.getAll(20, "http://web.mesh/", "a")
	m.nodes["b"].silent.Store(false)
	m.nodes["b"].UpdateLocal(nil)
	m.getAll(20, "http://web.mesh/", "a")
	m.quiet()
}

// TestLateBindingAtASilentAgent has a request wait in line at an agent that is silent: it does not wait for ever.
func TestLateBindingAtASilentAgent(t *testing.T) {
	m := newMesh(t, "a", "b")
	m.crowds("web", 1, 0, "b")
	m.setPolicy("web", func(p *policy.Policy) { p.Balancer = policy.BalancerLateBinding })
	m.getAll(1, "http://web.mesh/", "a")
	m.nodes["b"].silent.Store(true)
	began := time.Now()
	answered := make(chan struct{})
	var sending sync.WaitGroup
	sending.Go(func() {
		defer close(answered)
		if resp, err := m.nodes["a"].client.Get("http://web.mesh/"); err == nil {
			resp.Body.Close()
		}
	})
	within(t, "an answer of any kind", answered)
	t.Logf("answered after %v", time.Since(began))
	m.nodes["b"].silent.Store(false)
	sending.Wait()
	m.quiet()
}

// TestJoinIdleQueue keeps a replica busy: nobody is sent there while others are idle.
func TestJoinIdleQueue(t *testing.T) {
	m := newMesh(t, "a", "b", "c")
	all := m.crowds("web", 2, 2*time.Millisecond, "a", "b", "c")
	m.setPolicy("web", func(p *policy.Policy) { p.Balancer = policy.BalancerJoinIdleQueue })
	m.getAll(1, "http://web.mesh/", "a") // from now on it listens
	eventually(t, "requests placed by the rule in a row", func() any {
		before := m.picks("a", "web", "rule")
		for range 10 {
			m.getAll(1, "http://web.mesh/", "a")
		}
		return m.picks("a", "web", "rule") - before
	}, func(v any) bool { return v == 10.0 })
	for _, c := range all {
		c.most.Store(0)
	}
	fallback := m.picks("a", "web", "fallback")
	for range 20 {
		m.getAll(3, "http://web.mesh/", "a")
	}
	if n := m.picks("a", "web", "fallback") - fallback; n > 0 {
		t.Errorf("%v requests of 60 were placed at random, though half of the replicas were idle", n)
	}
	for _, c := range all {
		if most := c.most.Load(); most > 1 {
			t.Errorf("%s had %d requests at once", c.endpoint.ID(), most)
		}
	}
	m.quiet()
}

// TestWeightedRoundRobin follows what replicas say of themselves, in headers or trailers.
func TestWeightedRoundRobin(t *testing.T) {
	m := newMesh(t, "a", "b")
	var served [3]atomic.Int32
	for i, at := range []registry.NodeName{"a", "b", "b"} {
		m.serve("web", at, func(w http.ResponseWriter, r *http.Request) {
			served[i].Add(1)
			switch i {
			case 0:
				w.Header().Set("endpoint-load-metrics", "TEXT application_utilization=0.9")
			case 1:
				w.Header().Set("endpoint-load-metrics", `JSON {"cpu_utilization": 0.9}`)
			case 2:
				w.Header().Set(http.TrailerPrefix+"Endpoint-Load-Metrics", "TEXT cpu_utilization=0.1")
			}
			io.WriteString(w, "ok")
		})
	}
	m.setPolicy("web", func(p *policy.Policy) {
		p.Balancer = policy.BalancerWeightedRoundRobin
		p.WRR = policy.WeightedRoundRobin{Blackout: 10 * time.Millisecond, Expiry: time.Minute, UpdateInterval: 10 * time.Millisecond}
	})
	eventually(t, "shares", func() any {
		var before [3]int32
		for i := range before {
			before[i] = served[i].Load()
		}
		for range 50 {
			resp, _ := m.nodes["a"].get(t, "http://web.mesh/")
			if len(resp.Header["Endpoint-Load-Metrics"])+len(resp.Trailer["Endpoint-Load-Metrics"]) > 0 {
				t.Fatal("the caller sees the report")
			}
		}
		return [3]int32{served[0].Load() - before[0], served[1].Load() - before[1], served[2].Load() - before[2]}
	}, func(v any) bool {
		s := v.([3]int32)
		return s[2] > 2*s[0] && s[2] > 2*s[1]
	})
	m.quiet()
}

// TestPrequalSync asks replicas about each request. One that has served the key says less than its load.
func TestPrequalSync(t *testing.T) {
	m := newMesh(t, "a", "b")
	m.crowds("web", 3, 3*time.Millisecond, "b")
	m.setPolicy("web", func(p *policy.Policy) {
		p.Balancer = policy.BalancerPrequalSync
		p.Hash.Key = policy.HashKey{Source: policy.KeyHeader, Name: "X-Key"}
	})
	m.getAll(20, "http://web.mesh/", "a")
	home := func(key string) string {
		r := request(t, http.MethodGet, "http://web.mesh/", nil)
		r.Header.Set("X-Key", key)
		_, body := m.nodes["a"].do(t, r)
		return body
	}
	const keys = 120
	var first [keys]string
	for i := range first {
		first[i] = home(fmt.Sprint(i))
	}
	again := 0
	for i := range first {
		if home(fmt.Sprint(i)) == first[i] {
			again++
		}
	}
	// The replica is among the first two of three answers two times out of three.
	if again < keys/2 {
		t.Errorf("the second request with a key went to the replica of the first %d times of %d, where chance is a third", again, keys)
	}
	for _, o := range m.nodes["a"].Observe("web").Outbound {
		if requests := uint64(20 + 2*keys); o.Probes < 3*requests || o.ProbeAnswers < 2*requests {
			t.Errorf("%d probes, %d answers, want three for each of %d requests", o.Probes, o.ProbeAnswers, requests)
		}
	}
	m.quiet()
}

// TestPrequalSyncWithoutAnswers asks agents that have fallen silent, or know no such replica.
func TestPrequalSyncWithoutAnswers(t *testing.T) {
	m := newMesh(t, "a", "b", "c")
	m.crowds("web", 2, time.Millisecond, "a", "b", "c")
	m.setPolicy("web", func(p *policy.Policy) { p.Balancer = policy.BalancerPrequalSync })
	m.getAll(5, "http://web.mesh/", "a")
	m.nodes["c"].UpdateLocal(nil)
	m.getAll(20, "http://web.mesh/", "a")
	m.nodes["b"].silent.Store(true)
	m.getAll(20, "http://web.mesh/", "a")
	m.nodes["b"].silent.Store(false)
	m.quiet()
}

// TestZonePreferred has the agent keep to the zone of its node.
func TestZonePreferred(t *testing.T) {
	m := meshConfig{zones: map[registry.NodeName]string{"a": "east", "b": "east", "c": "west"}}.newMesh(t, "a", "b", "c")
	all := m.crowds("web", 2, 0, "a", "b", "c")
	for i := range m.endpoints {
		m.endpoints[i].Zone = map[registry.NodeName]string{"a": "east", "b": "east", "c": "west"}[m.endpoints[i].Node]
	}
	m.setPolicy("web", func(p *policy.Policy) { p.Balancer, p.Scope.Zone = policy.BalancerRoundRobin, policy.ZonePrefer })
	m.getAll(40, "http://web.mesh/", "a")
	for _, c := range all {
		if n, there := c.served.Load(), c.endpoint.Node != "c"; n > 0 != there {
			t.Errorf("%s served %d requests of another node in zone east", c.endpoint.ID(), n)
		}
	}
	m.quiet()
}
