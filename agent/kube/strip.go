package kube

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// What follows keeps of an object what compute needs: the rest, of which there is much more, would only take memory.

func stripNode(n *corev1.Node) {
	*n = corev1.Node{ObjectMeta: stripMeta(n.ObjectMeta, corev1.LabelTopologyZone)}
}

func stripNamespace(n *corev1.Namespace) {
	*n = corev1.Namespace{ObjectMeta: stripMeta(n.ObjectMeta, Label)}
}

func stripService(s *corev1.Service) {
	*s = corev1.Service{
		ObjectMeta: stripMeta(s.ObjectMeta),
		Spec: corev1.ServiceSpec{
			Type: s.Spec.Type, Selector: s.Spec.Selector, Ports: s.Spec.Ports,
			ClusterIP: s.Spec.ClusterIP, ClusterIPs: s.Spec.ClusterIPs, IPFamilies: s.Spec.IPFamilies,
			PublishNotReadyAddresses: s.Spec.PublishNotReadyAddresses,
			SessionAffinity:          s.Spec.SessionAffinity, InternalTrafficPolicy: s.Spec.InternalTrafficPolicy,
		},
	}
}

func stripPod(p *corev1.Pod) {
	meta := stripMeta(p.ObjectMeta)
	meta.Labels, meta.DeletionTimestamp = p.Labels, p.DeletionTimestamp // services select by any label
	if uid, ok := p.Annotations[corev1.MirrorPodAnnotationKey]; ok {
		meta.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: uid}
	}
	*p = corev1.Pod{
		ObjectMeta: meta,
		Spec: corev1.PodSpec{
			NodeName: p.Spec.NodeName, HostNetwork: p.Spec.HostNetwork, ServiceAccountName: p.Spec.ServiceAccountName,
			Containers: stripContainers(p.Spec.Containers), InitContainers: stripContainers(p.Spec.InitContainers),
		},
		Status: corev1.PodStatus{
			Phase: p.Status.Phase, PodIPs: p.Status.PodIPs,
			Conditions: slices.DeleteFunc(p.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type != corev1.PodReady }),
		},
	}
}

// stripContainers keeps those that have ports.
func stripContainers(all []corev1.Container) (kept []corev1.Container) {
	for _, c := range all {
		if len(c.Ports) > 0 {
			kept = append(kept, corev1.Container{Ports: c.Ports, RestartPolicy: c.RestartPolicy})
		}
	}
	return kept
}

func stripMeta(m metav1.ObjectMeta, labels ...string) metav1.ObjectMeta {
	kept := metav1.ObjectMeta{Name: m.Name, Namespace: m.Namespace, UID: m.UID, ResourceVersion: m.ResourceVersion}
	for _, l := range labels {
		if value, ok := m.Labels[l]; ok {
			kept.Labels = map[string]string{l: value}
		}
	}
	return kept
}
