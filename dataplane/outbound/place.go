package outbound

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/balancer"
	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
)

// errAllTried means that there is no replica but those that the request could not be sent to.
var errAllTried = errors.New("all replicas were tried")

func pickFault(ctx context.Context, name registry.ServiceName, err error, last *fault.Error) *fault.Error {
	switch {
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return timeoutFault()
	case ctx.Err() != nil:
		return fault.New(fault.Canceled, "the caller went away")
	case errors.Is(err, errAllTried):
		return exhausted(last, "no other replica to try")
	case errors.Is(err, balancer.ErrNoEndpoints):
		return fault.New(fault.NoEndpoints, "service %q has no endpoints", name)
	default:
		return fault.New(fault.NoneReady, "no endpoint of service %q is ready", name)
	}
}

// exhausted says why a call is not sent again after its last fault.
func exhausted(last *fault.Error, why string, args ...any) *fault.Error {
	f := fault.New(fault.RetriesExhausted, "no connection, and %s: %s", fmt.Sprintf(why, args...), last.Detail)
	f.Lasting = last.Lasting
	return f
}

func timeoutFault() *fault.Error { return fault.New(fault.Timeout, "the service's timeout ran out") }

// repicks is how often a rule is asked again when it picks a replica that was tried already.
const repicks = 8

// pick places the call on a replica that was not tried yet, and sends the probes that are due.
func (c *call) pick(ctx context.Context) error {
	b := c.service.balancer.Load()
	now := time.Now()
	if c.tries == 0 && !b.Asks() {
		now = c.start // just now
	}
	if err := c.place(ctx, b, now); err != nil {
		return err
	}
	for n := 0; slices.Contains(c.tried[:c.tries], c.picked.Endpoint); n++ {
		c.settle(now, balancer.Abandoned)
		if n == repicks {
			return errAllTried
		}
		if err := c.choose(b.Pick(now, balancer.Request{})); err != nil {
			return err
		}
	}
	c.began = now
	c.service.metrics.picks[c.picked.Class].Inc()
	for _, e := range c.picked.Due(c.probes[:0]) {
		c.outbound.probe(now, c.service, b, c.picked.Shard(), e)
	}
	return nil
}

func (c *call) choose(picked balancer.Picked, err error) error {
	c.picked, c.placed = picked, err == nil
	return err
}

// place places the call by the rule, which may have to ask replicas first. It does not ask those that were tried.
func (c *call) place(ctx context.Context, b *balancer.Balancer, now time.Time) error {
	req := c.keyFor(&b.Policy)
	c.request = req
	if !b.Asks() {
		return c.choose(b.Pick(now, req))
	}
	asked, enough, _ := b.Inquire(now, req, c.probes[:0])
	targets := c.notTried(asked)
	if len(targets) == 0 {
		return c.choose(b.Pick(now, req))
	}
	answers, err := c.ask(ctx, b, req, targets, max(1, enough-(len(asked)-len(targets))))
	if err != nil {
		return err
	}
	err = c.choose(b.Choose(time.Now(), req, answers))
	if c.held != nil && (err != nil || c.picked.Endpoint != c.held.endpoint) { // it has left meanwhile
		c.release()
	}
	return err
}

// ask waits for what the rule wants to know: the loads of some replicas, or which of them has a slot free first.
func (c *call) ask(ctx context.Context, b *balancer.Balancer, req balancer.Request, targets []*balancer.Endpoint, enough int) ([]balancer.Answer, error) {
	if b.Policy.Balancer != policy.BalancerLateBinding {
		return c.outbound.inquire(ctx, c.service, b, req, targets, enough)
	}
	held, err := c.outbound.reserve(ctx, c.service, b, targets)
	if held == nil || err != nil {
		return nil, err
	}
	c.held = held
	return []balancer.Answer{{Endpoint: held.endpoint}}, nil
}

// keyFor returns what the rule may know of the call.
func (c *call) keyFor(p *policy.Policy) balancer.Request {
	switch p.Balancer {
	case policy.BalancerRingHash, policy.BalancerMaglev, policy.BalancerPrequalSync:
	default:
		return balancer.Request{}
	}
	h, scratch, key := c.head, c.read[:0], []byte(nil)
	switch p.Hash.Key.Source {
	case policy.KeyHeader:
		key, _ = h.Field(scratch, p.Hash.Key.Name)
	case policy.KeyCookie:
		cookies, _ := h.Field(scratch, "cookie")
		key = cookieOf(cookies, p.Hash.Key.Name)
	case policy.KeyPath:
		key, _, _ = bytes.Cut(h.Path(scratch), []byte("?"))
	case policy.KeySourceAddress:
		if from := h.Source().Addr(); from.IsValid() {
			key = from.AppendTo(scratch)
		}
	}
	return balancer.Request{Key: balancer.HashKey(string(key)), Keyed: len(key) > 0}
}

// cookieOf returns the value of a cookie (RFC 6265, 4.2.1).
func cookieOf(cookies []byte, name string) []byte {
	for pair := range bytes.SplitSeq(cookies, []byte(";")) {
		key, value, ok := bytes.Cut(bytes.TrimSpace(pair), []byte("="))
		if ok && string(key) == name {
			return bytes.Trim(value, `"`)
		}
	}
	return nil
}
