package kube

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

// Kinds of objects, as they are named in roles.
const (
	nodes      = "nodes"
	namespaces = "namespaces"
	services   = "services"
	pods       = "pods"
)

// prepare makes what follows each kind of object. Nothing is watched yet.
func (w *Watcher) prepare() error {
	core := w.cfg.Client.CoreV1()
	var errs [4]error
	w.nodes, errs[0] = follow(w, nodes, core.Nodes(), metav1.ObjectNameField, new(corev1.Node), stripNode)
	w.namespaces, errs[1] = follow(w, namespaces, core.Namespaces(), "", new(corev1.Namespace), stripNamespace)
	w.services, errs[2] = follow(w, services, core.Services(metav1.NamespaceAll), "", new(corev1.Service), stripService)
	w.pods, errs[3] = follow(w, pods, core.Pods(metav1.NamespaceAll), "spec.nodeName", new(corev1.Pod), stripPod)
	return errors.Join(errs[:]...)
}

// collection is how client-go reads the objects of one kind.
type collection[L runtime.Object] interface {
	List(context.Context, metav1.ListOptions) (L, error)
	Watch(context.Context, metav1.ListOptions) (watch.Interface, error)
}

// follow makes what keeps the objects of one kind: those whose field is this node's name, or, if field is "", all.
func follow[L, T runtime.Object](w *Watcher, kind string, from collection[L], field string, example T, strip func(T)) (cache.SharedIndexInformer, error) {
	ofNode := func(o *metav1.ListOptions) {
		if field != "" {
			o.FieldSelector = fields.OneTermEqualSelector(field, string(w.cfg.Node)).String()
		}
	}
	source := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			ofNode(&o)
			all, err := from.List(ctx, o)
			w.answered(ctx, kind, err)
			return all, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			ofNode(&o)
			events, err := from.Watch(ctx, o)
			w.answered(ctx, kind, err)
			return events, err
		},
	}
	i := cache.NewSharedIndexInformerWithOptions(cache.ToListWatcherWithWatchListSemantics(source, w.cfg.Client), example,
		cache.SharedIndexInformerOptions{ObjectDescription: kind})
	_, err := i.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { w.change() }, UpdateFunc: func(any, any) { w.change() }, DeleteFunc: func(any) { w.change() },
	})
	quiet := func(context.Context, *cache.Reflector, error) {} // answered has told
	return i, errors.Join(err, i.SetWatchErrorHandlerWithContext(quiet), i.SetTransform(func(o any) (any, error) {
		if object, ok := o.(T); ok {
			strip(object)
		}
		return o, nil
	}))
}

func (w *Watcher) change() {
	select {
	case w.changed <- struct{}{}:
	default:
	}
}

// answered notes whether the API server could be asked for objects of a kind, and logs when that changes.
func (w *Watcher) answered(ctx context.Context, kind string, err error) {
	if ctx.Err() != nil {
		return
	}
	if apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		err = nil // all of them are listed again
	}
	w.mu.Lock()
	was := w.failing[kind] != nil
	if w.failing[kind] = err; err == nil {
		delete(w.failing, kind)
	}
	left := len(w.failing)
	w.mu.Unlock()

	w.metrics.answered(kind, err)
	switch {
	case err == nil && was && left == 0:
		w.log.Info("Kubernetes answers again")
	case err != nil && !was && (apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err)):
		w.log.Error("Kubernetes does not let this agent read what it needs: its role must permit to list and watch it",
			"err", fmt.Errorf("%s: %w", kind, err))
	case err != nil && !was:
		w.log.Warn("Kubernetes does not answer: what was known last stays", "err", fmt.Errorf("%s: %w", kind, err))
	}
}

// list returns what is known of a kind.
func list[T any](i cache.SharedIndexInformer) []T {
	known := i.GetStore().List()
	all := make([]T, 0, len(known))
	for _, o := range known {
		all = append(all, o.(T))
	}
	return all
}
