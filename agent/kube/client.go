package kube

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/headroom-mesh/headroom/registry"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// Client reaches the API server.
type Client struct {
	Core    kubernetes.Interface
	Objects dynamic.Interface // those of definitions that Kubernetes doesn't come with
	// Namespace is that of this agent's pod; outside of one, the one that agents have by default.
	Namespace string
}

// NewClient returns a Client. kubeconfig is a file; "" stands for what Kubernetes gives every pod.
func NewClient(kubeconfig string) (*Client, error) {
	cfg, err := restConfig(kubeconfig)
	if err != nil {
		return nil, err
	}
	cfg.UserAgent = "headroom"
	core, err := kubernetes.NewForConfig(compact(cfg))
	if err != nil {
		return nil, fmt.Errorf("kubernetes: make a client: %w", err)
	}
	objects, err := dynamic.NewForConfig(cfg)
	if err != nil {
		return nil, fmt.Errorf("kubernetes: make a client: %w", err)
	}
	return &Client{Core: core, Objects: objects, Namespace: ownNamespace()}, nil
}

func ownNamespace() string {
	name, err := os.ReadFile("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
	if err != nil || len(name) == 0 {
		return "headroom-system"
	}
	return strings.TrimSpace(string(name))
}

func restConfig(kubeconfig string) (*rest.Config, error) {
	if kubeconfig == "" {
		return inCluster()
	}
	file, err := clientcmd.LoadFromFile(kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("kubeconfig %s: %w", kubeconfig, err)
	}
	if err := clientcmd.ResolveLocalPaths(file); err != nil { // those of certificates are relative to the file
		return nil, fmt.Errorf("kubeconfig %s: %w", kubeconfig, err)
	}
	cfg, err := clientcmd.NewDefaultClientConfig(*file, nil).ClientConfig()
	switch {
	case clientcmd.IsEmptyConfig(err):
		return nil, fmt.Errorf("kubeconfig %s: names no cluster: want a current-context with a cluster and a user", kubeconfig)
	case err != nil:
		return nil, fmt.Errorf("kubeconfig %s: %w", kubeconfig, err)
	}
	return cfg, nil
}

func inCluster() (*rest.Config, error) {
	cfg, err := rest.InClusterConfig()
	switch {
	case errors.Is(err, rest.ErrNotInCluster):
		return nil, errors.New("not in a cluster: give --kubeconfig")
	case err != nil:
		return nil, fmt.Errorf("in a cluster, but without the token of a service account (is automountServiceAccountToken off?): %w", err)
	}
	return cfg, nil
}

// compact asks for protocol buffers, which cost both ends less than JSON. What custom resources are read with can't have them.
func compact(cfg *rest.Config) *rest.Config {
	cfg = rest.CopyConfig(cfg)
	cfg.ContentType = "application/vnd.kubernetes.protobuf"
	cfg.AcceptContentTypes = cfg.ContentType + ",application/json"
	return cfg
}

// Node returns where a node stands, as its label says ("" if it has none), and what tells it from all others, also from one of
// its name that comes after it.
func Node(ctx context.Context, client kubernetes.Interface, node registry.NodeName) (zone, uid string, err error) {
	one := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, string(node)).String()}
	found, err := client.CoreV1().Nodes().List(ctx, one)
	if err != nil {
		return "", "", fmt.Errorf("kubernetes: read node %s: %w", node, err)
	}
	for _, n := range found.Items {
		if n.Name == string(node) {
			return n.Labels[corev1.LabelTopologyZone], string(n.UID), nil
		}
	}
	return "", "", fmt.Errorf("kubernetes: there is no node %s: --node wants the name that it has there", node)
}
