package etcd

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"github.com/headroom-mesh/headroom/registry"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
)

const (
	// publishEvery is the least time between two snapshots: a burst of changes makes one.
	publishEvery = 20 * time.Millisecond
	listTimeout  = 10 * time.Second
)

// feed turns what etcd says into snapshots. It belongs to the goroutine that watches.
type feed struct {
	builder   *registry.Builder
	directory *directory
	metrics   *metrics
	publish   func(*registry.Snapshot)
	file      *file
	last      time.Time // of publishing
}

func newFeed(r *Registry, start *registry.Snapshot, publish func(*registry.Snapshot), file *file) *feed {
	bad := func(key string, err error) {
		r.metrics.badRecord(key)
		r.log.Warn("bad record in the registry skipped", "key", r.key(key), "err", err)
	}
	return &feed{builder: registry.NewBuilder(start, bad), directory: r.directory, metrics: r.metrics, publish: publish, file: file}
}

func (f *feed) flush() {
	snapshot := f.builder.Snapshot()
	f.last = time.Now()
	f.metrics.revision.Set(float64(snapshot.Revision))
	f.metrics.virtual.Set(float64(f.directory.taken()))
	f.publish(snapshot)
	f.file.save(snapshot)
	f.directory.published(snapshot)
}

// untilNext is how long to wait before the next flush.
func (f *feed) untilNext() time.Duration { return time.Until(f.last.Add(publishEvery)) }

// expiry tells when endpoints that were lost are awaited no longer. It is nil if none are.
func (f *feed) expiry() <-chan time.Time {
	next := f.builder.NextExpiry()
	if next.IsZero() {
		return nil
	}
	return time.After(time.Until(next))
}

// watch follows etcd until ctx ends.
func (r *Registry) watch(ctx context.Context, client *clientv3.Client, f *feed) {
	var retry backoff
	for {
		began := time.Now()
		err := r.listAndWatch(ctx, client, f)
		if ctx.Err() != nil {
			return
		}
		r.metrics.restarts.Inc()
		if !errors.Is(err, rpctypes.ErrCompacted) { // else etcd answers, and we were too slow
			r.complain(err)
		}
		if time.Since(began) > maxBackoff {
			retry = 0
		}
		retry.wait(ctx)
	}
}

// listAndWatch returns when the watch can't go on: everything must be read anew then. That includes a broken connection,
// although the client could resume by itself, because etcd may come back from a backup, with other content under lower
// revisions.
func (r *Registry) listAndWatch(ctx context.Context, client *clientv3.Client, f *feed) error {
	revision, err := r.list(ctx, client, f)
	if err != nil {
		return err
	}
	r.settled(revision)
	f.flush()

	ctx, cancel := context.WithCancelCause(ctx)
	var group sync.WaitGroup
	defer group.Wait()
	defer cancel(nil)
	group.Go(func() {
		if breaks(ctx, client.ActiveConnection()) {
			cancel(errDisconnected)
		}
	})
	responses := client.Watch(clientv3.WithRequireLeader(ctx), r.key(""), clientv3.WithPrefix(),
		clientv3.WithRev(revision+1))
	return r.follow(ctx, f, responses)
}

// breaks waits until a connection that was just used breaks, and returns false if ctx ends first. That the connection is
// ready may show only after its first answer.
func breaks(ctx context.Context, conn *grpc.ClientConn) bool {
	return (conn.GetState() != connectivity.Connecting || conn.WaitForStateChange(ctx, connectivity.Connecting)) &&
		conn.WaitForStateChange(ctx, connectivity.Ready)
}

func (r *Registry) list(ctx context.Context, client *clientv3.Client, f *feed) (revision int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	response, err := client.Get(ctx, r.key(""), clientv3.WithPrefix())
	if err != nil {
		return 0, err
	}
	records := make([]registry.Record, 0, len(response.Kvs))
	own := map[string]stored{}
	for _, kv := range response.Kvs {
		key := strings.TrimPrefix(string(kv.Key), r.key(""))
		records = append(records, registry.Record{Key: key, Value: kv.Value, Revision: kv.ModRevision,
			Created: kv.CreateRevision})
		if r.isOwn(key) {
			e, err := registry.EndpointFromValue(kv.Value)
			if err != nil || e.Key() != key {
				e = registry.Endpoint{}
			}
			own[key] = stored{endpoint: e, lease: clientv3.LeaseID(kv.Lease)}
		}
	}
	f.builder.Replace(time.Now(), records, response.Header.Revision)
	f.directory.listed(records, response.Header.Revision)
	r.advertise.listed(own)
	return response.Header.Revision, nil
}

// isOwn reports whether a key is that of an endpoint of this node, now or in an earlier life of the agent.
func (r *Registry) isOwn(key string) bool {
	part := strings.SplitN(key, "/", 4)
	return len(part) == 4 && part[0]+"/" == registry.EndpointKeys && part[2] == string(r.cfg.Node)
}

func (r *Registry) follow(ctx context.Context, f *feed, responses clientv3.WatchChan) error {
	var due <-chan time.Time // nil: nothing to publish
	defer func() {
		if due != nil {
			f.flush()
		}
	}()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-due:
			due = nil
			f.flush()
		case now := <-f.expiry():
			f.builder.Expire(now)
			f.flush()
		case response, ok := <-responses:
			if !ok {
				return errDisconnected
			}
			if err := response.Err(); err != nil {
				return err
			}
			r.apply(f, response)
			if due == nil {
				due = time.After(f.untilNext())
			}
		}
	}
}

// apply goes by the revisions of the events. That of the header is ahead of them while etcd still catches up.
func (r *Registry) apply(f *feed, response clientv3.WatchResponse) {
	for _, event := range response.Events {
		key := strings.TrimPrefix(string(event.Kv.Key), r.key(""))
		if event.Type == clientv3.EventTypeDelete {
			f.builder.Delete(time.Now(), key, event.Kv.ModRevision)
			f.directory.deleted(key, event.Kv.ModRevision)
			r.advertise.deleted(key)
			continue
		}
		record := registry.Record{Key: key, Value: event.Kv.Value, Revision: event.Kv.ModRevision}
		f.builder.Put(time.Now(), record)
		f.directory.changed(record)
	}
	if response.IsProgressNotify() {
		f.builder.Advance(response.Header.Revision)
	}
}
