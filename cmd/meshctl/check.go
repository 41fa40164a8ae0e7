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
	"syscall"
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
	found = append(found, checkPods(pods)...)
	if len(captures.Captures) == 0 {
		return append(found, finding{Check: "capture", OK: true, Note: "off: applications use the proxy or --listen"}), nil
	}
	return append(found, c.checkCaptures(ctx, services, captures.Dns, others)...), nil
}

// checkCaptures looks at the rules, and then tries them.
func (c *client) checkCaptures(ctx context.Context, services *meshv1.ListServicesResponse, dns *meshv1.DNSView, captures []*meshv1.CaptureView) []finding {
	if len(captures) == 0 {
		return nil
	}
	var found, tried []finding
	s, own := usableService(services), captures[0]
	if s != nil && own.Active {
		tried = c.checkPaths(ctx, s, own)
		if dns.GetMode() != "off" && len(dns.GetSuffixes()) > 0 {
			tried = append(tried, checkName(ctx, s, dns))
		}
	}
	fails := slices.ContainsFunc(tried, func(f finding) bool { return !f.OK })
	for i, capture := range captures {
		untried := i > 0 || len(tried) == 0 || capturesReal(capture)
		found = append(found, checkRules(capture), checkShadows(capture, untried, fails))
	}
	return append(found, tried...)
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

// checkShadows takes rules of others that come first for harmless if all is tried, and works. At the same priority nobody can
// tell who comes first: that matters only if something fails.
func checkShadows(c *meshv1.CaptureView, untried, fails bool) finding {
	check := where(c) + ", order"
	first := slices.DeleteFunc(slices.Clone(c.Before), func(b *meshv1.CaptureChain) bool { return !fails && level(c, b) })
	switch {
	case len(first) == 0:
		return finding{Check: check, OK: true, Note: "no rules of others come first"}
	case fails || untried:
		return finding{Check: check, Note: "rules of others may come first, and direct connections elsewhere: " + chainNames(first)}
	}
	return finding{Check: check, OK: true, Note: "rules of others come first, and let connections through: " + chainNames(first)}
}

// level reports whether a chain of others has the priority of one of the agent's.
func level(c *meshv1.CaptureView, other *meshv1.CaptureChain) bool {
	return slices.ContainsFunc(c.Chains, func(own *meshv1.CaptureChain) bool { return own.Hook == other.Hook && own.Priority == other.Priority })
}

func chainNames(chains []*meshv1.CaptureChain) string {
	var names []string
	for _, c := range chains {
		names = append(names, fmt.Sprintf("%s %s (priority %d)", c.Table, c.Name, c.Priority))
	}
	return strings.Join(names, ", ")
}

// capturesReal reports whether connections are captured that are not tried, as they would come to applications.
func capturesReal(c *meshv1.CaptureView) bool {
	return slices.ContainsFunc(c.Sets, func(s *meshv1.CaptureSet) bool { return strings.HasPrefix(s.Name, "real") && s.Elements > 0 })
}

// checkPods says what is wrong in pods, of a few by name.
func checkPods(pods []*meshv1.CaptureView) []finding {
	if len(pods) == 0 {
		return nil
	}
	var wrong []string
	for _, c := range pods {
		switch shadows := checkShadows(c, true, false); {
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

// checkPaths connects as an application does, to each virtual address of a service that is routed here. It tells whether
// that has come to the agent, and whether the agent's own connections would.
func (c *client) checkPaths(ctx context.Context, s *meshv1.ServiceSummary, capture *meshv1.CaptureView) []finding {
	var found []finding
	for _, address := range []string{s.Ipv4, s.Ipv6} {
		at, err := netip.ParseAddr(address)
		if err == nil && routed(capture, at) {
			found = append(found, c.checkPath(ctx, s.Name, netip.AddrPortFrom(at, 80))...)
		}
	}
	return found
}

func routed(capture *meshv1.CaptureView, at netip.Addr) bool {
	return slices.ContainsFunc(capture.Routes, func(r string) bool {
		p, err := netip.ParsePrefix(r)
		return err == nil && p.Contains(at)
	})
}

func (c *client) checkPath(ctx context.Context, service string, to netip.AddrPort) []finding {
	ctx, cancel := context.WithTimeout(ctx, pathTime)
	defer cancel()
	what := fmt.Sprintf("to %s (%s)", service, to)
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", to.String())
	if err != nil {
		return []finding{{Check: "connection", Note: fmt.Sprintf("%s: %v: %s", what, err, whyNot(err))}}
	}
	defer conn.Close()
	answer, err := c.CheckCapture(ctx, &meshv1.CheckCaptureRequest{From: conn.LocalAddr().String(), To: to.String()})
	if err != nil {
		return []finding{{Check: "connection", Note: fmt.Sprintf("%s: nobody can tell where it went: %v", what, err)}}
	}
	return []finding{checkArrival(what, answer), checkLoop(what, answer)}
}

func whyNot(err error) string {
	if errors.Is(err, syscall.ECONNREFUSED) {
		return "is this user exempt, or its control group (`meshctl capture status`), or do rules of others refuse it (`nft list ruleset`)?"
	}
	return "do rules of others drop it, or direct it elsewhere (`nft list ruleset`)?"
}

func checkArrival(what string, answer *meshv1.CheckCaptureResponse) finding {
	if !answer.Arrived {
		return finding{Check: "connection", Note: what + " went elsewhere: a rule of others directs it there, see `nft list ruleset`"}
	}
	return finding{Check: "connection", OK: true, Note: what + " comes to the agent"}
}

// checkLoop tells of rules that make the agent call itself.
func checkLoop(what string, answer *meshv1.CheckCaptureResponse) finding {
	if answer.Loop != "" {
		return finding{Check: "loop", Note: fmt.Sprintf("the agent's own connection %s is not left alone (%s), so requests may come back to it: "+
			"does a rule of others change marks? see `nft list ruleset`", what, answer.Loop)}
	}
	return finding{Check: "loop", OK: true, Note: fmt.Sprintf("the agent's own connection %s is left alone", what)}
}

// checkName asks the resolver that applications ask.
func checkName(ctx context.Context, s *meshv1.ServiceSummary, dns *meshv1.DNSView) finding {
	ctx, cancel := context.WithTimeout(ctx, pathTime)
	defer cancel()
	name := s.Name + "." + dns.Suffixes[0]
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip4", name)
	switch {
	case err != nil && strings.Contains(err.Error(), syscall.ENETUNREACH.Error()):
		return finding{Check: "names", Note: fmt.Sprintf("%v: redirected names take a route to the resolver in resolv.conf: add one, or start the agent with --dns resolv.conf", err)}
	case err != nil:
		return finding{Check: "names", Note: fmt.Sprintf("%v (--dns %s)", err, dns.Mode)}
	case !slices.Contains(addrs, netip.MustParseAddr(s.Ipv4)):
		return finding{Check: "names", Note: fmt.Sprintf("%s is %v, want %s: another server answers (--dns %s)", name, addrs, s.Ipv4, dns.Mode)}
	}
	return finding{Check: "names", OK: true, Note: name + " is " + s.Ipv4}
}
