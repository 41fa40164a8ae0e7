package policies

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"strconv"
	"time"

	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/registry"
)

const (
	writeTimeout = 5 * time.Second
	// settle lets changes that come in a burst be dealt with together.
	settle = 50 * time.Millisecond
	// refresh is the time after which agents are asked again, though nothing has changed: others may have come.
	refresh = 30 * time.Second
	// asking is the time between two rounds while some agents lag.
	asking = time.Second
	// applying is the time that agents usually need to apply what was written.
	applying   = 200 * time.Millisecond
	minBackoff = time.Second
	maxBackoff = 10 * time.Second
	// rivals bounds how often a write is tried when others write at the same time.
	rivals = 3
)

// leader is what the leading agent knows. Every pass goes through all objects: what is as it should be costs nothing.
type leader struct {
	*Mirror
	store    cache.Store
	written  map[registry.ServiceName]write   // what snapshots may not have yet
	reported map[types.UID]map[string]any     // the status last written, which the store of objects may not have yet
	outcomes map[registry.ServiceName]outcome // of the last pass
	agents   agents
	away     error // of the first write that failed in this pass
	wrote    bool  // something in this pass
	unsaid   error // of the first status that could not be written in this pass
	backoff  time.Duration
}

// write is something that was done to the registry.
type write struct {
	revision int64
	doc      *meshv1.ServicePolicy // nil: deleted
}

func newLeader(m *Mirror, store cache.Store) *leader {
	return &leader{
		Mirror:   m,
		store:    store,
		written:  map[registry.ServiceName]write{},
		reported: map[types.UID]map[string]any{},
		outcomes: map[registry.ServiceName]outcome{},
	}
}

func (l *leader) run(ctx context.Context) {
	for ctx.Err() == nil {
		next := time.NewTimer(l.pass(ctx))
		select {
		case <-l.changed:
			pause(ctx, settle)
		case <-next.C:
		case <-ctx.Done():
		}
		next.Stop()
	}
}

// pass does what is to be done, and returns how long the next pass may wait if nothing changes.
func (l *leader) pass(ctx context.Context) time.Duration {
	l.away, l.wrote, l.unsaid = nil, false, nil
	snapshot := l.cfg.Snapshot()
	if snapshot.Revision == 0 {
		return asking // this agent has not reached the registry yet
	}
	objects := l.objects()
	outcomes := map[registry.ServiceName]outcome{}
	for _, o := range objects {
		outcomes[o.service()] = l.mirror(ctx, snapshot, o)
	}
	l.removeOrphans(ctx, snapshot, outcomes)
	if ctx.Err() != nil {
		return 0 // what failed meanwhile says nothing of objects
	}
	l.learn(objects, outcomes)
	lag := l.ask(ctx)
	for _, o := range objects {
		l.report(ctx, o)
	}
	return l.pace(lag)
}

// pace returns the time until the next pass. It grows while writes fail.
func (l *leader) pace(lag bool) time.Duration {
	switch {
	case l.away != nil || l.unsaid != nil:
		l.backoff = min(max(2*l.backoff, minBackoff), maxBackoff)
		return l.backoff
	case lag:
		l.backoff = 0
		return asking
	}
	l.backoff = 0
	return refresh
}

// objects returns all objects, by service.
func (l *leader) objects() []object {
	var all []object
	for _, o := range l.store.List() {
		if u, ok := o.(*unstructured.Unstructured); ok {
			all = append(all, object{u})
		}
	}
	slices.SortFunc(all, func(a, b object) int { return cmp.Compare(a.service(), b.service()) })
	return all
}

// stored returns what the registry has, as far as is known here.
func (l *leader) stored(s *registry.Snapshot, service registry.ServiceName) *meshv1.ServicePolicy {
	if w, ok := l.written[service]; ok {
		if s.Revision < w.revision {
			return w.doc
		}
		delete(l.written, service)
	}
	if known := s.Services[service]; known != nil {
		return known.Document
	}
	return nil
}

// mirror makes the registry have what the object says.
func (l *leader) mirror(ctx context.Context, s *registry.Snapshot, o object) outcome {
	stored := l.stored(s, o.service())
	doc, err := o.document()
	if err != nil {
		return invalid(err, stored)
	}
	for range rivals {
		d := decide(o, doc, stored)
		switch {
		case !d.write:
			return d.outcome
		case l.away != nil:
			return unavailable(l.away)
		}
		doc.Metadata.ResourceVersion = d.version
		result, err := l.set(ctx, doc)
		if err == nil {
			return accepted(result)
		}
		if !errors.Is(err, registry.ErrConflict) {
			return l.failed(err)
		}
		if stored, err = l.read(ctx, o.service()); errors.Is(err, proto.Error) {
			return l.overUnreadable(ctx, o, doc, err)
		} else if err != nil {
			return l.failed(err)
		}
	}
	return l.failed(registry.ErrConflict)
}

