package evidence_test

import (
	"runtime/debug"
	"slices"
	"testing"

	"github.com/headroom-mesh/headroom/dataplane/sim/evidence"
	"github.com/headroom-mesh/headroom/dataplane/sim/scenario"
)

// TestClaims plays every built-in scenario and holds it to what its source says. Not with the race detector: a simulation is
// one goroutine, and this is minutes of them.
func TestClaims(t *testing.T) {
	if info, _ := debug.ReadBuildInfo(); slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"}) {
		t.Skip("make test plays the scenarios without the race detector")
	}
	for _, e := range evidence.All() {
		t.Run(e.Scenario, func(t *testing.T) {
			rows, err := e.Play(t.Context(), e.Quick, scenario.Options{Seed: 1})
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range e.Claims {
				check(t, c, rows)
			}
		})
	}
}

func check(t *testing.T, c evidence.Claim, rows evidence.Rows) {
	t.Helper()
	got, err := c.Value(rows)
	if err != nil {
		t.Errorf("%s: %v", c.What(), err)
		return
	}
	t.Logf("%s: %s, in the source %s", c.What(), c.Format(got), c.Source)
	switch {
	case !c.Holds(got) && c.Missed == "":
		t.Errorf("%s: got %s, want %s; in the source it is %s", c.What(), c.Format(got), c.Bounds(), c.Source)
	case c.Holds(got) && c.Missed != "":
		t.Errorf("%s: got %s, as wanted, though the claim is marked as missed: %s", c.What(), c.Format(got), c.Missed)
	}
}

func TestEveryScenarioHasEvidence(t *testing.T) {
	var names []string
	for _, e := range evidence.All() {
		names = append(names, e.Scenario)
		if len(e.Claims) == 0 {
			t.Errorf("%s: no claims", e.Scenario)
		}
	}
	builtin := scenario.Names()
	slices.Sort(names)
	slices.Sort(builtin)
	if !slices.Equal(names, builtin) {
		t.Errorf("there is evidence of %v, and there are the scenarios %v: evidence.All is to name each", names, builtin)
	}
}
