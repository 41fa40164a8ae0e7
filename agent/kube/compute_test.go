package kube

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"pgregory.net/rapid"

	"github.com/headroom-mesh/headroom/registry"
)

func namespace(name string, labels ...string) *corev1.Namespace {
	return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: pairs(labels)}}
}

func pairs(keysAndValues []string) map[string]string {
	m := map[string]string{}
	for p := range slices.Chunk(keysAndValues, 2) {
		m[p[0]] = p[1]
	}
	return m
}

func tcp(name string, port int32, to intstr.IntOrString) corev1.ServicePort {
	return corev1.ServicePort{Name: name, Port: port, TargetPort: to, Protocol: corev1.ProtocolTCP}
}

// service is shop/checkout, with port 80, which leads to port 8080 of pods with the label app=checkout.
func service(change ...func(*corev1.Service)) *corev1.Service {
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "checkout", Namespace: "shop"},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, Selector: map[string]string{"app": "checkout"},
			ClusterIP: "10.96.0.7", ClusterIPs: []string{"10.96.0.7"}, IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			Ports: []corev1.ServicePort{tcp("", 80, intstr.FromInt32(8080))},
		},
	}
	for _, c := range change {
		c(s)
	}
	return s
}

// pod is shop/checkout-1, a ready one at 10.244.1.5.
func pod(change ...func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "checkout-1", Namespace: "shop", UID: "uid-1", Labels: map[string]string{"app": "checkout", "tier": "web"}},
		Spec: corev1.PodSpec{
			NodeName: "node-1", ServiceAccountName: "seller",
			Containers: []corev1.Container{{Name: "main", Ports: []corev1.ContainerPort{{Name: "web", ContainerPort: 8080}, {Name: "web", ContainerPort: 53, Protocol: corev1.ProtocolUDP}}}},
		},
		Status: corev1.PodStatus{
			Phase: corev1.PodRunning, PodIPs: []corev1.PodIP{{IP: "10.244.1.5"}},
			Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}},
		},
	}
	for _, c := range change {
		c(p)
	}
	return p
}

func unready(p *corev1.Pod)     { p.Status.Conditions[0].Status = corev1.ConditionFalse }
func terminating(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{} }
func hostNetwork(p *corev1.Pod) {
	p.Spec.HostNetwork, p.Status.PodIPs = true, []corev1.PodIP{{IP: "172.30.0.11"}}
}
func dual(p *corev1.Pod) {
	p.Status.PodIPs = []corev1.PodIP{{IP: "10.244.1.5"}, {IP: "fd00:10:244:1::5"}}
}
func called(name string, uid types.UID) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Name, p.UID = name, uid }
}
func labelled(label, value string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Labels[label] = value }
}
func phase(phase corev1.PodPhase) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Status.Phase = phase }
}
func ports(ports ...corev1.ServicePort) func(*corev1.Service) {
	return func(s *corev1.Service) { s.Spec.Ports = ports }
}
func headless(s *corev1.Service) {
	s.Spec.ClusterIP, s.Spec.ClusterIPs = corev1.ClusterIPNone, []string{corev1.ClusterIPNone}
}
func families(f ...corev1.IPFamily) func(*corev1.Service) {
	return func(s *corev1.Service) { s.Spec.IPFamilies = f }
}

var mesh = netip.MustParseAddrPort("172.30.0.11:15008")

// cluster is a node with its objects.
func cluster(all ...any) objects {
	o := objects{node: "node-1", mesh: mesh, nodes: []*corev1.Node{
		{ObjectMeta: metav1.ObjectMeta{Name: "node-1", Labels: map[string]string{corev1.LabelTopologyZone: "eu-1a"}}},
	}}
	for _, a := range all {
		switch a := a.(type) {
		case *corev1.Namespace:
			o.namespaces = append(o.namespaces, a)
		case *corev1.Service:
			o.services = append(o.services, a)
		case *corev1.Pod:
			o.pods = append(o.pods, a)
		}
	}
	return o
}

// show puts a State into lines.
func show(s State) string {
	var lines []string
	for _, r := range s.Replicas {
		lines = append(lines, strings.TrimSpace(fmt.Sprintf("replica %s %s %s %s %s %s", r.Service, r.Address, r.State, r.Zone, r.Agent, r.Protocol)))
	}
	for _, at := range slices.SortedFunc(maps.Keys(s.Fronts), netip.AddrPort.Compare) {
		lines = append(lines, fmt.Sprintf("front %s %s", at, s.Fronts[at]))
	}
	for _, p := range s.Pods {
		lines = append(lines, fmt.Sprintf("pod %s %s/%s %s", p.UID, p.Namespace, p.Name, p.ServiceAccount))
	}
	return strings.Join(lines, "\n")
}

