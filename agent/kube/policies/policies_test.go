package policies

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic/fake"
	kubefake "k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"sigs.k8s.io/yaml"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/policy/document"
	"github.com/headroom-mesh/headroom/registry"
	"github.com/headroom-mesh/headroom/registry/registrytest"
)

// cluster is Kubernetes, the store, and the agents between them.
type cluster struct {
	t       *testing.T
	store   *registrytest.Memory
	kube    *kubefake.Clientset
	objects *fake.FakeDynamicClient
	agents  map[registry.NodeName]*agent

	mu       sync.Mutex
	lagging  map[registry.NodeName]bool // guarded by mu, as are those below
	missing  []string
	statuses int // how often agents were asked
	patches  int
}

type agent struct {
	*Mirror
	registry.Registry
	metrics *prometheus.Registry
	stop    func()
	cancel  func() // stop without waiting
	log     *log

	mu       sync.Mutex
	snapshot *registry.Snapshot // guarded by mu
}

// log keeps what an agent logs.
type log struct {
	mu   sync.Mutex
	text strings.Builder // guarded by mu
}

func (l *log) Write(line []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(line)
}

// count returns how many lines say so.
func (l *log) count(words string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.text.String(), words)
}

func (a *agent) last() *registry.Snapshot {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.snapshot
}

func newCluster(t *testing.T) *cluster {
	c := &cluster{
		t:     t,
		store: registrytest.NewMemory(),
		kube:  kubefake.NewClientset(),
		objects: fake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(),
			map[schema.GroupVersionResource]string{resource(): "ServicePolicyList"}),
		agents:  map[registry.NodeName]*agent{},
		lagging: map[registry.NodeName]bool{},
	}
	c.objects.PrependReactor("patch", "servicepolicies", func(clienttesting.Action) (bool, runtime.Object, error) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.patches++
		return false, nil, nil
	})
	return c
}

func (c *cluster) members() []registry.NodeName {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Collect(maps.Keys(c.agents))
}

func (c *cluster) ask(context.Context) (answers []*meshv1.StatusResponse, missing []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.statuses++
	for _, node := range slices.Sorted(maps.Keys(c.agents)) {
		applied := c.agents[node].last().Revision
		if c.lagging[node] {
			applied = 1
		}
		answers = append(answers, &meshv1.StatusResponse{Node: string(node), AppliedRevision: applied})
	}
	return answers, c.missing
}

// join starts an agent.
func (c *cluster) join(node registry.NodeName) *agent {
	a := &agent{Registry: c.store.Connect(node), snapshot: &registry.Snapshot{}, metrics: prometheus.NewRegistry(), log: &log{}}
	m, err := New(Config{
		Node: node, Namespace: "headroom-system", Client: c.kube, Objects: c.objects,
		Registry: a.Registry, Snapshot: a.last, Members: c.members, Statuses: c.ask,
		Log: slog.New(slog.NewTextHandler(io.MultiWriter(c.t.Output(), a.log), nil)), Metrics: a.metrics,
	})
	if err != nil {
		c.t.Fatal(err)
	}
	a.Mirror = m
	c.mu.Lock()
	c.agents[node] = a
	c.mu.Unlock()
	ctx, cancel := context.WithCancel(c.t.Context())
	a.cancel = cancel
	var running sync.WaitGroup
	running.Go(func() {
		_ = a.Registry.Run(ctx, func(s *registry.Snapshot) {
			a.mu.Lock()
			a.snapshot = s
			a.mu.Unlock()
			m.Update(s)
		})
	})
	running.Go(func() {
		if err := m.Run(ctx); err != nil {
			c.t.Error(err)
		}
	})
	a.stop = sync.OnceFunc(func() {
		cancel()
		running.Wait()
		c.mu.Lock()
		delete(c.agents, node)
		c.mu.Unlock()
	})
	return a
}

