package dataplane_test

import (
	"io"
	"net/http"
	"strings"
	"testing"

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
		})
	}
}
