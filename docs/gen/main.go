// Gen writes docs/reference/*.md: that of the documents that operators write, from the comments in api/mesh/v1/*.proto,
// and that of meshctl, from its commands; and the definition of ServicePolicy for Kubernetes. Run it from the root of the repository: go run ./docs/gen
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/bufbuild/protocompile"
	"google.golang.org/protobuf/reflect/protoreflect"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/dataplane/sim/scenario"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/policy/document"
	"github.com/headroom-mesh/headroom/policy/localservice"
)

func main() {
	dir := filepath.Join("docs", "reference")
	definitions := filepath.Join("deploy", "helm", "files")
	if err := errors.Join(generate(".", dir), generateCRD(".", definitions), meshctlDocs(dir)); err != nil {
		fmt.Fprintf(os.Stderr, "gen: %v\n", err)
		os.Exit(1)
	}
}

// meshctlDocs lets meshctl describe itself.
func meshctlDocs(dir string) error {
	out, err := exec.Command("go", "run", "./cmd/meshctl", "docs", dir).CombinedOutput()
	if err != nil {
		return fmt.Errorf("write the reference of meshctl: %w\n%s", err, out)
	}
	return nil
}

// page is one page of the reference.
type page struct {
	name    string // of the file
	source  string // .proto file, below api
	message string // the document
	intro   string
	example string // in YAML
}

func pages() ([]page, error) {
	policyExample, err := document.EncodeYAML(policy.Effective(&meshv1.ServicePolicy{Metadata: &meshv1.Metadata{Name: "checkout"}}))
	if err != nil {
		return nil, err
	}
	serviceExample, err := document.EncodeYAML(localService())
	if err != nil {
		return nil, err
	}
	scenarioExample, err := scenario.Text("stall")
	if err != nil {
		return nil, err
	}
	return []page{
		{
			name:    "policy.md",
			source:  "mesh/v1/policy.proto",
			message: "ServicePolicy",
			intro: "A policy is set with `meshctl policy set` and shown with `meshctl policy get`. " +
				"This one has every default written out:",
			example: string(policyExample),
		},
		{
			name:    "local-service.md",
			source:  "mesh/v1/service.proto",
			message: "LocalService",
			intro:   "An example:",
			example: string(serviceExample),
		},
		{
			name:    "scenario.md",
			source:  "mesh/v1/scenario.proto",
			message: "Scenario",
			intro: "A scenario is played with `meshctl simulate`; the [guide](../guides/simulate.md) shows how. " +
				"This is one of those that are built in:",
			example: string(scenarioExample),
		},
	}, nil
}

func localService() *meshv1.LocalService {
	return &meshv1.LocalService{
		ApiVersion: policy.APIVersion,
		Kind:       localservice.Kind,
		Metadata:   &meshv1.Metadata{Name: "checkout"},
		Spec: &meshv1.LocalServiceSpec{
			Endpoints: []*meshv1.LocalEndpoint{{Address: "127.0.0.1:8080"}},
			Check:     &meshv1.HealthCheck{Http: "/healthz", Interval: "2s", Timeout: "1s", Rise: 2, Fall: 3},
		},
	}
}

// compile reads a .proto file below api, with its comments.
func compile(root, source string) (protoreflect.FileDescriptor, error) {
	compiler := protocompile.Compiler{
		Resolver: protocompile.WithStandardImports(&protocompile.SourceResolver{
			ImportPaths: []string{filepath.Join(root, "api")},
		}),
		SourceInfoMode: protocompile.SourceInfoStandard,
	}
	files, err := compiler.Compile(context.Background(), source)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", source, err)
	}
	return files[0], nil
}

// generateCRD writes the definition of ServicePolicy into dir.
func generateCRD(root, dir string) error {
	file, err := compile(root, "mesh/v1/policy.proto")
	if err != nil {
		return err
	}
	text, err := crd(file)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return fmt.Errorf("write the definition of %s: %w", policy.Kind, err)
	}
	if err := os.WriteFile(filepath.Join(dir, "servicepolicies.yaml"), []byte(text), 0o666); err != nil {
		return fmt.Errorf("write the definition of %s: %w", policy.Kind, err)
	}
	return nil
}