// during runs a test in a bubble of a cluster with agents on the nodes a, b and c.
func during(t *testing.T, f func(t *testing.T, c *cluster)) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		for _, node := range []registry.NodeName{"a", "b", "c"} {
			defer c.join(node).stop()
		}
		pass(time.Second)
		f(t, c)
	})
}

func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// apply makes or changes an object as kubectl apply does.
func (c *cluster) apply(namespace, name, spec string, annotations ...string) {
	c.t.Helper()
	o := &unstructured.Unstructured{Object: map[string]any{}}
	if err := yaml.Unmarshal([]byte("spec: "+spec), &o.Object); err != nil {
		c.t.Fatal(err)
	}
	o.SetAPIVersion(policy.APIVersion)
	o.SetKind(policy.Kind)
	o.SetNamespace(namespace)
	o.SetName(name)
	o.SetUID(types.UID(namespace + "/" + name))
	o.SetGeneration(1)
	if len(annotations) > 0 {
		o.SetAnnotations(map[string]string{annotations[0]: annotations[1]})
	}
	client := c.objects.Resource(resource()).Namespace(namespace)
	before, err := client.Get(c.t.Context(), name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		_, err = client.Create(c.t.Context(), o, metav1.CreateOptions{})
	} else if err == nil {
		o.SetGeneration(before.GetGeneration() + 1)
		o.Object["status"] = before.Object["status"]
		_, err = client.Update(c.t.Context(), o, metav1.UpdateOptions{})
	}
	if err != nil {
		c.t.Fatal(err)
	}
	pass(time.Second)
}

func (c *cluster) delete(namespace, name string) {
	c.t.Helper()
	if err := c.objects.Resource(resource()).Namespace(namespace).Delete(c.t.Context(), name, metav1.DeleteOptions{}); err != nil {
		c.t.Fatal(err)
	}
	pass(time.Second)
}

type status struct {
	ObservedGeneration int64
	StoreRevision      int64
	Applied            string
	Conditions         []metav1.Condition
}

