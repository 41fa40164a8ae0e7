package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/reflect/protoreflect"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/dataplane/sim/scenario"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/policy/localservice"
)

func read(t *testing.T, dir, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func generated(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := generate(filepath.Join("..", ".."), dir); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestReferenceIsUpToDate(t *testing.T) {
	dir := generated(t)
	all, err := pages()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range all {
		want := read(t, filepath.Join("..", "reference"), p.name)
		if diff := cmp.Diff(read(t, dir, p.name), want); diff != "" {
			t.Errorf("docs/reference/%s is out of date, run go run ./docs/gen:\n%s", p.name, diff)
		}
	}
}

var example = regexp.MustCompile("(?s)```yaml\n(.*?)```")

func TestExamplesAreValid(t *testing.T) {
	dir := generated(t)
	if _, err := policy.Parse([]byte(example.FindStringSubmatch(read(t, dir, "policy.md"))[1])); err != nil {
		t.Error(err)
	}
	if _, err := localservice.Parse([]byte(example.FindStringSubmatch(read(t, dir, "local-service.md"))[1])); err != nil {
		t.Error(err)
	}
	if _, err := scenario.Parse([]byte(example.FindStringSubmatch(read(t, dir, "scenario.md"))[1])); err != nil {
		t.Error(err)
	}
}

// TestDefaultsInCommentsHold compares what the comments say with what a policy without any field means.
func TestDefaultsInCommentsHold(t *testing.T) {
	reference := read(t, generated(t), "policy.md")
	compared := 0
	var walk func(m protoreflect.Message)
	walk = func(m protoreflect.Message) {
		m.Range(func(field protoreflect.FieldDescriptor, v protoreflect.Value) bool {
			if field.Message() != nil {
				walk(v.Message())
				return true
			}
			row := fmt.Sprintf("| `%s` | ", field.JSONName())
			_, rest, _ := strings.Cut(reference, row)
			if cells := strings.Split(rest, " | "); len(cells) < 2 || cells[1] != "`"+v.String()+"`" {
				t.Errorf("the default of %s is %v; the reference says %.60q", field.FullName(), v, rest)
			}
			compared++
			return true
		})
	}
	walk(policy.Effective(&meshv1.ServicePolicy{}).Spec.ProtoReflect())
	if compared < 14 {
		t.Errorf("only %d defaults were compared", compared)
	}
}