func TestCompute(t *testing.T) {
	in := namespace("shop", Label, Enabled)
	const front, captured = "front 10.96.0.7:80 checkout.shop", "pod uid-1 shop/checkout-1 seller"
	replica := func(state string) string {
		return "replica checkout.shop 10.244.1.5:8080 " + state + " eu-1a 172.30.0.11:15008"
	}
	with := func(change ...func(*corev1.Service)) *corev1.Service { return service(change...) }
	appProtocol := func(name, app string) corev1.ServicePort {
		p := tcp(name, 80, intstr.FromInt32(8080))
		if app != "" {
			p.AppProtocol = &app
		}
		return p
	}
	always := corev1.ContainerRestartPolicyAlways
	for _, test := range []struct {
		name     string
		objects  objects
		want     []string
		problems []string
	}{
		{name: "a ready pod", objects: cluster(in, service(), pod()), want: []string{replica("ready"), front, captured}},
		{name: "not ready", objects: cluster(in, service(), pod(unready)), want: []string{replica("unhealthy"), front, captured}},
		{name: "leaving", objects: cluster(in, service(), pod(terminating)), want: []string{replica("draining"), front, captured}},
		{name: "leaving, and not ready any more", objects: cluster(in, service(), pod(terminating, unready)), want: []string{replica("draining"), front, captured}},
		{name: "not ready, but to be published",
			objects: cluster(in, with(func(s *corev1.Service) { s.Spec.PublishNotReadyAddresses = true }), pod(unready)), want: []string{replica("ready"), front, captured}},
		{name: "finished", objects: cluster(in, service(), pod(phase(corev1.PodSucceeded))), want: []string{front}},
		{name: "failed", objects: cluster(in, service(), pod(phase(corev1.PodFailed))), want: []string{front}},
		{name: "without an address yet", objects: cluster(in, service(), pod(unready, func(p *corev1.Pod) { p.Status.PodIPs = nil })), want: []string{front, captured}},
		{name: "no pod here", objects: cluster(in, service()), want: []string{front}},
		{name: "a pod of no service", objects: cluster(in, service(), pod(labelled("app", "cart"))), want: []string{front, captured}},
		{name: "a pod of another namespace", objects: cluster(in, namespace("back", Label, Enabled), service(), pod(func(p *corev1.Pod) { p.Namespace = "back" })),
			want: []string{front, "pod uid-1 back/checkout-1 seller"}},
		{name: "a pod that lacks one of the labels",
			objects: cluster(in, with(func(s *corev1.Service) { s.Spec.Selector["track"] = "stable" }), pod()), want: []string{front, captured}},
		{name: "a selector's value is empty",
			objects: cluster(in, with(func(s *corev1.Service) { s.Spec.Selector["track"] = "" }), pod()), want: []string{front, captured}},
		{name: "a static pod", objects: cluster(in, pod(func(p *corev1.Pod) { p.Annotations = map[string]string{"kubernetes.io/config.mirror": "hash-1"} })),
			want: []string{"pod hash-1 shop/checkout-1 seller"}},

		{name: "namespace not enrolled", objects: cluster(namespace("shop"), service(), pod())},
		{name: "namespace disabled", objects: cluster(namespace("shop", Label, Disabled), service(), pod())},
		{name: "namespace not known", objects: cluster(service(), pod())},
		{name: "pod opted in", objects: cluster(namespace("shop"), service(), pod(labelled(Label, Enabled))), want: []string{captured}},
		{name: "pod opted out of capture", objects: cluster(in, service(), pod(labelled(Label, Disabled))), want: []string{replica("ready"), front}},
		{name: "pod in the host's network", objects: cluster(in, service(), pod(hostNetwork, labelled(Label, Enabled))),
			want: []string{"replica checkout.shop 172.30.0.11:8080 ready eu-1a 172.30.0.11:15008", front}},
		{name: "labels that say nothing", objects: cluster(namespace("shop", Label, "true"), service(), pod(labelled(Label, "yes"))),
			problems: []string{
				`namespace shop: label headroom.dev/mesh: want enabled or disabled, got "true"`,
				`pod shop/checkout-1: label headroom.dev/mesh: want enabled or disabled, got "yes"`,
			}},

		{name: "ExternalName", objects: cluster(in, with(headless, func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeExternalName }), pod()), want: []string{captured}},
		{name: "no selector", objects: cluster(in, with(func(s *corev1.Service) { s.Spec.Selector = nil }), pod()), want: []string{captured}},
		{name: "headless", objects: cluster(in, with(headless), pod()), want: []string{replica("ready"), captured}},
		{name: "headless without ports", objects: cluster(in, with(headless, ports()), pod()), want: []string{captured}},
		{name: "only UDP", objects: cluster(in, with(ports(corev1.ServicePort{Port: 53, Protocol: corev1.ProtocolUDP})), pod()), want: []string{captured}},
		{name: "cluster IP not given yet", objects: cluster(in, with(func(s *corev1.Service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = "", nil }), pod()),
			want: []string{replica("ready"), captured}},
		{name: "several ports, the first of them UDP", objects: cluster(in, with(ports(
			corev1.ServicePort{Name: "dns", Port: 53, Protocol: corev1.ProtocolUDP}, tcp("dns-tcp", 53, intstr.FromInt32(5353)), tcp("admin", 9000, intstr.IntOrString{}),
		)), pod()), want: []string{
			"replica admin.checkout.shop 10.244.1.5:9000 ready eu-1a 172.30.0.11:15008",
			"replica checkout.shop 10.244.1.5:5353 ready eu-1a 172.30.0.11:15008",
			"front 10.96.0.7:53 checkout.shop", "front 10.96.0.7:9000 admin.checkout.shop", captured,
		}},
		{name: "named target port", objects: cluster(in, with(ports(tcp("", 80, intstr.FromString("web")))), pod()), want: []string{replica("ready"), front, captured}},
		{name: "named target port, not the same in all pods", objects: cluster(in, with(ports(tcp("", 80, intstr.FromString("web")))), pod(),
			pod(called("checkout-2", "uid-2"), func(p *corev1.Pod) {
				p.Status.PodIPs[0].IP, p.Spec.Containers[0].Ports[0].ContainerPort = "10.244.1.6", 8081
			})),
			want: []string{replica("ready"), "replica checkout.shop 10.244.1.6:8081 ready eu-1a 172.30.0.11:15008", front, captured, "pod uid-2 shop/checkout-2 seller"}},
		{name: "named target port that no container has", objects: cluster(in, with(ports(tcp("", 80, intstr.FromString("admin")))), pod()), want: []string{front, captured}},
		{name: "named target port of a sidecar", objects: cluster(in, with(ports(tcp("", 80, intstr.FromString("side")))), pod(func(p *corev1.Pod) {
			p.Spec.InitContainers = []corev1.Container{
				{Name: "init", Ports: []corev1.ContainerPort{{Name: "side", ContainerPort: 1}}},
				{Name: "sidecar", RestartPolicy: &always, Ports: []corev1.ContainerPort{{Name: "side", ContainerPort: 8080}}},
			}
		})), want: []string{replica("ready"), front, captured}},
		{name: "a name that is none", objects: cluster(in, with(ports(tcp("", 80, intstr.FromInt32(8080)), tcp("Bad_Name", 81, intstr.FromInt32(8081)))), pod()),
			want:     []string{replica("ready"), front, captured},
			problems: []string{`service shop/checkout: port 81 is left out: service "Bad_Name.checkout.shop": want `}},

		{name: "two services of one pod", objects: cluster(in, service(), with(headless, func(s *corev1.Service) { s.Name = "all" }), pod()),
			want: []string{"replica all.shop 10.244.1.5:8080 ready eu-1a 172.30.0.11:15008", replica("ready"), front, captured}},
		{name: "in the host's network, one leaves and one comes", objects: cluster(in, service(), pod(hostNetwork), pod(hostNetwork, terminating, called("checkout-0", "uid-0"))),
			want: []string{"replica checkout.shop 172.30.0.11:8080 ready eu-1a 172.30.0.11:15008", front}},

		{name: "two families, IPv4 first", objects: cluster(in, with(families(corev1.IPv4Protocol, corev1.IPv6Protocol), func(s *corev1.Service) {
			s.Spec.ClusterIPs = append(s.Spec.ClusterIPs, "fd00:10:96::7")
		}), pod(dual)), want: []string{replica("ready"), front, "front [fd00:10:96::7]:80 checkout.shop", captured}},
		{name: "two families, IPv6 first", objects: cluster(in, with(families(corev1.IPv6Protocol, corev1.IPv4Protocol)), pod(dual)),
			want: []string{"replica checkout.shop [fd00:10:244:1::5]:8080 ready eu-1a 172.30.0.11:15008", front, captured}},
		{name: "two families, of which the pod has the second", objects: cluster(in, with(families(corev1.IPv6Protocol, corev1.IPv4Protocol)), pod()), want: []string{replica("ready"), front, captured}},
		{name: "one family, which the pod does not have", objects: cluster(in, with(families(corev1.IPv6Protocol)), pod()), want: []string{front, captured}},
		{name: "family not said", objects: cluster(in, with(families()), pod(dual)), want: []string{replica("ready"), front, captured}},

		{name: "appProtocol", objects: cluster(in, with(ports(appProtocol("", "kubernetes.io/h2c"))), pod()), want: []string{replica("ready") + " http2", front, captured}},
		{name: "appProtocol before the port's name", objects: cluster(in, with(ports(appProtocol("http", "mysql"))), pod()), want: []string{replica("ready") + " tcp", front, captured}},
		{name: "appProtocol that nobody knows", objects: cluster(in, with(ports(appProtocol("http", "example.com/own"))), pod()), want: []string{replica("ready"), front, captured}},
		{name: "port's name", objects: cluster(in, with(ports(appProtocol("http", ""))), pod()), want: []string{replica("ready") + " http", front, captured}},
		{name: "port's name begins with the protocol", objects: cluster(in, with(ports(appProtocol("grpc-admin", ""))), pod()), want: []string{replica("ready") + " http2", front, captured}},
		{name: "port's name begins with a longer protocol", objects: cluster(in, with(ports(appProtocol("grpc-web-x", ""))), pod()), want: []string{replica("ready") + " http", front, captured}},
		{name: "port's name says nothing", objects: cluster(in, with(ports(appProtocol("web-http", ""))), pod()), want: []string{replica("ready"), front, captured}},

		{name: "only to pods of the same node", objects: cluster(in, with(func(s *corev1.Service) { s.Spec.InternalTrafficPolicy = new(corev1.ServiceInternalTrafficPolicyLocal) }), pod()),
			want: []string{replica("ready"), captured},
			problems: []string{"service shop/checkout: connections to its cluster IP are left to Kubernetes, since it has internalTrafficPolicy: Local; " +
				"those to checkout.shop.mesh are not"}},
		{name: "sticky", objects: cluster(in, with(func(s *corev1.Service) { s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP }), pod()),
			want:     []string{replica("ready"), captured},
			problems: []string{"service shop/checkout: connections to its cluster IP are left to Kubernetes, since it has sessionAffinity: ClientIP; "}},
	} {
		t.Run(test.name, func(t *testing.T) {
			state, problems := compute(test.objects)
			if diff := cmp.Diff(strings.Join(test.want, "\n"), show(state)); diff != "" {
				t.Errorf("want -, got +:\n%s", diff)
			}
			if len(problems) != len(test.problems) {
				t.Fatalf("problems: want %q, got %q", test.problems, problems)
			}
			for i, p := range problems {
				if !strings.HasPrefix(p.Error(), test.problems[i]) {
					t.Errorf("problem: want %q, got %q", test.problems[i], p)
				}
			}
		})
	}
}