func (c *cluster) status(namespace, name string) status {
	c.t.Helper()
	o, err := c.objects.Resource(resource()).Namespace(namespace).Get(c.t.Context(), name, metav1.GetOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	text, err := json.Marshal(o.Object["status"])
	if err != nil {
		c.t.Fatal(err)
	}
	var s status
	if err := json.Unmarshal(text, &s); err != nil {
		c.t.Fatal(err)
	}
	return s
}

// condition writes a condition in one line: "Accepted=True Stored: why".
func (s status) condition(kind string) string {
	for _, c := range s.Conditions {
		if c.Type == kind {
			return fmt.Sprintf("%s=%s %s: %s", c.Type, c.Status, c.Reason, c.Message)
		}
	}
	return "no " + kind
}

func (c *cluster) wantCondition(namespace, name, kind string, words ...string) {
	c.t.Helper()
	got := c.status(namespace, name).condition(kind)
	for _, w := range words {
		if !strings.Contains(got, w) {
			c.t.Errorf("%s/%s has condition %q, want %q in it", namespace, name, got, w)
		}
	}
}

// policy returns what is stored, nil for nothing.
func (c *cluster) policy(service registry.ServiceName) *meshv1.ServicePolicy {
	c.t.Helper()
	doc, err := c.store.Connect("reader").Policy(c.t.Context(), service)
	if err != nil && !errors.Is(err, registry.ErrNotFound) {
		c.t.Fatal(err)
	}
	return doc
}

// set stores a policy as meshctl does.
func (c *cluster) set(service, balancer string) {
	c.t.Helper()
	_, err := c.store.Connect("operator").SetPolicy(c.t.Context(), &meshv1.ServicePolicy{
		ApiVersion: policy.APIVersion, Kind: policy.Kind, Metadata: &meshv1.Metadata{Name: service},
		Spec: &meshv1.ServicePolicySpec{Balancer: balancer},
	})
	if err != nil {
		c.t.Fatal(err)
	}
	pass(time.Second)
}

func (c *cluster) wantPolicy(service registry.ServiceName, balancer, managedBy string) {
	c.t.Helper()
	doc := c.policy(service)
	if doc.GetSpec().GetBalancer() != balancer || doc.GetMetadata().GetManagedBy() != managedBy {
		c.t.Errorf("%s has the policy %v, want balancer %q, managed by %q", service, doc, balancer, managedBy)
	}
}

func TestAPolicyIsCopiedChangedAndDeleted(t *testing.T) {
	during(t, func(t *testing.T, c *cluster) {
		c.apply("shop", "checkout", "{balancer: p2c, prequal: {poolSize: 32, qRIF: 0.5}}")
		c.wantPolicy("checkout.shop", "p2c", document.ManagedByKubernetes)
		if p := c.policy("checkout.shop").Spec.Prequal; p.GetPoolSize() != 32 || p.GetQRif() != 0.5 {
			t.Errorf("prequal: %v", p)
		}
		s := c.status("shop", "checkout")
		if s.Applied != "3/3" || s.ObservedGeneration != 1 || fmt.Sprint(s.StoreRevision) != c.policy("checkout.shop").Metadata.ResourceVersion {
			t.Errorf("status %+v", s)
		}
		c.wantCondition("shop", "checkout", "Accepted", "=True Stored")
		c.wantCondition("shop", "checkout", "Applied", "=True Everywhere: all 3 live agents")

		c.apply("shop", "checkout", "{balancer: random}")
		c.wantPolicy("checkout.shop", "random", document.ManagedByKubernetes)
		if now := c.status("shop", "checkout"); now.StoreRevision <= s.StoreRevision || now.ObservedGeneration != 2 || now.Applied != "3/3" {
			t.Errorf("after a change: %+v", now)
		}
		c.apply("shop", "grpc.checkout", "{}") // of one port
		c.wantPolicy("grpc.checkout.shop", "", document.ManagedByKubernetes)

		c.delete("shop", "checkout")
		if doc := c.policy("checkout.shop"); doc != nil {
			t.Errorf("the object is gone, but %v is stored", doc)
		}
		c.wantPolicy("grpc.checkout.shop", "", document.ManagedByKubernetes)
	})
}

func TestNothingIsWrittenWhileNothingChanges(t *testing.T) {
	during(t, func(t *testing.T, c *cluster) {
		for i := range 20 {
			c.apply("shop", fmt.Sprintf("s%d", i), "{balancer: p2c}")
		}
		pass(time.Minute)
		c.mu.Lock()
		patches, statuses := c.patches, c.statuses
		c.mu.Unlock()
		revision := c.policy("s7.shop").Metadata.ResourceVersion
		pass(10 * time.Minute)
		if now := c.policy("s7.shop").Metadata.ResourceVersion; now != revision {
			t.Errorf("written again: revision %s, before %s", now, revision)
		}
		if c.patches != patches {
			t.Errorf("%d statuses were written in ten minutes without a change", c.patches-patches)
		}
		if asked := c.statuses - statuses; asked < 10 || asked > 25 {
			t.Errorf("agents were asked %d times in ten minutes, want about 20", asked)
		}
	})
}

func TestWhatIsNotAPolicyIsSaidAndTheOneBeforeStays(t *testing.T) {
	during(t, func(t *testing.T, c *cluster) {
		c.apply("shop", "checkout", "{balancer: p2c}")
		c.apply("shop", "checkout", "{balancer: maglev, timeout: 48h}")
		c.wantPolicy("checkout.shop", "p2c", document.ManagedByKubernetes)
		c.wantCondition("shop", "checkout", "Accepted", "=False Invalid", "spec.timeout: want a duration from 1ms to 24h",
			"spec.consistentHash.key: required by balancer maglev", "the policy before this one stays in force")
		c.wantCondition("shop", "checkout", "Applied", "=False NotStored")
		if s := c.status("shop", "checkout"); s.Applied != "" || s.StoreRevision != 0 || s.ObservedGeneration != 2 {
			t.Errorf("status %+v", s)
		}
		c.apply("shop", "a.b.c", "{}")
		c.wantCondition("shop", "a.b.c", "Accepted", "=False Invalid", "metadata.name", "a.b.c.shop")
		c.apply("shop", "checkout", "{balancer: random}")
		c.wantCondition("shop", "checkout", "Accepted", "=True Stored")
		c.wantPolicy("checkout.shop", "random", document.ManagedByKubernetes)
	})
}

func TestWhatOperatorsWroteIsTakenOverOnlyWhenToldSo(t *testing.T) {
	during(t, func(t *testing.T, c *cluster) {
		c.set("checkout.shop", "round_robin")
		c.apply("shop", "checkout", "{balancer: p2c}")
		c.wantPolicy("checkout.shop", "round_robin", "")
		c.wantCondition("shop", "checkout", "Accepted", "=False Conflict", "meshctl policy delete checkout.shop",
			"kubectl annotate servicepolicy -n shop checkout headroom.dev/adopt=true")
		c.apply("shop", "checkout", "{balancer: p2c}", adopt, "true")
		c.wantPolicy("checkout.shop", "p2c", document.ManagedByKubernetes)
		c.wantCondition("shop", "checkout", "Accepted", "=True Stored")

		// Deleting an object leaves alone what is not its copy.
		c.set("cart.shop", "random")
		c.apply("shop", "cart", "{balancer: p2c}")
		c.delete("shop", "cart")
		c.wantPolicy("cart.shop", "random", "")

		// It is handed over by deleting it, too.
		c.apply("shop", "cart", "{balancer: p2c}")
		if _, err := c.store.Connect("operator").DeletePolicy(t.Context(), "cart.shop"); err != nil {
			t.Fatal(err)
		}
		pass(time.Second)
		c.wantPolicy("cart.shop", "p2c", document.ManagedByKubernetes)
	})
}

func TestWhatIsTakenFromKubernetesByForceIsAConflict(t *testing.T) {
	during(t, func(t *testing.T, c *cluster) {
		c.apply("shop", "checkout", "{balancer: p2c}")
		c.set("checkout.shop", "random") // as with --force
		c.wantPolicy("checkout.shop", "random", "")
		c.wantCondition("shop", "checkout", "Accepted", "=False Conflict")
		c.delete("shop", "checkout")
		c.wantPolicy("checkout.shop", "random", "")
	})
}

func TestSomethingUnreadableIsAConflict(t *testing.T) {
	during(t, func(t *testing.T, c *cluster) {
		c.store.Put(registry.ServiceName("checkout.shop").PolicyKey(), []byte("{"))
		c.apply("shop", "checkout", "{balancer: p2c}")
		c.wantCondition("shop", "checkout", "Accepted", "=False Conflict", "can't be read", "meshctl policy delete checkout.shop")
		c.apply("shop", "checkout", "{balancer: p2c}", adopt, "true")
		c.wantPolicy("checkout.shop", "p2c", document.ManagedByKubernetes)
		c.wantCondition("shop", "checkout", "Accepted", "=True Stored")
	})
}

func TestAgentsThatLagAreNamed(t *testing.T) {
	during(t, func(t *testing.T, c *cluster) {
		c.mu.Lock()
		c.lagging["b"] = true
		c.missing = []string{"d: no answer within 500ms"}
		c.mu.Unlock()
		c.apply("shop", "checkout", "{balancer: p2c}")
		if s := c.status("shop", "checkout"); s.Applied != "2/4" {
			t.Errorf("applied %q, want 2/4", s.Applied)
		}
		c.wantCondition("shop", "checkout", "Accepted", "=True Stored")
		c.wantCondition("shop", "checkout", "Applied", "=False Waiting", "waiting for b: at revision 1, d: no answer within 500ms")
		c.mu.Lock()
		delete(c.lagging, "b")
		c.missing = nil
		c.mu.Unlock()
		pass(2 * time.Second)
		if s := c.status("shop", "checkout"); s.Applied != "3/3" {
			t.Errorf("applied %q, want 3/3", s.Applied)
		}
		defer c.join("d").stop()
		pass(refresh + time.Second)
		if s := c.status("shop", "checkout"); s.Applied != "4/4" {
			t.Errorf("with another agent: applied %q, want 4/4", s.Applied)
		}
	})
}

func TestTheStoreIsAway(t *testing.T) {
	during(t, func(t *testing.T, c *cluster) {
		c.apply("shop", "cart", "{balancer: p2c}")
		c.apply("shop", "old", "{balancer: p2c}")
		c.store.SetAway(true)
		c.apply("shop", "checkout", "{balancer: p2c}")
		c.delete("shop", "old")
		c.wantCondition("shop", "checkout", "Accepted", "=False StoreUnavailable", "the registry is unreachable", "tried again")
		c.wantCondition("shop", "cart", "Accepted", "=True Stored")
		pass(time.Minute)
		c.store.SetAway(false)
		pass(maxBackoff + time.Second)
		c.wantPolicy("checkout.shop", "p2c", document.ManagedByKubernetes)
		c.wantCondition("shop", "checkout", "Accepted", "=True Stored")
		if doc := c.policy("old.shop"); doc != nil {
			t.Errorf("its object went while the store was away, but %v is stored", doc)
		}
	})
}

// refuse makes the API server refuse what it is asked, until the returned function is called.
func (c *cluster) refuse() (restore func()) {
	away := func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewServiceUnavailable("it is away")
	}
	kube, objects := c.kube.ReactionChain, c.objects.ReactionChain
	c.kube.Lock()
	c.kube.ReactionChain = append([]clienttesting.Reactor{&clienttesting.SimpleReactor{Verb: "*", Resource: "*", Reaction: away}}, kube...)
	c.kube.Unlock()
	c.objects.Lock()
	c.objects.ReactionChain = append([]clienttesting.Reactor{&clienttesting.SimpleReactor{Verb: "*", Resource: "*", Reaction: away}}, objects...)
	c.objects.Unlock()
	return func() {
		c.kube.Lock()
		c.kube.ReactionChain = kube
		c.kube.Unlock()
		c.objects.Lock()
		c.objects.ReactionChain = objects
		c.objects.Unlock()
	}
}

