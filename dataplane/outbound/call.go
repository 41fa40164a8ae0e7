package outbound

import (
	"bytes"
	"context"
	"slices"
	"strconv"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/balancer"
	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/headroom-mesh/headroom/dataplane/inbound"
	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/dataplane/relay"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
)

// maxTries bounds the tries of one request; the retry budget bounds those of all (SRE book, ch. 21: three attempts).
const maxTries = 3

// call is one request on its way out of the agent. Calls are used again.
type call struct {
	outbound *Outbound
	head     relay.Head
	service  *service
	refusal  *fault.Error // nil if there is a service
	start    time.Time
	tries    int
	tried    [maxTries]*balancer.Endpoint
	status   int
	failed   bool         // as the answer says
	left     *fault.Error // why it has left the mesh, nil if it has not
	waits    int          // how often it has

	// Of the last try.

	placed   bool // and not yet settled
	answered bool
	picked   balancer.Picked
	request  balancer.Request // as the rule saw it
	held     *hold
	flight   inbound.Flight
	began    time.Time

	probes  [4]*balancer.Endpoint
	fields  [3]relay.Field
	scratch [192]byte // what fields refer to
	read    [128]byte // what was read last, of a head
}

var _ relay.Call = (*call)(nil)

// Router returns the Router of calls that name their service.
func (o *Outbound) Router() relay.Router { return byName{o} }

// Entry returns what listeners need that take calls for one service.
func (o *Outbound) Entry(name registry.ServiceName) relay.Entry {
	return relay.Entry{Router: toOne{o, name}, Service: func() relay.Service {
		if s := o.service(name); s != nil {
			p := s.policy.Load()
			return relay.Service{Protocol: p.protocol, DetectTimeout: p.DetectTimeout}
		}
		return relay.Service{DetectTimeout: policy.Default().DetectTimeout}
	}}
}

type byName struct{ *Outbound }

// Begin takes in a call of this node.
func (r byName) Begin(h relay.Head, now time.Time) relay.Call {
	c := r.call(h, now)
	authority := h.Authority(c.read[:0])
	name, ours := serviceOf(authority)
	c.service = (*r.services.Load())[registry.ServiceName(name)]
	switch {
	case c.service != nil:
		c.service.use(now)
	case ours:
		c.refusal = r.unknown(registry.ServiceName(name))
	default:
		c.refusal = fault.New(fault.NotMesh, "host %q is not SERVICE.%s", authority, Domain)
	}
	return c
}

type toOne struct {
	*Outbound
	service registry.ServiceName
}

// Begin takes in a call of this node.
func (r toOne) Begin(h relay.Head, now time.Time) relay.Call {
	c := r.call(h, now)
	if c.service = r.Outbound.service(r.service); c.service == nil {
		c.refusal = r.unknown(r.service)
	} else {
		c.service.use(now)
	}
	return c
}

func (o *Outbound) call(h relay.Head, now time.Time) *call {
	c := o.calls.Get().(*call)
	c.outbound, c.head, c.start = o, h, now
	return c
}

func (o *Outbound) unknown(name registry.ServiceName) *fault.Error {
	if !o.updated.Load() {
		return fault.New(fault.NoRegistry, "this agent has not reached the registry yet, so it knows no services")
	}
	return fault.New(fault.UnknownService, "no service %q is registered; `meshctl services` lists those that are", name)
}

// serviceOf returns the service that an authority names, in authority's own memory: SERVICE.mesh, or NAME.NAMESPACE as in
// Kubernetes, with .svc and the cluster's domain or without. Ours are those names that can be nobody else's.
func serviceOf(authority []byte) (name []byte, ours bool) {
	if colon := bytes.LastIndexByte(authority, ':'); colon >= 0 {
		authority = authority[:colon]
	}
	for i, c := range authority {
		if 'A' <= c && c <= 'Z' {
			authority[i] = c + 'a' - 'A'
		}
	}
	authority = bytes.TrimSuffix(authority, []byte("."))
	if name, ours = bytes.CutSuffix(authority, []byte("."+Domain)); ours {
		return name, len(name) > 0
	}
	if svc := bytes.Index(authority, []byte(".svc")); svc > 0 && isEndOf(authority[svc+len(".svc"):]) {
		return authority[:svc], true
	}
	if bytes.IndexByte(authority, '.') > 0 {
		return authority, false
	}
	return nil, false
}

