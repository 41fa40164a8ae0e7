package kube

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/headroom-mesh/headroom/registry"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

// node is the one that is watched.
func node() *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1", Labels: map[string]string{corev1.LabelTopologyZone: "eu-1a"}}}
}

// watched is a Watcher that runs in a bubble.
type watched struct {
	t       *testing.T
	watcher *Watcher
	client  *fake.Clientset
	metrics *prometheus.Registry
	log     bytes.Buffer
	states  []State // as applied, the last of them last
	cancel  context.CancelFunc
	ended   chan error
}

// run runs the test in a bubble, with a Watcher of a cluster that has the objects. prepare may change how the API server answers.
func run(t *testing.T, objects []runtime.Object, prepare func(*fake.Clientset), test func(*watched)) {
	synctest.Test(t, func(t *testing.T) {
		w := &watched{t: t, client: fake.NewSimpleClientset(objects...), metrics: prometheus.NewRegistry(), ended: make(chan error, 1)}
		if prepare != nil {
			prepare(w.client)
		}
		watcher, err := New(Config{Node: "node-1", Mesh: mesh, Client: w.client, Log: slog.New(slog.NewTextHandler(&w.log, nil)), Metrics: w.metrics})
		if err != nil {
			t.Fatal(err)
		}
		w.watcher = watcher
		ctx, cancel := context.WithCancel(t.Context())
		w.cancel = cancel
		go func() { w.ended <- watcher.Run(ctx, func(s State) { w.states = append(w.states, s) }) }()
		w.settle()
		test(w)
		cancel()
		if err := <-w.ended; err != nil {
			t.Error(err)
		}
	})
}

// settle waits until all that has happened has been applied.
func (w *watched) settle() {
	synctest.Wait()
	time.Sleep(interval + settle)
	synctest.Wait()
}

// put makes the objects, or changes them.
func (w *watched) put(objects ...runtime.Object) {
	w.t.Helper()
	for _, o := range objects {
		resource := resourceOf(o)
		namespace := o.(metav1.Object).GetNamespace()
		err := w.client.Tracker().Update(resource, o, namespace)
		if apierrors.IsNotFound(err) {
			err = w.client.Tracker().Create(resource, o, namespace)
		}
		if err != nil {
			w.t.Fatal(err)
		}
	}
	synctest.Wait() // for the events to be taken: the channel of the fake is short
}

func (w *watched) remove(o runtime.Object) {
	w.t.Helper()
	resource := resourceOf(o)
	if err := w.client.Tracker().Delete(resource, o.(metav1.Object).GetNamespace(), o.(metav1.Object).GetName()); err != nil {
		w.t.Fatal(err)
	}
}

func resourceOf(o runtime.Object) schema.GroupVersionResource {
	kind := ""
	switch o.(type) {
	case *corev1.Pod:
		kind = pods
	case *corev1.Service:
		kind = services
	case *corev1.Namespace:
		kind = namespaces
	case *corev1.Node:
		kind = nodes
	}
	return corev1.SchemeGroupVersion.WithResource(kind)
}

// want wants the last State to be as shown.
func (w *watched) want(lines ...string) {
	w.t.Helper()
	w.settle()
	if len(w.states) == 0 {
		w.t.Fatal("nothing was applied")
	}
	if diff := cmp.Diff(strings.Join(lines, "\n"), show(w.states[len(w.states)-1])); diff != "" {
		w.t.Fatalf("want -, got +:\n%s", diff)
	}
}

const (
	aFront    = "front 10.96.0.7:80 checkout.shop"
	aCaptured = "pod uid-1 shop/checkout-1 seller"
)

func aReplica(state string) string {
	return "replica checkout.shop 10.244.1.5:8080 " + state + " eu-1a 172.30.0.11:15008"
}

func enrolled() []runtime.Object {
	return []runtime.Object{node(), namespace("shop", Label, Enabled), service(), pod()}
}

