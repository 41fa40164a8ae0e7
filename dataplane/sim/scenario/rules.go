package scenario

import (
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

// rulesOf returns the rules of a scenario, or those of one that names none.
func rulesOf(spec *meshv1.ScenarioSpec) []*meshv1.ScenarioRule {
	if len(spec.GetRules()) > 0 {
		return spec.Rules
	}
	return []*meshv1.ScenarioRule{
		{Name: string(policy.BalancerRoundRobin)},
		{Name: string(policy.BalancerLeastLoaded)},
		{Name: string(policy.BalancerPrequal)},
	}
}

// rules is what a scenario says of rules.
type rules struct {
	base    *meshv1.ServicePolicySpec
	invalid bool // the policy of the scenario is
	own     []rule
}

type rule struct {
	name    string
	policy  policy.Policy
	without sim.Without
	config  *sim.Config // of the scenario as the rule changes it; nil: it doesn't
}

func (p point) readRules(spec *meshv1.ScenarioSpec, problems *document.Problems) rules {
	r := rules{base: spec.GetPolicy()}
	if r.base == nil {
		r.base = new(meshv1.ServicePolicySpec)
	}
	if _, err := compile(r.base, "spec.policy."); err != nil {
		addAll(problems, err)
		r.invalid = true // or each rule would tell it again
		return r
	}
	if n := len(spec.Rules); n > mostCases {
		problems.Add("spec.rules", "want %d at most, got %d", mostCases, n)
		r.invalid = true
		return r
	}
	names := map[string]bool{}
	for i, doc := range rulesOf(spec) {
		path := fmt.Sprintf("spec.rules[%d].", i)
		name := doc.GetName()
		if !isName(name) || names[name] {
			problems.Add(path+"name", "want a name that no other rule has, %s, got %q", nameForm, name)
		}
		names[name] = true
		compiled, err := compile(r.merged(doc), path+"policy.")
		if err != nil {
			addAll(problems, err)
		}
		own := rule{name: name, policy: compiled, without: readWithout(doc.GetWithout())}
		if len(doc.GetSet()) > 0 && problems.Err() == nil {
			if own.config, err = p.under(doc.Set, path+"set"); err != nil {
				addAll(problems, err)
			}
		}
		r.own = append(r.own, own)
	}
	return r
}

// under returns what a scenario means under a rule that sets fields, which path says where to find.
func (p point) under(set map[string]*structpb.Value, path string) (*sim.Config, error) {
	var problems document.Problems
	for _, field := range slices.Sorted(maps.Keys(set)) {
		if steps, err := parsePath(field); err == nil && slices.Contains([]string{"policy", "rules", "sweep"}, steps[0].name) {
			problems.Add(path, "%s: want another field: a rule can't set the scenario's %s", field, steps[0].name)
		}
	}
	if problems.Err() != nil {
		return nil, problems
	}
	changed := point{path: path}.with(p.doc, set)
	if changed.err != nil {
		return nil, changed.locate(changed.err)
	}
	config := read(changed.doc.Spec, &problems)
	if err := problems.Err(); err != nil {
		return nil, changed.locate(err)
	}
	return &config, nil
}

func readWithout(w *meshv1.ScenarioWithout) sim.Without {
	return sim.Without{
		Reports:       w.GetReports(),
		ErrorAversion: w.GetErrorAversion(),
		Ejection:      w.GetEjection(),
		Utilization:   w.GetUtilization(),
	}
}

// isName reports whether a rule or a point can be called that.
func isName(s string) bool {
	return s != "" && len(s) <= 40 && !strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r > '~' || r == ',' })
}

const nameForm = "40 characters of ASCII at most, without commas"

// merged returns the policy of a rule, on top of that of the scenario.
func (r rules) merged(doc *meshv1.ScenarioRule) *meshv1.ServicePolicySpec {
	merged := proto.CloneOf(r.base)
	if isBalancer(doc.GetName()) {
		merged.Balancer = doc.GetName()
	}
	if doc.GetPolicy().GetConsistentHash().GetKey() != nil && merged.ConsistentHash != nil {
		merged.ConsistentHash.Key = nil // only one kind of key can be set
	}
	if doc.GetPolicy() != nil {
		proto.Merge(merged, doc.Policy)
	}
	return merged
}

func isBalancer(name string) bool { return slices.Contains(policy.Balancers(), policy.Balancer(name)) }

// compile returns what a policy means. Problems are told with the path of the policy.
func compile(spec *meshv1.ServicePolicySpec, path string) (policy.Policy, error) {
	spec = proto.CloneOf(spec)
	if spec.ConsistentHash == nil {
		spec.ConsistentHash = new(meshv1.ConsistentHash)
	}
	if spec.ConsistentHash.Key == nil {
		spec.ConsistentHash.Key = &meshv1.HashKey{Header: "item"} // whatever it is, it is the item
	}
	p, err := policy.Compile(&meshv1.ServicePolicy{
		ApiVersion: policy.APIVersion,
		Kind:       policy.Kind,
		Metadata:   &meshv1.Metadata{Name: "simulated"},
		Spec:       spec,
	})
	if err == nil {
		return p, nil
	}
	var problems document.Problems
	for line := range strings.SplitSeq(err.Error(), "\n") {
		problems = append(problems, path+strings.TrimPrefix(line, "spec."))
	}
	return p, problems
}

// apply lets c play a rule.
func (r rules) apply(wanted Rule, c *sim.Config, problems *document.Problems) {
	if wanted.Policy != nil {
		c.Policy = *wanted.Policy
		return
	}
	if i := slices.IndexFunc(r.own, func(own rule) bool { return own.name == wanted.Name }); i >= 0 {
		if r.own[i].config != nil {
			*c = *r.own[i].config
		}
		c.Policy, c.Without, c.Oracle = r.own[i].policy, r.own[i].without, wanted.Name == Oracle
		return
	}
	if r.invalid {
		return
	}
	c.Oracle = wanted.Name == Oracle
	var err error
	if c.Policy, err = compile(r.merged(&meshv1.ScenarioRule{Name: wanted.Name}), "spec.policy."); err != nil {
		addAll(problems, err)
	}
}

// Rule returns the rule of a name: one of the scenario's, a balancer, or the oracle.
func (s Scenario) Rule(name string) (Rule, error) {
	known := s.ruleNames()
	for _, b := range policy.Balancers() {
		known = append(known, string(b))
	}
	known = append(known, Oracle)
	if slices.Contains(known, name) {
		return Rule{Name: name}, nil
	}
	slices.Sort(known)
	list := strings.Join(slices.Compact(known), ", ")
	if near := document.Nearest(name, known); near != "" {
		return Rule{}, fmt.Errorf("there is no rule %q: did you mean %s? There are %s", name, near, list)
	}
	return Rule{}, fmt.Errorf("there is no rule %q: there are %s", name, list)
}

// addAll adds problems that came as an error.
func addAll(problems *document.Problems, err error) {
	*problems = append(*problems, strings.Split(err.Error(), "\n")...)
}
