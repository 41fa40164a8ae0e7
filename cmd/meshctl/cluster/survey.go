package cluster

import (
	"cmp"
	"context"
	"slices"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// MeshLabel enrols a namespace or a pod, or takes a pod out.
const (
	MeshLabel = "headroom.dev/mesh"
	enabled   = "enabled"
	disabled  = "disabled"
)

// SchedulableNodes lists the nodes that pods may be sent to.
func (c *Cluster) SchedulableNodes(ctx context.Context) ([]string, error) {
	nodes, err := list[corev1.Node](ctx, c, resource{api: "/api/v1", plural: "nodes"})
	var found []string
	for _, n := range nodes {
		if !n.Spec.Unschedulable {
			found = append(found, n.Name)
		}
	}
	return found, err
}

// Enrolled lists the namespaces that are in the mesh.
func (c *Cluster) Enrolled(ctx context.Context) ([]string, error) {
	namespaces, err := list[corev1.Namespace](ctx, c, resource{api: "/api/v1", plural: "namespaces", labels: MeshLabel + "=" + enabled})
	var found []string
	for _, n := range namespaces {
		found = append(found, n.Name)
	}
	return found, err
}

// inEach lists a resource in each of the namespaces.
func inEach[T any](ctx context.Context, c *Cluster, namespaces []string, r resource) ([]T, error) {
	const most = 8
	found := make([][]T, len(namespaces))
	listing, ctx := errgroup.WithContext(ctx)
	listing.SetLimit(most)
	for i, namespace := range namespaces {
		r.namespace = namespace
		listing.Go(func() (err error) {
			found[i], err = list[T](ctx, c, r)
			return err
		})
	}
	err := listing.Wait()
	return slices.Concat(found...), err
}

// Pod is a pod that runs, in the mesh or left out of it.
type Pod struct {
	Namespace, Name, Node string
	LeftOut               string // why; empty: its connections are to be captured
	labels                map[string]string
}

// Pods lists those of the enrolled namespaces.
func (c *Cluster) Pods(ctx context.Context, enrolled []string) ([]Pod, error) {
	pods, err := inEach[corev1.Pod](ctx, c, enrolled, resource{api: "/api/v1", plural: "pods"})
	return running(pods), err
}

// SinglePods lists those of other namespaces that are enrolled one by one.
func (c *Cluster) SinglePods(ctx context.Context, enrolled []string) ([]Pod, error) {
	pods, err := list[corev1.Pod](ctx, c, resource{api: "/api/v1", plural: "pods", labels: MeshLabel + "=" + enabled})
	pods = slices.DeleteFunc(pods, func(p corev1.Pod) bool { return slices.Contains(enrolled, p.Namespace) })
	return running(pods), err
}

func running(pods []corev1.Pod) (found []Pod) {
	for _, p := range pods {
		if p.Status.Phase == corev1.PodRunning && p.DeletionTimestamp == nil {
			found = append(found, Pod{p.Namespace, p.Name, p.Spec.NodeName, podLeftOut(p), p.Labels})
		}
	}
	return found
}

func podLeftOut(p corev1.Pod) string {
	switch {
	case p.Spec.HostNetwork:
		return "it uses its node's network"
	case p.Labels[MeshLabel] == disabled:
		return "label " + MeshLabel + "=" + disabled
	}
	return ""
}

// Service is a Service of an enrolled namespace.
type Service struct {
	Namespace, Name string
	LeftOut         string // why it is not in the mesh; empty: it is to be
	selector        labels.Set
}

// Selects reports whether a pod is one of the service's replicas.
func (s Service) Selects(p Pod) bool {
	return s.Namespace == p.Namespace && len(s.selector) > 0 && s.selector.AsSelector().Matches(labels.Set(p.labels))
}

// Services lists those of the enrolled namespaces.
func (c *Cluster) Services(ctx context.Context, enrolled []string) ([]Service, error) {
	services, err := inEach[corev1.Service](ctx, c, enrolled, resource{api: "/api/v1", plural: "services"})
	var found []Service
	for _, s := range services {
		found = append(found, Service{s.Namespace, s.Name, serviceLeftOut(s.Spec), s.Spec.Selector})
	}
	return found, err
}

func serviceLeftOut(s corev1.ServiceSpec) string {
	tcp := slices.ContainsFunc(s.Ports, func(p corev1.ServicePort) bool { return cmp.Or(p.Protocol, corev1.ProtocolTCP) == corev1.ProtocolTCP })
	switch {
	case s.Type == corev1.ServiceTypeExternalName:
		return "ExternalName"
	case len(s.Selector) == 0:
		return "no selector"
	case !tcp:
		return "no TCP port"
	}
	return ""
}

// Closing lists the network policies of the enrolled namespaces, as NAMESPACE/NAME, that let connections in to pods, but
// none by the address of where they come from, as those of the node's agent do.
func (c *Cluster) Closing(ctx context.Context, enrolled []string) ([]string, error) {
	policies, err := inEach[networkingv1.NetworkPolicy](ctx, c, enrolled, resource{api: "/apis/networking.k8s.io/v1", plural: "networkpolicies"})
	var found []string
	for _, p := range policies {
		if closes(p.Spec) {
			found = append(found, p.Namespace+"/"+p.Name)
		}
	}
	return found, err
}

func closes(p networkingv1.NetworkPolicySpec) bool {
	if len(p.PolicyTypes) > 0 && !slices.Contains(p.PolicyTypes, networkingv1.PolicyTypeIngress) {
		return false
	}
	return !slices.ContainsFunc(p.Ingress, func(r networkingv1.NetworkPolicyIngressRule) bool {
		return len(r.From) == 0 || slices.ContainsFunc(r.From, func(peer networkingv1.NetworkPolicyPeer) bool { return peer.IPBlock != nil })
	})
}
