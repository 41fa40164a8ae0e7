package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"time"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	topPeriod  = time.Second
	topTimeout = 5 * time.Second
)

func (a *app) top() *cobra.Command {
	var once bool
	cmd := &cobra.Command{
		Use:   "top [SERVICE]",
		Short: "Show what the balancers see: requests, load, latency, hot and cold",
		Long: `Show, for every replica, what the balancers see. On a terminal the view is live; press ? for its keys. Otherwise, or
with --once, two samples are taken one second apart and shown once.

Columns: REQ/S and ERR/S count all callers; SHARE is the part of all picks; RIF (requests in flight) and LATENCY are those
that the replica's own agent counts; HEAT (hot or cold) and PROBED (the age of the freshest probe) are those of the balancer
that the second line of the heading names. Where the balancer goes by them there are also WEIGHT (a multiple of the mean),
COST (of one more request) and SLOTS (in use, of how many, and how many requests wait in line).`,
		Args: optionalServiceArg,
		RunE: func(cmd *cobra.Command, args []string) error {
			t := &topper{service: firstOf(args)}
			return a.converse(cmd.Context(), func(ctx context.Context, c *client) error {
				t.client = c
				if a.output == "text" && !once && isTerminal(cmd.OutOrStdout()) && os.Getenv("TERM") != "dumb" {
					return t.live(ctx)
				}
				view, err := t.twice(ctx)
				if err != nil {
					return err
				}
				return a.writeTop(cmd.OutOrStdout(), view)
			})
		},
	}
	a.outputFlag(cmd, "text", "json")
	cmd.Flags().BoolVar(&once, "once", false, "show the view once, on a terminal too")
	return cmd
}

// topper takes samples for the view.
type topper struct {
	client  *client
	service string // only this one; all if empty
}

// sample asks the agent, and leaves it if it takes too long: another may answer.
func (t *topper) sample(ctx context.Context) (*meshv1.TopResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, topTimeout)
	defer cancel()
	answer, err := t.client.Top(ctx, &meshv1.TopRequest{Service: t.service})
	explained := t.client.explain(err)
	if status.Code(err) == codes.DeadlineExceeded {
		t.client.hangUp(explained)
	}
	return answer, explained
}

// twice takes two samples and merges them.
func (t *topper) twice(ctx context.Context) (topView, error) {
	before, err := t.sample(ctx)
	if err != nil {
		return topView{}, err
	}
	select {
	case <-ctx.Done():
		return topView{}, ctx.Err()
	case <-time.After(topPeriod):
	}
	now, err := t.sample(ctx)
	if err != nil {
		return topView{}, err
	}
	return merge(before, now), nil
}

func (a *app) writeTop(w io.Writer, v topView) error {
	if a.output == "json" {
		out := json.NewEncoder(w)
		out.SetIndent("", "  ")
		return out.Encode(v)
	}
	return writeTopText(w, v, sheet{})
}

func writeTopText(w io.Writer, v topView, s sheet) error {
	lines := silent(v)
	for _, service := range v.Services {
		if len(lines) > 0 {
			lines = append(lines, "")
		}
		lines = append(lines, s.head(v, service)...)
		lines = append(lines, s.table(service.Replicas)...)
		lines = append(lines, notes(service)...)
	}
	if len(v.Services) == 0 {
		lines = append(lines, "No service is known to the agents that answered.")
	}
	for _, line := range s.cut(lines) {
		if _, err := fmt.Fprintln(w, line); err != nil {
			return err
		}
	}
	return nil
}