// TestEvents follows one cluster through what may happen in it.
func TestEvents(t *testing.T) {
	run(t, enrolled(), nil, func(w *watched) {
		w.want(aReplica("ready"), aFront, aCaptured)
		for _, step := range []struct {
			name   string
			put    runtime.Object
			remove runtime.Object
			want   []string
		}{
			{name: "not ready", put: pod(unready), want: []string{aReplica("unhealthy"), aFront, aCaptured}},
			{name: "ready again", put: pod(), want: []string{aReplica("ready"), aFront, aCaptured}},
			{name: "terminating", put: pod(terminating), want: []string{aReplica("draining"), aFront, aCaptured}},
			{name: "deleted", remove: pod(), want: []string{aFront}},
			{name: "another", put: pod(called("checkout-2", "uid-2")), want: []string{aReplica("ready"), aFront, "pod uid-2 shop/checkout-2 seller"}},
			{name: "deleted", remove: pod(called("checkout-2", "")), want: []string{aFront}},
			{name: "back", put: pod(), want: []string{aReplica("ready"), aFront, aCaptured}},
			{name: "opted out", put: pod(labelled(Label, Disabled)), want: []string{aReplica("ready"), aFront}},
			{name: "opted out, namespace not enrolled", put: namespace("shop")},
			{name: "opted in", put: pod(labelled(Label, Enabled)), want: []string{aCaptured}},
			{name: "namespace enrolled", put: namespace("shop", Label, Enabled), want: []string{aReplica("ready"), aFront, aCaptured}},
			{name: "port edited", put: service(ports(tcp("", 81, intstr.FromString("web")))),
				want: []string{aReplica("ready"), "front 10.96.0.7:81 checkout.shop", aCaptured}},
			{name: "port added", put: service(ports(tcp("web", 80, intstr.FromInt32(8080)), tcp("admin", 9000, intstr.FromInt32(9000)))),
				want: []string{"replica admin.checkout.shop 10.244.1.5:9000 ready eu-1a 172.30.0.11:15008", aReplica("ready"), aFront,
					"front 10.96.0.7:9000 admin.checkout.shop", aCaptured}},
			{name: "port renamed", put: service(ports(tcp("web", 80, intstr.FromInt32(8080)), tcp("ops", 9000, intstr.FromInt32(9000)))),
				want: []string{aReplica("ready"), "replica ops.checkout.shop 10.244.1.5:9000 ready eu-1a 172.30.0.11:15008", aFront,
					"front 10.96.0.7:9000 ops.checkout.shop", aCaptured}},
			{name: "headless", put: service(headless), want: []string{aReplica("ready"), aCaptured}},
			{name: "two families", put: service(families(corev1.IPv6Protocol, corev1.IPv4Protocol), func(s *corev1.Service) { s.Spec.ClusterIPs = []string{"fd00:10:96::7", "10.96.0.7"} }),
				want: []string{aReplica("ready"), aFront, "front [fd00:10:96::7]:80 checkout.shop", aCaptured}},
			{name: "service removed", remove: service(), want: []string{aCaptured}},
			{name: "service back", put: service(), want: []string{aReplica("ready"), aFront, aCaptured}},
			{name: "zone changed", put: &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1", Labels: map[string]string{corev1.LabelTopologyZone: "eu-1b"}}},
				want: []string{strings.ReplaceAll(aReplica("ready"), "eu-1a", "eu-1b"), aFront, aCaptured}},
			{name: "namespace removed", remove: namespace("shop"), want: []string{aCaptured}},
		} {
			if step.put != nil {
				w.put(step.put)
			} else {
				w.remove(step.remove)
			}
			w.t.Log(step.name)
			w.want(step.want...)
		}
		if w.log.Len() > 0 {
			t.Errorf("logged:\n%s", &w.log)
		}
	})
}