// overUnreadable replaces what is no policy, if the object is to take its place.
func (l *leader) overUnreadable(ctx context.Context, o object, doc *meshv1.ServicePolicy, why error) outcome {
	if !o.adopts() {
		return o.unreadable(why)
	}
	doc.Metadata.ResourceVersion = ""
	result, err := l.set(ctx, doc)
	if err != nil {
		return l.failed(err)
	}
	return accepted(result)
}

func (l *leader) failed(err error) outcome {
	l.away = err
	return unavailable(err)
}

func (l *leader) set(ctx context.Context, doc *meshv1.ServicePolicy) (*meshv1.ServicePolicy, error) {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	result, err := l.cfg.Registry.SetPolicy(ctx, doc)
	if err != nil {
		return nil, err
	}
	l.wrote = true
	l.written[registry.ServiceName(doc.Metadata.Name)] = write{revisionOf(result), result}
	return result, nil
}

// read returns what is stored, nil for nothing.
func (l *leader) read(ctx context.Context, service registry.ServiceName) (*meshv1.ServicePolicy, error) {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	doc, err := l.cfg.Registry.Policy(ctx, service)
	if errors.Is(err, registry.ErrNotFound) {
		return nil, nil
	}
	return doc, err
}

func revisionOf(doc *meshv1.ServicePolicy) int64 {
	revision, _ := strconv.ParseInt(doc.GetMetadata().GetResourceVersion(), 10, 64) // the store writes nothing else
	return revision
}

// removeOrphans deletes copies of objects that are gone.
func (l *leader) removeOrphans(ctx context.Context, s *registry.Snapshot, live map[registry.ServiceName]outcome) {
	services := slices.Collect(maps.Keys(s.Services))
	for service := range l.written { // snapshots may not have it yet
		services = append(services, service)
	}
	slices.Sort(services)
	for _, service := range slices.Compact(services) {
		if _, ok := live[service]; ok || l.away != nil || !managed(l.stored(s, service)) {
			continue
		}
		if err := l.remove(ctx, service); err != nil {
			l.away = err
			l.log.Warn("can't delete the policy whose ServicePolicy is gone", "service", service, "err", err)
		}
	}
}

// remove looks again before it deletes: somebody may have taken the policy over.
func (l *leader) remove(ctx context.Context, service registry.ServiceName) error {
	doc, err := l.read(ctx, service)
	if err != nil || !managed(doc) {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	revision, err := l.cfg.Registry.DeletePolicy(ctx, service)
	if errors.Is(err, registry.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	l.written[service] = write{revision: revision}
	l.log.Info("policy deleted, as its ServicePolicy is gone", "service", service, "revision", revision)
	return nil
}

// learn takes in what came of the objects, logs what is new of it, and forgets objects that are gone.
func (l *leader) learn(objects []object, outcomes map[registry.ServiceName]outcome) {
	counts := map[reason]int{}
	for service, now := range outcomes {
		counts[now.reason]++
		switch before := l.outcomes[service]; {
		case now == before:
		case now.reason == reasonStored && before.reason == "" && l.written[service].revision != now.revision: // by the leader before
		case now.reason == reasonStored:
			l.log.Info("policy copied from Kubernetes", "service", service, "revision", now.revision)
		case now.reason != before.reason || now.reason == reasonInvalid:
			l.log.Warn("policy of Kubernetes not copied", "service", service, "reason", now.reason, "err", now.message)
		}
	}
	l.outcomes = outcomes
	l.metrics.count(counts)
	live := map[types.UID]bool{}
	for _, o := range objects {
		live[o.GetUID()] = true
	}
	maps.DeleteFunc(l.reported, func(uid types.UID, _ map[string]any) bool { return !live[uid] })
}

// ask asks the agents how far they have come, if that is to be known, and reports whether some of them lag.
func (l *leader) ask(ctx context.Context) bool {
	if len(l.outcomes) == 0 {
		return false
	}
	if l.wrote {
		pause(ctx, applying)
	}
	if age := time.Since(l.agents.at); l.agents.at.IsZero() || age >= refresh || l.lag() && age >= asking {
		answers, missing := l.cfg.Statuses(ctx)
		l.agents = agents{answers: answers, missing: missing, at: time.Now()}
	}
	return l.lag()
}

func (l *leader) lag() bool {
	for _, o := range l.outcomes {
		if o.reason == reasonStored && len(l.agents.waiting(o.revision)) > 0 {
			return true
		}
	}
	return false
}
