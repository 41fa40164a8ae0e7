package scenario_test

import (
	"strings"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/sim/scenario"
)

// TestBuiltinsRun plays a moment of every scenario at every point under every rule. What the
// scenarios must show is claimed, and tested, in dataplane/sim/evidence.
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
				c := &cases[i].Config
				c.Warmup, c.Duration = 0, 200*time.Millisecond
				c.Agents[0].Count, c.Replicas[0].Count = min(c.Agents[0].Count, 100), min(c.Replicas[0].Count, 100)
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

// One model of machines, antagonists and service times serves all scenarios of the paper: nothing is tuned to one of them.
func TestScenariosOfThePaperHaveTheSameMachines(t *testing.T) {
	common := func(name string) string {
		text, err := scenario.Text(name)
		if err != nil {
			t.Fatal(err)
		}
		_, rest, found := strings.Cut(string(text), "\n  machines:\n")
		machines, rest, found2 := strings.Cut(rest, "      lasts: ")
		if _, work, _ := strings.Cut(rest, "  work: "); !found || !found2 || !strings.HasPrefix(work, "{distribution: normal,") || !strings.Contains(work, ", spread: 1}\n") {
			t.Fatalf("%s: no machines, or other work", name)
		}
		return machines
	}
	want := common("ramp")
	for _, name := range []string{"nine-rules", "probe-rate", "q-rif", "linear", "antagonists"} {
		if got := common(name); got != want {
			t.Errorf("%s has these machines:\n%s\nramp has these:\n%s", name, got, want)
		}
	}
}