func TestNodeWithoutZone(t *testing.T) {
	o := cluster(namespace("shop", Label, Enabled), service(), pod())
	o.nodes = nil
	if state, _ := compute(o); len(state.Replicas) != 1 || state.Replicas[0].Zone != "" {
		t.Errorf("want a replica without a zone, got %+v", state.Replicas)
	}
}

// TestComputeAgainstModel compares with nested loops over everything, in any order, before and after what isn't needed is
// taken from the objects.
func TestComputeAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o := someObjects(t)
		want := model(o)
		state, _ := compute(o)
		check := func(when string, state State) {
			if diff := cmp.Diff(want, state, cmpopts.EquateEmpty(), cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); diff != "" {
				t.Fatalf("%s: model -, compute +:\n%s", when, diff)
			}
		}
		check("as drawn", state)

		r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		r.Shuffle(len(o.services), func(i, j int) { o.services[i], o.services[j] = o.services[j], o.services[i] })
		r.Shuffle(len(o.pods), func(i, j int) { o.pods[i], o.pods[j] = o.pods[j], o.pods[i] })
		state, _ = compute(o)
		check("in another order", state)

		for _, n := range o.nodes {
			stripNode(n)
		}
		for _, n := range o.namespaces {
			stripNamespace(n)
		}
		for _, s := range o.services {
			stripService(s)
		}
		for _, p := range o.pods {
			stripPod(p)
		}
		state, _ = compute(o)
		check("stripped", state)
	})
}

