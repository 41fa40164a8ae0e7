package main

import (
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"
	"sigs.k8s.io/yaml"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/policy/document"
)

// schema is what the API server of Kubernetes checks values by: the part of OpenAPI that is needed here.
type schema struct {
	Type             string             `json:"type"`
	Format           string             `json:"format,omitempty"`
	Description      string             `json:"description,omitempty"`
	Properties       map[string]*schema `json:"properties,omitempty"`
	Required         []string           `json:"required,omitempty"`
	Items            *schema            `json:"items,omitempty"`
	ListType         string             `json:"x-kubernetes-list-type,omitempty"`
	ListMapKeys      []string           `json:"x-kubernetes-list-map-keys,omitempty"`
	Enum             []string           `json:"enum,omitempty"`
	Pattern          string             `json:"pattern,omitempty"`
	MaxLength        int                `json:"maxLength,omitempty"`
	Minimum          *float64           `json:"minimum,omitempty"`
	ExclusiveMinimum bool               `json:"exclusiveMinimum,omitempty"`
	Maximum          *float64           `json:"maximum,omitempty"`
	Rules            []rule             `json:"x-kubernetes-validations,omitempty"`
}

// rule is what else must hold, in CEL.
type rule struct {
	Rule    string `json:"rule"`
	Message string `json:"message"`
}

// crd returns the definition that makes ServicePolicy known to Kubernetes.
func crd(file protoreflect.FileDescriptor) (string, error) {
	root := file.Messages().ByName(policy.Kind)
	spec := root.Fields().ByName("spec")
	described, err := (&reader{limits: limits()}).group("spec", spec)
	if err != nil {
		return "", err
	}
	described.Rules = append(described.Rules, keyNeeded())
	text, err := yaml.Marshal(definition(&schema{
		Type:        "object",
		Description: comment(root),
		Properties: map[string]*schema{
			"apiVersion": {Type: "string"},
			"kind":       {Type: "string"},
			"metadata":   {Type: "object"},
			"spec":       described,
			"status":     statusSchema(),
		},
	}))
	if err != nil {
		return "", fmt.Errorf("write the definition of %s: %w", policy.Kind, err)
	}
	return "# Generated from api/" + file.Path() + ": do not edit.\n" + string(text), nil
}

func definition(root *schema) map[string]any {
	group, version, _ := strings.Cut(policy.APIVersion, "/")
	column := func(name, kind, path, description string) map[string]any {
		return map[string]any{"name": name, "type": kind, "jsonPath": path, "description": description}
	}
	return map[string]any{
		"apiVersion": "apiextensions.k8s.io/v1",
		"kind":       "CustomResourceDefinition",
		"metadata":   map[string]any{"name": "servicepolicies." + group},
		"spec": map[string]any{
			"group": group,
			"names": map[string]any{
				"kind": policy.Kind, "listKind": policy.Kind + "List",
				"plural": "servicepolicies", "singular": "servicepolicy", "shortNames": []string{"spol"},
			},
			"scope":                 "Namespaced",
			"preserveUnknownFields": false,
			"versions": []any{map[string]any{
				"name": version, "served": true, "storage": true,
				"schema":       map[string]any{"openAPIV3Schema": root},
				"subresources": map[string]any{"status": map[string]any{}},
				"additionalPrinterColumns": []any{
					column("Balancer", "string", ".spec.balancer", "The rule that picks a replica; none: the default"),
					column("Revision", "integer", ".status.storeRevision", "The revision of the store at which the policy was written"),
					column("Applied", "string", ".status.applied", "How many of the live agents go by it"),
					column("Status", "string", `.status.conditions[?(@.type=="Accepted")].reason`, "Whether it is what the mesh goes by, and if not, why"),
					column("Age", "date", ".metadata.creationTimestamp", "Time since it was made"),
				},
			}},
		},
	}
}

