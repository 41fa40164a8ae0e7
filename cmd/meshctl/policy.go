package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
)

func (a *app) policy() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "policy",
		Short: "Read and change the policies of services",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return misused("want one of: policy get, policy list, policy set, policy delete")
		},
	}
	cmd.AddCommand(a.policyGet(), a.policyList(), a.policySet(), a.policyDelete())
	return cmd
}

func (a *app) policyGet() *cobra.Command {
	var effective bool
	cmd := &cobra.Command{
		Use:   "get SERVICE",
		Short: "Show the policy of a service as it is stored",
		Long: `Show the policy of a service as it is stored. What it prints can be edited and given to 'meshctl policy set -f':
the resource version in it sees to it that nobody's change is lost.`,
		Args: serviceArg,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.ask(cmd.Context(), func(ctx context.Context, c *client) error {
				answer, err := c.policy(ctx, args[0])
				if err != nil {
					return err
				}
				c.noteCopy(cmd, answer.FromCopy)
				doc := answer.Policy
				if effective {
					doc = answer.Effective
				} else if !isStored(doc) {
					cmd.PrintErrf("No policy is stored for %s: the defaults hold; --effective shows them.\n", args[0])
				}
				return a.writeDocument(cmd.OutOrStdout(), doc)
			})
		},
	}
	a.outputFlag(cmd, "yaml", "json")
	cmd.Flags().BoolVar(&effective, "effective", false, "write out the defaults of all that is not set")
	return cmd
}

// isStored tells a document from the answer of an agent that has none.
func isStored(doc *meshv1.ServicePolicy) bool {
	version := doc.GetMetadata().GetResourceVersion()
	return version != "" && version != "0"
}

func (a *app) policyList() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the policies that are stored",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.ask(cmd.Context(), func(ctx context.Context, c *client) error {
				stored, err := c.storedPolicies(ctx)
				if err != nil {
					return err
				}
				for _, problem := range stored.unreadable {
					cmd.PrintErrln(problem)
				}
				c.noteCopy(cmd, stored.fromCopy)
				return a.writePolicies(cmd.OutOrStdout(), stored.docs)
			})
		},
	}
	a.outputFlag(cmd, "table", "yaml", "json")
	return cmd
}

// policy says how to be rid of what is stored if that is no policy of the service.
func (c *client) policy(ctx context.Context, service string) (*meshv1.GetPolicyResponse, error) {
	answer, err := c.GetPolicy(ctx, &meshv1.GetPolicyRequest{Service: service})
	if status.Code(err) == codes.DataLoss {
		return nil, notRead(service, status.Convert(err).Message())
	}
	if err != nil {
		return nil, err
	}
	if p := answer.Policy; isStored(p) && (p.ApiVersion != policy.APIVersion || p.Kind != policy.Kind || p.Metadata.Name != service) {
		return nil, notRead(service, fmt.Sprintf("it states apiVersion %q, kind %q and metadata.name %q", p.ApiVersion, p.Kind, p.Metadata.Name))
	}
	return answer, nil
}

func notRead(service, why string) unreadable {
	return unreadable(fmt.Sprintf("the stored policy of %s can't be read: 'meshctl policy delete %[1]s' removes it (%s)", service, why))
}

// unreadable is the error for a policy that is stored, but is no document.
type unreadable string

func (e unreadable) Error() string { return string(e) }

func (c *client) noteCopy(cmd *cobra.Command, fromCopy bool) {
	if fromCopy {
		cmd.PrintErrf("note: the registry is unreachable: this is the copy of agent %s\n", c.at())
	}
}

// stored is all that is stored, as far as it can be read.
type stored struct {
	docs       []*meshv1.ServicePolicy
	unreadable []unreadable
	fromCopy   bool
}

// storedPolicies asks for many at once, as an agent without its registry takes a while for each.
func (c *client) storedPolicies(ctx context.Context) (stored, error) {
	const most = 256
	services, err := c.ListServices(ctx, &meshv1.ListServicesRequest{})
	if err != nil {
		return stored{}, err
	}
	answers := make([]*meshv1.GetPolicyResponse, len(services.Services))
	problems := make([]unreadable, len(services.Services))
	asking, ctx := errgroup.WithContext(ctx)
	asking.SetLimit(most)
	for i, s := range services.Services {
		asking.Go(func() (err error) {
			answers[i], err = c.policy(ctx, s.Name)
			if errors.As(err, &problems[i]) {
				return nil
			}
			return err
		})
	}
	if err := asking.Wait(); err != nil {
		return stored{}, err
	}
	all := stored{unreadable: slices.DeleteFunc(problems, func(p unreadable) bool { return p == "" })}
	for _, answer := range answers {
		all.fromCopy = all.fromCopy || answer.GetFromCopy()
		if isStored(answer.GetPolicy()) {
			all.docs = append(all.docs, answer.Policy)
		}
	}
	return all, nil
}

func (a *app) writePolicies(w io.Writer, docs []*meshv1.ServicePolicy) error {
	switch a.output {
	case "json":
		return writeJSONList(w, docs)
	case "yaml":
		return a.writeDocuments(w, docs)
	}
	var rows [][]string
	for _, d := range docs {
		rows = append(rows, []string{d.Metadata.GetName(), policy.Effective(d).Spec.Balancer, d.Metadata.GetResourceVersion()})
	}
	return writeTable(w, "SERVICE BALANCER REVISION", rows)
}

// writeDocuments separates documents in the way in which 'policy set -f' reads them.
func (a *app) writeDocuments(w io.Writer, docs []*meshv1.ServicePolicy) error {
	if a.output == "json" && len(docs) > 1 {
		return writeJSONList(w, docs)
	}
	for i, doc := range docs {
		if i > 0 {
			fmt.Fprintln(w, "---")
		}
		if err := a.writeDocument(w, doc); err != nil {
			return err
		}
	}
	return nil
}

func writeJSONList(w io.Writer, docs []*meshv1.ServicePolicy) error {
	list := []json.RawMessage{}
	for _, doc := range docs {
		text, err := protojson.Marshal(doc)
		if err != nil {
			return fmt.Errorf("write as JSON: %w", err)
		}
		list = append(list, text)
	}
	text, err := json.Marshal(map[string]any{"policies": list})
	if err != nil {
		return fmt.Errorf("write as JSON: %w", err)
	}
	return indentJSON(w, text)
}

func (a *app) policyDelete() *cobra.Command {
	var w wait
	var force bool
	cmd := &cobra.Command{
		Use:   "delete SERVICE",
		Short: "Delete the policy of a service, so that the defaults hold again",
		Args:  serviceArg,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := w.contradiction(cmd); err != nil {
				return err
			}
			return a.converse(cmd.Context(), func(ctx context.Context, c *client) error {
				answer, err := c.deletePolicy(ctx, args[0], force)
				if err != nil {
					return err
				}
				fmt.Fprintf(cmd.OutOrStdout(), "policy of %s deleted at revision %d: the defaults hold\n",
					args[0], answer.Revision)
				return w.forAll(ctx, cmd, c, answer.Revision)
			})
		},
	}
	cmd.Flags().BoolVar(&force, "force", false, "delete it though Kubernetes manages it; what exists there brings it back")
	w.flags(cmd)
	return cmd
}

func (c *client) deletePolicy(ctx context.Context, service string, force bool) (*meshv1.DeletePolicyResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return c.DeletePolicy(ctx, &meshv1.DeletePolicyRequest{Service: service, Force: force})
}
