package kube

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
)

// Label says of a namespace that it is in the mesh, and of a pod that it is, or is not, whatever its namespace says.
const (
	Label    = "headroom.dev/mesh"
	Enabled  = "enabled"
	Disabled = "disabled"
)

// objects are what is known of the cluster: nodes and pods only of this node.
type objects struct {
	node       registry.NodeName
	mesh       netip.AddrPort
	nodes      []*corev1.Node
	namespaces []*corev1.Namespace
	services   []*corev1.Service
	pods       []*corev1.Pod
}

// compute returns what the objects amount to, and what in them is left out.
func compute(o objects) (State, []error) {
	c := computation{
		objects: o, zone: o.zone(), enrolled: make(map[string]bool),
		replicas: make(map[registry.EndpointID]registry.Endpoint), fronts: make(map[netip.AddrPort]registry.ServiceName, len(o.services)),
	}
	for _, n := range o.namespaces {
		c.enrolled[n.Name] = c.enabled("namespace "+n.Name, n.Labels, false)
	}
	c.index = indexed(o.pods)
	for _, s := range o.services {
		if c.enrolled[s.Namespace] {
			c.service(s)
		}
	}
	state := State{Fronts: c.fronts, Pods: c.captured()}
	for _, id := range slices.Sorted(maps.Keys(c.replicas)) {
		state.Replicas = append(state.Replicas, c.replicas[id])
	}
	return state, c.problems
}

type computation struct {
	objects
	zone     string
	enrolled map[string]bool // namespaces
	index    index
	replicas map[registry.EndpointID]registry.Endpoint
	fronts   map[netip.AddrPort]registry.ServiceName
	problems []error
}

func (o objects) zone() string {
	for _, n := range o.nodes {
		if n.Name == string(o.node) {
			return n.Labels[corev1.LabelTopologyZone]
		}
	}
	return ""
}

// enabled reads the label of an object.
func (c *computation) enabled(what string, labels map[string]string, otherwise bool) bool {
	switch value, ok := labels[Label]; {
	case value == Enabled:
		return true
	case value == Disabled:
		return false
	case ok:
		c.problems = append(c.problems, fmt.Errorf("%s: label %s: want %s or %s, got %q", what, Label, Enabled, Disabled, value))
	}
	return otherwise
}

// captured returns the pods whose connections are to be captured. Those in the host's network are not: they would be
// captured with all else there, the agent included.
func (c *computation) captured() []Pod {
	var pods []Pod
	for _, p := range c.pods {
		if enabled := c.enabled("pod "+p.Namespace+"/"+p.Name, p.Labels, c.enrolled[p.Namespace]); enabled && !p.Spec.HostNetwork && !finished(p) {
			pods = append(pods, Pod{UID: uid(p), Namespace: p.Namespace, Name: p.Name, ServiceAccount: p.Spec.ServiceAccountName})
		}
	}
	slices.SortFunc(pods, func(a, b Pod) int { return cmp.Compare(a.UID, b.UID) })
	return pods
}

// uid returns the name that the kubelet has for the pod. Of a static pod the API server knows only a likeness, with a UID of
// its own.
func uid(p *corev1.Pod) string {
	return cmp.Or(p.Annotations[corev1.MirrorPodAnnotationKey], string(p.UID))
}

func finished(p *corev1.Pod) bool {
	return p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
}

// service adds the replicas and fronts of a service of an enrolled namespace.
func (c *computation) service(s *corev1.Service) {
	if s.Spec.Type == corev1.ServiceTypeExternalName || len(s.Spec.Selector) == 0 {
		return // whose endpoints others write
	}
	pods := c.index.selected(s)
	addresses := c.clusterIPs(s)
	for _, p := range c.ports(s) {
		for _, ip := range addresses {
			c.fronts[netip.AddrPortFrom(ip, uint16(p.Port))] = p.service
		}
		for _, pod := range pods {
			c.replica(s, p, pod)
		}
	}
}

// port is a port of a Kubernetes Service, which is a service of the mesh.
type port struct {
	corev1.ServicePort
	service registry.ServiceName
}

// ports returns the ports of TCP: the first has the name of the Kubernetes Service, the others have names of their own.
func (c *computation) ports(s *corev1.Service) []port {
	var ports []port
	name, first := s.Name+"."+s.Namespace, true
	for _, p := range s.Spec.Ports {
		if p.Protocol != corev1.ProtocolTCP && p.Protocol != "" || number(p.Port) == 0 {
			continue
		}
		service := registry.ServiceName(name)
		if !first {
			service = registry.ServiceName(p.Name + "." + name)
		}
		first = false
		if err := service.Validate(); err != nil {
			c.problems = append(c.problems, fmt.Errorf("service %s/%s: port %d is left out: %w", s.Namespace, s.Name, p.Port, err))
			continue
		}
		ports = append(ports, port{p, service})
	}
	return ports
}

// clusterIPs returns the addresses at which connections are balanced by the mesh. Where the Service says something of where
// they go, beyond that it be one of its pods, they are left to Kubernetes.
func (c *computation) clusterIPs(s *corev1.Service) []netip.Addr {
	all := s.Spec.ClusterIPs
	if len(all) == 0 {
		all = []string{s.Spec.ClusterIP}
	}
	var ips []netip.Addr
	for _, text := range all {
		if ip, err := netip.ParseAddr(text); err == nil { // "None" and "" are none
			ips = append(ips, ip)
		}
	}
	if field := placing(s); field != "" && len(ips) > 0 {
		c.problems = append(c.problems, fmt.Errorf("service %s/%s: connections to its cluster IP are left to Kubernetes, since it has %s; those to %s.%s.mesh are not",
			s.Namespace, s.Name, field, s.Name, s.Namespace))
		return nil
	}
	return ips
}

