package agent

import (
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
	want := metricsReference(a.metrics)
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
func metricsReference(r *prometheus.Registry) string {
	descriptions := make(chan *prometheus.Desc)
	go func() { r.Describe(descriptions); close(descriptions) }()
	form := regexp.MustCompile(`fqName: "(\w+)", help: "(.*)", unit: ".*", constLabels: \{.*\}, variableLabels: \{(.*)\}\}`)
	var rows []string
	for d := range descriptions {
		if m := form.FindStringSubmatch(d.String()); m != nil && strings.HasPrefix(m[1], "headroom_") {
			rows = append(rows, fmt.Sprintf("| `%s` | %s | %s | %s |\n", m[1], kind(m[1]), strings.ReplaceAll(m[3], ",", ", "), m[2]))
		}
	}
	slices.Sort(rows)
	return "# Metrics\n\nWhat an agent serves on `/metrics`, besides the usual `go_*` and `process_*`. No label holds an address: series stay few.\n\n" +
		"| metric | type | labels | meaning |\n|---|---|---|---|\n" + strings.Join(rows, "")
}

// kind tells the type by the name, which promlint holds to the conventions.
func kind(name string) string {
	switch {
	case strings.HasSuffix(name, "_total"):
		return "counter"
	case strings.HasSuffix(name, "_expiry_seconds"), strings.HasSuffix(name, "_timestamp_seconds"):
		return "gauge"
	case strings.HasSuffix(name, "_seconds"):
		return "histogram"
	}
	return "gauge"
}
