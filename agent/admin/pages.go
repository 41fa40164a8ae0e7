package admin

import (
	"fmt"
	"net/http"
	"net/http/pprof"
	"strings"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
)

const index = `/metrics      metrics for Prometheus
/livez        whether the agent runs
/readyz       whether the agent is ready, and what is missing if not
/debug/pprof/ profiles
`

// pages serves what monitoring asks for.
func (a *Admin) pages() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) { plain(w, http.StatusOK, index) })
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) { plain(w, http.StatusOK, "ok\n") })
	mux.HandleFunc("GET /readyz", a.readyz)
	mux.Handle("GET /metrics", a.metricsHandler())
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	return mux
}

// metricsPage is what others get to see.
func (a *Admin) metricsPage() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", a.metricsHandler())
	return mux
}

func (a *Admin) metricsHandler() http.Handler {
	return promhttp.HandlerFor(a.cfg.Metrics, promhttp.HandlerOpts{})
}

func (a *Admin) readyz(w http.ResponseWriter, _ *http.Request) {
	readiness := a.readiness()
	var b strings.Builder
	for _, c := range readiness.Checks {
		switch {
		case !c.Ok:
			fmt.Fprintf(&b, "[-]%s: %s\n", c.Name, c.Note)
		case c.Note != "":
			fmt.Fprintf(&b, "[+]%s ok (%s)\n", c.Name, c.Note)
		default:
			fmt.Fprintf(&b, "[+]%s ok\n", c.Name)
		}
	}
	if readiness.Ready {
		plain(w, http.StatusOK, b.String()+"ready\n")
	} else {
		plain(w, http.StatusServiceUnavailable, b.String()+"not ready\n")
	}
}

func (a *Admin) readiness() *meshv1.GetReadinessResponse {
	readiness := &meshv1.GetReadinessResponse{Ready: true}
	for _, c := range a.cfg.Ready {
		note, err := c.Func()
		if err != nil {
			readiness.Ready, note = false, err.Error()
		}
		readiness.Checks = append(readiness.Checks, &meshv1.ReadinessCheck{Name: c.Name, Ok: err == nil, Note: note})
	}
	return readiness
}

func plain(w http.ResponseWriter, code int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(code)
	_, _ = w.Write([]byte(text)) // who asked may be gone
}