// model says of every port of every service, and every pod, whether they belong together.
func model(o objects) State {
	m := State{Fronts: map[netip.AddrPort]registry.ServiceName{}}
	enrolled := func(namespace string) bool {
		return slices.ContainsFunc(o.namespaces, func(n *corev1.Namespace) bool { return n.Name == namespace && n.Labels[Label] == Enabled })
	}
	for _, s := range o.services {
		first := true
		for _, sp := range s.Spec.Ports {
			if sp.Protocol != corev1.ProtocolTCP {
				continue
			}
			name := registry.ServiceName(sp.Name + "." + s.Name + "." + s.Namespace)
			if first {
				name, first = registry.ServiceName(s.Name+"."+s.Namespace), false
			}
			if !enrolled(s.Namespace) || s.Spec.Type == corev1.ServiceTypeExternalName || len(s.Spec.Selector) == 0 {
				continue
			}
			for _, ip := range s.Spec.ClusterIPs {
				if ip != corev1.ClusterIPNone && s.Spec.SessionAffinity != corev1.ServiceAffinityClientIP {
					m.Fronts[netip.MustParseAddrPort(fmt.Sprintf("%s:%d", ip, sp.Port))] = name
				}
			}
			for _, p := range o.pods {
				if e, ok := modelReplica(o, s, sp, p); ok {
					e.Service = name
					m.Replicas = append(m.Replicas, e)
				}
			}
		}
	}
	slices.SortFunc(m.Replicas, func(a, b registry.Endpoint) int { return strings.Compare(string(a.ID()), string(b.ID())) })
	for _, p := range o.pods {
		in := p.Labels[Label] == Enabled || p.Labels[Label] != Disabled && enrolled(p.Namespace)
		if in && !p.Spec.HostNetwork && p.Status.Phase == corev1.PodRunning {
			m.Pods = append(m.Pods, Pod{string(p.UID), p.Namespace, p.Name, p.Spec.ServiceAccountName})
		}
	}
	slices.SortFunc(m.Pods, func(a, b Pod) int { return strings.Compare(a.UID, b.UID) })
	return m
}