func TestTheAPIServerIsAway(t *testing.T) {
	during(t, func(t *testing.T, c *cluster) {
		c.apply("shop", "checkout", "{balancer: p2c}")
		restore := c.refuse()
		pass(10 * time.Minute)
		c.wantPolicy("checkout.shop", "p2c", document.ManagedByKubernetes)
		restore()
		pass(time.Minute)
		c.apply("shop", "checkout", "{balancer: random}")
		pass(time.Minute)
		c.wantPolicy("checkout.shop", "random", document.ManagedByKubernetes)
	})
}

// leaders returns which agents say that they lead.
func (c *cluster) leaders() (leaders []string) {
	for node, a := range c.agents {
		if testutil.ToFloat64(a.Mirror.metrics.leader) == 1 {
			leaders = append(leaders, string(node))
		}
	}
	return leaders
}

func TestAnotherAgentTakesOverAndReconciles(t *testing.T) {
	during(t, func(t *testing.T, c *cluster) {
		c.apply("shop", "checkout", "{balancer: p2c}")
		c.apply("shop", "cart", "{balancer: p2c}")
		first := c.leaders()
		if len(first) != 1 {
			t.Fatalf("leaders: %v, want one", first)
		}
		for node := range c.agents {
			if string(node) != first[0] {
				defer c.join("z" + node).stop()
			}
		}
		restore := c.refuse()
		c.agents[registry.NodeName(first[0])].stop()
		restore()
		c.delete("shop", "cart") // while nobody leads
		pass(leaseDuration + 2*retryPeriod)
		if second := c.leaders(); len(second) != 1 || second[0] == first[0] {
			t.Errorf("leaders after %v: %v", first, second)
		}
		if doc := c.policy("cart.shop"); doc != nil {
			t.Errorf("its object went while nobody led, but %v is stored", doc)
		}
		c.apply("shop", "checkout", "{balancer: random}")
		c.wantPolicy("checkout.shop", "random", document.ManagedByKubernetes)
	})
}