func placing(s *corev1.Service) string {
	if t := s.Spec.InternalTrafficPolicy; t != nil && *t == corev1.ServiceInternalTrafficPolicyLocal {
		return "internalTrafficPolicy: Local"
	}
	if s.Spec.SessionAffinity == corev1.ServiceAffinityClientIP {
		return "sessionAffinity: ClientIP"
	}
	return ""
}

// replica adds what a pod is to a service, if it is anything. Of two pods at one address, in the host's network, one has
// ended, or else they could not be.
func (c *computation) replica(s *corev1.Service, p port, pod *corev1.Pod) {
	ip, to := address(s, pod), target(p.ServicePort, pod)
	if finished(pod) || !ip.IsValid() || to == 0 {
		return
	}
	e := registry.Endpoint{
		Service: p.service, Node: c.node, Zone: c.zone, Address: netip.AddrPortFrom(ip, to), Agent: c.mesh,
		State: state(s, pod), Protocol: protocol(p.ServicePort),
	}
	id := e.ID()
	if other, ok := c.replicas[id]; !ok || e.State < other.State {
		c.replicas[id] = e
	}
}

// address returns one address, though a pod may have one of each family: it is one replica, and not more loaded or more
// able for having two. The first family of the service is that of its cluster IP, which all of its pods serve.
func address(s *corev1.Service, pod *corev1.Pod) netip.Addr {
	var ips []netip.Addr
	for _, text := range pod.Status.PodIPs {
		if ip, err := netip.ParseAddr(text.IP); err == nil {
			ips = append(ips, ip)
		}
	}
	for _, f := range s.Spec.IPFamilies {
		for _, ip := range ips {
			if ip.Is4() == (f == corev1.IPv4Protocol) {
				return ip
			}
		}
	}
	if len(s.Spec.IPFamilies) > 0 || len(ips) == 0 {
		return netip.Addr{}
	}
	return ips[0]
}

func state(s *corev1.Service, pod *corev1.Pod) registry.State {
	switch {
	case pod.DeletionTimestamp != nil:
		return registry.Draining
	case s.Spec.PublishNotReadyAddresses || ready(pod):
		return registry.Ready
	}
	return registry.Unhealthy
}

func ready(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// target returns the port of the pod to which one of a service leads. 0: the pod has none.
func target(p corev1.ServicePort, pod *corev1.Pod) uint16 {
	switch to := p.TargetPort; {
	case to.Type == intstr.String:
		return named(to.StrVal, pod)
	case to.IntVal != 0:
		return number(to.IntVal)
	}
	return number(p.Port)
}

// named finds a port in the pod's containers, and in those that run beside them, which are initContainers that are restarted.
func named(name string, pod *corev1.Pod) uint16 {
	beside := slices.DeleteFunc(slices.Clone(pod.Spec.InitContainers), func(c corev1.Container) bool {
		return c.RestartPolicy == nil || *c.RestartPolicy != corev1.ContainerRestartPolicyAlways
	})
	for _, c := range slices.Concat(pod.Spec.Containers, beside) {
		for _, p := range c.Ports {
			if p.Name == name && (p.Protocol == corev1.ProtocolTCP || p.Protocol == "") {
				return number(p.ContainerPort)
			}
		}
	}
	return 0
}

func number(port int32) uint16 {
	if port < 1 || port > 65535 {
		return 0
	}
	return uint16(port)
}

// protocol returns what the port is said to speak: by its appProtocol, or, without one, by its name, as in "grpc-web" and
// "http-metrics". One that the mesh doesn't know is told by the first bytes of connections.
func protocol(p corev1.ServicePort) policy.Protocol {
	if p.AppProtocol != nil {
		known, _ := policy.ParseProtocol(*p.AppProtocol)
		return known
	}
	for name := p.Name; name != ""; name = name[:max(0, strings.LastIndexByte(name, '-'))] {
		if known, err := policy.ParseProtocol(name); err == nil {
			return known
		}
	}
	return policy.ProtocolUndeclared
}

// index finds pods by their labels.
type index map[indexKey][]*corev1.Pod

type indexKey struct{ namespace, label, value string }

func indexed(pods []*corev1.Pod) index {
	x := make(index)
	for _, p := range pods {
		for label, value := range p.Labels {
			k := indexKey{p.Namespace, label, value}
			x[k] = append(x[k], p)
		}
	}
	return x
}

// selected returns the pods that the service selects. Most services have none on a node, which is soon found.
func (x index) selected(s *corev1.Service) []*corev1.Pod {
	var fewest []*corev1.Pod
	first := true
	for label, value := range s.Spec.Selector {
		pods := x[indexKey{s.Namespace, label, value}]
		if len(pods) == 0 {
			return nil
		}
		if first || len(pods) < len(fewest) {
			fewest, first = pods, false
		}
	}
	return slices.DeleteFunc(slices.Clone(fewest), func(p *corev1.Pod) bool { return !matches(s.Spec.Selector, p.Labels) })
}

func matches(selector, labels map[string]string) bool {
	for label, value := range selector {
		if v, ok := labels[label]; !ok || v != value {
			return false
		}
	}
	return true
}
