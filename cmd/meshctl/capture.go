package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/headroom-mesh/headroom/agent/capture"
	"github.com/headroom-mesh/headroom/agent/names"
	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/cmd/meshctl/cluster"
	"github.com/spf13/cobra"
)

func (a *app) capture() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "capture",
		Short: "See, and end, what leads this node's connections to its agent",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return misused("want one of: capture status, capture off")
		},
	}
	cmd.AddCommand(a.captureStatus(), a.captureOff())
	return cmd
}

func (a *app) captureStatus() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the rules, their counters, what is exempt, and how names are answered",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			a.one = true
			return a.ask(cmd.Context(), func(ctx context.Context, c *client) error {
				answer, err := c.GetCapture(ctx, &meshv1.GetCaptureRequest{})
				if err != nil {
					return err
				}
				if a.output != "table" {
					return a.writeMessage(cmd.OutOrStdout(), answer)
				}
				return writeCapture(cmd.OutOrStdout(), answer)
			})
		},
	}
	a.outputFlag(cmd, "table", "json", "yaml")
	return cmd
}

func writeCapture(w io.Writer, answer *meshv1.GetCaptureResponse) error {
	if len(answer.Captures) == 0 {
		fmt.Fprintln(w, "This agent captures no connections: start it with --capture.")
	}
	pods, others := podsAmong(answer.Captures)
	for _, c := range others {
		if err := writeCaptureOf(w, c); err != nil {
			return err
		}
	}
	if err := writePods(w, pods); err != nil {
		return err
	}
	if d := answer.Dns; d != nil {
		fmt.Fprintf(w, "DNS: %s", d.Mode)
		if len(d.Addresses) > 0 {
			fmt.Fprintf(w, " at %s, for names under %s", strings.Join(d.Addresses, ", "), strings.Join(d.Suffixes, ", "))
		}
		fmt.Fprintln(w)
	}
	return nil
}

// podPrefix starts what is in place of the path of a network namespace, for those of pods.
const podPrefix = "pod "

func podsAmong(all []*meshv1.CaptureView) (pods, others []*meshv1.CaptureView) {
	for _, c := range all {
		if strings.HasPrefix(c.Netns, podPrefix) {
			pods = append(pods, c)
		} else {
			others = append(others, c)
		}
	}
	return pods, others
}

func writePods(w io.Writer, pods []*meshv1.CaptureView) error {
	if len(pods) == 0 {
		return nil
	}
	var rows [][]string
	for _, c := range pods {
		result, note := "yes", "-"
		if !c.Active {
			result, note = "no", c.Error
		}
		rows = append(rows, []string{strings.TrimPrefix(c.Netns, podPrefix), result, strconv.FormatUint(redirected(c), 10), note})
	}
	return writeTable(w, "POD CAPTURED CONNECTIONS NOTE", rows)
}

// redirected is how many connections were captured.
func redirected(c *meshv1.CaptureView) (connections uint64) {
	for _, r := range c.Rules {
		if strings.HasPrefix(r.What, "redirect ") {
			connections += r.Packets
		}
	}
	return connections
}

func writeCaptureOf(w io.Writer, c *meshv1.CaptureView) error {
	where := "this node"
	if c.Netns != "" {
		where = "network namespace " + c.Netns
	}
	if !c.Active {
		fmt.Fprintf(w, "Connections of %s are not captured: %s\n", where, c.Error)
		return nil
	}
	fmt.Fprintf(w, "Connections of %s to %s are captured; the rules end with process %d.\n", where, strings.Join(c.Routes, " and "), c.Owner)
	var rows [][]string
	for _, r := range c.Rules {
		rows = append(rows, []string{r.Table, r.Chain, r.What, strconv.FormatUint(r.Packets, 10), strconv.FormatUint(r.Bytes, 10)})
	}
	if err := writeTable(w, "TABLE CHAIN RULE PACKETS BYTES", rows); err != nil {
		return err
	}
	fmt.Fprintf(w, "Exempt: %s\n", exemptions(c))
	for _, b := range c.Before {
		fmt.Fprintf(w, "Chain %s of table %s (%s, priority %d, %d rules) may come before them.\n", b.Name, b.Table, b.Hook, b.Priority, b.Rules)
	}
	return nil
}

func exemptions(c *meshv1.CaptureView) string {
	all := []string{fmt.Sprintf("mark %#x (the agent)", c.ExemptMark)}
	for _, uid := range c.ExemptUids {
		all = append(all, fmt.Sprintf("user %d", uid))
	}
	for _, port := range c.ExemptPorts {
		all = append(all, fmt.Sprintf("port %d", port))
	}
	for _, group := range c.ExemptCgroups {
		all = append(all, "cgroup "+group)
	}
	return strings.Join(all, ", ")
}

// removeLeftovers removes what an agent that was killed has left on this machine.
func removeLeftovers() ([]string, error) {
	removed, captureErr := capture.RemoveAll("/proc")
	const resolvConf = "/etc/resolv.conf"
	changed, err := names.Restore(resolvConf)
	if changed {
		removed = append(removed, "the agent's lines in "+resolvConf)
	}
	dropIn, dropInErr := names.RestoreResolved("/")
	if dropIn {
		removed = append(removed, "the agent's domains in systemd-resolved; reload it")
	}
	return removed, errors.Join(captureErr, err, dropInErr)
}

func (a *app) captureOff() *cobra.Command {
	return &cobra.Command{
		Use:   "off",
		Short: "End it until the agent is started again, and remove what an agent that was killed has left",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			removed, err := a.stopCapture(cmd)
			if err != nil {
				return err
			}
			if len(removed) == 0 {
				fmt.Fprintln(cmd.OutOrStdout(), "Nothing was captured, and nothing is left to remove.")
			}
			for _, what := range removed {
				fmt.Fprintf(cmd.OutOrStdout(), "removed %s\n", what)
			}
			return nil
		},
	}
}

// stopCapture returns what was removed: by the agent, or by this very program if there is none on this machine.
func (a *app) stopCapture(cmd *cobra.Command) (removed []string, err error) {
	a.one = true
	err = a.ask(cmd.Context(), func(ctx context.Context, c *client) error {
		answer, err := c.StopCapture(ctx, &meshv1.StopCaptureRequest{})
		removed = answer.GetRemoved()
		return err
	})
	_, answered := errors.AsType[answerError](err)
	if err == nil || answered || a.target.cluster != (cluster.Options{}) || cmd.Context().Err() != nil {
		return removed, err // what another machine has left is not here
	}
	fmt.Fprintf(cmd.ErrOrStderr(), "No agent answers here (%v): only what it may have left behind is removed.\n", err)
	return removeLeftovers()
}
