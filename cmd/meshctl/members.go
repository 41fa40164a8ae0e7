package main

import (
	"context"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/spf13/cobra"
)

func (a *app) members() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "members",
		Short: "List the agents of the mesh",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.ask(cmd.Context(), func(ctx context.Context, c *client) error {
				answer, err := c.ListMembers(ctx, &meshv1.ListMembersRequest{})
				if err != nil {
					return err
				}
				if a.output != "table" {
					return a.writeMessage(cmd.OutOrStdout(), answer)
				}
				return writeTable(cmd.OutOrStdout(), "NODE STATE ZONE VERSION GOSSIP MESH", memberRows(answer))
			})
		},
	}
	a.outputFlag(cmd, "table", "json", "yaml")
	return cmd
}

func memberRows(answer *meshv1.ListMembersResponse) (rows [][]string) {
	for _, m := range answer.Members {
		rows = append(rows, []string{m.Node, m.State, m.Zone, m.Version, m.GossipAddress, m.MeshAddress})
	}
	return rows
}