// TestOnlyThisNode wants the API server to be asked for no other node's pods, and for no other node.
func TestOnlyThisNode(t *testing.T) {
	run(t, enrolled(), nil, func(w *watched) {
		var asked []string
		for _, a := range w.client.Actions() {
			var r clienttesting.ListRestrictions
			if l, ok := a.(clienttesting.ListAction); ok {
				r = l.GetListRestrictions()
			} else {
				watch := a.(clienttesting.WatchAction).GetWatchRestrictions()
				r = clienttesting.ListRestrictions{Fields: watch.Fields}
			}
			asked = append(asked, strings.TrimSpace(a.GetVerb()+" "+a.GetResource().Resource+" "+r.Fields.String()))
		}
		slices.Sort(asked)
		want := []string{
			"list namespaces", "list nodes metadata.name=node-1", "list pods spec.nodeName=node-1", "list services",
			"watch namespaces", "watch nodes metadata.name=node-1", "watch pods spec.nodeName=node-1", "watch services",
		}
		if diff := cmp.Diff(want, asked); diff != "" {
			t.Errorf("want -, got +:\n%s", diff)
		}
	})
}

// TestManyChanges wants changes that come together to be applied together, and those that change nothing not at all.
func TestManyChanges(t *testing.T) {
	run(t, enrolled(), nil, func(w *watched) {
		w.settle()
		before := len(w.states)
		for i := range 100 {
			w.put(pod(), pod(called("checkout-2", "uid-2"), func(p *corev1.Pod) {
				p.Status.PodIPs[0].IP = "10.244.1." + string(rune('0'+i%10))
			}))
		}
		w.settle()
		if n := len(w.states) - before; n < 1 || n > 2 {
			t.Errorf("100 changes were applied in %d steps", n)
		}
		before = len(w.states)
		w.put(pod(), service(), pod(func(p *corev1.Pod) { p.Annotations = map[string]string{"seen": "yes"} }))
		w.settle()
		if n := len(w.states) - before; n > 0 {
			t.Errorf("nothing has changed, and was applied %d times", n)
		}
		start := time.Now()
		for time.Since(start) < time.Second {
			w.put(pod(func(p *corev1.Pod) { p.Spec.ServiceAccountName = time.Now().Format(".000") }))
			time.Sleep(time.Millisecond)
		}
		if n := len(w.states) - before; n < 10 || n > 20 {
			t.Errorf("changes of a second were applied %d times", n)
		}
	})
}

// server is how the API server behaves.
type server struct {
	mu sync.Mutex
	// mu guards the fields below.

	fail    func(resource string) error // nil: it answers
	watches []watch.Interface
}

func (s *server) failure(a clienttesting.Action) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fail == nil {
		return nil
	}
	return s.fail(a.GetResource().Resource)
}

// fails says how it behaves from now on.
func (s *server) fails(how func(resource string) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fail = how
}

// stand puts the server before the client.
func (s *server) stand(c *fake.Clientset) {
	c.PrependReactor("list", "*", func(a clienttesting.Action) (bool, runtime.Object, error) {
		err := s.failure(a)
		return err != nil, nil, err
	})
	c.PrependWatchReactor("*", func(a clienttesting.Action) (bool, watch.Interface, error) {
		if err := s.failure(a); err != nil {
			return true, nil, err
		}
		events, err := c.Tracker().Watch(a.GetResource(), a.GetNamespace())
		s.mu.Lock()
		defer s.mu.Unlock()
		s.watches = append(s.watches, events)
		return true, events, err
	})
}

// cut ends all connections.
func (s *server) cut() {
	s.mu.Lock()
	watches := s.watches
	s.watches = nil
	s.mu.Unlock()
	for _, w := range watches {
		w.Stop()
	}
}

func away(string) error { return errors.New("dial tcp 10.96.0.1:443: connect: no route to host") }

func refused(string) error {
	return &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
}

// metric returns the value of a metric of a kind of objects.
func (w *watched) metric(name, kind string) float64 {
	w.t.Helper()
	families, err := w.metrics.Gather()
	if err != nil {
		w.t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == name && m.GetLabel()[0].GetValue() == kind {
				return m.GetGauge().GetValue() + m.GetCounter().GetValue()
			}
		}
	}
	w.t.Fatalf("there is no metric %s of %s", name, kind)
	return 0
}

// logged wants so many lines of the log to have the text.
func (w *watched) logged(n int, text string) {
	w.t.Helper()
	if got := strings.Count(w.log.String(), text); got != n {
		w.t.Errorf("want %d lines with %q, got %d:\n%s", n, text, got, &w.log)
	}
}

