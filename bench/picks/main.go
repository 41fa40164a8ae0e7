// Picks measures what a pick costs under every balancing rule, and writes it down in bench/README.md and docs/balancers.md.
// Run it from the root of the repository, on a machine that has nothing else to do: go run ./bench/picks
package main

import (
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintf(os.Stderr, "picks: %v\n", err)
		os.Exit(1)
	}
}

func run() error {
	measure := exec.Command("go", "test", "-run", "^$", "-bench", "Pick", "-cpu", "1,2", "-benchtime", "100ms", "-count", "10", "./dataplane/balancer")
	measure.Stderr = os.Stderr
	out, err := measure.Output()
	if err != nil {
		return fmt.Errorf("run the benchmark: %w\n%s", err, out)
	}
	rules, err := parse(string(out))
	if err != nil {
		return err
	}
	if err := rewrite("bench/README.md", func(text string) string { return withTable(text, rules) }); err != nil {
		return err
	}
	return rewrite("docs/balancers.md", func(text string) string { return withColumn(text, rules) })
}

func rewrite(name string, change func(string) string) error {
	text, err := os.ReadFile(name)
	if err == nil {
		err = os.WriteFile(name, []byte(change(string(text))), 0o666)
	}
	if err != nil {
		return fmt.Errorf("write down the figures: %w", err)
	}
	return nil
}

// rule is what was measured of a balancing rule.
type rule struct {
	name        string
	one, two    []float64 // nanoseconds a request with one processor and with two
	allocations int
}

var result = regexp.MustCompile(`(?m)^BenchmarkPick/([a-z0-9_]+?)(-2)?\s+\d+\s+([\d.]+) ns/op.*?(\d+) allocs/op$`)

// parse reads what go test prints.
func parse(out string) ([]rule, error) {
	var rules []rule
	for _, found := range result.FindAllStringSubmatch(out, -1) {
		i := slices.IndexFunc(rules, func(r rule) bool { return r.name == found[1] })
		if i < 0 {
			rules = append(rules, rule{name: found[1]})
			i = len(rules) - 1
		}
		ns, _ := strconv.ParseFloat(found[3], 64) // the expression sees to it
		allocations, _ := strconv.Atoi(found[4])
		if r := &rules[i]; found[2] == "" {
			r.one = append(r.one, ns)
		} else {
			r.two = append(r.two, ns)
		}
		rules[i].allocations = max(rules[i].allocations, allocations)
	}
	for _, r := range rules {
		if len(r.one) == 0 || len(r.two) == 0 {
			return nil, fmt.Errorf("read the figures of %s: want some with one processor and some with two", r.name)
		}
	}
	if len(rules) == 0 {
		return nil, fmt.Errorf("there are no figures in what the benchmark printed: %q", out)
	}
	return rules, nil
}

func median(runs []float64) float64 {
	runs = slices.Sorted(slices.Values(runs))
	return (runs[(len(runs)-1)/2] + runs[len(runs)/2]) / 2
}

const head = "| balancer | 1 processor | 2 processors | range, 1 | range, 2 | allocations |\n|---|--:|--:|--:|--:|--:|\n"

// withTable replaces the lines of the table that head begins.
func withTable(text string, rules []rule) string {
	before, rest, _ := strings.Cut(text, head)
	for strings.HasPrefix(rest, "|") {
		_, rest, _ = strings.Cut(rest, "\n")
	}
	var table strings.Builder
	for _, r := range rules {
		fmt.Fprintf(&table, "| `%s` | %.0f | %.0f | %.0f to %.0f | %.0f to %.0f | %d |\n", r.name, median(r.one), median(r.two),
			slices.Min(r.one), slices.Max(r.one), slices.Min(r.two), slices.Max(r.two), r.allocations)
	}
	return before + head + table.String() + rest
}

// column is that of the time a pick takes, in the table of docs/balancers.md.
const column = 5

// withColumn replaces the times in the lines of the table that begin with the name of a rule.
func withColumn(text string, rules []rule) string {
	lines := strings.Split(text, "\n")
	for _, r := range rules {
		i := slices.IndexFunc(lines, func(line string) bool { return strings.HasPrefix(line, "| [`"+r.name+"`](") })
		if i < 0 {
			continue
		}
		cells := strings.Split(lines[i], "|")
		cells[column] = fmt.Sprintf(" %.0f ", median(r.one))
		lines[i] = strings.Join(cells, "|")
	}
	return strings.Join(lines, "\n")
}
