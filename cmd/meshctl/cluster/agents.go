package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// agentLabels select the pods of agents, as the chart labels them.
const agentLabels = "app.kubernetes.io/name=headroom,app.kubernetes.io/component=agent"

// agentPort is where an agent's admin API listens, on its loopback address.
const agentPort = 15010

// Agent is the pod of an agent.
type Agent struct {
	Namespace, Pod, Node string
	Ready                bool
	Runs                 bool   // so that it can be asked, ready or not
	State                string // why it isn't ready
}

// String names an agent for people.
func (a Agent) String() string {
	return fmt.Sprintf("the agent of node %s (pod %s/%s)", a.Node, a.Namespace, a.Pod)
}

// Agents lists all agents, whatever their state, by node.
func (c *Cluster) Agents(ctx context.Context) ([]Agent, error) {
	pods, err := c.agentPods(ctx)
	if err != nil {
		return nil, err
	}
	var agents []Agent
	for _, p := range pods {
		a := Agent{Namespace: p.Namespace, Pod: p.Name, Node: p.Spec.NodeName}
		a.State, a.Ready = podState(p)
		a.Runs = a.Ready || a.State == notReady
		agents = append(agents, a)
	}
	slices.SortFunc(agents, func(a, b Agent) int { return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Pod, b.Pod)) })
	return agents, nil
}

// agentPods looks where agents usually are first, as the user may not be allowed to look everywhere.
func (c *Cluster) agentPods(ctx context.Context) ([]corev1.Pod, error) {
	namespace := cmp.Or(c.options.Namespace, DefaultNamespace)
	pods, err := c.labelled(ctx, namespace)
	if err != nil || len(pods) > 0 {
		return pods, elsewhere(err)
	}
	if c.options.Namespace != "" {
		return nil, fmt.Errorf("namespace %s of %s has no Headroom agents: --namespace-of-agents says where they are", namespace, c.name)
	}
	pods, err = c.labelled(ctx, "")
	if refused, ok := errors.AsType[Refused](err); ok {
		return nil, fmt.Errorf("namespace %s of %s has no Headroom agents, and %w: --namespace-of-agents says where they are", namespace, c.name, refused)
	}
	if err == nil && len(pods) == 0 {
		return nil, fmt.Errorf("%s has no Headroom agents: install them by 'helm install headroom deploy/helm -n %s --create-namespace'", c.name, DefaultNamespace)
	}
	return pods, err
}

func (c *Cluster) labelled(ctx context.Context, namespace string) ([]corev1.Pod, error) {
	return list[corev1.Pod](ctx, c, resource{api: "/api/v1", plural: "pods", namespace: namespace, labels: agentLabels})
}

func elsewhere(err error) error {
	if _, ok := errors.AsType[Refused](err); ok {
		return fmt.Errorf("%w; if the agents are in another namespace, say --namespace-of-agents", err)
	}
	return err
}

const (
	notReady = "not ready"        // it runs, and says that it can't do its work
	crashes  = "CrashLoopBackOff" // it ends soon after each start
)

func podState(p corev1.Pod) (state string, ready bool) {
	if p.DeletionTimestamp != nil {
		return "ending", false
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue && p.Status.Phase == corev1.PodRunning {
			return "", true
		}
	}
	for _, c := range p.Status.ContainerStatuses {
		if w := c.State.Waiting; w != nil && w.Reason != "" {
			return w.Reason, false
		}
	}
	if p.Status.Phase == corev1.PodRunning {
		return notReady, false
	}
	return cmp.Or(string(p.Status.Phase), "Pending"), false
}

// usable returns the agents that can be asked: those that are ready, or if none is, those that run.
func (c *Cluster) usable(ctx context.Context) ([]Agent, error) {
	agents, err := c.Agents(ctx)
	if err != nil {
		return nil, err
	}
	if node := c.options.Node; node != "" {
		nodes := names(agents, func(a Agent) string { return a.Node })
		agents = slices.DeleteFunc(agents, func(a Agent) bool { return a.Node != node })
		if len(agents) == 0 {
			return nil, fmt.Errorf("no agent runs on node %s: there are agents on %s", node, nodes)
		}
	}
	for _, will := range []func(Agent) bool{func(a Agent) bool { return a.Ready }, func(a Agent) bool { return a.Runs }} {
		if some := slices.DeleteFunc(slices.Clone(agents), func(a Agent) bool { return !will(a) }); len(some) > 0 {
			return some, nil
		}
	}
	see := "describe pod" // has the events that keep it from starting
	if agents[0].State == crashes {
		see = "logs"
	}
	return nil, fmt.Errorf("no agent is ready: %s; see 'kubectl %s -n %s %s'",
		names(agents, func(a Agent) string { return a.Pod + " is " + a.State }), see, agents[0].Namespace, agents[0].Pod)
}

// names joins names, but no more than people read.
func names[T any](all []T, name func(T) string) string {
	const most = 5
	var words []string
	for _, x := range all[:min(most, len(all))] {
		words = append(words, name(x))
	}
	if len(all) > most {
		words = append(words, fmt.Sprintf("%d more", len(all)-most))
	}
	return strings.Join(words, ", ")
}

// Dial connects to the admin API of an agent. Where the first doesn't do, such as when its node has just
// gone, others are tried; and so does the next Dial, as an agent may also turn out not to answer when it is connected to.
func (c *Cluster) Dial(ctx context.Context) (net.Conn, error) {
	const (
		most    = 3
		eachFor = 5 * time.Second
	)
	agents, err := c.usable(ctx)
	if err != nil {
		return nil, err
	}
	var problems []error
	first := int(c.dials.Add(1)-1) % len(agents)
	agents = slices.Concat(agents[first:], agents[:first])
	for _, agent := range agents[:min(most, len(agents))] {
		trying, cancel := context.WithTimeout(ctx, eachFor)
		conn, err := c.DialAgent(trying, agent)
		cancel()
		if err == nil {
			return conn, nil
		}
		if _, refused := errors.AsType[Refused](err); refused || ctx.Err() != nil {
			return nil, err
		}
		problems = append(problems, err)
	}
	return nil, errors.Join(problems...)
}