// generate writes all pages into dir, from the sources below root.
func generate(root, dir string) error {
	all, err := pages()
	if err != nil {
		return err
	}
	for _, p := range all {
		file, err := compile(root, p.source)
		if err != nil {
			return err
		}
		text, err := p.render(file)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, p.name), []byte(text), 0o666); err != nil {
			return fmt.Errorf("write the reference: %w", err)
		}
	}
	return nil
}

func (p page) render(file protoreflect.FileDescriptor) (string, error) {
	root := file.Messages().ByName(protoreflect.Name(p.message))
	if root == nil {
		return "", fmt.Errorf("%s has no message %s", p.source, p.message)
	}
	var out strings.Builder
	fmt.Fprintf(&out, "# %s\n\n<!-- Generated from api/%s: do not edit. -->\n\n", p.message, p.source)
	fmt.Fprintf(&out, "%s\n\n%s\n\n```yaml\n%s```\n", comment(root), p.intro, p.example)
	for _, m := range messages(root) {
		section(&out, m)
	}
	out.WriteString("\nDurations are written as `300ms`, `2s` or `1m30s`.\n")
	return out.String(), nil
}

// part is a message and where in the document it is.
type part struct {
	path    string
	message protoreflect.MessageDescriptor
}

// messages returns the messages of a document in the order in which it holds them, but for those that have a page of
// their own, or come from elsewhere.
func messages(root protoreflect.MessageDescriptor) []part {
	parts := []part{{"", root}}
	for i := 0; i < len(parts); i++ {
		fields := parts[i].message.Fields()
		for j := range fields.Len() {
			field := fields.Get(j)
			if m := field.Message(); m != nil && !field.IsMap() && !foreign(m) && !hasOwnPage(m, root) {
				parts = append(parts, part{join(parts[i].path, field), m})
			}
		}
	}
	return parts
}

func foreign(m protoreflect.MessageDescriptor) bool {
	return m.ParentFile().Package() == "google.protobuf"
}

// hasOwnPage reports whether m is described on another page than that of root.
func hasOwnPage(m, root protoreflect.MessageDescriptor) bool {
	return m.Name() == "ServicePolicySpec" && root.Name() != policy.Kind
}

func join(path string, field protoreflect.FieldDescriptor) string {
	name := field.JSONName()
	if field.IsList() {
		name += "[]"
	}
	return strings.TrimPrefix(path+"."+name, ".")
}

func section(out *strings.Builder, p part) {
	if p.path != "" {
		fmt.Fprintf(out, "\n## %s\n\n", p.path)
		if text := comment(p.message); text != "" {
			fmt.Fprintf(out, "%s\n\n", text)
		}
	} else {
		out.WriteString("\n## Fields\n\n")
	}
	out.WriteString("| Field | Type | Default | Meaning |\n|---|---|---|---|\n")
	fields := p.message.Fields()
	for i := range fields.Len() {
		field := fields.Get(i)
		text := comment(field)
		fmt.Fprintf(out, "| `%s` | %s | %s | %s |\n",
			field.JSONName(), typeName(field), defaultOf(text), strings.ReplaceAll(text, "|", `\|`))
	}
}

// comment returns what stands above a declaration, as one paragraph.
func comment(d protoreflect.Descriptor) string {
	text := d.ParentFile().SourceLocations().ByDescriptor(d).LeadingComments
	return strings.Join(strings.Fields(text), " ")
}

// given finds the default in a comment: "Default 0.84 (2^-0.25, §5)."
var given = regexp.MustCompile(`Default (\S+?)\.?( |$)`)

func defaultOf(comment string) string {
	if found := given.FindStringSubmatch(comment); found != nil {
		return "`" + found[1] + "`"
	}
	return ""
}

var duration = regexp.MustCompile("^`([0-9]+(\\.[0-9]+)?(ms|s|m|h))+`$")

func typeName(field protoreflect.FieldDescriptor) string {
	if field.IsMap() {
		return "paths and values"
	}
	name := "string"
	switch field.Kind() {
	case protoreflect.MessageKind:
		name = "group"
		if foreign(field.Message()) {
			name = "value"
		}
	case protoreflect.BoolKind:
		name = "true or false"
	case protoreflect.DoubleKind:
		name = "number"
	case protoreflect.Uint32Kind:
		name = "whole number"
	case protoreflect.StringKind:
		if duration.MatchString(defaultOf(comment(field))) {
			name = "duration"
		}
	}
	if field.IsList() {
		return "list of " + name + "s"
	}
	return name
}