func modelReplica(o objects, s *corev1.Service, sp corev1.ServicePort, p *corev1.Pod) (registry.Endpoint, bool) {
	for k, v := range s.Spec.Selector {
		if p.Labels[k] != v {
			return registry.Endpoint{}, false
		}
	}
	if p.Namespace != s.Namespace || p.Status.Phase != corev1.PodRunning {
		return registry.Endpoint{}, false
	}
	e := registry.Endpoint{Node: o.node, Agent: o.mesh, Zone: "eu-1a", State: registry.Unhealthy}
	if p.Status.Conditions[0].Status == corev1.ConditionTrue || s.Spec.PublishNotReadyAddresses {
		e.State = registry.Ready
	}
	if p.DeletionTimestamp != nil {
		e.State = registry.Draining
	}
	port := sp.TargetPort.IntValue()
	if sp.TargetPort.Type == intstr.String {
		for _, c := range p.Spec.Containers[0].Ports {
			if c.Name == sp.TargetPort.StrVal && c.Protocol != corev1.ProtocolUDP {
				port = int(c.ContainerPort)
			}
		}
	}
	if port == 0 {
		return e, false
	}
	e.Address = netip.MustParseAddrPort(fmt.Sprintf("%s:%d", p.Status.PodIPs[0].IP, port))
	return e, true
}

