package scenario_test

import (
	"strings"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/sim/scenario"
)

// A claim is what a scenario must show, beside what its source says.
type claim struct {
	what      string
	source    float64
	low, high float64 // what is still true to the source
	got       func(results) float64
}

// results are the rows of a scenario by "rule", or "rule at point".
type results map[string]scenario.Row

// above is no upper bound.
const above = 1e9

// check plays a built-in scenario, with some fields set if that makes it faster without changing what it shows, and holds
// it to claims. A new scenario is a file in builtin, whose comments say where its figures come from and what was chosen
// where the source is silent, and a test like those below.
func check(t *testing.T, name string, settings []scenario.Setting, claims ...claim) {
	t.Helper()
	s, err := scenario.Builtin(name)
	if err != nil {
		t.Fatal(err)
	}
	if s, err = s.With(settings); err != nil {
		t.Fatal(err)
	}
	cases, err := s.Plan(nil)
	if err != nil {
		t.Fatal(err)
	}
	rows, err := scenario.Run(t.Context(), cases, scenario.Options{Seed: 1})
	if err != nil {
		t.Fatal(err)
	}
	r := results{}
	for _, row := range rows {
		r[strings.TrimSuffix(row.Rule+" at "+row.Point, " at ")] = row
	}
	for _, c := range claims {
		got := c.got(r)
		t.Logf("%s: %s is %.4g, in the source %.4g", name, c.what, got, c.source)
		if !(got >= c.low && got <= c.high) {
			t.Errorf("%s: %s is %.4g, want from %.4g to %.4g; in the source it is %.4g", name, c.what, got, c.low, c.high, c.source)
		}
	}
}

func p99(rule string) func(results) float64 { return func(r results) float64 { return r[rule].P99MS } }

func errorRate(rule string) func(results) float64 {
	return func(r results) float64 { return r[rule].ErrorRate }
}

func TestFastSlow(t *testing.T) {
	toSlow := func(rule string) func(results) float64 {
		return func(r results) float64 { return r[rule].Groups[1].Share }
	}
	check(t, "fast-slow", []scenario.Setting{{Path: "duration", Value: "40s"}},
		claim{"p50 of prequal, ms", 53, 52, 54, func(r results) float64 { return r["prequal"].P50MS }},
		claim{"p99 of round robin, ms", 807.3, 767, 848, p99("round_robin")},
		claim{"p99 of least loaded, ms", 802.8, 763, 843, p99("least_loaded")},
		claim{"p99 of prequal, ms", 94.2, 50, 94.2, p99("prequal")},
		claim{"p99 of round robin over that of prequal", 8.57, 8.57, above, func(r results) float64 { return r["round_robin"].P99MS / r["prequal"].P99MS }},
		claim{"share of the slow replicas under round robin", 0.125, 0.124, 0.126, toSlow("round_robin")},
		claim{"share of the slow replicas under least loaded", 0.013, 0.010, 0.017, toSlow("least_loaded")},
		claim{"requests a second to each slow replica under prequal", 0.1, 0, 0.2, func(r results) float64 {
			return r["prequal"].Groups[1].Share * 500 / 2
		}},
	)
}

func TestFastSlowRamp(t *testing.T) {
	check(t, "fast-slow-ramp", []scenario.Setting{{Path: "load.stages[0].lasts", Value: "40s"}},
		claim{"p99 of round robin, ms", 831.6, 790, 873, p99("round_robin")},
		claim{"p99 of prequal, ms", 123.4, 50, 123.4, p99("prequal")},
		claim{"p99 of round robin over that of prequal", 6.74, 6.74, above, func(r results) float64 { return r["round_robin"].P99MS / r["prequal"].P99MS }},
	)
}

func TestStall(t *testing.T) {
	check(t, "stall", nil,
		claim{"late under round robin", 0.05, 0.04, 0.06, errorRate("round_robin")},
		claim{"late under least loaded", 0.01, 0.005, 0.015, errorRate("least_loaded")},
		claim{"late under two choices", 0.01, 0.005, 0.015, errorRate("p2c")},
		claim{"late under peak EWMA", 0.001, 0.0005, 0.002, errorRate("peak_ewma")},
		claim{"late under prequal over late under peak EWMA", 1, 0, 1.3, func(r results) float64 {
			return r["prequal"].ErrorRate / r["peak_ewma"].ErrorRate
		}},
	)
}

func TestSinkhole(t *testing.T) {
	check(t, "sinkhole", []scenario.Setting{{Path: "duration", Value: "20s"}},
		claim{"failures with error aversion over those without", 0.15, 0, 0.15, func(r results) float64 {
			return r["prequal"].ErrorRate / r["prequal without aversion"].ErrorRate
		}},
	)
}

// TestBuiltinsRun plays a moment of every scenario at every point under every rule.
func TestBuiltinsRun(t *testing.T) {
	for _, name := range scenario.Names() {
		t.Run(name, func(t *testing.T) {
			s, err := scenario.Builtin(name)
			if err != nil {
				t.Fatal(err)
			}
			if s.Name() != name || s.Description() == "" || name == "list" || name == "show" {
				t.Errorf("its name is %q, what it shows %q", s.Name(), s.Description())
			}
			cases, err := s.Plan(nil)
			if err != nil {
				t.Fatal(err)
			}
			for i := range cases {
				cases[i].Config.Warmup, cases[i].Config.Duration = 0, 200*time.Millisecond
			}
			rows, err := scenario.Run(t.Context(), cases, scenario.Options{})
			if err != nil {
				t.Fatal(err)
			}
			for _, r := range rows {
				if r.Requests == 0 {
					t.Errorf("%s %s: no requests", r.Rule, r.Point)
				}
			}
		})
	}
}

func TestUnknownBuiltin(t *testing.T) {
	_, err := scenario.Builtin("fast-slo")
	if err == nil || !strings.Contains(err.Error(), "did you mean fast-slow?") || !strings.Contains(err.Error(), "sinkhole") {
		t.Errorf("got %v", err)
	}
}
