// Package policies copies the ServicePolicy objects of Kubernetes to the registry, and says in their status what came of them.
package policies

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/klog/v2"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/registry"
)

// Lease is the name of the Lease that the leader holds.
const Lease = "headroom-policies"

const (
	// candidates bounds how many agents stand for election, and so what waiting costs the API server, however many there are.
	candidates        = 3
	candidacyInterval = 10 * time.Second

	leaseDuration = 15 * time.Second
	renewDeadline = 10 * time.Second
	retryPeriod   = 2 * time.Second
)

// Config says whose policies go where. All but Log and Metrics is required.
type Config struct {
	Node registry.NodeName
	// Namespace is that of the agents, and so of their Lease.
	Namespace string
	Client    kubernetes.Interface
	Objects   dynamic.Interface

	Registry registry.Policies
	// Snapshot returns what this agent last learned of the registry; never nil.
	Snapshot func() *registry.Snapshot
	// Members returns the live agents, this one among them. The first few by name stand for election.
	Members func() []registry.NodeName
	// Statuses asks all live agents how far they have come. Of those that give no answer, missing says why: "NODE: WHY".
	Statuses func(context.Context) (answers []*meshv1.StatusResponse, missing []string)

	// Log takes what operators should know. Default: nothing is logged.
	Log     *slog.Logger
	Metrics prometheus.Registerer
}

// Validate reports all that is wrong with the configuration.
func (c Config) Validate() error {
	errs := []error{c.Node.Validate()}
	for _, r := range []struct {
		field   string
		missing bool
	}{
		{"namespace", c.Namespace == ""}, {"client", c.Client == nil}, {"objects", c.Objects == nil}, {"registry", c.Registry == nil},
		{"snapshot", c.Snapshot == nil}, {"members", c.Members == nil}, {"statuses", c.Statuses == nil},
	} {
		if r.missing {
			errs = append(errs, fmt.Errorf("%s: required", r.field))
		}
	}
	return errors.Join(errs...)
}

// Mirror is one agent's part in copying policies: all of them can, one at a time does.
type Mirror struct {
	cfg     Config
	log     *slog.Logger
	metrics *metrics
	changed chan struct{} // holds something while there may be something to do
	stored  atomic.Int64  // fingerprint of the policies in the last snapshot
}

// New checks the configuration. Nothing is started before Run.
func New(cfg Config) (*Mirror, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("policies of Kubernetes: %w", err)
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Mirror{cfg: cfg, log: cfg.Log, metrics: newMetrics(cfg.Metrics), changed: make(chan struct{}, 1)}, nil
}

// Update says that Snapshot now returns s. It does not wait.
func (m *Mirror) Update(s *registry.Snapshot) {
	var sum int64
	for _, service := range s.Services {
		sum += service.PolicyRevision
	}
	if m.stored.Swap(sum) != sum { // a policy was written, or deleted
		m.wake()
	}
}

func (m *Mirror) wake() {
	select {
	case m.changed <- struct{}{}:
	default:
	}
}

// Run takes part until ctx ends. While the API server is away nobody leads, and all stays as it is.
func (m *Mirror) Run(ctx context.Context) error {
	ctx = klog.NewContext(ctx, klog.Logger{}) // what matters is logged here
	for m.awaitCandidacy(ctx) {
		if err := m.campaign(ctx); err != nil {
			return fmt.Errorf("policies of Kubernetes: %w", err)
		}
	}
	return nil
}

func (m *Mirror) isCandidate() bool {
	members := slices.Sorted(slices.Values(m.cfg.Members()))
	return slices.Contains(members[:min(candidates, len(members))], m.cfg.Node)
}

// awaitCandidacy returns false when ctx ends.
func (m *Mirror) awaitCandidacy(ctx context.Context) bool {
	for ctx.Err() == nil && !m.isCandidate() {
		pause(ctx, candidacyInterval)
	}
	return ctx.Err() == nil
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// campaign stands for election and leads if elected. It returns when that ends, or when others are to stand.
func (m *Mirror) campaign(ctx context.Context) error {
	elected := make(chan struct{})
	elector, err := m.elector(func(context.Context) { close(elected) })
	if err != nil {
		return err
	}
	leading, lost := context.WithCancel(ctx)
	defer lost()
	// The lease is given up only when nothing is done any more in its name.
	electing, resign := context.WithCancel(context.WithoutCancel(ctx))
	var election sync.WaitGroup
	defer election.Wait()
	defer resign()
	election.Go(func() {
		elector.Run(electing)
		lost()
	})
	if m.awaitElection(leading, elected) {
		m.lead(leading)
	}
	return nil
}

// lock says what goes wrong with the Lease, once until it goes well or something else does: agents without the right to it
// try for ever.
type lock struct {
	resourcelock.Interface
	log  *slog.Logger
	said map[string]string // by what was tried; guarded by the elector, which does one thing at a time
}

func (l *lock) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	record, raw, err := l.Interface.Get(ctx)
	l.say(ctx, "get", err, apierrors.IsNotFound)
	return record, raw, err
}