func someObjects(t *rapid.T) objects {
	pick := func(what string, of ...string) string { return rapid.SampledFrom(of).Draw(t, what) }
	flip := func(what string) bool { return rapid.Bool().Draw(t, what) }
	var all []any
	for _, name := range []string{"shop", "back", "else"} {
		if label := pick("label", "", Enabled, Enabled, Disabled); label == "" {
			all = append(all, namespace(name))
		} else {
			all = append(all, namespace(name, Label, label, "other", "x"))
		}
	}
	for i := range rapid.IntRange(0, 6).Draw(t, "services") {
		s := service(func(s *corev1.Service) {
			s.Name, s.Namespace = fmt.Sprintf("s%d", i), pick("namespace", "shop", "back", "else")
			s.Spec.ClusterIP = fmt.Sprintf("10.96.0.%d", i)
			s.Spec.ClusterIPs = []string{s.Spec.ClusterIP}
			s.Spec.Selector = map[string]string{}
			for _, label := range []string{"app", "tier"} {
				if flip("selects") {
					s.Spec.Selector[label] = pick("value", "a", "b")
				}
			}
			s.Spec.PublishNotReadyAddresses = flip("publish")
			s.Spec.SessionAffinity = corev1.ServiceAffinity(pick("affinity", "None", "None", "ClientIP"))
			s.Spec.Ports = nil
			for j := range rapid.IntRange(1, 3).Draw(t, "ports") {
				p := tcp(fmt.Sprintf("p%d", j), int32(80+j), rapid.SampledFrom([]intstr.IntOrString{
					intstr.FromInt32(8080), intstr.FromInt32(9090), intstr.FromString("web"), intstr.FromString("none"),
				}).Draw(t, "target"))
				p.Protocol = corev1.Protocol(pick("protocol", "TCP", "TCP", "UDP"))
				s.Spec.Ports = append(s.Spec.Ports, p)
			}
		})
		if flip("headless") {
			headless(s)
		}
		all = append(all, s)
	}
	for i := range rapid.IntRange(0, 8).Draw(t, "pods") {
		p := pod(called(fmt.Sprintf("pod%d", i), types.UID(fmt.Sprintf("uid%d", i))), func(p *corev1.Pod) {
			p.Namespace = pick("namespace", "shop", "back", "else")
			p.Labels = map[string]string{"app": pick("app", "a", "b"), "tier": pick("tier", "a", "b")}
			p.Status.PodIPs[0].IP = fmt.Sprintf("10.244.1.%d", i)
			p.Spec.HostNetwork = flip("hostNetwork")
			p.Status.Phase = corev1.PodPhase(pick("phase", "Running", "Running", "Failed"))
			if flip("labelled") {
				p.Labels[Label] = pick("label", Enabled, Disabled)
			}
		})
		for _, change := range []func(*corev1.Pod){unready, terminating} {
			if flip("change") {
				change(p)
			}
		}
		all = append(all, p)
	}
	return cluster(all...)
}

// BenchmarkCompute is of a node with 200 pods in a cluster with 5,000 services, all in the mesh.
func BenchmarkCompute(b *testing.B) {
	o := cluster()
	for i := range 50 {
		o.namespaces = append(o.namespaces, namespace(fmt.Sprintf("team-%d", i), Label, Enabled))
	}
	labels := func(i int) map[string]string {
		return map[string]string{
			"app.kubernetes.io/name": fmt.Sprintf("app-%d", i), "app.kubernetes.io/instance": fmt.Sprintf("app-%d", i), "app.kubernetes.io/part-of": "platform",
		}
	}
	for i := range 5000 {
		o.services = append(o.services, service(
			ports(tcp("http", 80, intstr.FromString("web")), tcp("metrics", 9090, intstr.FromInt32(9090))),
			func(s *corev1.Service) {
				s.Name, s.Namespace, s.Spec.Selector = fmt.Sprintf("app-%d", i), fmt.Sprintf("team-%d", i%50), labels(i)
				s.Spec.ClusterIPs = []string{netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}).String()}
			}))
	}
	for i := range 200 {
		o.pods = append(o.pods, pod(called(fmt.Sprintf("pod-%d", i), types.UID(fmt.Sprintf("uid-%d", i))), func(p *corev1.Pod) {
			p.Namespace, p.Labels = fmt.Sprintf("team-%d", i%50), labels(i)
			p.Labels["pod-template-hash"] = "abc"
			p.Status.PodIPs[0].IP = fmt.Sprintf("10.244.1.%d", i)
		}))
	}
	b.ReportAllocs()
	for b.Loop() {
		if state, _ := compute(o); len(state.Replicas) != 400 || len(state.Fronts) != 10000 {
			b.Fatalf("%d replicas, %d fronts", len(state.Replicas), len(state.Fronts))
		}
	}
}