func TestALeaderThatLeavesIsReplacedAtOnce(t *testing.T) {
	during(t, func(t *testing.T, c *cluster) {
		first := c.leaders()[0]
		c.agents[registry.NodeName(first)].stop()
		pass(2 * retryPeriod)
		if second := c.leaders(); len(second) != 1 {
			t.Errorf("leaders after %s has left: %v", first, second)
		}
	})
}

// TestTheNextLeaderSaysOnlyWhatIsNew expects no line for each policy that another leader has copied.
func TestTheNextLeaderSaysOnlyWhatIsNew(t *testing.T) {
	during(t, func(t *testing.T, c *cluster) {
		const copied = "policy copied from Kubernetes"
		first := c.agents[registry.NodeName(c.leaders()[0])]
		c.apply("shop", "checkout", "{balancer: p2c}")
		if n := first.log.count(copied); n != 1 {
			t.Errorf("the first leader logs %d times that a policy is copied, want once", n)
		}
		first.stop()
		pass(2 * retryPeriod)
		second := c.agents[registry.NodeName(c.leaders()[0])]
		c.apply("shop", "cart", "{balancer: p2c}")
		if second.log.count(copied) != 1 || second.log.count("service=cart.shop") != 1 {
			t.Error("the second leader doesn't log once that a policy is copied, and which")
		}
	})
}