// ready wants the watcher to say whether it knows the node, and texts of what it can't learn; none: it can learn all.
func (w *watched) ready(known bool, texts ...string) {
	w.t.Helper()
	note, err := w.watcher.Ready()
	if (err == nil) != known || len(texts) == 0 && note != "" {
		w.t.Errorf("want known: %t, got %q, %v", known, note, err)
	}
	for _, text := range texts {
		if !strings.Contains(note+fmt.Sprint(err), text) {
			w.t.Errorf("want %q, got %q, %v", text, note, err)
		}
	}
}

func TestAPIServerAwayAtStart(t *testing.T) {
	var s server
	s.fails(away)
	run(t, enrolled(), s.stand, func(w *watched) {
		time.Sleep(time.Minute)
		if len(w.states) > 0 {
			t.Fatalf("applied, though nothing can be known:\n%s", show(w.states[0]))
		}
		w.logged(4, "Kubernetes does not answer")
		w.ready(false, "pods: dial tcp", "services: dial tcp")
		if w.metric("headroom_kubernetes_connected", pods) != 0 || w.metric("headroom_kubernetes_failures_total", pods) < 3 {
			t.Error("metrics don't tell of the failures")
		}
		s.fails(nil)
		time.Sleep(time.Minute)
		w.want(aReplica("ready"), aFront, aCaptured)
		w.logged(1, "Kubernetes answers again")
		w.ready(true)
	})
}

func TestAPIServerAwayMeanwhile(t *testing.T) {
	for name, fail := range map[string]func(string) error{"away": away, "refused": refused} {
		t.Run(name, func(t *testing.T) {
			var s server
			run(t, enrolled(), s.stand, func(w *watched) {
				w.want(aReplica("ready"), aFront, aCaptured)
				if w.metric("headroom_kubernetes_connected", pods) != 1 || w.metric("headroom_kubernetes_objects", services) != 1 {
					t.Error("metrics don't tell what is known")
				}
				s.fails(fail)
				s.cut()
				time.Sleep(10 * time.Minute)
				w.want(aReplica("ready"), aFront, aCaptured)
				w.logged(4, "Kubernetes does not answer")
				w.ready(true, "what was known last stays: namespaces: ")
				if w.metric("headroom_kubernetes_connected", pods) != 0 {
					t.Error("still connected, says the metric")
				}

				s.fails(nil)
				time.Sleep(time.Minute)
				w.put(pod(unready))
				w.want(aReplica("unhealthy"), aFront, aCaptured)
				w.logged(1, "Kubernetes answers again")
				if w.metric("headroom_kubernetes_connected", pods) != 1 {
					t.Error("not connected, says the metric")
				}
				if len(w.states) != 2 {
					t.Errorf("applied %d times", len(w.states))
				}
			})
		})
	}
}

// TestMissedWhileAway wants what changed while the API server was away to be found when it is back.
func TestMissedWhileAway(t *testing.T) {
	var s server
	run(t, enrolled(), s.stand, func(w *watched) {
		s.fails(away)
		s.cut()
		time.Sleep(time.Minute)
		w.put(pod(terminating))
		w.remove(service())
		w.want(aReplica("ready"), aFront, aCaptured)
		s.fails(nil)
		time.Sleep(time.Minute)
		w.want(aCaptured)
	})
}

func TestForbidden(t *testing.T) {
	s := server{fail: func(resource string) error {
		if resource != pods {
			return nil
		}
		return apierrors.NewForbidden(corev1.Resource(pods), "", errors.New(`cannot list resource "pods" at the cluster scope`))
	}}
	run(t, enrolled(), s.stand, func(w *watched) {
		time.Sleep(time.Minute)
		if len(w.states) > 0 {
			t.Fatalf("applied, though the pods aren't known:\n%s", show(w.states[0]))
		}
		w.logged(1, "its role must permit to list and watch it")
		w.logged(1, "pods is forbidden")
		s.fails(nil)
		time.Sleep(time.Minute)
		w.want(aReplica("ready"), aFront, aCaptured)
	})
}

