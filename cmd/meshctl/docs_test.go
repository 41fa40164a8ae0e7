package main

import (
	"io"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestReferenceIsUpToDate(t *testing.T) {
	committed, err := os.ReadFile("../../docs/reference/meshctl.md")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(reference(new(app).root()), string(committed)); diff != "" {
		t.Errorf("docs/reference/meshctl.md is out of date, run go run ./docs/gen:\n%s", diff)
	}
}

var policySet = regexp.MustCompile(`(?m)^meshctl (policy set [a-z][^#\n]*)`)

// TestDocumentedPoliciesAreAccepted sets the policies that the documentation shows.
func TestDocumentedPoliciesAreAccepted(t *testing.T) {
	server, agent, err := newFakeAgent().listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Stop()
	for page, least := range map[string]int{"README.md": 1, "docs/balancers.md": 15, "docs/guides/policies.md": 4} {
		text, err := os.ReadFile("../../" + page)
		if err != nil {
			t.Fatal(err)
		}
		found := policySet.FindAllStringSubmatch(strings.ReplaceAll(string(text), "\\\n", ""), -1)
		if len(found) < least {
			t.Errorf("%s shows %d commands that set a policy, want %d at least", page, len(found), least)
		}
		for _, f := range found {
			if err := meshctl(io.Discard, append(strings.Fields(f[1]), "--agent", agent)...); err != nil {
				t.Errorf("%s: meshctl %s: %v", page, f[1], err)
			}
		}
	}
}

// TestDocumentedSimulationsAreTrue wants what the documentation shows of a scenario to be what comes of it.
func TestDocumentedSimulationsAreTrue(t *testing.T) {
	for page, scenario := range map[string]string{"README.md": "stall", "docs/guides/simulate.md": "fast-slow"} {
		text, err := os.ReadFile("../../" + page)
		if err != nil {
			t.Fatal(err)
		}
		var out strings.Builder
		if err := meshctl(&out, "simulate", scenario); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(text), "```\n"+out.String()+"```\n") {
			t.Errorf("%s does not show what meshctl simulate %s does:\n%s", page, scenario, &out)
		}
	}
}

func meshctl(out io.Writer, args ...string) error {
	cmd := new(app).root()
	cmd.SetArgs(args)
	cmd.SetOut(out)
	cmd.SetErr(io.Discard)
	return cmd.Execute()
}
