package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/headroom-mesh/headroom/cmd/meshctl/cluster"
	"github.com/spf13/cobra"
)

// clusterTimeout leaves time for a program that brings credentials.
const clusterTimeout = 12 * time.Second

// target is what the user says of the agent to ask.
type target struct {
	agent   string // its address
	given   bool   // whether the user gave that address
	cluster cluster.Options
	one     bool // whether the command concerns one node, so that not just any agent of a cluster will do
}

func (t *target) flags(cmd *cobra.Command) {
	flags := cmd.PersistentFlags()
	flags.StringVar(&t.agent, "agent", defaultAgent,
		"agent to ask: HOST:PORT or unix:///PATH; the environment variable HEADROOM_AGENT changes the default")
	flags.StringVar(&t.cluster.Node, "node", "", "ask the agent of the Kubernetes node `NAME`")
	flags.StringVar(&t.cluster.Kubeconfig, "kubeconfig", "", "`FILE` that says where the Kubernetes cluster is (default: KUBECONFIG, then ~/.kube/config)")
	flags.StringVar(&t.cluster.Context, "context", "", "`NAME` of the context in the kubeconfig (default: the current one)")
	flags.StringVar(&t.cluster.Namespace, "namespace-of-agents", "", "`NAME` of the Kubernetes namespace with the agents (default: "+
		cluster.DefaultNamespace+", else wherever they are)")
}

// settle takes in what the user gave: flags come before the environment.
func (t *target) settle(cmd *cobra.Command) error {
	flags := cmd.Root().PersistentFlags()
	t.given = flags.Changed("agent")
	if t.given && t.cluster != (cluster.Options{}) {
		return misused("--agent says which agent to ask: --node, --kubeconfig, --context and --namespace-of-agents can't be given with it")
	}
	if address := os.Getenv("HEADROOM_AGENT"); !t.given && address != "" && t.cluster == (cluster.Options{}) {
		t.agent, t.given = address, true
	}
	return nil
}

// reach connects to the agent that the user named. If none was named, it is that of this machine, and where there is none,
// one of the user's Kubernetes cluster, whose kubeconfig is not read before.
func (t *target) reach(ctx context.Context) (*client, error) {
	if t.cluster != (cluster.Options{}) {
		return t.reachCluster(ctx)
	}
	local, err := directly(t.agent)
	if err != nil {
		return nil, err
	}
	c, err := dial(ctx, local)
	if err == nil || t.given || ctx.Err() != nil {
		return c, err
	}
	c, inCluster := t.reachCluster(ctx)
	switch {
	case errors.Is(inCluster, cluster.ErrNone):
		return nil, err
	case inCluster != nil:
		return nil, fmt.Errorf("no agent answers at %s, so the cluster was asked: %w", t.agent, inCluster)
	}
	return c, nil
}

func (t *target) reachCluster(ctx context.Context) (*client, error) {
	k, err := cluster.Open(t.cluster)
	if errors.Is(err, cluster.ErrNone) && t.cluster != (cluster.Options{}) {
		return nil, fmt.Errorf("%w: set KUBECONFIG or --kubeconfig", err)
	}
	if err != nil {
		return nil, err
	}
	if t.one && t.cluster.Node == "" {
		return nil, misused("this concerns one node: name it with --node")
	}
	return dialAny(ctx, k, t.cluster.Node == "")
}

// dialAny tries some agents, if there is a choice: those of nodes that have just gone may still seem to be ready.
func dialAny(ctx context.Context, k *cluster.Cluster, choice bool) (*client, error) {
	const most = 3
	p := throughCluster(k, k.Dial)
	p.any = choice
	for tried := 1; ; tried++ {
		c, err := dial(ctx, p)
		if _, silent := errors.AsType[cluster.Silent](err); !silent || !choice || tried == most {
			return c, err
		}
	}
}

func throughCluster(k *cluster.Cluster, dial func(context.Context) (net.Conn, error)) place {
	const reserve = 2 * time.Second // so that it is dial that says what takes so long
	return place{name: k.Name(), patience: clusterTimeout, through: k, dial: func(ctx context.Context) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, clusterTimeout-reserve)
		defer cancel()
		return dial(ctx)
	}}
}
