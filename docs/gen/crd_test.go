package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/reflect/protoreflect"
	"sigs.k8s.io/yaml"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/policy"
)

const definitionFile = "../../deploy/helm/files/servicepolicies.yaml"

func TestDefinitionIsUpToDate(t *testing.T) {
	dir := t.TempDir()
	if err := generateCRD(filepath.Join("..", ".."), dir); err != nil {
		t.Fatal(err)
	}
	committed := read(t, filepath.Dir(definitionFile), filepath.Base(definitionFile))
	if diff := cmp.Diff(read(t, dir, filepath.Base(definitionFile)), committed); diff != "" {
		t.Errorf("%s is out of date, run go run ./docs/gen:\n%s", definitionFile, diff)
	}
}

// committedSchema returns the schema of ServicePolicy as the chart has it. What it holds beside what schema knows fails the test.
func committedSchema(t *testing.T) *schema {
	t.Helper()
	text, err := os.ReadFile(definitionFile)
	if err != nil {
		t.Fatal(err)
	}
	var definition struct {
		Spec struct {
			Versions []struct {
				Schema struct {
					OpenAPIV3Schema json.RawMessage `json:"openAPIV3Schema"`
				} `json:"schema"`
			} `json:"versions"`
		} `json:"spec"`
	}
	if err := yaml.Unmarshal(text, &definition); err != nil {
		t.Fatal(err)
	}
	s := new(schema)
	if err := yaml.UnmarshalStrict(definition.Spec.Versions[0].Schema.OpenAPIV3Schema, s); err != nil {
		t.Fatal(err)
	}
	return s
}

// structural wants what the API server wants of a schema: a type everywhere, fields of objects only, what lists are made of,
// required fields that exist, and of strings in rules that they are bounded.
func structural(t *testing.T, path string, s *schema) {
	t.Helper()
	if s.Type == "" {
		t.Errorf("%s has no type", path)
	}
	if (s.Type == "object") != (len(s.Properties) > 0) && path != ".metadata" {
		t.Errorf("%s is of type %s and has %d fields", path, s.Type, len(s.Properties))
	}
	if (s.Type == "array") != (s.Items != nil) {
		t.Errorf("%s is of type %s and has items %v", path, s.Type, s.Items)
	}
	for _, name := range s.Required {
		if s.Properties[name] == nil {
			t.Errorf("%s requires %s, which it doesn't have", path, name)
		}
	}
	for _, r := range s.Rules {
		if r.Rule == "" || r.Message == "" || strings.ContainsAny(r.Message, "\n") {
			t.Errorf("%s has a rule without words, or with too many lines: %+v", path, r)
		}
		if s.Type == "string" && s.MaxLength == 0 {
			t.Errorf("%s has a rule, whose cost can't be told without maxLength", path)
		}
	}
	if _, err := regexp.Compile(s.Pattern); err != nil {
		t.Errorf("%s: %v", path, err)
	}
	for name, inner := range s.Properties {
		structural(t, path+"."+name, inner)
	}
	if s.Items != nil {
		structural(t, path+"[]", s.Items)
	}
}

func TestDefinitionIsStructural(t *testing.T) {
	structural(t, "", committedSchema(t))
}

// refusal returns why the API server refuses a value, "" if it doesn't; it leaves out the rules, which the API server alone can
// judge.
func (s *schema) refusal(path string, v any) string {
	switch v := v.(type) {
	case map[string]any:
		return s.refuseObject(path, v)
	case string:
		if s.Type != "string" || len(s.Enum) > 0 && !slices.Contains(s.Enum, v) ||
			!regexp.MustCompile(s.Pattern).MatchString(v) || s.MaxLength > 0 && len(v) > s.MaxLength {
			return fmt.Sprintf("%s: %q", path, v)
		}
	case float64:
		if s.Type != "number" && (s.Type != "integer" || v != math.Trunc(v)) || s.outOfRange(v) {
			return fmt.Sprintf("%s: %v", path, v)
		}
	case bool:
		if s.Type != "boolean" {
			return fmt.Sprintf("%s: %v", path, v)
		}
	default:
		return fmt.Sprintf("%s: a %T", path, v)
	}
	return ""
}

func (s *schema) outOfRange(x float64) bool {
	return s.Minimum != nil && (x < *s.Minimum || x == *s.Minimum && s.ExclusiveMinimum) || s.Maximum != nil && x > *s.Maximum
}

func (s *schema) refuseObject(path string, object map[string]any) string {
	if s.Type != "object" {
		return path + ": an object"
	}
	for _, name := range slices.Sorted(maps.Keys(object)) {
		inner, known := s.Properties[name]
		if !known {
			return path + "." + name + ": no such field"
		}
		if path == "" && name == "metadata" {
			continue
		}
		if why := inner.refusal(path+"."+name, object[name]); why != "" {
			return why
		}
	}
	return ""
}

func decoded(t *testing.T, text string) map[string]any {
	t.Helper()
	var object map[string]any
	if err := yaml.Unmarshal([]byte(text), &object); err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	return object
}

