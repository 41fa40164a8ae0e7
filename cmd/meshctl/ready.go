package main

import (
	"context"
	"errors"
	"io"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/spf13/cobra"
)

func (a *app) ready() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ready",
		Short: "Tell whether an agent is ready, and what is missing if not",
		Long:  "Tell whether an agent is ready, and what is missing if not. The exit code is 1 if it is not: it can be used as a probe.",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var r *meshv1.GetReadinessResponse
			err := a.ask(cmd.Context(), func(ctx context.Context, c *client) (err error) {
				r, err = c.GetReadiness(ctx, &meshv1.GetReadinessRequest{})
				return err
			})
			if err != nil {
				return err
			}
			if err := a.writeReadiness(cmd.OutOrStdout(), r); err != nil {
				return err
			}
			if !r.Ready {
				return errors.New("the agent is not ready")
			}
			return nil
		},
	}
	a.outputFlag(cmd, "table", "json")
	return cmd
}

func (a *app) writeReadiness(w io.Writer, r *meshv1.GetReadinessResponse) error {
	if a.output == "json" {
		return a.writeMessage(w, r)
	}
	var rows [][]string
	for _, c := range r.Checks {
		rows = append(rows, []string{c.Name, finding{OK: c.Ok}.result(), c.Note})
	}
	return writeTable(w, "CHECK RESULT NOTE", rows)
}
