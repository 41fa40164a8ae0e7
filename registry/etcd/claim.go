package etcd

import (
	"context"
	"errors"
	"time"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/registry"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// claimEvery is how often an agent tries to claim the name of its node while another agent holds it.
const claimEvery = time.Second

var (
	errForeign   = errors.New("no endpoint of this node is registered: another agent holds the node's name")
	errClaimLost = errors.New("the claim of the node's name is gone")
)

// claim says whose the name of this agent's node is.
type claim int

const (
	open    claim = iota // not known
	ours                 // this agent's
	foreign              // another agent's
)

func (a *advertisement) isClaimed() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.claim == ours
}

// setClaim notes whose the name of the node is. All that was stored under the name goes with the lease of another agent
// that gives it up.
func (a *advertisement) setClaim(next claim) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.claim == foreign && next == ours {
		a.found = map[string]stored{}
	}
	a.claim = next
	a.notify()
}

// claimNode returns nil when the name of the node is ours.
func (g *registrar) claimNode(ctx context.Context, renewed <-chan *clientv3.LeaseKeepAliveResponse) error {
	var retry backoff
	for {
		wait := claimEvery
		holder, err := g.tryClaim(ctx)
		switch {
		case errors.Is(err, rpctypes.ErrLeaseNotFound):
			return err
		case err != nil:
			g.report(ctx, "the node's name is not claimed; will try again", err)
			wait = retry.next()
		case holder == nil:
			g.holder = ""
			g.advertise.setClaim(ours)
			return nil
		default:
			g.yield(holder)
		}
		if err := g.idle(ctx, renewed, time.After(wait)); err != nil {
			return err
		}
	}
}

// yield complains of every holder once.
func (g *registrar) yield(holder *meshv1.NodeRecord) {
	g.advertise.setClaim(foreign)
	if g.holder == holder.GetOwner() {
		return
	}
	g.holder = holder.GetOwner()
	g.log.Error("another agent holds this node's name", "node", g.cfg.Node, "peer", holder.GetAgent(),
		"reason", "names are unique: choose another --node, or wait: its claim ends when it does")
}

// tryClaim returns who else holds the name of the node; nil if it is ours now.
func (g *registrar) tryClaim(ctx context.Context) (holder *meshv1.NodeRecord, err error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	key := g.key(g.cfg.Node.Key())
	put, err := g.putNode(false)
	if err != nil {
		return nil, err
	}
	absent := clientv3.Compare(clientv3.CreateRevision(key), "=", 0)
	response, err := g.client.Txn(ctx).If(absent).Then(put).Else(clientv3.OpGet(key)).Commit()
	if err != nil || response.Succeeded {
		return nil, err
	}
	kv := response.Responses[0].GetResponseRange().Kvs[0]
	holder, err = registry.NodeFromValue(kv.Value)
	if err == nil && holder.GetOwner() != g.cfg.Owner {
		return holder, nil
	}
	// It is ours from an earlier life or lease, or nobody's who could be asked.
	same := clientv3.Compare(clientv3.ModRevision(key), "=", kv.ModRevision)
	response, err = g.client.Txn(ctx).If(same).Then(put).Commit()
	if err == nil && !response.Succeeded {
		err = errClaimLost
	}
	return nil, err
}

func (g *registrar) putNode(registered bool) (clientv3.Op, error) {
	value, err := registry.Encode(&meshv1.NodeRecord{
		Node:       string(g.cfg.Node),
		Owner:      g.cfg.Owner,
		Agent:      g.cfg.Agent,
		Registered: registered,
	})
	return clientv3.OpPut(g.key(g.cfg.Node.Key()), string(value), clientv3.WithLease(g.lease)), err
}

// sayComplete tells all who watch, once for each lease, that the node has no endpoints but those that are stored.
func (g *registrar) sayComplete(ctx context.Context) error {
	if g.complete {
		return nil
	}
	put, err := g.putNode(true)
	if err != nil {
		return err
	}
	if err := g.commit(ctx, []clientv3.Op{put}); err != nil {
		return err
	}
	g.complete = true
	return nil
}

// ours holds as long as the name of the node is claimed by our lease.
func (g *registrar) ours() clientv3.Cmp {
	return clientv3.Compare(clientv3.LeaseValue(g.key(g.cfg.Node.Key())), "=", g.lease)
}