func (l *lock) Create(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	err := l.Interface.Create(ctx, r)
	l.say(ctx, "create", err, apierrors.IsAlreadyExists)
	return err
}

func (l *lock) Update(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	err := l.Interface.Update(ctx, r)
	l.say(ctx, "update", err, apierrors.IsConflict)
	return err
}

// say logs what is wrong, and not usual.
func (l *lock) say(ctx context.Context, verb string, err error, usual func(error) bool) {
	switch {
	case err == nil || usual(err):
		delete(l.said, verb)
	case ctx.Err() == nil && l.said[verb] != err.Error():
		l.said[verb] = err.Error()
		l.log.Warn("can't hold the Lease "+Lease+": the policies of Kubernetes are copied when some agent can", "err", err)
	}
}

func (m *Mirror) elector(elected func(context.Context)) (*leaderelection.LeaderElector, error) {
	return leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: &lock{log: m.log, said: map[string]string{}, Interface: &resourcelock.LeaseLock{
			LeaseMeta:  metav1.ObjectMeta{Name: Lease, Namespace: m.cfg.Namespace},
			Client:     m.cfg.Client.CoordinationV1(),
			LockConfig: resourcelock.ResourceLockConfig{Identity: string(m.cfg.Node)},
		}},
		LeaseDuration:   leaseDuration,
		RenewDeadline:   renewDeadline,
		RetryPeriod:     retryPeriod,
		ReleaseOnCancel: true,
		Name:            Lease,
		Callbacks:       leaderelection.LeaderCallbacks{OnStartedLeading: elected, OnStoppedLeading: func() {}},
	})
}

// awaitElection returns false if this agent is not to stand for election any more.
func (m *Mirror) awaitElection(ctx context.Context, elected <-chan struct{}) bool {
	tick := time.NewTicker(candidacyInterval)
	defer tick.Stop()
	for {
		select {
		case <-elected:
			return true
		case <-ctx.Done():
			return false
		case <-tick.C:
			if !m.isCandidate() {
				return false
			}
		}
	}
}

func resource() schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: "headroom.dev", Version: "v1", Resource: "servicepolicies"}
}

// lead copies policies until ctx ends.
func (m *Mirror) lead(ctx context.Context) {
	m.log.Info("this agent copies the policies of Kubernetes to the registry", "node", m.cfg.Node)
	m.metrics.leader.Set(1)
	defer m.metrics.leave()
	informer, err := m.informer()
	if err != nil {
		m.log.Error("can't watch policies", "err", err)
		return
	}
	var watching sync.WaitGroup
	defer watching.Wait()
	watching.Go(func() { informer.RunWithContext(ctx) })
	if !cache.WaitForCacheSync(ctx.Done(), informer.HasSynced) {
		return
	}
	newLeader(m, informer.GetStore()).run(ctx)
}

func (m *Mirror) informer() (cache.SharedIndexInformer, error) {
	informer := dynamicinformer.NewFilteredDynamicInformer(m.cfg.Objects, resource(), metav1.NamespaceAll, 0, cache.Indexers{}, nil).Informer()
	_, added := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { m.wake() },
		UpdateFunc: func(any, any) { m.wake() },
		DeleteFunc: func(any) { m.wake() },
	})
	return informer, errors.Join(added, informer.SetTransform(withoutManagers), informer.SetWatchErrorHandlerWithContext((&watch{log: m.log}).failed))
}

// withoutManagers takes away what is long, and of no use here.
func withoutManagers(o any) (any, error) {
	if u, ok := o.(*unstructured.Unstructured); ok {
		u.SetManagedFields(nil)
	}
	return o, nil
}

// watch says why objects can't be watched, once as long as that goes on.
type watch struct {
	log  *slog.Logger
	said string // guarded by the informer, which tries one after the other
	at   time.Time
}

func (w *watch) failed(ctx context.Context, _ *cache.Reflector, err error) {
	const apart = 2 * time.Minute // more than the informer ever waits before it tries again
	now := time.Now()
	goesOn := now.Sub(w.at) < apart && err.Error() == w.said
	w.said, w.at = err.Error(), now
	if ctx.Err() == nil && !goesOn {
		w.log.Warn("can't watch the ServicePolicy objects of Kubernetes: what was copied stays", "err", err)
	}
}
