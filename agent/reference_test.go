package agent

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

var rewrite = flag.Bool("rewrite", false, "write docs/reference/metrics.md anew")

const metricsPage = "../docs/reference/metrics.md"

func TestMetricsReference(t *testing.T) {
	a := newTestAgent(t)
	want := metricsReference(t, a.metrics)
	if *rewrite {
		if err := os.WriteFile(metricsPage, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(metricsPage)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("%s is out of date; run go test ./agent -run Reference -rewrite (- code, + page):\n%s", metricsPage, diff)
	}
}

func TestMetricsAreLintClean(t *testing.T) {
	problems, err := testutil.GatherAndLint(newTestAgent(t).metrics)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

func newTestAgent(t *testing.T) *Agent {
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	const nobody = `{"clusters":[{"name":"a","cluster":{"server":"http://127.0.0.1:1"}}],"contexts":[{"name":"a","context":{"cluster":"a"}}],"current-context":"a"}`
	if err := os.WriteFile(kubeconfig, []byte(nobody), 0o600); err != nil {
		t.Fatal(err)
	}
	a, err := New(Config{
		Node: "test", Etcd: []string{"127.0.0.1:2379"}, DataDir: t.TempDir(), CA: t.TempDir(),
		Kubernetes: true, Kubeconfig: kubeconfig,
	})
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// metricsReference describes the agent's own metrics as a page.
func metricsReference(t *testing.T, r *prometheus.Registry) string {
	form := regexp.MustCompile(`fqName: "(\w+)", help: "(.*)", unit: ".*", constLabels: \{.*\}, variableLabels: \{(.*)\}\}`)
	kinds := gatheredKinds(t, r)
	var rows []string
	for _, d := range descriptions(r) {
		if m := form.FindStringSubmatch(d.String()); m != nil && strings.HasPrefix(m[1], "headroom_") {
			kind, found := kinds[m[1]]
			if !found {
				kind = vectorKind(t, r, d)
			}
			rows = append(rows, fmt.Sprintf("| `%s` | %s | %s | %s |\n", m[1], kind, strings.ReplaceAll(m[3], ",", ", "), m[2]))
		}
	}
	slices.Sort(rows)
	return "# Metrics\n\nWhat an agent serves on `/metrics`, besides the usual `go_*` and `process_*`. No label holds an address: series stay few.\n\n" +
		"| metric | type | labels | meaning |\n|---|---|---|---|\n" + strings.Join(rows, "")
}

// descriptions are those of all metrics. The registry is free when they are returned, to be asked for more.
func descriptions(r *prometheus.Registry) (all []*prometheus.Desc) {
	c := make(chan *prometheus.Desc)
	go func() { r.Describe(c); close(c) }()
	for d := range c {
		all = append(all, d)
	}
	return all
}

// gatheredKinds are the types of the metrics that have series already.
func gatheredKinds(t *testing.T, r prometheus.Gatherer) map[string]string {
	t.Helper()
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	kinds := map[string]string{}
	for _, f := range families {
		kinds[f.GetName()] = strings.ToLower(f.GetType().String())
	}
	return kinds
}

// vectorKind is the type of the metrics of a vector, which need not have any yet.
func vectorKind(t *testing.T, r prometheus.Registerer, d *prometheus.Desc) string {
	t.Helper()
	taken, ok := errors.AsType[prometheus.AlreadyRegisteredError](r.Register(claim{d}))
	if !ok {
		t.Fatalf("what is registered for %s is not one vector", d)
	}
	switch taken.ExistingCollector.(type) {
	case *prometheus.CounterVec:
		return "counter"
	case *prometheus.GaugeVec:
		return "gauge"
	case *prometheus.HistogramVec:
		return "histogram"
	}
	t.Fatalf("%s has no series, and is a %T, whose type is not known", d, taken.ExistingCollector)
	return ""
}

// claim is a collector that only claims a description, so that the registry tells which one has it.
type claim struct{ *prometheus.Desc }

func (c claim) Describe(to chan<- *prometheus.Desc) { to <- c.Desc }
func (claim) Collect(chan<- prometheus.Metric)      {}
