// Package kube is what an agent learns from Kubernetes: the replicas of its node, the addresses of services, and the pods that
// are in the mesh.
package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/headroom-mesh/headroom/registry"
)

// Config says which node this is, and of which cluster.
type Config struct {
	// Node is the name of this node, of the agent and in Kubernetes. Required.
	Node registry.NodeName
	// Mesh is where this agent takes traffic from other agents. Required.
	Mesh netip.AddrPort
	// Client reaches the API server. Required.
	Client kubernetes.Interface
	// Log takes what operators should know. Default: nothing is logged.
	Log *slog.Logger
	// Metrics registers the metrics of this package. Default: they are kept and not shown.
	Metrics prometheus.Registerer
}

// Validate reports all that is wrong with the configuration.
func (c Config) Validate() error {
	errs := []error{c.Node.Validate()}
	if !c.Mesh.IsValid() || c.Mesh.Port() == 0 || c.Mesh.Addr().IsUnspecified() {
		errs = append(errs, fmt.Errorf("mesh: want the IP:PORT at which other agents reach this one, got %s", c.Mesh))
	}
	if c.Client == nil {
		errs = append(errs, errors.New("client: want one of the API server"))
	}
	return errors.Join(errs...)
}

// State is what the cluster says that concerns this node. It is shared: nobody may change it.
type State struct {
	Replicas []registry.Endpoint                     // on this node, sorted by ID
	Fronts   map[netip.AddrPort]registry.ServiceName // the cluster IPs of services in the mesh
	Pods     []Pod                                   // of this node, whose connections are to be captured; sorted by UID
}

// Pod is a pod as the node knows it.
type Pod struct {
	UID                             string // by which the kubelet names the pod's control groups
	Namespace, Name, ServiceAccount string
}

func (s State) equal(o State) bool {
	return slices.Equal(s.Replicas, o.Replicas) && maps.Equal(s.Fronts, o.Fronts) && slices.Equal(s.Pods, o.Pods)
}

const (
	// settle gathers changes that belong together, such as those of a rollout.
	settle = 5 * time.Millisecond
	// interval bounds how often a State is computed, however much changes.
	interval = 50 * time.Millisecond
)

// Watcher follows what happens in the cluster. It watches the namespaces and services of all of it, and of pods and nodes only
// this node's: what an agent costs the API server doesn't grow with the number of pods. Whether a replica is ready, and where
// it is, its pod says, so EndpointSlices, which can't be had by node, aren't needed.
type Watcher struct {
	cfg                               Config
	log                               *slog.Logger
	metrics                           *metrics
	nodes, namespaces, services, pods cache.SharedIndexInformer
	changed                           chan struct{}
	told                              map[string]bool // problems that were logged and are still there; Run's

	mu      sync.Mutex
	failing map[string]error // guarded by mu: why objects of a kind can't be read now
	known   bool             // guarded by mu: whether all was read once
}

// New checks the configuration. Nothing is started before Run.
func New(cfg Config) (*Watcher, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("kubernetes: %w", err)
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	w := &Watcher{
		cfg: cfg, log: cfg.Log, metrics: newMetrics(cfg.Metrics), changed: make(chan struct{}, 1), failing: make(map[string]error),
	}
	if err := w.prepare(); err != nil {
		return nil, fmt.Errorf("kubernetes: prepare to watch: %w", err)
	}
	return w, nil
}

// Run follows the cluster until ctx ends; it can run once only. It calls apply from one goroutine, first when all is known,
// and again whenever something has changed. While the API server is away, what was known last stays.
func (w *Watcher) Run(ctx context.Context, apply func(State)) error {
	// Failures are logged where requests are made, in words of our own; the rest of what client-go would log is of no use.
	ctx, cancel := context.WithCancel(klog.NewContext(ctx, klog.Logger{}))
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()

	var synced []cache.DoneChecker
	for _, i := range []cache.SharedIndexInformer{w.nodes, w.namespaces, w.services, w.pods} {
		wg.Go(func() { i.RunWithContext(ctx) })
		synced = append(synced, i.HasSyncedChecker())
	}
	if !cache.WaitFor(ctx, "", synced...) {
		return nil
	}
	last := w.compute()
	apply(last)
	w.mu.Lock()
	w.known = true
	w.mu.Unlock()
	for w.wait(ctx) {
		if now := w.compute(); !now.equal(last) {
			last = now
			apply(now)
		}
	}
	return nil
}

// Ready fails, saying why, as long as it is not known which replicas and pods this node has. Once it is, the note tells if no
// news can be had.
func (w *Watcher) Ready() (note string, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var problems []string
	for _, kind := range slices.Sorted(maps.Keys(w.failing)) {
		problems = append(problems, fmt.Sprintf("%s: %v", kind, w.failing[kind]))
	}
	why := strings.Join(problems, "; ")
	switch {
	case !w.known && why == "":
		return "", errors.New("not all was read yet")
	case !w.known:
		return "", errors.New(why)
	case why != "":
		return "what was known last stays: " + why, nil
	}
	return "", nil
}

// wait returns when something has changed, and false when ctx has ended.
func (w *Watcher) wait(ctx context.Context) bool {
	if !pause(ctx, interval) {
		return false
	}
	select {
	case <-ctx.Done():
		return false
	case <-w.changed:
	}
	return pause(ctx, settle)
}

func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// compute returns the State of now, and tells what in the cluster can't be as it says.
func (w *Watcher) compute() State {
	select {
	case <-w.changed: // is considered by what follows
	default:
	}
	start := time.Now()
	o := objects{
		node: w.cfg.Node, mesh: w.cfg.Mesh,
		nodes: list[*corev1.Node](w.nodes), namespaces: list[*corev1.Namespace](w.namespaces),
		services: list[*corev1.Service](w.services), pods: list[*corev1.Pod](w.pods),
	}
	state, problems := compute(o)
	w.metrics.computed(o, time.Since(start))
	w.tell(problems)
	return state
}

// tell logs each problem once for as long as it is there.
func (w *Watcher) tell(problems []error) {
	told := make(map[string]bool, len(problems))
	for _, p := range problems {
		if text := p.Error(); !told[text] {
			told[text] = true
			if !w.told[text] {
				w.log.Warn("something in Kubernetes is not as the mesh can take it", "err", p)
			}
		}
	}
	w.told = told
}