// TestStatusesThatCantBeWritten expects one line for all objects, and none of a leader that is told to end.
func TestStatusesThatCantBeWritten(t *testing.T) {
	during(t, func(t *testing.T, c *cluster) {
		leader := c.agents[registry.NodeName(c.leaders()[0])]
		var leaves atomic.Bool
		c.objects.PrependReactor("patch", "servicepolicies", func(clienttesting.Action) (bool, runtime.Object, error) {
			if leaves.Load() {
				leader.cancel()
			}
			return true, nil, apierrors.NewForbidden(resource().GroupResource(), "x", errors.New("you may not"))
		})
		const failed = "can't write the status"
		for i := range 20 {
			c.apply("shop", fmt.Sprint("s", i), "{balancer: p2c}")
		}
		before := leader.log.count(failed)
		pass(time.Minute)
		if n := leader.log.count(failed) - before; n < 1 || n > int(time.Minute/maxBackoff) {
			t.Errorf("in a minute it is logged %d times that a status can't be written, want once each time that all are tried", n)
		}
		leaves.Store(true)
		before = leader.log.count("level=WARN")
		pass(maxBackoff)
		if n := leader.log.count("level=WARN") - before; n > 0 {
			t.Errorf("a leader that ends logs %d warnings", n)
		}
	})
}

// TestObjectsThatCantBeWatched expects one line, however long that goes on, and policies to be copied when it is over.
func TestObjectsThatCantBeWatched(t *testing.T) {
	during(t, func(t *testing.T, c *cluster) {
		var refused atomic.Bool
		c.objects.PrependReactor("list", "servicepolicies", func(clienttesting.Action) (bool, runtime.Object, error) {
			return refused.Load(), nil, apierrors.NewForbidden(resource().GroupResource(), "", errors.New("you may not"))
		})
		refused.Store(true)
		c.agents[registry.NodeName(c.leaders()[0])].stop()
		pass(3 * time.Minute)
		leader := c.agents[registry.NodeName(c.leaders()[0])]
		if n := leader.log.count("can't watch"); n != 1 {
			t.Errorf("in three minutes it is logged %d times that objects can't be watched, want once", n)
		}
		refused.Store(false)
		c.apply("shop", "checkout", "{balancer: p2c}")
		pass(time.Minute)
		c.wantPolicy("checkout.shop", "p2c", document.ManagedByKubernetes)
	})
}

