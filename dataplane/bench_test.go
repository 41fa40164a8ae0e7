package dataplane_test

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
)

// BenchmarkRequest sends one small request after another: what a hop costs in time and garbage, client and replica
// included. "direct" is without the mesh.
func BenchmarkRequest(b *testing.B) {
	for _, way := range []struct {
		name    string
		replica registry.NodeName
	}{{"direct", ""}, {"same node", "a"}, {"other node", "b"}} {
		b.Run(way.name, func(b *testing.B) {
			m := newMesh(b, "a", "b")
			target, client := "http://web.mesh/", m.nodes["a"].client
			s, _ := m.serve("web", max(way.replica, "a"), func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "ok") })
			if way.replica == "" {
				target, client = s.URL, s.Client()
			}
			post(b, client, target)
		})
	}
}

// BenchmarkAsking sends one small request after another to replicas on another node, by rules that ask there first and by
// one that doesn't.
func BenchmarkAsking(b *testing.B) {
	for _, rule := range []policy.Balancer{
		policy.BalancerPrequal, policy.BalancerPrequalSync, policy.BalancerLateBinding, policy.BalancerJoinIdleQueue,
	} {
		b.Run(string(rule), func(b *testing.B) {
			m := newMesh(b, "a", "b")
			for range 3 {
				m.serve("web", "b", func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "ok") })
			}
			m.setPolicy("web", func(p *policy.Policy) { p.Balancer = rule })
			post(b, m.nodes["a"].client, "http://web.mesh/")
		})
	}
}

func post(b *testing.B, client *http.Client, target string) {
	b.ReportAllocs()
	for b.Loop() {
		resp, err := client.Post(target, "text/plain", strings.NewReader("hello"))
		if err != nil {
			b.Fatal(err)
		}
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		if resp.StatusCode != 200 {
			b.Fatal(resp.Status)
		}
	}
}
