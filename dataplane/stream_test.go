package dataplane_test

import (
	"io"
	"net/http"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
)

func noChange(*policy.Policy) {}

// echo answers with the request's body.
func echo(w http.ResponseWriter, r *http.Request) {
	http.NewResponseController(w).EnableFullDuplex()
	io.Copy(flushing{w}, r.Body)
}

type flushing struct{ http.ResponseWriter }

func (f flushing) Write(p []byte) (int, error) {
	n, err := f.ResponseWriter.Write(p)
	http.NewResponseController(f.ResponseWriter).Flush()
	return n, err
}

// endpointView returns how a node sees the only endpoint of a service.
func endpointView(n *node, service registry.ServiceName) *meshv1.EndpointView {
	return n.Observe(service).Outbound[0].Endpoints[0]
}
