// Package scenario reads what users want to have simulated, plays it, and ships scenarios of its own. The fields of a
// document, their bounds and their defaults are explained in api/mesh/v1/scenario.proto.
package scenario

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/policy/document"
)

// Kind is what these documents state as their kind.
const Kind = "Scenario"

// Scenario is a document that makes sense.
type Scenario struct{ doc *meshv1.Scenario }

// Parse reads one Scenario in YAML or JSON. Its error tells all that is wrong, one problem a line.
func Parse(data []byte) (Scenario, error) {
	doc := new(meshv1.Scenario)
	if err := document.Decode(data, doc); err != nil {
		return Scenario{}, err
	}
	return checked(doc)
}

// checked refuses what can't be played.
func checked(doc *meshv1.Scenario) (Scenario, error) {
	var problems document.Problems
	head(doc, &problems)
	s := Scenario{doc}
	if _, err := s.Plan(nil); err != nil {
		addAll(&problems, err)
	}
	return s, problems.Err()
}

func head(doc *meshv1.Scenario, problems *document.Problems) {
	if doc.ApiVersion != policy.APIVersion {
		problems.Add("apiVersion", "want %s, got %q", policy.APIVersion, doc.ApiVersion)
	}
	if doc.Kind != Kind {
		problems.Add("kind", "want %s, got %q", Kind, doc.Kind)
	}
	if name := doc.GetMetadata().GetName(); !document.IsLabel(name) {
		problems.Add("metadata.name", "want a DNS label (a-z, 0-9 and '-' inside, 63 characters at most), got %q", name)
	}
}

// Name returns the name of the scenario.
func (s Scenario) Name() string { return s.doc.Metadata.Name }

// Description tells what the scenario shows.
func (s Scenario) Description() string { return s.doc.Spec.Description }

// Source says where the figures of the scenario come from.
func (s Scenario) Source() string { return s.doc.Spec.Source }

// ruleNames returns the names of the scenario's own rules.
func (s Scenario) ruleNames() []string {
	var names []string
	for _, r := range rulesOf(s.doc.Spec) {
		names = append(names, r.Name)
	}
	return names
}

// Setting is a field of a scenario and the value that it shall have.
type Setting struct {
	Path  string // from spec, as in "replicas[0].count"
	Value string // JSON, or else text
}

// With returns the scenario with some fields set. A field that the scenario would sweep is no longer swept.
func (s Scenario) With(settings []Setting) (Scenario, error) {
	doc := proto.CloneOf(s.doc)
	for _, set := range settings {
		if sweep := doc.Spec.Sweep; sweep != nil && sweep.Path != "" && overlap(set.Path, sweep.Path) {
			doc.Spec.Sweep = nil
		}
	}
	var assignments []assignment
	for _, set := range settings {
		assignments = append(assignments, assignment{set.Path, valueOf(set.Value)})
	}
	changed, err := assign(doc, assignments)
	if err != nil {
		return Scenario{}, err
	}
	for _, set := range settings {
		if err := conflict(changed.GetSpec(), set.Path); err != nil {
			return Scenario{}, err
		}
	}
	return checked(changed)
}

// conflict tells of points and rules that set anew what was set.
func conflict(spec *meshv1.ScenarioSpec, path string) error {
	for _, p := range spec.GetSweep().GetPoints() {
		for other := range p.Set {
			if overlap(path, other) {
				return fmt.Errorf("%s: the point %s of the sweep sets %s: leave the points out with sweep=null", path, p.Name, other)
			}
		}
	}
	for i, r := range spec.GetRules() {
		for other := range r.Set {
			if overlap(path, other) {
				return fmt.Errorf("%s: the rule %s sets %s: leave that out with rules[%d].set=null", path, r.Name, other, i)
			}
		}
	}
	return nil
}

// valueOf takes text for what it is in JSON, or else for itself.
func valueOf(text string) any {
	decoder := json.NewDecoder(strings.NewReader(text))
	decoder.UseNumber()
	var v any
	if !json.Valid([]byte(text)) || decoder.Decode(&v) != nil {
		return text
	}
	return v
}

type assignment struct {
	path  string
	value any // of JSON
}

// assign returns doc with fields set.
func assign(doc *meshv1.Scenario, assignments []assignment) (*meshv1.Scenario, error) {
	tree, err := treeOf(doc)
	if err != nil {
		return nil, err
	}
	var problems document.Problems
	for _, a := range assignments {
		steps, err := parsePath(a.path)
		if err == nil {
			makeRoom(tree["spec"], steps)
			_, err = put(tree["spec"], steps, a.value)
		}
		if err != nil {
			problems.Add(a.path, "%v", err)
		}
	}
	if err := problems.Err(); err != nil {
		return nil, err
	}
	text, err := json.Marshal(tree)
	if err != nil {
		return nil, fmt.Errorf("write the scenario as JSON: %w", err)
	}
	changed := new(meshv1.Scenario)
	return changed, document.Decode(text, changed)
}

// treeOf returns doc as JSON has it.
func treeOf(doc *meshv1.Scenario) (tree map[string]any, err error) {
	text, err := protojson.Marshal(doc)
	if err != nil {
		return nil, fmt.Errorf("write the scenario as JSON: %w", err)
	}
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.UseNumber()
	if err := decoder.Decode(&tree); err != nil {
		return nil, fmt.Errorf("read the scenario as JSON: %w", err)
	}
	if tree["spec"] == nil {
		tree["spec"] = map[string]any{}
	}
	return tree, nil
}
