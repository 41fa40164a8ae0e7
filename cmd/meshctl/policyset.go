package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/policy/document"
	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// policyChange is what the flags of policy set say.
type policyChange struct {
	settings []*setting
	file     string
	dryRun   bool
	force    bool
	wait     wait
}

func (a *app) policySet() *cobra.Command {
	var p policyChange
	cmd := &cobra.Command{
		Use:   "set [SERVICE]",
		Short: "Change fields of the policy of a service, or store whole documents",
		Long: `Change the given fields of the policy of a service and keep the others, or, with -f, replace the stored document by
the one in a file. Changes that others make at the same time are never lost. The value "default" takes a field out of the
document, so that its default holds.`,
		Example: `  meshctl policy set checkout --q-rif 0.9 --retry-budget 10% --wait
  meshctl policy set sessions --balancer ring_hash --hash-cookie session
  meshctl policy get checkout > checkout.yaml; vi checkout.yaml; meshctl policy set -f checkout.yaml`,
		Args: func(cmd *cobra.Command, args []string) error {
			return cmp.Or(p.straySwitch(args), optionalServiceArg(cmd, args))
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := errors.Join(p.contradiction(), p.wait.contradiction(cmd)); err != nil {
				return err
			}
			if p.file != "" {
				return a.setDocuments(cmd, p, firstOf(args))
			}
			if len(args) == 0 {
				return misused("want the name of a service, or -f FILE")
			}
			return a.setFields(cmd, p, args[0])
		},
	}
	a.outputFlag(cmd, "text", "yaml", "json")
	flags := cmd.Flags()
	flags.SortFlags = false
	p.settings = addSettings(cmd)
	flags.StringVarP(&p.file, "file", "f", "", "store the documents in this file, in YAML or JSON; -: standard input")
	flags.BoolVar(&p.dryRun, "dry-run", false, "check and print the result, but store nothing")
	flags.BoolVar(&p.force, "force", false, "take the policy over from Kubernetes, if that manages it")
	p.wait.flags(cmd)
	return cmd
}

// straySwitch finds a value that was meant for a switch, as in --hash-path true.
func (p policyChange) straySwitch(args []string) error {
	if len(args) != 2 || args[1] != "true" && args[1] != "false" && args[1] != "default" {
		return nil
	}
	for _, s := range p.given() {
		if s.value == "bool" {
			return misused("%q is taken for the name of a service: write --%s=%[1]s", args[1], s.name)
		}
	}
	return nil
}

// given returns the settings that the user gave.
func (p policyChange) given() (given []*setting) {
	for _, s := range p.settings {
		if s.given {
			given = append(given, s)
		}
	}
	return given
}

// contradiction finds flags that can't be given together.
func (p policyChange) contradiction() error {
	if p.dryRun && p.wait.wanted {
		return misused("--dry-run stores nothing: there is nothing to --wait for")
	}
	key := ""
	for _, s := range p.given() {
		if p.file != "" {
			return misused("-f stores whole documents: --%s can't be given with it", s.name)
		}
		if strings.HasPrefix(s.name, "hash-") && !s.negated() {
			if key != "" {
				return misused("want one hash key, got --%s and --%s", key, s.name)
			}
			key = s.name
		}
	}
	return nil
}

// setFields merges the given fields into what is stored.
func (a *app) setFields(cmd *cobra.Command, p policyChange, service string) error {
	if len(p.given()) == 0 {
		return misused("nothing to set: want at least one of\n%s\nor -f FILE", listSettings(p.settings))
	}
	if err := impossible(p.given(), service); err != nil {
		return err
	}
	if p.dryRun {
		return a.ask(cmd.Context(), func(ctx context.Context, c *client) error {
			doc, fromCopy, err := c.merged(ctx, p.given(), service)
			if err != nil {
				return err
			}
			c.noteCopy(cmd, fromCopy)
			noteManaged(cmd, p, doc)
			return a.writeDocument(cmd.OutOrStdout(), doc)
		})
	}
	return a.converse(cmd.Context(), func(ctx context.Context, c *client) error {
		stored, err := c.merge(ctx, p, service)
		if err != nil {
			return err
		}
		return a.report(ctx, cmd, c, p.wait, stored)
	})
}

