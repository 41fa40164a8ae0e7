package main

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/reflect/protoreflect"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/policy"
)

// TestEveryBalancerIsDescribed wants a line in the table of docs/balancers.md, a section and an example of each rule.
func TestEveryBalancerIsDescribed(t *testing.T) {
	text := read(t, "..", "balancers.md")
	for _, b := range policy.Balancers() {
		_, section, found := strings.Cut(text, fmt.Sprintf("\n## %s\n", b))
		section, _, _ = strings.Cut(section, "\n## ")
		if !found {
			t.Errorf("there is no section %s", b)
		}
		section = strings.Join(strings.Fields(section), " ")
		for _, part := range []string{"Source: ", "Use it ", "Not ", " --balancer " + string(b)} {
			if !strings.Contains(section, part) {
				t.Errorf("the section %s has no %q", b, part)
			}
		}
		if row := fmt.Sprintf("\n| [`%s`](#%s) |", b, b); !strings.Contains(text, row) {
			t.Errorf("the table has no line %q", row)
		}
	}
}

var statedDefault = regexp.MustCompile("`([a-zA-Z0-9.]+): ([^`]+)`")

func TestStatedProbesHold(t *testing.T) {
	text := read(t, "..", "balancers.md")
	probes := policy.Default().Prequal.ProbesPerRequest
	for _, b := range []policy.Balancer{policy.BalancerPrequal, policy.BalancerLinear, policy.BalancerC3} {
		_, row, _ := strings.Cut(text, fmt.Sprintf("\n| [`%s`]", b))
		row, _, _ = strings.Cut(row, "\n")
		if !strings.Contains(row, fmt.Sprintf("| %v probe", probes)) {
			t.Errorf("the table says of %s %q, though it sends %v probes for a request", b, row, probes)
		}
	}
}

// TestStatedDefaultsHold compares the defaults in docs/balancers.md with what a policy without any field means.
func TestStatedDefaultsHold(t *testing.T) {
	stated := map[string]string{}
	for paragraph := range strings.SplitSeq(read(t, "..", "balancers.md"), "\n\n") {
		if strings.HasPrefix(paragraph, "Defaults: ") {
			for _, found := range statedDefault.FindAllStringSubmatch(paragraph, -1) {
				stated[found[1]] = found[2]
			}
		}
	}
	actual := map[string]string{}
	spec := policy.Effective(&meshv1.ServicePolicy{}).Spec
	spec.Balancer, spec.Timeout, spec.Scope, spec.RetryBudget = "", "", nil, nil // not of a balancer
	spec.WaitForReady, spec.Forwarded, spec.ProxyProtocol, spec.DetectTimeout, spec.CaptureReal, spec.CaptureInbound = "", "", nil, "", nil, nil
	collect(spec.ProtoReflect(), "", actual)
	if diff := cmp.Diff(actual, stated); diff != "" {
		t.Errorf("docs/balancers.md states other defaults (-actual +stated):\n%s", diff)
	}
}

// collect adds all fields of a message by their paths.
func collect(m protoreflect.Message, path string, fields map[string]string) {
	m.Range(func(field protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		if field.Message() != nil {
			collect(v.Message(), path+field.JSONName()+".", fields)
		} else {
			fields[path+field.JSONName()] = v.String()
		}
		return true
	})
}
