package agent

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/headroom-mesh/headroom/agent/gossip"
	"github.com/headroom-mesh/headroom/agent/kube"
	"github.com/headroom-mesh/headroom/agent/kube/policies"
	"github.com/headroom-mesh/headroom/registry"
)

// nodeTimeout bounds how long the start waits for Kubernetes to say what it knows of the node.
const nodeTimeout = 5 * time.Second

// newCluster makes what follows Kubernetes, if the agent is to.
func (a *Agent) newCluster() error {
	if !a.cfg.Kubernetes {
		a.replicas.clusterKnown = true
		a.known.happened()
		return nil
	}
	var err error
	if a.kubernetes, err = kube.NewClient(a.cfg.Kubeconfig); err != nil {
		return fmt.Errorf("--kubernetes: %w", err)
	}
	core := a.kubernetes.Core
	ctx, cancel := context.WithTimeout(context.Background(), nodeTimeout)
	defer cancel()
	zone, uid, err := kube.Node(ctx, core, a.cfg.Node)
	if err != nil {
		a.cfg.Log.Warn("the zone of this node is not known", "err", err)
	}
	a.cfg.Zone, a.nodeUID = cmp.Or(a.cfg.Zone, zone), uid
	a.cluster, err = kube.New(kube.Config{Node: a.cfg.Node, Mesh: a.cfg.Mesh, Client: core, Log: a.cfg.Log, Metrics: a.metrics})
	return inFlags("kube", map[string]string{"node": "--node", "mesh": "--mesh"}, err)
}

// newPolicies makes what copies the policies of Kubernetes to the registry, if there is a cluster.
func (a *Agent) newPolicies() error {
	if !a.cfg.Kubernetes {
		return nil
	}
	var err error
	a.policies, err = policies.New(policies.Config{
		Node: a.cfg.Node, Namespace: a.kubernetes.Namespace, Client: a.kubernetes.Core, Objects: a.kubernetes.Objects,
		Registry: a.registry, Snapshot: a.snapshot.Load, Members: a.liveMembers, Statuses: a.admin.Statuses,
		Log: a.cfg.Log, Metrics: a.metrics,
	})
	return err
}

func (a *Agent) liveMembers() []registry.NodeName {
	var live []registry.NodeName
	for _, m := range a.gossip.Members() {
		if m.State == gossip.Alive {
			live = append(live, m.Node)
		}
	}
	return live
}

// replicas are those of this node, by who declares them.
type replicas struct {
	local, cluster           []registry.Endpoint
	localKnown, clusterKnown bool // whether they have declared theirs yet
	draining                 bool
}

// all returns them together. What a file says of one counts for more than what Kubernetes says.
func (r replicas) all() []registry.Endpoint {
	all := slices.Clone(r.local)
	known := map[registry.EndpointID]bool{}
	for _, e := range all {
		known[e.ID()] = true
	}
	for _, e := range r.cluster {
		if r.draining {
			e.State = registry.Draining
		}
		if !known[e.ID()] {
			all = append(all, e)
		}
	}
	return all
}

// applyLocal takes in the replicas that files declare.
func (a *Agent) applyLocal(endpoints []registry.Endpoint) {
	a.applyReplicas(func(r *replicas) { r.local, r.localKnown = endpoints, true })
	a.own.happened()
}

// applyCluster takes in what Kubernetes says of this node.
func (a *Agent) applyCluster(s kube.State) {
	a.dataplane.UpdateFronts(s.Fronts)
	a.capturing.setFronts(s.Fronts)
	a.applyReplicas(func(r *replicas) { r.cluster, r.clusterKnown = s.Replicas, true })
	a.capturing.setPods(s.Pods)
	a.known.happened()
}

// applyReplicas takes in the replicas of this node: first where they are delivered to, then where they are announced. They are
// not announced before all are known: those of the agent that was here before would be gone for a moment.
func (a *Agent) applyReplicas(change func(*replicas)) {
	a.advertising.Lock()
	defer a.advertising.Unlock()
	change(&a.replicas)
	all := a.replicas.all()
	a.dataplane.UpdateLocal(all)
	a.recapture()
	if a.turn.Load() && !a.left && a.replicas.localKnown && a.replicas.clusterKnown {
		a.registry.Advertise(all)
	}
}
