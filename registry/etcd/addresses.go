package etcd

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	// courtesy is how long agents leave a change to others, at most, that any of them may make. It spreads them.
	courtesy = 2 * time.Second
	// reviewEvery is how long it takes until somebody sees that time has made a change due.
	reviewEvery = time.Minute
	// changesPerTxn make a transaction each in one transaction, of which etcd's default limit is 128.
	changesPerTxn = 50
)

// allocator gives services their virtual addresses. Any agent may do it: whoever comes first, does. It belongs to the
// goroutine of keepAddresses.
type allocator struct {
	*Registry
	client *clientv3.Client
	turn   time.Time // when this agent does what others have not; zero if there is no such thing
	used   bool      // it was said that no addresses are left
}

// keepAddresses makes the changes that are due until ctx ends.
func (r *Registry) keepAddresses(ctx context.Context, client *clientv3.Client) {
	a := &allocator{Registry: r, client: client}
	var retry backoff
	for {
		wait, err := a.settle(ctx, time.Now())
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			a.report(ctx, "virtual addresses are not up to date; will try again", err)
			wait = retry.next()
		default:
			retry = 0
		}
		select {
		case <-ctx.Done():
			return
		case <-r.directory.wake:
		case <-time.After(wait):
		}
	}
}

// settle makes the changes that are due, and returns when it should be called again at the latest. What somebody else
// was faster with comes back by the watch.
func (a *allocator) settle(ctx context.Context, now time.Time) (wait time.Duration, err error) {
	changes, used := a.directory.due(now)
	a.sayUsed(used)
	own := a.advertise.services()
	mine := make([]change, 0, len(changes))
	var rest []change
	for _, c := range changes {
		if own[c.service] {
			mine = append(mine, c)
		} else {
			rest = append(rest, c)
		}
	}
	rest, wait = a.takeTurn(now, rest)
	for part := range slices.Chunk(append(mine, rest...), changesPerTxn) {
		if err := a.commit(ctx, part); err != nil {
			return 0, err
		}
	}
	return wait, nil
}

// takeTurn returns what the others have left to this agent, and how long to leave it to them.
func (a *allocator) takeTurn(now time.Time, rest []change) ([]change, time.Duration) {
	switch {
	case len(rest) == 0:
		a.turn = time.Time{}
		return nil, reviewEvery
	case a.turn.IsZero():
		a.turn = now.Add(rand.N(courtesy))
	case !now.Before(a.turn):
		a.turn = time.Time{}
		return rest, reviewEvery
	}
	return nil, a.turn.Sub(now)
}

// sayUsed complains once.
func (a *allocator) sayUsed(used bool) {
	if used && !a.used {
		a.log.Error("no virtual addresses are left: some services have none",
			"reason", fmt.Sprintf("%s and %s have room for %d services: choose a larger --virtual-ipv4 or --virtual-ipv6, for all agents",
				a.cfg.VirtualIPv4, a.cfg.VirtualIPv6, a.directory.pool.room()))
	}
	a.used = used
}

// commit makes each of the changes, or leaves it to others.
func (a *allocator) commit(ctx context.Context, changes []change) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	var ops []clientv3.Op
	for _, c := range changes {
		ops = append(ops, a.op(c))
	}
	response, err := a.client.Txn(ctx).Then(ops...).Commit()
	if err != nil {
		return err
	}
	for i, c := range changes {
		if response.Responses[i].GetResponseTxn().GetSucceeded() {
			a.directory.done(c, response.Header.Revision)
		}
	}
	return nil
}

// op translates a change: etcd counts a key that doesn't exist as modified at revision 0.
func (a *allocator) op(c change) clientv3.Op {
	var conditions []clientv3.Cmp
	for key, revision := range c.seen {
		conditions = append(conditions, clientv3.Compare(clientv3.ModRevision(a.key(key)), "=", revision))
	}
	var ops []clientv3.Op
	for key, value := range c.puts {
		ops = append(ops, clientv3.OpPut(a.key(key), string(value)))
	}
	for _, key := range c.deletes {
		ops = append(ops, clientv3.OpDelete(a.key(key)))
	}
	return clientv3.OpTxn(conditions, ops, nil)
}