// TestLeaseTrouble expects what is wrong with the Lease to be said once, and again if it was well meanwhile.
func TestLeaseTrouble(t *testing.T) {
	var out log
	lease := &troubledLease{}
	l := &lock{Interface: lease, log: slog.New(slog.NewTextHandler(&out, nil)), said: map[string]string{}}
	for _, step := range []struct {
		get, update error
		want        int // lines so far
	}{
		{nil, errors.New("forbidden"), 1},
		{nil, errors.New("forbidden"), 1},
		{errors.New("away"), errors.New("forbidden"), 2},
		{nil, nil, 2},
		{nil, errors.New("forbidden"), 3},
		{errors.New("away"), nil, 4},
	} {
		lease.get, lease.update = step.get, step.update
		l.Get(t.Context())
		l.Update(t.Context(), resourcelock.LeaderElectionRecord{})
		if n := out.count("can't hold the Lease"); n != step.want {
			t.Errorf("get: %v, update: %v: %d lines so far, want %d", step.get, step.update, n, step.want)
		}
	}
}

// troubledLease fails as it is told to.
type troubledLease struct {
	resourcelock.Interface
	get, update error
}

func (l *troubledLease) Get(context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	return nil, nil, l.get
}

func (l *troubledLease) Update(context.Context, resourcelock.LeaderElectionRecord) error {
	return l.update
}

func TestFewAgentsStandForElection(t *testing.T) {
	during(t, func(t *testing.T, c *cluster) {
		for i := range 20 {
			defer c.join(registry.NodeName(fmt.Sprintf("n%02d", i))).stop()
		}
		pass(time.Minute)
		c.kube.ClearActions()
		pass(time.Minute)
		if n := len(c.kube.Actions()); n > 150 {
			t.Errorf("the API server was asked %d times in a minute by 23 agents, want what three of them cost", n)
		}
		for _, node := range []registry.NodeName{"a", "b", "c"} {
			c.agents[node].stop()
		}
		pass(leaseDuration + candidacyInterval + 2*retryPeriod)
		if l := c.leaders(); len(l) != 1 {
			t.Errorf("leaders: %v, want one of those that are left", l)
		}
	})
}

func TestMetrics(t *testing.T) {
	during(t, func(t *testing.T, c *cluster) {
		c.set("cart.shop", "random")
		c.apply("shop", "cart", "{}")
		c.apply("shop", "checkout", "{}")
		c.apply("shop", "bad", "{timeout: 48h}")
		leader := c.agents[registry.NodeName(c.leaders()[0])]
		want := `# HELP headroom_kubernetes_policies ServicePolicy objects by what came of them, told by the agent that copies them.
# TYPE headroom_kubernetes_policies gauge
headroom_kubernetes_policies{status="Conflict"} 1
headroom_kubernetes_policies{status="Invalid"} 1
headroom_kubernetes_policies{status="StoreUnavailable"} 0
headroom_kubernetes_policies{status="Stored"} 1
# HELP headroom_kubernetes_policies_leader Whether this agent copies the policies of Kubernetes to the registry.
# TYPE headroom_kubernetes_policies_leader gauge
headroom_kubernetes_policies_leader 1
`
		if err := testutil.GatherAndCompare(leader.metrics, strings.NewReader(want)); err != nil {
			t.Error(err)
		}
		if problems, err := testutil.GatherAndLint(leader.metrics); err != nil || len(problems) > 0 {
			t.Error(problems, err)
		}
	})
}

func TestValidate(t *testing.T) {
	_, err := New(Config{})
	for _, field := range []string{"node", "namespace", "client", "objects", "registry", "snapshot", "members", "statuses"} {
		if err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%v: want %s to be named", err, field)
		}
	}
}