func TestProblemsAreLoggedOnce(t *testing.T) {
	run(t, []runtime.Object{node(), namespace("shop", Label, "true"), service(), pod()}, nil, func(w *watched) {
		w.want()
		w.put(pod(unready))
		w.put(pod(labelled(Label, Enabled)))
		w.want(aCaptured)
		w.logged(1, `namespace shop: label headroom.dev/mesh: want enabled or disabled, got \"true\"`)
		w.put(namespace("shop", Label, Disabled))
		w.want(aCaptured)
		w.put(namespace("shop", Label, "true"))
		w.want(aCaptured)
		w.logged(2, `namespace shop: label`)
	})
}

func TestMetrics(t *testing.T) {
	run(t, enrolled(), nil, func(w *watched) {
		w.settle()
		problems, err := testutil.GatherAndLint(w.metrics)
		if err != nil || len(problems) > 0 {
			t.Error(problems, err)
		}
	})
}

func TestConfig(t *testing.T) {
	_, err := New(Config{})
	if err == nil {
		t.Fatal("nothing was given, and nothing is wrong")
	}
	for _, want := range []string{"node", "mesh: want the IP:PORT", "client: want"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("want %q in %q", want, err)
		}
	}
}

func TestNewClient(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config")
	write := func(text string) string {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	const good = `{"apiVersion": "v1", "kind": "Config", "current-context": "a", "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
		"clusters": [{"name": "a", "cluster": {"server": "https://10.0.0.1:6443"}}], "users": [{"name": "a", "user": {"token": "secret"}}]}`
	for _, test := range []struct {
		name, text string
		env        string // KUBERNETES_SERVICE_HOST, and PORT
		want       string
	}{
		{name: "good", text: good},
		{name: "not in a cluster", want: "not in a cluster: give --kubeconfig"},
		{name: "in a cluster without a token", env: "10.96.0.1", want: "in a cluster, but without the token of a service account"},
		{name: "no YAML", text: "{", want: "kubeconfig " + file + ": "},
		{name: "empty", text: " ", want: "names no cluster: want a current-context"},
		{name: "context that is none", text: strings.Replace(good, `"a"`, `"b"`, 1), want: `kubeconfig ` + file + `: invalid configuration: [context was not found for specified context: b`},
		{name: "CA that is none", text: strings.Replace(good, `"server"`, `"certificate-authority": "ca.crt", "server"`, 1), want: filepath.Join(filepath.Dir(file), "ca.crt")},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Setenv("KUBERNETES_SERVICE_HOST", test.env)
			t.Setenv("KUBERNETES_SERVICE_PORT", test.env)
			path := ""
			if test.text != "" {
				path = write(test.text)
			}
			client, err := NewClient(path)
			if test.want == "" {
				if err != nil {
					t.Error(err)
				} else if at := client.Core.CoreV1().RESTClient().Get().URL().Host; at != "10.0.0.1:6443" {
					t.Errorf("reaches %s", at)
				}
			} else if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("want %q, got %v", test.want, err)
			}
		})
	}
	if _, err := NewClient(filepath.Join(t.TempDir(), "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("want that there is no such file, got %v", err)
	}
}

func TestNode(t *testing.T) {
	n := node()
	n.UID = "6f1d"
	client := fake.NewSimpleClientset(n, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-2", UID: "7a2e"}})
	for _, test := range []struct{ node, zone, uid, problem string }{
		{node: "node-1", zone: "eu-1a", uid: "6f1d"},
		{node: "node-2", uid: "7a2e"},
		{node: "host", problem: "there is no node host: --node wants the name that it has there"},
	} {
		zone, uid, err := Node(t.Context(), client, registry.NodeName(test.node))
		if zone != test.zone || uid != test.uid || (err == nil) != (test.problem == "") || err != nil && !strings.Contains(err.Error(), test.problem) {
			t.Errorf("%s: %q, %q, %v", test.node, zone, uid, err)
		}
	}
}
