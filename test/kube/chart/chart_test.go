//go:build chart

// Package chart tests the chart where no cluster is.
package chart

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var rewrite = flag.Bool("rewrite", false, "write the messages in testdata anew")

const root = "../../.."

func TestMain(m *testing.M) { os.Exit(runWithTools(m)) }

// runWithTools builds what the tests call, unless it was built before.
func runWithTools(m *testing.M) int {
	for _, what := range []string{"cluster", "checks"} {
		bin, err := run("../build.sh", what)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		os.Setenv("PATH", strings.TrimSpace(bin)+":"+os.Getenv("PATH"))
	}
	return m.Run()
}

// run returns what a program prints.
func run(program string, args ...string) (string, error) {
	var out, messages bytes.Buffer
	c := exec.Command(program, args...)
	c.Stdout, c.Stderr = &out, &messages
	if err := c.Run(); err != nil {
		return out.String(), fmt.Errorf("%s %s: %w\n%s%s", program, strings.Join(args, " "), err, &messages, &out)
	}
	return out.String(), nil
}

func must(t *testing.T, program string, args ...string) string {
	t.Helper()
	out, err := run(program, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func glob(t *testing.T, pattern string) []string {
	t.Helper()
	files, err := filepath.Glob(pattern)
	if err != nil || len(files) == 0 {
		t.Fatalf("%s: %v, %v", pattern, files, err)
	}
	return files
}

const chart = root + "/deploy/helm"

// TestExamples wants Kubernetes to know all fields of what the chart makes of its own values and of all examples: neither
// helm lint nor a dry run finds those that are misspelt.
func TestExamples(t *testing.T) {
	for _, values := range append(glob(t, chart+"/examples/*.yaml"), chart+"/values.yaml") {
		t.Run(filepath.Base(values), func(t *testing.T) {
			must(t, "helm", "lint", "--strict", chart, "--values", values)
			out := must(t, "helm", "template", "headroom", chart, "--namespace", "headroom-system", "--values", values)
			validate(t, out)
		})
	}
}

// TestSameEachTime wants what is rendered without a cluster to stay the same where all Secrets are there.
func TestSameEachTime(t *testing.T) {
	for _, values := range []string{"gitops", "external-etcd"} {
		render := func() string {
			return must(t, "helm", "template", "headroom", chart, "--values", chart+"/examples/"+values+".yaml")
		}
		if first := render(); first != render() || strings.Contains(first, "\nkind: Secret\n") {
			t.Errorf("%s: it differs from one time to the next, or makes a Secret", values)
		}
	}
	if out := must(t, "helm", "template", "headroom", chart); strings.Count(out, "each time it is another one") != 4 {
		t.Error("it is not said of all Secrets that they differ from one time to the next")
	}
}

// TestHelm3 wants helm 3 to make the same of the chart, where HELM3 says where one is.
func TestHelm3(t *testing.T) {
	helm3 := os.Getenv("HELM3")
	if helm3 == "" {
		t.Skip("HELM3 is not set to a helm 3")
	}
	for _, values := range glob(t, chart+"/examples/*.yaml") {
		must(t, helm3, "lint", "--strict", chart, "--values", values)
		args := []string{"template", "headroom", chart, "--kube-version", "1.37.2", "--values", values}
		if third, fourth := objects(must(t, helm3, args...)), objects(must(t, "helm", args...)); !slices.Equal(third, fourth) {
			t.Errorf("%s: helm 3 makes\n%s\nand helm 4\n%s", values, third, fourth)
		}
	}
	for _, values := range glob(t, "testdata/wrong/*.yaml") {
		args := []string{"template", "headroom", chart, "--kube-version", "1.37.2", "--values", values}
		_, third := run(helm3, args...)
		_, fourth := run("helm", args...)
		if got, want := message(third), message(fourth); got != want {
			t.Errorf("%s: helm 3 says\n%s\nand helm 4\n%s", values, got, want)
		}
	}
}

// objects returns those of a rendered chart, without an order and without what is made by chance.
func objects(manifests string) []string {
	manifests = regexp.MustCompile(`(key|crt): \S{40,}`).ReplaceAllString(manifests, "$1: ...")
	all := strings.Split(manifests, "---\n")
	for i := range all {
		all[i] = strings.TrimSpace(all[i])
	}
	slices.Sort(all)
	return all
}

// TestMisspeltFieldIsFound tests the test.
func TestMisspeltFieldIsFound(t *testing.T) {
	out := must(t, "helm", "template", "headroom", chart)
	wrong := strings.Replace(out, "hostPID:", "hostPIDD:", 1)
	if message, err := kubectlValidate(t, wrong); err == nil || !strings.Contains(message, "hostPIDD") {
		t.Errorf("%v: %s", err, message)
	}
}

func validate(t *testing.T, manifests string) {
	t.Helper()
	if message, err := kubectlValidate(t, manifests); err != nil {
		t.Errorf("%v\n%s", err, message)
	}
}

// kubectlValidate looks at all but PodMonitors, whose schema only the Prometheus operator has.
func kubectlValidate(t *testing.T, manifests string) (string, error) {
	t.Helper()
	helm, err := exec.LookPath("helm")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for i, document := range strings.Split(manifests, "\n---\n") {
		if strings.Contains(document, "\nkind: PodMonitor\n") || !strings.Contains(document, "\nkind: ") {
			continue
		}
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("%02d.yaml", i)), []byte(document), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	out, err := run("kubectl-validate", dir, "--local-schemas", filepath.Join(filepath.Dir(helm), "schemas"), "--output", "json")
	return out, err
}

func TestUnits(t *testing.T) {
	t.Log(must(t, "helm-unittest", "--strict", chart))
}

// TestWrongValues wants each of the files in testdata to be refused, with the message beside it.
func TestWrongValues(t *testing.T) {
	for _, values := range glob(t, "testdata/wrong/*.yaml") {
		_, refusal := run("helm", "template", "headroom", chart, "--values", values)
		if refusal == nil {
			t.Errorf("%s: nothing is said of it", values)
			continue
		}
		file := strings.TrimSuffix(values, ".yaml") + ".txt"
		if *rewrite {
			if err := os.WriteFile(file, []byte(message(refusal)), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if got := message(refusal); got != string(want) {
			t.Errorf("%s: got\n%s\nwant (-rewrite takes what it got)\n%s", values, got, want)
		}
	}
}

// message returns what helm says of values, without where in the chart it says so.
func message(err error) string {
	if err == nil {
		return ""
	}
	_, text, _ := strings.Cut(err.Error(), "Error: ")
	text, _, _ = strings.Cut(text, "\nUse --debug")
	return regexp.MustCompile(`execution error at \(.*?\): `).ReplaceAllString(strings.TrimSpace(text)+"\n", "")
}

// metric is one of the reference.
type metric struct {
	kind   string
	labels []string
}

// metrics returns those that the reference has, and the series of its histograms.
func metrics(t *testing.T) map[string]metric {
	t.Helper()
	reference, err := os.ReadFile(root + "/docs/reference/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]metric{}
	for _, row := range regexp.MustCompile("(?m)^\\| `(\\w+)` \\| (\\w+) \\| ([\\w, ]*) \\|").FindAllStringSubmatch(string(reference), -1) {
		name, m := row[1], metric{row[2], strings.Split(row[3], ", ")}
		if m.kind == "histogram" {
			name, m = name+"_bucket", metric{m.kind, append(m.labels, "le")}
		}
		m.labels = append(m.labels, "instance", "node") // those of the PodMonitor
		all[name] = m
	}
	return all
}

type panel struct {
	ID          int
	Title       string
	Description string
	GridPos     struct{ X, Y, W, H int }
	Datasource  struct{ UID string }
	FieldConfig struct{ Defaults struct{ Unit string } }
	Options     struct{ Legend struct{ ShowLegend bool } }
	Targets     []struct{ Expr, LegendFormat string }
}

// TestDashboard wants the dashboard to show metrics that there are, by labels that they have, and in their units.
func TestDashboard(t *testing.T) {
	text, err := os.ReadFile(chart + "/files/dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	var dashboard struct{ Panels []panel }
	if err := json.Unmarshal(text, &dashboard); err != nil || len(dashboard.Panels) < 10 {
		t.Fatalf("%v: %+v", err, dashboard)
	}
	known, ids, places := metrics(t), map[int]bool{}, map[[2]int]string{}
	for _, p := range dashboard.Panels {
		if ids[p.ID] || p.Title == "" || p.Description == "" || p.Datasource.UID != "${datasource}" || !p.Options.Legend.ShowLegend {
			t.Errorf("panel %d %q: has the number of another one, or no title, description, legend or choice of the source", p.ID, p.Title)
		}
		ids[p.ID] = true
		for x := range p.GridPos.W {
			for y := range p.GridPos.H {
				at := [2]int{p.GridPos.X + x, p.GridPos.Y + y}
				if other := places[at]; other != "" || at[0] >= 24 {
					t.Fatalf("panel %q is over %q, or out of the page", p.Title, other)
				}
				places[at] = p.Title
			}
		}
		for _, target := range p.Targets {
			for _, problem := range problems(known, target.Expr, target.LegendFormat, p.FieldConfig.Defaults.Unit) {
				t.Errorf("panel %q: %s: %s", p.Title, target.Expr, problem)
			}
		}
	}
}

// problems returns what is wrong with a query. It needs no parser, as all queries are of one kind.
func problems(known map[string]metric, query, legend, unit string) (found []string) {
	problem := func(format string, args ...any) { found = append(found, fmt.Sprintf(format, args...)) }
	names := regexp.MustCompile(`headroom_\w+`).FindAllString(query, -1)
	if len(names) == 0 || strings.Count(query, "(") != strings.Count(query, ")") || strings.Count(query, "{") != strings.Count(query, "}") {
		problem("it is of no metric, or has no end")
	}
	grouped := list(regexp.MustCompile(`by \(([\w, ]*)\)`), query)
	selected := list(regexp.MustCompile(`(\w+)(?:=~|!~|!=|=)"`), query)
	for _, name := range names {
		m, there := known[name]
		if !there {
			problem("there is no metric %s", name)
		}
		for _, label := range slices.Concat(grouped, selected) {
			if !slices.Contains(m.labels, label) {
				problem("%s has no label %q", name, label)
			}
		}
		if rated := strings.Contains(query, "rate("+name); rated == (m.kind == "gauge") {
			problem("%s is a %s", name, m.kind)
		}
		if want := strings.Contains(name, "_seconds"); want != (unit == "s") {
			problem("%s is not in %q", name, unit)
		}
	}
	for _, label := range list(regexp.MustCompile(`\{\{(\w+)\}\}`), legend) {
		if !slices.Contains(grouped, label) {
			problem("the legend names %q, which the query leaves out", label)
		}
	}
	return found
}

// list returns the names in all that an expression finds.
func list(form *regexp.Regexp, text string) (names []string) {
	for _, m := range form.FindAllStringSubmatch(text, -1) {
		names = append(names, strings.Split(m[1], ", ")...)
	}
	return names
}

func TestWrongQueriesAreFound(t *testing.T) {
	for query, want := range map[string]string{
		`sum(rate(headroom_outbound_request_total[5m]))`:                              "there is no metric headroom_outbound_request_total",
		`sum by (srevice) (rate(headroom_outbound_requests_total[5m]))`:               `headroom_outbound_requests_total has no label "srevice"`,
		`sum(rate(headroom_outbound_requests_total{status="5xx"}[5m]))`:               `headroom_outbound_requests_total has no label "status"`,
		`sum(rate(headroom_gossip_members[5m]))`:                                      "headroom_gossip_members is a gauge",
		`sum(headroom_outbound_requests_total)`:                                       "headroom_outbound_requests_total is a counter",
		`sum(rate(headroom_outbound_requests_total[5m])`:                              "it is of no metric, or has no end",
		`histogram_quantile(0.5, sum(rate(headroom_probe_duration_seconds_sum[5m])))`: "there is no metric headroom_probe_duration_seconds_sum",
		`sum by (le) (rate(headroom_probe_duration_seconds_bucket{kind="udp"}[5m])) `: `headroom_probe_duration_seconds_bucket has no label "kind"`,
	} {
		if found := problems(metrics(t), query, "", "reqps"); !slices.Contains(found, want) {
			t.Errorf("%s: got %q, want %q", query, found, want)
		}
	}
}
