package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"time"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/cmd/meshctl/cluster"
	"golang.org/x/sync/errgroup"
)

// surveyTimeout is the time for all checks of a cluster.
const surveyTimeout = time.Minute

// survey checks a mesh in a Kubernetes cluster. What the user may not see is skipped.
type survey struct {
	*cluster.Cluster
	asked    *client // any one agent
	enrolled []string
	unknown  error // why it is not known what is enrolled
	agents   []cluster.Agent
	pods     []cluster.Pod
	found    []finding
}

func clusterFindings(ctx context.Context, c *client) ([]finding, error) {
	s := &survey{Cluster: c.through, asked: c}
	members, err := c.ListMembers(ctx, &meshv1.ListMembersRequest{})
	if err != nil {
		return nil, err
	}
	services, err := c.ListServices(ctx, &meshv1.ListServicesRequest{})
	if err != nil {
		return nil, err
	}
	if s.agents, err = s.Agents(ctx); err != nil {
		return nil, err
	}
	s.add(checkMembers(members), checkVersions(members))
	s.checkNodes(ctx)
	s.add(checkServices(withReplicas(services)))
	s.checkNamespaces(ctx)
	s.checkPods(ctx)
	s.checkKubernetesServices(ctx, services)
	s.checkNetworkPolicies(ctx)
	return s.found, nil
}

func (s *survey) add(found ...finding) { s.found = append(s.found, found...) }

func skipped(check string, err error) finding {
	return finding{Check: check, Skipped: true, Note: err.Error()}
}

func checkVersions(answer *meshv1.ListMembersResponse) finding {
	nodes := map[string][]string{}
	for _, m := range answer.Members {
		if m.State == "alive" {
			nodes[m.Version] = append(nodes[m.Version], m.Node)
		}
	}
	versions := slices.Sorted(maps.Keys(nodes))
	if len(versions) == 1 {
		return finding{Check: "versions", OK: true, Note: "all agents are " + versions[0]}
	}
	var words []string
	for _, v := range versions {
		words = append(words, fmt.Sprintf("%s on %s", orDash(v), briefly(nodes[v])))
	}
	return finding{Check: "versions", OK: true, Warn: true, Note: "agents differ, as they do during an upgrade: " + strings.Join(words, "; ")}
}

// briefly joins names, but no more than are read.
func briefly(names []string) string {
	const most = 8
	if len(names) > most {
		names = append(slices.Clone(names[:most]), fmt.Sprintf("%d more", len(names)-most))
	}
	return strings.Join(names, ", ")
}

// checkNodes wants an agent on each node that pods may be sent to.
func (s *survey) checkNodes(ctx context.Context) {
	nodes, err := s.SchedulableNodes(ctx)
	if err != nil {
		s.add(skipped("nodes", err))
		return
	}
	states := map[string]string{}
	for _, a := range s.agents {
		if a.Ready || states[a.Node] != "ready" {
			states[a.Node] = cmp.Or(a.State, "ready")
		}
	}
	var bare []string
	for _, node := range nodes {
		if state := cmp.Or(states[node], "none"); state != "ready" {
			bare = append(bare, fmt.Sprintf("%s (%s)", node, state))
		}
	}
	if len(bare) > 0 {
		s.add(finding{Check: "nodes", Note: "no agent is ready on " + briefly(bare) + ": see 'kubectl get pods -A -o wide -l app.kubernetes.io/name=headroom'"})
		return
	}
	s.add(finding{Check: "nodes", OK: true, Note: fmt.Sprintf("%d, each with an agent that is ready", len(nodes))})
}

func (s *survey) checkNamespaces(ctx context.Context) {
	s.enrolled, s.unknown = s.Enrolled(ctx)
	switch {
	case s.unknown != nil:
		s.add(skipped("namespaces", s.unknown))
		s.unknown = errors.New("which namespaces are in the mesh is not known")
	case len(s.enrolled) == 0:
		s.add(finding{Check: "namespaces", OK: true, Note: "none is in the mesh: 'kubectl label namespace NAME " + cluster.MeshLabel + "=enabled' brings one in"})
	default:
		s.add(finding{Check: "namespaces", OK: true, Note: "in the mesh: " + briefly(s.enrolled)})
	}
}

// checkPods compares the pods that are to be captured with those that the agents say they capture.
func (s *survey) checkPods(ctx context.Context) {
	err := s.unknown
	if err == nil {
		s.pods, err = s.Pods(ctx, s.enrolled)
	}
	if err != nil {
		s.add(skipped("pods", err))
		return
	}
	single, err := s.SinglePods(ctx, s.enrolled)
	if err != nil {
		s.add(skipped("pods of other namespaces", err))
	}
	s.pods = append(s.pods, single...)
	s.checkCaptures(ctx)
}

// checkCaptures asks every agent that has pods, many at once.
func (s *survey) checkCaptures(ctx context.Context) {
	expected := map[string][]string{} // by node
	var leftOut []string
	for _, p := range s.pods {
		name := p.Namespace + "/" + p.Name
		if p.LeftOut != "" {
			leftOut = append(leftOut, fmt.Sprintf("%s (%s)", name, p.LeftOut))
			continue
		}
		expected[p.Node] = append(expected[p.Node], name)
	}
	nodes := slices.Sorted(maps.Keys(expected))
	found := make([]finding, len(nodes))
	const most = 16
	var asking errgroup.Group
	asking.SetLimit(most)
	for i, node := range nodes {
		asking.Go(func() error {
			found[i] = s.checkCaptured(ctx, node, expected[node])
			return nil
		})
	}
	_ = asking.Wait() // what fails is in what was found
	s.add(found...)
	if len(nodes) == 0 {
		s.add(finding{Check: "pods", OK: true, Note: "none that runs is in the mesh"})
	}
	if len(leftOut) > 0 {
		s.add(finding{Check: "pods left out", OK: true, Note: briefly(leftOut)})
	}
}