// isEndOf reports whether a name's label ends where rest begins.
func isEndOf(rest []byte) bool { return len(rest) == 0 || rest[0] == '.' }

// Waits reports whether the rule asks replicas before it places a request, or the request may have to wait for a replica.
func (c *call) Waits() bool {
	s := c.service
	return s != nil && (c.tries > 0 || c.left != nil || s.fleet.Empty() || s.balancer.Load().Asks())
}

// Next picks a replica that was not tried yet. If there is none the call may leave the mesh; if nobody takes it there either,
// it may be that a replica is just about to come.
func (c *call) Next(ctx context.Context, failed *fault.Error) (relay.Hop, *fault.Error) {
	if c.left != nil {
		if !failed.Reason.Unsent() {
			return relay.Hop{}, failed
		}
		if no := c.await(ctx, c.left); no != nil {
			return relay.Hop{}, no
		}
		failed = nil
	}
	for {
		hop, no := c.within(ctx, failed)
		if no == nil {
			return hop, nil
		}
		if hop, ok := c.outside(no); ok {
			return hop, nil
		}
		if no = c.await(ctx, no); no != nil {
			return relay.Hop{}, no
		}
		failed = nil
	}
}

// within picks a replica that was not tried yet.
func (c *call) within(ctx context.Context, failed *fault.Error) (relay.Hop, *fault.Error) {
	if c.refusal != nil {
		return relay.Hop{}, c.refusal
	}
	if failed != nil {
		now := time.Now()
		c.flight.End(relay.Ending{Reason: failed.Reason}, now)
		c.settle(now, outcomeOf(failed.Reason))
		if no := c.mayRetry(failed); no != nil {
			return relay.Hop{}, no
		}
	}
	if limit := c.deadline(); !limit.IsZero() && c.service.balancer.Load().Asks() {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, limit)
		defer cancel()
	}
	if err := c.pick(ctx); err != nil {
		return relay.Hop{}, pickFault(ctx, c.service.name, err, failed)
	}
	c.tried[c.tries] = c.picked.Endpoint
	c.tries++
	return c.hop(ctx)
}

func (c *call) deadline() time.Time {
	limit := c.service.policy.Load().Timeout
	if limit == 0 {
		return time.Time{}
	}
	return c.start.Add(limit)
}

// mayRetry returns the fault to answer with if the call is not to be sent again after one.
func (c *call) mayRetry(failed *fault.Error) *fault.Error {
	switch {
	case !failed.Reason.Unsent():
		return failed
	case c.tries == maxTries || c.waits > 0 || !c.service.retry(): // who has waited tries once each time
		return exhausted(failed, "no retry left after try %d", c.tries)
	}
	return nil
}

// retry asks the service's budget for a retry.
func (s *service) retry() bool {
	if !s.policy.Load().budget.Withdraw(time.Now()) {
		s.metrics.budgetExhausted.Inc()
		return false
	}
	s.retries.Add(1)
	s.metrics.retries.Inc()
	return true
}

// hop returns where the picked replica is: on this node, or behind the agent of its own.
func (c *call) hop(ctx context.Context) (relay.Hop, *fault.Error) {
	p := c.service.policy.Load()
	hop := relay.Hop{Deadline: c.deadline(), Forwarded: p.Forwarded}
	key, record := c.key(), c.picked.Endpoint.Record()
	if record.Node != c.outbound.cfg.Node {
		hop.To, hop.Fields = c.outbound.agents.to(record.Agent, c.head.Caller().Workload), c.agentFields(key)
		return hop, nil
	}
	hop.Certified = p.Forwarded.Tells()
	var no *fault.Error
	hop.To, no = c.flight.Begin(c.outbound.cfg.Inbound, c.picked.Endpoint.ID, c.began, key, c.held.id())
	c.release()
	if no != nil { // it has just left
		return c.within(ctx, no)
	}
	return hop, nil
}

// key returns the hash of the call's key if the replica is to know it, else 0.
func (c *call) key() uint64 {
	if c.request.Keyed && c.service.balancer.Load().Policy.Balancer == policy.BalancerPrequalSync {
		return c.request.Key
	}
	return 0
}