// TestDefinitionAcceptsAllPolicies takes the documents by which policies are tested, and those of the documentation.
func TestDefinitionAcceptsAllPolicies(t *testing.T) {
	s := committedSchema(t)
	var texts []string
	datadriven.RunTest(t, "../../policy/testdata/documents/valid", func(t *testing.T, d *datadriven.TestData) string {
		if doc, err := policy.Parse([]byte(d.Input)); err == nil {
			text, err := protojson.Marshal(doc) // the form in which the API server has it
			if err != nil {
				t.Fatal(err)
			}
			texts = append(texts, string(text))
		}
		return d.Expected
	})
	for _, page := range []string{"guides/policies.md", "reference/policy.md"} {
		for _, found := range example.FindAllStringSubmatch(read(t, "..", page), -1) {
			texts = append(texts, strings.Replace(found[1], "spec:", "apiVersion: headroom.dev/v1\nkind: ServicePolicy\nspec:", 1))
		}
	}
	for _, text := range texts {
		object := decoded(t, text)
		object["apiVersion"], object["kind"] = policy.APIVersion, policy.Kind
		if why := s.refusal("", object); why != "" {
			t.Errorf("refused for %s:\n%s", why, text)
		}
	}
	if len(texts) < 8 {
		t.Errorf("only %d documents were tried", len(texts))
	}
}

func TestDefinitionRefusesWhatIsMisspelt(t *testing.T) {
	s := committedSchema(t)
	for text, want := range map[string]string{
		"spec: {balancr: p2c}":                           ".spec.balancr: no such field",
		"spec: {prequal: {q_rif: 0.5}}":                  ".spec.prequal.q_rif: no such field",
		"spec: {peakEwma: {}}":                           ".spec.peakEwma: no such field",
		"spec: {balancer: prequel}":                      `.spec.balancer: "prequel"`,
		"spec: {timeout: 5}":                             ".spec.timeout: 5",
		"spec: {timeout: soon}":                          `.spec.timeout: "soon"`,
		"spec: {slots: 1.5}":                             ".spec.slots: 1.5",
		"spec: {slots: \"1\"}":                           `.spec.slots: "1"`,
		"spec: {prequal: {delta: 0}}":                    ".spec.prequal.delta: 0",
		"spec: {consistentHash: {key: {header: 'a b'}}}": `.spec.consistentHash.key.header: "a b"`,
		"spec: {consistentHash: {key: {path: 1}}}":       ".spec.consistentHash.key.path: 1",
		"spec: {retryBudget: []}":                        ".spec.retryBudget: a []interface {}",
		"spec: {scope: any}":                             `.spec.scope: "any"`,
		"policy: {}":                                     ".policy: no such field",
	} {
		if got := s.refusal("", decoded(t, text)); got != want {
			t.Errorf("%s: refused for %q, want %q", text, got, want)
		}
	}
}

// TestDefinitionHasThePolicysBounds tries values at the bounds of every number, and beyond: the definition and the policy must
// agree on them.
func TestDefinitionHasThePolicysBounds(t *testing.T) {
	spec := committedSchema(t).Properties["spec"]
	tried := 0
	try := func(path []protoreflect.FieldDescriptor, s *schema, x float64) {
		field := path[len(path)-1]
		doc := &meshv1.ServicePolicy{ApiVersion: policy.APIVersion, Kind: policy.Kind, Metadata: &meshv1.Metadata{Name: "a"}, Spec: new(meshv1.ServicePolicySpec)}
		m := doc.Spec.ProtoReflect()
		for _, group := range path[:len(path)-1] {
			m = m.Mutable(group).Message()
		}
		switch {
		case field.Kind() == protoreflect.DoubleKind:
			m.Set(field, protoreflect.ValueOfFloat64(x))
		case x < 0:
			return // protobuf can't say it
		default:
			m.Set(field, protoreflect.ValueOfUint32(uint32(x)))
		}
		tried++
		ok := s.refusal("", x) == ""
		if len(s.Rules) > 0 && x > 0 && x <= 1 { // the rule that the API server judges
			ok = false
		}
		if err := policy.Validate(doc); (err == nil) != ok {
			t.Errorf("%s = %v: the definition takes it: %v; the policy says %v", field.FullName(), x, ok, err)
		}
	}
	var walk func(path []protoreflect.FieldDescriptor, fields protoreflect.FieldDescriptors, s *schema)
	walk = func(path []protoreflect.FieldDescriptor, fields protoreflect.FieldDescriptors, s *schema) {
		for i := range fields.Len() {
			field := fields.Get(i)
			inner, here := s.Properties[field.JSONName()], append(slices.Clone(path), field)
			switch field.Kind() {
			case protoreflect.MessageKind:
				walk(here, field.Message().Fields(), inner)
			case protoreflect.Uint32Kind, protoreflect.DoubleKind:
				step := 1.0
				if field.Kind() == protoreflect.DoubleKind {
					step = 1e-6
				}
				for _, x := range []float64{*inner.Minimum - step, *inner.Minimum, *inner.Minimum + step, *inner.Maximum, *inner.Maximum + step} {
					try(here, inner, x)
				}
			}
		}
	}
	walk(nil, new(meshv1.ServicePolicySpec).ProtoReflect().Descriptor().Fields(), spec)
	if tried < 60 {
		t.Errorf("only %d values were tried", tried)
	}
}
