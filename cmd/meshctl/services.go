package main

import (
	"context"
	"fmt"
	"strconv"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/spf13/cobra"
)

func (a *app) services() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "services",
		Short: "List the services of the mesh",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.ask(cmd.Context(), func(ctx context.Context, c *client) error {
				answer, err := c.ListServices(ctx, &meshv1.ListServicesRequest{})
				if err != nil {
					return err
				}
				if a.output != "table" {
					return a.writeMessage(cmd.OutOrStdout(), answer)
				}
				return writeTable(cmd.OutOrStdout(), "SERVICE BALANCER POLICY READY UNHEALTHY DRAINING IPV4 IPV6", serviceRows(answer))
			})
		},
	}
	a.outputFlag(cmd, "table", "json", "yaml")
	return cmd
}

func serviceRows(answer *meshv1.ListServicesResponse) (rows [][]string) {
	for _, s := range answer.Services {
		rows = append(rows, []string{s.Name, s.Balancer, revision(s.PolicyRevision),
			fmt.Sprint(s.Ready), fmt.Sprint(s.Unhealthy), fmt.Sprint(s.Draining), s.Ipv4, s.Ipv6})
	}
	return rows
}

// revision names the revision of a policy.
func revision(n int64) string {
	if n == 0 {
		return "default"
	}
	return strconv.FormatInt(n, 10)
}
