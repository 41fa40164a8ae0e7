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
