package outbound

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/balancer"
)

// hold is a place in the line for a replica; once granted, a slot.
type hold struct {
	endpoint    *balancer.Endpoint
	reservation string
	giveUp      func()
	err         error // why it was not granted
}

// release gives up the place, or the slot unless the request that carries the reservation has claimed it.
func (h *hold) release() {
	if h != nil {
		h.giveUp()
	}
}

func (h *hold) id() string {
	if h == nil {
		return ""
	}
	return h.reservation
}

// reserve joins the lines for all targets (late binding) and returns the hold that is granted first. The other lines have
// been left by then. It returns nil if none can be granted, and fails only if ctx ends.
func (o *Outbound) reserve(ctx context.Context, s *service, b *balancer.Balancer, targets []*balancer.Endpoint) (*hold, error) {
	settled := make(chan *hold, len(targets))
	joined := make([]*hold, 0, len(targets))
	var waiting sync.WaitGroup
	for _, local := range []bool{true, false} { // for what is free here, nobody else is asked
		free := len(settled) > 0
		for _, e := range targets {
			if e.Record().Node == o.cfg.Node != local || free {
				continue
			}
			h := o.join(ctx, e, &waiting, settled)
			if h == nil {
				s.declined(time.Now(), b, e)
				continue
			}
			joined = append(joined, h)
			free = local && len(settled) > 0
		}
	}
	first, err := firstOf(ctx, joined, settled, func(h *hold) {
		if errors.Is(h.err, errDeclined) {
			s.declined(time.Now(), b, h.endpoint)
		}
	})
	for _, h := range joined {
		if h != first {
			h.release()
		}
	}
	waiting.Wait()
	return first, err
}

// firstOf returns the first hold that is granted.
func firstOf(ctx context.Context, joined []*hold, settled <-chan *hold, failed func(*hold)) (*hold, error) {
	for range joined {
		select {
		case h := <-settled:
			if h.err == nil {
				return h, nil
			}
			failed(h)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return nil, ctx.Err()
}

// join joins the line for a replica, and sends the hold on settled when that is granted or has failed.
func (o *Outbound) join(ctx context.Context, e *balancer.Endpoint, waiting *sync.WaitGroup, settled chan<- *hold) *hold {
	record := e.Record()
	if record.Node == o.cfg.Node {
		return o.joinHere(e, settled)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx)) // the line is left by giving up, not by a deadline over there
	h := &hold{endpoint: e, giveUp: cancel}
	waiting.Go(func() {
		h.reservation, h.err = o.lines.reserve(ctx, record.Agent, e.ID)
		settled <- h
	})
	return h
}

// joinHere is join for a replica on this node.
func (o *Outbound) joinHere(e *balancer.Endpoint, settled chan<- *hold) *hold {
	h := &hold{endpoint: e, giveUp: func() {}}
	place, err := o.cfg.Inbound.Reserve(e.ID, func(granted bool) {
		if !granted {
			h.err = errDeclined
		}
		settled <- h
	})
	if err != nil {
		return nil
	}
	h.reservation, h.giveUp = place.ID, func() { o.cfg.Inbound.Release(place) }
	return h
}