// statusSchema describes what the agents say of a policy.
func statusSchema() *schema {
	text := func(description string) *schema { return &schema{Type: "string", Description: description} }
	number := func(description string) *schema {
		return &schema{Type: "integer", Format: "int64", Description: description}
	}
	return &schema{
		Type:        "object",
		Description: "What the agents say of the policy. One of them, the leader, writes it.",
		Properties: map[string]*schema{
			"observedGeneration": number("The metadata.generation that the rest is about."),
			"storeRevision":      number("The revision of the store at which the policy was written."),
			"applied":            text("How many of the live agents go by that revision, such as 3/3."),
			"conditions": {
				Type:        "array",
				ListType:    "map",
				ListMapKeys: []string{"type"},
				Description: "Accepted: the store has the policy. Applied: all live agents go by it.",
				Items: &schema{
					Type:     "object",
					Required: []string{"type", "status", "reason", "message", "lastTransitionTime"},
					Properties: map[string]*schema{
						"type":               text("Accepted or Applied."),
						"status":             {Type: "string", Enum: []string{"True", "False", "Unknown"}, Description: "Whether it holds."},
						"reason":             text("Why, in one word."),
						"message":            text("Why, and what to do about it."),
						"lastTransitionTime": {Type: "string", Format: "date-time", Description: "When the status last changed."},
						"observedGeneration": number("The metadata.generation that this is about."),
					},
				},
			},
		},
	}
}

// keyNeeded is the one rule about several groups of parameters.
func keyNeeded() rule {
	var names []string
	for _, b := range policy.Balancers() {
		if b.NeedsKey() {
			names = append(names, string(b))
		}
	}
	return rule{
		Rule: fmt.Sprintf("!has(self.balancer) || !(self.balancer in ['%s']) || has(self.consistentHash) && has(self.consistentHash.key)",
			strings.Join(names, "', '")),
		Message: "balancers " + strings.Join(names, " and ") + " need consistentHash.key: set one of header, cookie, path and source",
	}
}

// limits returns, by path, what policies want of their fields: what they say of a document in which nothing is right.
func limits() map[string]string {
	doc := &meshv1.ServicePolicy{Spec: new(meshv1.ServicePolicySpec)}
	spoil(doc.Spec.ProtoReflect())
	wants := map[string]string{}
	problems, _ := policy.Validate(doc).(document.Problems)
	for _, problem := range problems {
		path, rest, _ := strings.Cut(problem, ": want ")
		want, _, _ := strings.Cut(rest, ", got ")
		wants[path] = want
	}
	return wants
}

// spoil sets every field to something that no field may be.
func spoil(m protoreflect.Message) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		switch field := fields.Get(i); field.Kind() {
		case protoreflect.MessageKind:
			spoil(m.Mutable(field).Message())
		case protoreflect.StringKind:
			m.Set(field, protoreflect.ValueOfString("1000000h"))
		case protoreflect.Uint32Kind:
			m.Set(field, protoreflect.ValueOfUint32(math.MaxUint32))
		case protoreflect.DoubleKind:
			m.Set(field, protoreflect.ValueOfFloat64(math.MaxFloat64))
		}
	}
}

// reader makes schemas of fields.
type reader struct {
	limits map[string]string // by path
}

// group describes a field that has fields.
func (r *reader) group(path string, field protoreflect.FieldDescriptor) (*schema, error) {
	about := comment(field)
	if about == "" {
		about = comment(field.Message())
	}
	s := &schema{Type: "object", Description: about, Properties: map[string]*schema{}}
	fields := field.Message().Fields()
	for i := range fields.Len() {
		inner := fields.Get(i)
		described, err := r.field(path+"."+inner.JSONName(), inner)
		if err != nil {
			return nil, err
		}
		s.Properties[inner.JSONName()] = described
	}
	if field.Message().Name() == "HashKey" {
		s.Rules = []rule{{
			Rule:    "[has(self.header), has(self.cookie), has(self.path) && self.path, has(self.source) && self.source].filter(set, set).size() == 1",
			Message: "want " + r.limits[path],
		}}
	}
	return s, nil
}