func (s *survey) checkCaptured(ctx context.Context, node string, expected []string) finding {
	check := "pods on " + node
	alone := finding{Check: check, Note: fmt.Sprintf("%d go without the mesh: no agent is ready there", len(expected))}
	i := slices.IndexFunc(s.agents, func(a cluster.Agent) bool { return a.Node == node && a.Runs })
	if i < 0 {
		return alone
	}
	answer, err := s.captures(ctx, s.agents[i])
	switch {
	case answer.GetKubernetesError() != "":
		return finding{Check: check, Note: "the agent there can't ask Kubernetes: " + answer.KubernetesError}
	case !s.agents[i].Ready:
		return alone
	case err != nil:
		return skipped(check, err)
	}
	return compareCaptures(check, expected, answer.Captures)
}

func (s *survey) captures(ctx context.Context, agent cluster.Agent) (*meshv1.GetCaptureResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	c, err := dial(ctx, throughCluster(s.Cluster, func(ctx context.Context) (net.Conn, error) { return s.DialAgent(ctx, agent) }))
	if err != nil {
		return nil, err
	}
	defer c.conn.Close()
	answer, err := c.GetCapture(ctx, &meshv1.GetCaptureRequest{})
	return answer, c.explain(err)
}

func compareCaptures(check string, expected []string, captures []*meshv1.CaptureView) finding {
	views := map[string]*meshv1.CaptureView{}
	for _, c := range captures {
		views[strings.TrimPrefix(c.Netns, podPrefix)] = c
	}
	var wrong, shadowed []string
	for _, pod := range expected {
		switch view := views[pod]; {
		case view == nil:
			wrong = append(wrong, pod)
		case !view.Active:
			wrong = append(wrong, fmt.Sprintf("%s (%s)", pod, view.Error))
		case len(view.Before) > 0:
			shadowed = append(shadowed, fmt.Sprintf("%s (%s %s)", pod, view.Before[0].Table, view.Before[0].Name))
		}
	}
	switch {
	case len(wrong) > 0:
		return finding{Check: check, Note: fmt.Sprintf("%d of %d are not captured: %s", len(wrong), len(expected), briefly(wrong))}
	case len(shadowed) > 0:
		return finding{Check: check, Note: "rules of their own come first, and may direct connections elsewhere: " + briefly(shadowed)}
	}
	return finding{Check: check, OK: true, Note: fmt.Sprintf("%d, all captured", len(expected))}
}

// checkKubernetesServices compares Services with what the mesh knows.
func (s *survey) checkKubernetesServices(ctx context.Context, known *meshv1.ListServicesResponse) {
	const check = "Kubernetes services"
	if s.unknown != nil {
		s.add(skipped(check, s.unknown))
		return
	}
	services, err := s.Services(ctx, s.enrolled)
	if err != nil {
		s.add(skipped(check, err))
		return
	}
	var leftOut, missing []string
	for _, service := range services {
		name := service.Namespace + "/" + service.Name
		switch {
		case service.LeftOut != "":
			leftOut = append(leftOut, fmt.Sprintf("%s (%s)", name, service.LeftOut))
		case slices.ContainsFunc(s.pods, service.Selects) && !knows(known, service):
			missing = append(missing, name)
		}
	}
	if len(leftOut) > 0 {
		s.add(finding{Check: check + " left out", OK: true, Note: briefly(leftOut)})
	}
	if len(missing) > 0 {
		s.add(finding{Check: check, Note: "they have pods, but the mesh doesn't know them: " + briefly(missing) + "; see the agents' logs"})
		return
	}
	s.add(finding{Check: check, OK: true, Note: fmt.Sprintf("%d in the mesh", len(services)-len(leftOut))})
}

func knows(known *meshv1.ListServicesResponse, service cluster.Service) bool {
	return slices.ContainsFunc(withReplicas(known).Services, func(s *meshv1.ServiceSummary) bool {
		return s.Name == service.Name+"."+service.Namespace
	})
}

// withReplicas leaves out services that Kubernetes has no pods for now, or had once: the mesh keeps their addresses for a while.
func withReplicas(known *meshv1.ListServicesResponse) *meshv1.ListServicesResponse {
	some := func(s *meshv1.ServiceSummary) bool { return s.Ready+s.Unhealthy+s.Draining > 0 }
	return &meshv1.ListServicesResponse{Services: slices.DeleteFunc(slices.Clone(known.Services), func(s *meshv1.ServiceSummary) bool { return !some(s) })}
}

// checkNetworkPolicies warns only: most networks let a node reach its own pods, whatever the policies say.
func (s *survey) checkNetworkPolicies(ctx context.Context) {
	const check = "network policies"
	if s.unknown != nil {
		s.add(skipped(check, s.unknown))
		return
	}
	closing, err := s.Closing(ctx, s.enrolled)
	switch {
	case err != nil:
		s.add(skipped(check, err))
	case len(closing) > 0:
		s.add(finding{Check: check, OK: true, Warn: true, Note: "calls through the mesh come from the address of the pod's own node, which these don't name by ipBlock: " + briefly(closing)})
	default:
		s.add(finding{Check: check, OK: true, Note: "none stands between agents and pods"})
	}
}
