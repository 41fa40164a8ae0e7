package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/policy/document"
	"github.com/headroom-mesh/headroom/policy/localservice"
	"github.com/spf13/cobra"
)

func (a *app) endpoints() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "endpoints [SERVICE]",
		Short: "List the replicas of one service, or of all",
		Args:  optionalServiceArg,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.ask(cmd.Context(), func(ctx context.Context, c *client) error {
				answer, err := c.ListEndpoints(ctx, &meshv1.ListEndpointsRequest{Service: firstOf(args)})
				if err != nil {
					return err
				}
				if a.output != "table" {
					return a.writeMessage(cmd.OutOrStdout(), answer)
				}
				if len(args) == 1 && len(answer.Endpoints) == 0 {
					cmd.PrintErrf("No replica of %s is registered.\n", args[0])
				}
				return writeTable(cmd.OutOrStdout(), "SERVICE NODE ADDRESS PROTOCOL ZONE WEIGHT STATE AGENT", endpointRows(answer))
			})
		},
	}
	a.outputFlag(cmd, "table", "json", "yaml")
	return cmd
}

func endpointRows(answer *meshv1.ListEndpointsResponse) (rows [][]string) {
	for _, e := range answer.Endpoints {
		rows = append(rows, []string{e.Service, e.Node, e.Address, e.Protocol, e.Zone, fmt.Sprint(max(e.Weight, 1)), stateWord(e.State), e.Agent})
	}
	return rows
}

func stateWord(s meshv1.EndpointRecord_State) string { return strings.ToLower(s.String()) }

// registration is what the flags of register say.
type registration struct {
	addresses         []string
	weight            uint32
	protocol          string
	check             string
	interval, timeout time.Duration
	rise, fall        uint32
	given             func(flag string) bool
}

func (a *app) register() *cobra.Command {
	var r registration
	cmd := &cobra.Command{
		Use:   "register SERVICE --address ADDRESS",
		Short: "Register replicas that run on the agent's node",
		Long: `Register replicas that run on the node of the agent that is asked. They stay registered, over restarts of the
agent too, until they are deregistered.`,
		Example: `  meshctl register checkout --address 127.0.0.1:8080 --check http:/healthz
  meshctl register ledger --address 127.0.0.1:9090 --check grpc --check-interval 500ms
  meshctl register batch --address 127.0.0.1:8090 --weight 4
  meshctl register accounts --address unix:/run/mysqld/mysqld.sock --protocol mysql`,
		Args: serviceArg,
		RunE: func(cmd *cobra.Command, args []string) error {
			r.given = cmd.Flags().Changed
			doc, err := r.document(args[0])
			if err != nil {
				return err
			}
			a.one = true
			return a.ask(cmd.Context(), func(ctx context.Context, c *client) error {
				answer, err := c.Register(ctx, &meshv1.RegisterRequest{Service: doc})
				if err != nil {
					return err
				}
				fmt.Fprintf(cmd.OutOrStdout(), "registered %s at %s on node %s\n", args[0], strings.Join(r.addresses, ", "), answer.Node)
				return nil
			})
		},
	}
	flags := cmd.Flags()
	flags.StringSliceVar(&r.addresses, "address", nil, "where a replica listens, as the agent reaches it: IP:PORT or unix:/PATH; may be repeated")
	flags.StringVar(&r.protocol, "protocol", "", "what the replicas speak: http, http2, grpc, tls, tcp, or a Kubernetes name of one of these (default not said: the first bytes tell)")
	flags.Uint32Var(&r.weight, "weight", 1, "how much each of them can bear, compared with other replicas of the service, 1 to 100")
	flags.StringVar(&r.check, "check", "", "health check: http:/PATH, tcp, grpc or grpc:SERVICE (default none: always healthy)")
	flags.DurationVar(&r.interval, "check-interval", 0, "time between two checks (default 2s)")
	flags.DurationVar(&r.timeout, "check-timeout", 0, "time allowed for one check (default 1s)")
	flags.Uint32Var(&r.rise, "rise", 0, "successes in a row that make an unhealthy replica healthy (default 2)")
	flags.Uint32Var(&r.fall, "fall", 0, "failures in a row that make a healthy replica unhealthy (default 3)")
	return cmd
}

