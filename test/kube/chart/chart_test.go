//go:build chart

// Package chart tests the chart where no cluster is.
package chart

import (
	"bytes"
	"cmp"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
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
		_, err := run("helm", "template", "headroom", chart, "--values", values)
		if err == nil {
			t.Errorf("%s: nothing is said of it", values)
			continue
		}
		_, message, _ := strings.Cut(err.Error(), "Error: ")
		message, _, _ = strings.Cut(message, "\nUse --debug")
		message = regexp.MustCompile(`execution error at \(.*?\): `).ReplaceAllString(strings.TrimSpace(message)+"\n", "")
		file := strings.TrimSuffix(values, ".yaml") + ".txt"
		if *rewrite {
			if err := os.WriteFile(file, []byte(message), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if message != string(want) {
			t.Errorf("%s: got\n%s\nwant (-rewrite takes what it got)\n%s", values, message, want)
		}
	}
}

// TestDashboard wants the dashboard to show metrics that there are.
func TestDashboard(t *testing.T) {
	dashboard, err := os.ReadFile(chart + "/files/dashboard.json")
	reference, err2 := os.ReadFile(root + "/docs/reference/metrics.md")
	if err := cmp.Or(err, err2); err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile(`headroom_[a-z_]+`).FindAllString(string(dashboard), -1)
	if len(found) < 10 {
		t.Errorf("it shows %v only", found)
	}
	for _, name := range found {
		if !strings.Contains(string(reference), "`"+strings.TrimSuffix(name, "_bucket")+"`") {
			t.Errorf("there is no metric %s", name)
		}
	}
}