func (r *reader) field(path string, field protoreflect.FieldDescriptor) (*schema, error) {
	if field.IsList() || field.IsMap() {
		return nil, fmt.Errorf("%s: lists and maps are not described yet", path)
	}
	s := &schema{Description: comment(field)}
	switch kind := field.Kind(); kind {
	case protoreflect.MessageKind:
		return r.group(path, field)
	case protoreflect.BoolKind:
		s.Type = "boolean"
		return s, nil
	case protoreflect.Uint32Kind:
		s.Type = "integer"
	case protoreflect.DoubleKind:
		s.Type = "number"
	case protoreflect.StringKind:
		s.Type = "string"
		if field.Parent().Name() == "HashKey" {
			s.Pattern, s.MaxLength = policy.KeyNamePattern, 256
			return s, nil
		}
	default:
		return nil, fmt.Errorf("%s: fields of kind %v are not described yet", path, kind)
	}
	if !s.limit(r.limits[path]) {
		return nil, fmt.Errorf("%s: the policy wants %q, which can't be described yet", path, r.limits[path])
	}
	return s, nil
}

var (
	wholeNumber = regexp.MustCompile(`^a whole number from (\d+) to (\d+)$`)
	anyNumber   = regexp.MustCompile(`^a number (from|above) (\S+?),? to (\S+?)(, or 0)?$`)
	durations   = regexp.MustCompile(`^a duration from (\S+) to (\S+?)(, or "0s")?$`)
	names       = regexp.MustCompile(`^[a-z0-9_]+(?:(?:, | or )[a-z0-9_]+)+$`)
	between     = regexp.MustCompile(`, | or `)
)

// limit adds what is wanted of a value, in the words of the policy, and reports whether they are known here.
func (s *schema) limit(want string) bool {
	if m := wholeNumber.FindStringSubmatch(want); m != nil {
		s.Minimum, s.Maximum = number(m[1]), number(m[2])
		return s.Minimum != nil && s.Maximum != nil
	}
	if m := anyNumber.FindStringSubmatch(want); m != nil {
		return s.limitNumber(m[1] == "above", number(m[2]), number(m[3]), m[4] != "", want)
	}
	if m := durations.FindStringSubmatch(want); m != nil {
		s.limitDuration(m[1], m[2], m[3] != "", want)
		return true
	}
	if names.MatchString(want) {
		s.Enum = between.Split(want, -1)
		return true
	}
	return false
}

func number(text string) *float64 {
	x, err := strconv.ParseFloat(text, 64)
	if err != nil {
		return nil
	}
	return &x
}

func (s *schema) limitNumber(above bool, least, most *float64, orZero bool, want string) bool {
	if least == nil || most == nil {
		return false
	}
	s.Minimum, s.ExclusiveMinimum, s.Maximum = least, above, most
	if orZero {
		s.Minimum, s.ExclusiveMinimum = new(0.0), false
		compare := ">="
		if above {
			compare = ">"
		}
		s.Rules = []rule{{Rule: fmt.Sprintf("self == 0.0 || self %s double(%v)", compare, *least), Message: "want " + want}}
	}
	return true
}

func (s *schema) limitDuration(least, most string, orZero bool, want string) {
	s.Pattern, s.MaxLength = document.DurationPattern, 32
	zero := ""
	if orZero {
		zero = "duration(self) == duration('0s') || "
	}
	s.Rules = []rule{{
		// What is no duration is told by the pattern.
		Rule: fmt.Sprintf("!self.matches(r'%s') || %sduration(self) >= duration('%s') && duration(self) <= duration('%s')",
			document.DurationPattern, zero, least, most),
		Message: "want " + want,
	}}
}
