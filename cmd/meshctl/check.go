package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/spf13/cobra"
)

// finding is what a check has found.
type finding struct {
	Check string `json:"check"`
	OK    bool   `json:"ok"`
	Note  string `json:"note"` // what was found, and where it is wrong, what to do

	Warn    bool `json:"warn,omitempty"`    // it works, but may not be meant so
	Skipped bool `json:"skipped,omitempty"` // nobody looked, and Note says why
}

func (f finding) result() string {
	switch {
	case f.Skipped:
		return "skipped"
	case !f.OK:
		return "WRONG"
	case f.Warn:
		return "warning"
	}
	return "ok"
}

func (a *app) check() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Check whether the agents, their capture and their names work",
		Long: `Check whether this node's agent, its capture and its names work. In a Kubernetes cluster, check its agents: whether there is
one on each node, whether the pods that are in the mesh are captured, and what is left out. What your role in the cluster
does not let you see is skipped. The exit code is 1 if anything is wrong.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var found []finding
			ctx, cancel := context.WithTimeout(cmd.Context(), surveyTimeout)
			defer cancel()
			err := a.converse(ctx, func(ctx context.Context, c *client) (err error) {
				found, err = findings(ctx, c)
				return err
			})
			if err != nil {
				return err
			}
			if err := a.writeFindings(cmd, found); err != nil {
				return err
			}
			if slices.ContainsFunc(found, func(f finding) bool { return !f.OK && !f.Skipped }) {
				return errors.New("not all is well")
			}
			return nil
		},
	}
	a.outputFlag(cmd, "table", "json")
	return cmd
}

func (a *app) writeFindings(cmd *cobra.Command, found []finding) error {
	if a.output != "table" {
		text, err := json.MarshalIndent(map[string][]finding{"checks": found}, "", "  ")
		if err != nil {
			return err
		}
		_, err = fmt.Fprintln(cmd.OutOrStdout(), string(text))
		return err
	}
	var rows [][]string
	for _, f := range found {
		rows = append(rows, []string{f.Check, f.result(), f.Note})
	}
	return writeTable(cmd.OutOrStdout(), "CHECK RESULT NOTE", rows)
}

func findings(ctx context.Context, c *client) ([]finding, error) {
	if c.through != nil {
		return clusterFindings(ctx, c)
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	members, err := c.ListMembers(ctx, &meshv1.ListMembersRequest{})
	if err != nil {
		return nil, err
	}
	services, err := c.ListServices(ctx, &meshv1.ListServicesRequest{})
	if err != nil {
		return nil, err
	}
	captures, err := c.GetCapture(ctx, &meshv1.GetCaptureRequest{})
	if err != nil {
		return nil, err
	}
	found := []finding{checkMembers(members), checkServices(services)}
	pods, others := podsAmong(captures.Captures)
	for _, capture := range others {
		found = append(found, checkRules(capture), checkShadows(capture))
	}
	found = append(found, checkPods(pods)...)
	if len(others) == 0 && len(pods) == 0 {
		return append(found, finding{Check: "capture", OK: true, Note: "off: applications use the proxy or --listen"}), nil
	}
	if s := usableService(services); s != nil && len(others) > 0 {
		found = append(found, checkPath(ctx, s))
		if captures.Dns.GetMode() != "off" {
			found = append(found, checkName(ctx, s, captures.Dns))
		}
	}
	return found, nil
}

func checkMembers(answer *meshv1.ListMembersResponse) finding {
	alive := 0
	for _, m := range answer.Members {
		if m.State == "alive" {
			alive++
		}
	}
	return finding{Check: "agents", OK: alive > 0, Note: fmt.Sprintf("%d of %d alive", alive, len(answer.Members))}
}

func checkServices(answer *meshv1.ListServicesResponse) finding {
	var bare []string
	for _, s := range answer.Services {
		if s.Ready == 0 {
			bare = append(bare, s.Name)
		}
	}
	if len(bare) == 0 {
		return finding{Check: "services", OK: true, Note: fmt.Sprintf("%d, all with replicas that are ready", len(answer.Services))}
	}
	return finding{Check: "services", Note: "no replica is ready of " + strings.Join(bare, ", ") + ": see `meshctl endpoints`"}
}

func where(c *meshv1.CaptureView) string {
	if c.Netns == "" {
		return "capture"
	}
	return "capture in " + c.Netns
}

func checkRules(c *meshv1.CaptureView) finding {
	if !c.Active {
		return finding{Check: where(c), Note: c.Error}
	}
	return finding{Check: where(c), OK: true, Note: fmt.Sprintf("%d rules in %d chains, for %s", len(c.Rules), len(c.Chains), strings.Join(c.Routes, " and "))}
}

func checkShadows(c *meshv1.CaptureView) finding {
	if len(c.Before) == 0 {
		return finding{Check: where(c) + ", order", OK: true, Note: "no rules of others come first"}
	}
	var chains []string
	for _, b := range c.Before {
		chains = append(chains, fmt.Sprintf("%s %s (priority %d)", b.Table, b.Name, b.Priority))
	}
	return finding{Check: where(c) + ", order", Note: "rules of others come first, and may direct connections elsewhere: " + strings.Join(chains, ", ")}
}

// checkPods says what is wrong in pods, of a few by name.
func checkPods(pods []*meshv1.CaptureView) []finding {
	if len(pods) == 0 {
		return nil
	}
	var wrong []string
	for _, c := range pods {
		switch shadows := checkShadows(c); {
		case !c.Active:
			wrong = append(wrong, c.Netns+": "+c.Error)
		case !shadows.OK:
			wrong = append(wrong, c.Netns+": "+shadows.Note)
		}
	}
	note := fmt.Sprintf("%d of %d captured", len(pods)-len(wrong), len(pods))
	if len(wrong) == 0 {
		return []finding{{Check: "pods", OK: true, Note: note}}
	}
	const few = 3
	if more := len(wrong) - few; more > 0 {
		wrong = append(wrong[:few], fmt.Sprintf("and %d more: see `meshctl capture status`", more))
	}
	return []finding{{Check: "pods", Note: note + "; " + strings.Join(wrong, "; ")}}
}

// usableService returns one that can be called; nil if there is none.
func usableService(answer *meshv1.ListServicesResponse) *meshv1.ServiceSummary {
	for _, s := range answer.Services {
		if s.Ready > 0 && s.Ipv4 != "" {
			return s
		}
	}
	return nil
}

// pathTime bounds what an application would find slow.
const pathTime = 2 * time.Second

// checkPath connects as an application does.
func checkPath(ctx context.Context, s *meshv1.ServiceSummary) finding {
	ctx, cancel := context.WithTimeout(ctx, pathTime)
	defer cancel()
	address := net.JoinHostPort(s.Ipv4, "80")
	c, err := new(net.Dialer).DialContext(ctx, "tcp", address)
	if err != nil {
		return finding{Check: "connection", Note: fmt.Sprintf("to %s (%s): %v", s.Name, address, err)}
	}
	c.Close()
	return finding{Check: "connection", OK: true, Note: fmt.Sprintf("to %s (%s) is captured", s.Name, address)}
}

// checkName asks the resolver that applications ask.
func checkName(ctx context.Context, s *meshv1.ServiceSummary, dns *meshv1.DNSView) finding {
	ctx, cancel := context.WithTimeout(ctx, pathTime)
	defer cancel()
	name := s.Name + "." + dns.Suffixes[0]
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip4", name)
	switch {
	case err != nil:
		return finding{Check: "names", Note: fmt.Sprintf("%v (--dns %s)", err, dns.Mode)}
	case !slices.Contains(addrs, netip.MustParseAddr(s.Ipv4)):
		return finding{Check: "names", Note: fmt.Sprintf("%s is %v, want %s: another server answers (--dns %s)", name, addrs, s.Ipv4, dns.Mode)}
	}
	return finding{Check: "names", OK: true, Note: name + " is " + s.Ipv4}
}