func (r registration) document(service string) (*meshv1.LocalService, error) {
	if len(r.addresses) == 0 {
		return nil, misused("no --address is given: want where the replica listens, such as --address 127.0.0.1:8080")
	}
	check, err := r.healthCheck()
	if err != nil {
		return nil, err
	}
	doc := &meshv1.LocalService{
		ApiVersion: policy.APIVersion,
		Kind:       localservice.Kind,
		Metadata:   &meshv1.Metadata{Name: service},
		Spec:       &meshv1.LocalServiceSpec{Check: check, Protocol: r.protocol},
	}
	for _, address := range r.addresses {
		e := &meshv1.LocalEndpoint{Address: address}
		if r.given("weight") {
			e.Weight = &r.weight
		}
		doc.Spec.Endpoints = append(doc.Spec.Endpoints, e)
	}
	if err := localservice.Validate(doc); err != nil {
		return nil, misused("%v", listed("this can't be registered", err))
	}
	return doc, nil
}

func (r registration) healthCheck() (*meshv1.HealthCheck, error) {
	if r.check == "" {
		if slices.ContainsFunc([]string{"check-interval", "check-timeout", "rise", "fall"}, r.given) {
			return nil, misused("--check-interval, --check-timeout, --rise and --fall need --check")
		}
		return nil, nil
	}
	if r.given("rise") && r.rise == 0 || r.given("fall") && r.fall == 0 {
		return nil, misused("--rise and --fall: want a whole number from 1 to 100, got 0")
	}
	check := &meshv1.HealthCheck{Rise: r.rise, Fall: r.fall}
	if r.given("check-interval") {
		check.Interval = document.FormatDuration(r.interval)
	}
	if r.given("check-timeout") {
		check.Timeout = document.FormatDuration(r.timeout)
		if interval := cmp.Or(r.interval, 2*time.Second); r.timeout > interval {
			return nil, misused("--check-timeout: want no more than the time between two checks, %v, got %v", interval, r.timeout)
		}
	}
	kind, target, hasTarget := strings.Cut(r.check, ":")
	switch {
	case kind == "http" && hasTarget && target != "":
		check.Http = target
	case kind == "tcp" && !hasTarget:
		check.Tcp = true
	case kind == "grpc" && !hasTarget:
		check.Grpc = "*"
	case kind == "grpc" && target != "":
		check.Grpc = target
	default:
		return nil, misused("--check: want http:/PATH, tcp, grpc or grpc:SERVICE, got %q", r.check)
	}
	return check, nil
}

func (a *app) deregister() *cobra.Command {
	var addresses []string
	cmd := &cobra.Command{
		Use:   "deregister SERVICE",
		Short: "Remove replicas that were registered on the agent's node",
		Args:  serviceArg,
		RunE: func(cmd *cobra.Command, args []string) error {
			for _, address := range addresses {
				if _, err := localservice.ParseAddress(address); err != nil {
					return misused("--address: %v", err)
				}
			}
			a.one = true
			return a.ask(cmd.Context(), func(ctx context.Context, c *client) error {
				return deregister(ctx, cmd, c, args[0], addresses)
			})
		},
	}
	cmd.Flags().StringSliceVar(&addresses, "address", nil,
		"only the replica at this address; may be repeated (default all that were registered on this node)")
	return cmd
}

func deregister(ctx context.Context, cmd *cobra.Command, c *client, service string, addresses []string) error {
	if len(addresses) == 0 {
		addresses = []string{""} // stands for all of them
	}
	for _, address := range addresses {
		answer, err := c.Deregister(ctx, &meshv1.DeregisterRequest{Service: service, Address: address})
		if err != nil {
			return err
		}
		if len(answer.Addresses) == 0 {
			return fmt.Errorf("no such replica of %s was registered on node %s", service, answer.Node)
		}
		fmt.Fprintf(cmd.OutOrStdout(), "deregistered %s at %s on node %s\n",
			service, strings.Join(answer.Addresses, ", "), answer.Node)
	}
	return nil
}