// noteManaged warns that what a dry run shows would not be stored.
func noteManaged(cmd *cobra.Command, p policyChange, doc *meshv1.ServicePolicy) {
	if by := doc.GetMetadata().GetManagedBy(); by != "" && !p.force {
		cmd.PrintErrf("note: the policy of %s is managed by %s: it is only stored with --force\n", doc.Metadata.Name, by)
	}
}

// impossible finds values that no policy can have, whatever is stored.
func impossible(settings []*setting, service string) error {
	doc := newDocument(service)
	for _, s := range settings {
		if err := s.apply(doc.Spec); err != nil {
			return misused("--%s: %v", s.name, err)
		}
	}
	if policy.Balancer(doc.Spec.Balancer).NeedsKey() && doc.Spec.GetConsistentHash().GetKey() == nil {
		doc.Spec.Balancer = "" // the key that it needs may be stored
	}
	if err := policy.Validate(doc); err != nil {
		return misused("%v", listed("the policy would not be valid", err))
	}
	return nil
}

func newDocument(service string) *meshv1.ServicePolicy {
	return &meshv1.ServicePolicy{
		ApiVersion: policy.APIVersion,
		Kind:       policy.Kind,
		Metadata:   &meshv1.Metadata{Name: service, ResourceVersion: "0"},
		Spec:       new(meshv1.ServicePolicySpec),
	}
}

func listSettings(settings []*setting) string {
	var lines []string
	for _, s := range settings {
		flag := "--" + s.name + " " + strings.TrimPrefix(s.value, "bool")
		lines = append(lines, fmt.Sprintf("  %-32s %s", flag, s.usage))
	}
	return strings.Join(lines, "\n")
}

// merge tries again when somebody else changes the document between reading and writing it.
func (c *client) merge(ctx context.Context, p policyChange, service string) ([]*meshv1.SetPolicyResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	for {
		doc, _, err := c.merged(ctx, p.given(), service)
		if err != nil {
			return nil, err
		}
		stored, err := c.SetPolicy(ctx, &meshv1.SetPolicyRequest{Policy: doc, Force: p.force})
		if err == nil {
			return []*meshv1.SetPolicyResponse{stored}, nil
		}
		if status.Code(err) != codes.Aborted {
			return nil, err
		}
	}
}

// merged returns the stored document with the given settings in it. Its resource version is that of what was read.
func (c *client) merged(ctx context.Context, settings []*setting, service string) (doc *meshv1.ServicePolicy, fromCopy bool, err error) {
	answer, err := c.policy(ctx, service)
	if err != nil {
		return nil, false, err
	}
	doc = newDocument(service)
	proto.Merge(doc, answer.Policy)
	before := proto.CloneOf(doc)
	for _, s := range settings {
		if err := s.apply(doc.Spec); err != nil {
			return nil, false, fmt.Errorf("--%s: %w", s.name, err)
		}
	}
	if last := settings[len(settings)-1]; proto.Equal(before, doc) && !slices.ContainsFunc(settings, isPositive) {
		return nil, false, misused("nothing to set: the hash key of %s is not the %s", service, strings.TrimPrefix(last.name, "hash-"))
	}
	if err := policy.Validate(doc); err != nil {
		return nil, false, listed("the policy would not be valid", err)
	}
	return doc, answer.FromCopy, nil
}

func isPositive(s *setting) bool { return !s.negated() }

// setDocuments stores whole documents; each replaces what is stored, unless its resource version forbids it.
func (a *app) setDocuments(cmd *cobra.Command, p policyChange, service string) error {
	docs, err := readDocuments(cmd.InOrStdin(), p.file, service)
	if err != nil {
		return err
	}
	if p.dryRun {
		return a.writeDocuments(cmd.OutOrStdout(), docs)
	}
	return a.converse(cmd.Context(), func(ctx context.Context, c *client) error {
		stored, err := c.setAll(ctx, p, docs)
		if len(stored) == 0 {
			return err
		}
		if problem := a.report(ctx, cmd, c, p.wait, stored); err == nil {
			return problem
		}
		return err
	})
}