// agentFields tells the replica's agent what it must know.
func (c *call) agentFields(key uint64) []relay.Field {
	b := append(c.scratch[:0], c.picked.Endpoint.ID...)
	fields := append(c.fields[:0], relay.Field{Name: relay.FieldEndpoint, Value: b})
	if key != 0 {
		at := len(b)
		b = strconv.AppendUint(b, key, 16)
		fields = append(fields, relay.Field{Name: relay.FieldKey, Value: b[at:]})
	}
	if c.held != nil {
		fields = append(fields, relay.Field{Name: relay.FieldReservation, Value: []byte(c.held.reservation)})
	}
	return fields
}

// release gives up the slot of the try, unless the request has claimed it.
func (c *call) release() {
	c.held.release()
	c.held = nil
}

// Answered takes in the head of the response: the load of the replica, or what its agent says.
func (c *call) Answered(h relay.Answer, now time.Time) ([]relay.Field, *fault.Error) {
	if c.left != nil {
		c.answeredBy(h)
		return nil, nil
	}
	report, known, failed := c.received(h, now)
	c.release()
	if failed != nil {
		return nil, failed
	}
	told := &report
	if !known {
		told = nil
	}
	c.picked.Responded(now, now.Sub(c.began), told)
	c.service.stays(c.start, c.outbound.cfg.Log)
	c.answeredBy(h)
	return nil, nil
}

// answeredBy notes what a replica has answered.
func (c *call) answeredBy(h relay.Answer) {
	c.service.absence.end()
	c.answered, c.status = true, h.Status()
	c.failed = relay.Failed(c.status, h, c.read[:0])
}

func (c *call) received(h relay.Answer, now time.Time) (report load.Report, known bool, failed *fault.Error) {
	if c.picked.Endpoint.Record().Node == c.outbound.cfg.Node {
		return c.flight.Answered(h, now), true, nil
	}
	if reason, ok := h.Field(c.read[:0], relay.FieldReason); ok {
		return report, false, faultOf(h, fault.Reason(reason))
	}
	text, ok := h.Field(c.read[:0], relay.FieldLoad)
	if !ok {
		return report, false, nil
	}
	report, err := load.ParseReport(text)
	return report, err == nil, nil
}

// faultOf returns what the agent of the replica says.
func faultOf(h relay.Answer, reason fault.Reason) *fault.Error {
	if !reason.Known() || reason == fault.None || reason == fault.Canceled { // we are still here
		reason = fault.Reset
	}
	detail, _ := h.Field(nil, relay.FieldDetail)
	return &fault.Error{Reason: reason, Detail: string(detail)}
}

// settle ends the last try, if there is one that has not ended.
func (c *call) settle(now time.Time, outcome balancer.Outcome) {
	if !c.placed {
		return
	}
	c.placed = false
	c.release()
	c.picked.Done(now, outcome)
}

// End accounts for the call.
func (c *call) End(e relay.Ending, now time.Time) {
	if e.Trailers != nil {
		c.failed = c.failed || relay.Failed(0, e.Trailers, c.read[:0])
	}
	c.flight.End(e, now)
	outcome := outcomeOf(e.Reason)
	if outcome == balancer.Succeeded && c.failed {
		outcome = balancer.Failed
	}
	c.settle(now, outcome)
	if !c.answered {
		c.status = e.Reason.Status()
	}
	c.account(e.Reason, now)
	o := c.outbound
	*c = call{}
	o.calls.Put(c)
}

func outcomeOf(r fault.Reason) balancer.Outcome {
	switch {
	case r == fault.None:
		return balancer.Succeeded
	case r == fault.Canceled || r == fault.BadRequest:
		return balancer.Abandoned
	case r.Unsent() || r == fault.RetriesExhausted:
		return balancer.Unconnected
	}
	return balancer.Failed
}

// notTried leaves those out that the call was sent to in vain.
func (c *call) notTried(targets []*balancer.Endpoint) []*balancer.Endpoint {
	return slices.DeleteFunc(targets, func(e *balancer.Endpoint) bool { return slices.Contains(c.tried[:c.tries], e) })
}
