package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/spf13/cobra"
	"golang.org/x/term"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// wait holds the flags of commands that can wait until all agents have applied what they changed.
type wait struct {
	wanted  bool
	timeout time.Duration
}

func (w *wait) flags(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&w.wanted, "wait", false, "wait until all live agents have applied the change")
	cmd.Flags().DurationVar(&w.timeout, "wait-timeout", 30*time.Second, "how long --wait waits")
}

// contradiction finds what makes no sense, before anything is stored.
func (w *wait) contradiction(cmd *cobra.Command) error {
	switch {
	case w.timeout <= 0:
		return misused("--wait-timeout: want a duration above 0s, got %v", w.timeout)
	case cmd.Flags().Changed("wait-timeout") && !w.wanted:
		return misused("--wait-timeout needs --wait")
	}
	return nil
}

// forAll returns when all live agents have applied revision, if that is wanted.
func (w *wait) forAll(ctx context.Context, cmd *cobra.Command, c *client, revision int64) error {
	if !w.wanted {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, w.timeout)
	defer cancel()
	last, err := follow(ctx, cmd.ErrOrStderr(), c, revision)
	if status.Code(err) == codes.DeadlineExceeded {
		return fmt.Errorf("not applied everywhere within %v: %s", w.timeout, progress(last, revision))
	}
	if err != nil {
		return err
	}
	if last.Applied < last.Members {
		return fmt.Errorf("not applied everywhere: %s", progress(last, revision))
	}
	fmt.Fprintf(cmd.OutOrStdout(), "applied on %d/%d agents at revision %d\n", last.Applied, last.Members, revision)
	return nil
}

// follow returns the last news of how far agents have come with revision.
func follow(ctx context.Context, stderr io.Writer, c *client, revision int64) (*meshv1.WaitAppliedResponse, error) {
	last := &meshv1.WaitAppliedResponse{}
	stream, err := c.WaitApplied(ctx, &meshv1.WaitAppliedRequest{Revision: revision})
	if err != nil {
		return last, err
	}
	live := isTerminal(stderr)
	for {
		news, err := stream.Recv()
		if live {
			fmt.Fprint(stderr, "\r\x1b[K")
		}
		if errors.Is(err, io.EOF) {
			return last, nil
		}
		if err != nil {
			return last, err
		}
		if last = news; live {
			fmt.Fprint(stderr, progress(last, revision))
		}
	}
}

func progress(p *meshv1.WaitAppliedResponse, revision int64) string {
	text := fmt.Sprintf("applied on %d/%d agents at revision %d", p.Applied, p.Members, revision)
	if len(p.Waiting) == 0 {
		return text
	}
	return text + "; waiting for " + strings.Join(p.Waiting, ", ")
}

func isTerminal(w any) bool {
	file, ok := w.(*os.File)
	return ok && term.IsTerminal(int(file.Fd()))
}