func readDocuments(stdin io.Reader, file, service string) ([]*meshv1.ServicePolicy, error) {
	data, err := readFile(stdin, file)
	if err != nil {
		return nil, err
	}
	docs, err := policy.ParseAll(data)
	if err != nil {
		return nil, listed(file+" is not valid", err)
	}
	if len(docs) == 0 {
		return nil, fmt.Errorf("%s holds no document", file)
	}
	for _, doc := range docs {
		if name := doc.Metadata.Name; service != "" && name != service {
			return nil, misused("%s is about %s, not about %s", file, name, service)
		}
	}
	return docs, nil
}

func readFile(stdin io.Reader, file string) ([]byte, error) {
	if file == "-" {
		return io.ReadAll(io.LimitReader(stdin, document.MaxSize+1))
	}
	return os.ReadFile(file)
}

// setAll stops at the first document that can't be stored.
func (c *client) setAll(ctx context.Context, p policyChange, docs []*meshv1.ServicePolicy) ([]*meshv1.SetPolicyResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	var all []*meshv1.SetPolicyResponse
	for _, doc := range docs {
		stored, err := c.SetPolicy(ctx, &meshv1.SetPolicyRequest{Policy: doc, Force: p.force})
		if status.Code(err) == codes.Aborted {
			return all, outdated(doc.Metadata)
		}
		if err != nil {
			return all, err
		}
		all = append(all, stored)
	}
	return all, nil
}

// outdated says why a document was refused whose resource version isn't that of the stored one.
func outdated(m *meshv1.Metadata) error {
	found := "is no longer that of revision " + m.ResourceVersion
	if m.ResourceVersion == "0" {
		found = "exists already"
	}
	return fmt.Errorf("the policy of %s %s: read it again with 'meshctl policy get %[1]s', "+
		"or take metadata.resourceVersion out to replace whatever is stored", m.Name, found)
}

// report says what was stored, and waits until it is applied if that is wanted.
func (a *app) report(
	ctx context.Context, cmd *cobra.Command, c *client, w wait, stored []*meshv1.SetPolicyResponse,
) error {
	var docs []*meshv1.ServicePolicy
	var newest int64
	for _, s := range stored {
		docs, newest = append(docs, s.Policy), max(newest, s.Revision)
		if a.output == "text" {
			fmt.Fprintf(cmd.OutOrStdout(), "policy of %s stored at revision %d\n", s.Policy.GetMetadata().GetName(), s.Revision)
		}
	}
	if a.output != "text" {
		if err := a.writeDocuments(cmd.OutOrStdout(), docs); err != nil {
			return err
		}
		cmd.SetOut(cmd.ErrOrStderr()) // what follows is not part of the documents
	}
	c.noteUnknown(ctx, cmd, docs)
	return w.forAll(ctx, cmd, c, newest)
}

// noteUnknown warns of policies for services that nobody registered: their names may be mistyped.
func (c *client) noteUnknown(ctx context.Context, cmd *cobra.Command, docs []*meshv1.ServicePolicy) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	answer, err := c.ListServices(ctx, &meshv1.ListServicesRequest{})
	if err != nil {
		return // the policies are stored; this is only a courtesy
	}
	var unknown []string
	for _, doc := range docs {
		name := doc.GetMetadata().GetName()
		if !slices.ContainsFunc(answer.Services, func(s *meshv1.ServiceSummary) bool { return s.Name == name && isKnown(s) }) {
			unknown = append(unknown, name)
		}
	}
	switch len(unknown) {
	case 0:
	case 1:
		cmd.PrintErrf("note: no replica of a service %s is registered. Is the name right?\n", unknown[0])
	default:
		cmd.PrintErrf("note: no replica is registered of %s. Are the names right?\n", firstNames(unknown))
	}
}

func firstNames(names []string) string {
	const most = 5
	if len(names) <= most {
		last := len(names) - 1
		return strings.Join(names[:last], ", ") + " and " + names[last]
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
}

func isKnown(s *meshv1.ServiceSummary) bool { return s.Ready+s.Unhealthy+s.Draining > 0 }
