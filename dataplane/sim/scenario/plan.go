package scenario

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/dataplane/sim"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/policy/document"
)

// Oracle is the name of the rule that sees everything.
const Oracle = "oracle"

// Case is one rule at one point of a scenario.
type Case struct {
	Scenario, Rule, Point string
	// Load is what the scenario states: a share of the capacity, requests a second, or the number of users. Of stages, it
	// is the mean over time.
	Load float64
	// Swept is the path of the field with another value at each point; "" if it isn't a single one.
	Swept  string
	Config sim.Config
}

// Rule is a rule to play.
type Rule struct {
	Name string
	// Policy is what the rule does. If nil, it is what the scenario says of the name; see Scenario.Rule.
	Policy *policy.Policy
}

// Plan returns all cases to play, points before rules. Without rules they are the scenario's own. Its error is a
// document.Problems.
func (s Scenario) Plan(rules []Rule) ([]Case, error) {
	if len(rules) == 0 {
		for _, name := range s.ruleNames() {
			rules = append(rules, Rule{Name: name})
		}
	}
	var problems document.Problems
	points, err := s.points()
	if err != nil {
		addAll(&problems, err)
		points = []point{{doc: s.doc}} // which may have problems of its own
	}
	var cases []Case
	for _, p := range points {
		atPoint, err := p.plan(rules)
		if err != nil {
			addAll(&problems, p.locate(err))
			break // or each point would tell it again
		}
		cases = append(cases, atPoint...)
	}
	for i := range cases {
		cases[i].Swept = s.doc.GetSpec().GetSweep().GetPath()
	}
	return cases, problems.Err()
}

// point is the scenario with some fields set.
type point struct {
	name string
	doc  *meshv1.Scenario
	path string // of what sets the fields; "" if it is the scenario as it is
	err  error  // why they can't be set
}

// locate says at which point there are problems.
func (p point) locate(err error) error {
	if p.path == "" {
		return err
	}
	var problems document.Problems
	for line := range strings.SplitSeq(err.Error(), "\n") {
		problems.Add(p.path, "%s", line)
	}
	return problems
}

// points returns the points of the sweep, or the scenario as the only one.
func (s Scenario) points() ([]point, error) {
	sweep := s.doc.GetSpec().GetSweep()
	if sweep == nil {
		return []point{{doc: s.doc}}, nil
	}
	if err := checkSweep(sweep); err != nil {
		return nil, err
	}
	var points []point
	for i, v := range sweep.Values {
		p := point{name: plainText(v), path: fmt.Sprintf("spec.sweep.values[%d]", i)}
		points = append(points, p.with(s.doc, map[string]*structpb.Value{sweep.Path: v}))
	}
	for i, q := range sweep.Points {
		p := point{name: q.Name, path: fmt.Sprintf("spec.sweep.points[%d].set", i)}
		points = append(points, p.with(s.doc, q.Set))
	}
	for _, p := range points {
		if p.err != nil {
			return nil, p.locate(p.err)
		}
	}
	return points, nil
}

// mostCases is how many points there can be, or rules.
const mostCases = 200

// plainText writes a value as the name of a point.
func plainText(v *structpb.Value) string {
	if text, ok := v.GetKind().(*structpb.Value_StringValue); ok {
		return text.StringValue
	}
	text, _ := json.Marshal(v.AsInterface()) // it came from JSON
	return string(text)
}

func checkSweep(sweep *meshv1.ScenarioSweep) error {
	var problems document.Problems
	if byPath := sweep.Path != ""; byPath != (len(sweep.Values) > 0) || byPath == (len(sweep.Points) > 0) {
		problems.Add("spec.sweep", "want a path with values, or else points")
	}
	if n := len(sweep.Values) + len(sweep.Points); n > mostCases {
		problems.Add("spec.sweep", "want %d points at most, got %d", mostCases, n)
		return problems
	}
	names := map[string]bool{}
	for i, p := range sweep.Points {
		if name := p.GetName(); !isName(name) || names[name] {
			problems.Add(fmt.Sprintf("spec.sweep.points[%d].name", i), "want a name that no other point has, %s, got %q", nameForm, name)
		}
		names[p.GetName()] = true
	}
	return problems.Err()
}

// with returns p with the fields of doc set.
func (p point) with(doc *meshv1.Scenario, values map[string]*structpb.Value) point {
	var assignments []assignment
	for _, path := range slices.Sorted(maps.Keys(values)) {
		assignments = append(assignments, assignment{path, values[path].AsInterface()})
	}
	doc = proto.CloneOf(doc)
	doc.Spec.Sweep = nil
	p.doc, p.err = assign(doc, assignments)
	if p.err == nil && p.doc.GetSpec().GetSweep() != nil {
		p.err = document.Problems{"a point can't have a sweep of its own"}
	}
	return p
}

// plan returns the cases at a point.
func (p point) plan(rules []Rule) ([]Case, error) {
	var problems document.Problems
	spec := p.doc.GetSpec()
	if spec == nil {
		spec = new(meshv1.ScenarioSpec)
	}
	base := read(spec, &problems)
	own := p.readRules(spec, &problems)
	var cases []Case
	for _, r := range rules {
		c := Case{Scenario: p.doc.GetMetadata().GetName(), Rule: r.Name, Point: p.name, Config: base}
		own.apply(r, &c.Config, &problems)
		c.Load = statedLoad(c.Config.Load)
		cases = append(cases, c)
	}
	if err := problems.Err(); err != nil {
		return nil, err
	}
	for _, c := range cases {
		if err := c.Config.Validate(); err != nil {
			return nil, document.Problems{"spec: " + strings.ReplaceAll(err.Error(), "\n", "; ")}
		}
	}
	return cases, nil
}

// statedLoad returns the load as the scenario has it.
func statedLoad(l sim.Load) float64 {
	if l.Users > 0 {
		return float64(l.Users)
	}
	requests, time := 0.0, 0.0
	for _, s := range l.Stages {
		end := s.Rate
		if s.To > 0 {
			end = s.To
		}
		requests += (s.Rate + end) / 2 * s.Lasts.Seconds()
		time += s.Lasts.Seconds()
	}
	if time == 0 && len(l.Stages) > 0 {
		return l.Stages[0].Rate
	}
	return requests / max(time, 1e-9)
}
