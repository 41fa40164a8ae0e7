package outbound

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/balancer"
	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/headroom-mesh/headroom/dataplane/httpio"
	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
)

const (
	// maxTries bounds the tries of one request; the retry budget bounds those of all (SRE book, ch. 21: three attempts).
	maxTries = 3
	// lateWrite is how long a caller may take, once its time is out, to read what it is told of that.
	lateWrite = time.Second
)

// engine is the part of Outbound that stands on net/http.
type engine struct {
	outbound *Outbound
	peers    *peers
	proxy    *httpio.Proxy
}

func newEngine(o *Outbound) *engine {
	en := &engine{outbound: o, peers: newPeers(o.cfg.Dial)}
	en.proxy = httpio.NewProxy(en.roundTrip, o.cfg.Log)
	return en
}

// exchange is one request on its way through the agent. It travels in the request's context.
type exchange struct {
	service  *service
	start    time.Time
	tries    int
	endpoint registry.EndpointID // of the last try
	status   int
	reason   fault.Reason
	key      string                // of the last try, where the replica is to know it
	probes   [4]*balancer.Endpoint // scratch
}

type exchangeKey struct{}

// serve answers one request of a caller on this node.
func (en *engine) serve(w http.ResponseWriter, r *http.Request) {
	x := &exchange{start: time.Now()}
	defer en.outbound.account(r, x)
	s, refusal := en.route(r)
	if refusal != nil {
		x.status, x.reason = refusal.Reason.Status(), refusal.Reason
		refusal.Write(w)
		return
	}
	x.service = s
	s.use(x.start)
	ctx := context.WithValue(r.Context(), exchangeKey{}, x)
	if limit := s.policy.Load().Timeout; limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, limit)
		defer cancel()
		http.NewResponseController(w).SetWriteDeadline(x.start.Add(limit + lateWrite))
	}
	httpio.StripHeaders(r.Header)
	en.proxy.ServeHTTP(w, r.WithContext(ctx))
}

// route finds the service that the request is for.
func (en *engine) route(r *http.Request) (*service, *fault.Error) {
	if r.Method == http.MethodConnect {
		return nil, fault.New(fault.UnsupportedRequest, "CONNECT is not supported; send plain HTTP requests for SERVICE.%s", Domain)
	}
	if r.ProtoMajor != 1 {
		return nil, fault.New(fault.UnsupportedRequest, "%s is not supported; use HTTP/1.1", r.Proto)
	}
	if !printable(r.Header.Get("Upgrade")) {
		return nil, fault.New(fault.BadRequest, "the Upgrade header is not plain ASCII: %q", r.Header.Get("Upgrade"))
	}
	name, ok := serviceOf(r.Host)
	if !ok {
		return nil, fault.New(fault.NotMesh, "host %q is not SERVICE.%s", r.Host, Domain)
	}
	s := en.outbound.service(name)
	if s == nil && !en.outbound.updated.Load() {
		return nil, fault.New(fault.NoRegistry, "this agent has not reached the registry yet, so it knows no services")
	}
	if s == nil {
		return nil, fault.New(fault.UnknownService, "no service %q is registered; `meshctl services` lists those that are", name)
	}
	return s, nil
}

func printable(s string) bool {
	return !strings.ContainsFunc(s, func(c rune) bool { return c < ' ' || c > '~' })
}

// serviceOf returns the service that a Host header names.
func serviceOf(host string) (registry.ServiceName, bool) {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	name, ok := strings.CutSuffix(host, "."+Domain)
	return registry.ServiceName(name), ok && name != ""
}

// roundTrip tries replicas until one has taken the request, and returns its response.
func (en *engine) roundTrip(r *http.Request) (*http.Response, error) {
	x := r.Context().Value(exchangeKey{}).(*exchange)
	replay := replayable(r)
	body, _ := replay.next()
	var tried [maxTries]*balancer.Endpoint
	var failure *fault.Error
	for {
		picked, held, err := en.outbound.pick(x, r, tried[:x.tries])
		if err != nil {
			return x.fail(pickFault(r.Context(), x.service.name, err, failure))
		}
		tried[x.tries] = picked.Endpoint
		x.tries++
		x.endpoint = picked.Endpoint.ID
		var resp *http.Response
		if resp, failure = en.try(r, body, picked, held); failure == nil {
			x.status = resp.StatusCode
			return resp, nil
		}
		if !failure.Reason.Unsent() {
			return x.fail(failure)
		}
		var again bool
		if body, again = replay.next(); !again || x.tries == maxTries || !x.service.retry() {
			return x.fail(fault.New(fault.RetriesExhausted, "no connection, and no retry left after try %d: %s", x.tries, failure.Detail))
		}
	}
}

func (x *exchange) fail(f *fault.Error) (*http.Response, error) {
	x.status, x.reason = f.Reason.Status(), f.Reason
	return nil, f
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

// errAllTried means that there is no replica but those that the request could not be sent to.
var errAllTried = errors.New("all replicas were tried")

func pickFault(ctx context.Context, name registry.ServiceName, err error, last *fault.Error) *fault.Error {
	switch {
	case ctx.Err() != nil:
		return httpio.FaultOf(ctx, err)
	case errors.Is(err, errAllTried):
		return fault.New(fault.RetriesExhausted, "no connection, and no other replica to try: %s", last.Detail)
	case errors.Is(err, balancer.ErrNoEndpoints):
		return fault.New(fault.NoEndpoints, "service %q has no endpoints", name)
	default:
		return fault.New(fault.NoneReady, "no endpoint of service %q is ready", name)
	}
}

// repicks is how often a rule is asked again when it picks a replica that was tried already.
const repicks = 8

// pick places the request on a replica that was not tried yet, and sends the probes that are due. If the request has a slot
// of that replica, held is that.
func (o *Outbound) pick(x *exchange, r *http.Request, tried []*balancer.Endpoint) (picked balancer.Picked, held *hold, err error) {
	b := x.service.balancer.Load()
	picked, held, err = o.place(x, r, b, tried)
	now := time.Now()
	for n := 0; err == nil && slices.Contains(tried, picked.Endpoint); n++ {
		picked.Done(now, balancer.Abandoned)
		if n == repicks {
			return picked, nil, errAllTried
		}
		picked, err = b.Pick(now, balancer.Request{})
	}
	if err != nil {
		return picked, nil, err
	}
	x.service.metrics.picks[picked.Class].Inc()
	for _, e := range picked.Due(x.probes[:0]) {
		o.probe(now, x.service, b, picked.Shard(), e)
	}
	return picked, held, nil
}

// place places the request by the rule, which may have to ask replicas first. It does not ask those that were tried.
func (o *Outbound) place(x *exchange, r *http.Request, b *balancer.Balancer, tried []*balancer.Endpoint) (picked balancer.Picked, held *hold, err error) {
	now, req := time.Now(), keyOf(r, b.Policy)
	x.key = ""
	if req.Keyed && b.Policy.Balancer == policy.BalancerPrequalSync {
		x.key = strconv.FormatUint(req.Key, 16)
	}
	asked, enough, _ := b.Inquire(now, req, x.probes[:0])
	targets := slices.DeleteFunc(asked, func(e *balancer.Endpoint) bool { return slices.Contains(tried, e) })
	if len(targets) == 0 {
		picked, err = b.Pick(now, req)
		return picked, nil, err
	}
	var answers []balancer.Answer
	if b.Policy.Balancer == policy.BalancerLateBinding {
		held, err = o.reserve(r.Context(), x.service, b, targets)
		if held != nil {
			answers = []balancer.Answer{{Endpoint: held.endpoint}}
		}
	} else {
		enough = max(1, enough-(len(asked)-len(targets)))
		answers, err = o.inquire(r.Context(), x.service, b, req, targets, enough)
	}
	if err != nil {
		return picked, nil, err
	}
	picked, err = b.Choose(time.Now(), req, answers)
	if held == nil || err != nil || picked.Endpoint != held.endpoint { // it has left meanwhile
		held.release()
		return picked, nil, err
	}
	return picked, held, nil
}

// keyOf returns what the rule may know of the request.
func keyOf(r *http.Request, p policy.Policy) balancer.Request {
	switch p.Balancer {
	case policy.BalancerRingHash, policy.BalancerMaglev, policy.BalancerPrequalSync:
	default:
		return balancer.Request{}
	}
	key := ""
	switch p.Hash.Key.Source {
	case policy.KeyHeader:
		key = r.Header.Get(p.Hash.Key.Name)
	case policy.KeyCookie:
		if c, err := r.Cookie(p.Hash.Key.Name); err == nil {
			key = c.Value
		}
	case policy.KeyPath:
		key = r.URL.Path
	case policy.KeySourceAddress:
		key, _, _ = net.SplitHostPort(r.RemoteAddr)
	}
	return balancer.Request{Key: balancer.HashKey(key), Keyed: key != ""}
}

// try sends the request to one replica.
func (en *engine) try(r *http.Request, body io.ReadCloser, picked balancer.Picked, held *hold) (*http.Response, *fault.Error) {
	x := r.Context().Value(exchangeKey{}).(*exchange)
	began := time.Now()
	out := x.attempt(r, body)
	setHeader(out.Header, httpio.HeaderKey, x.key)
	setHeader(out.Header, httpio.HeaderReservation, held.id())
	defer held.release() // the request has claimed the slot, or never will
	resp, report, failure := en.send(out, picked)
	now := time.Now()
	if failure != nil {
		picked.Done(now, outcomeOf(failure.Reason))
		return nil, failure
	}
	picked.Responded(now, now.Sub(began), report)
	httpio.TrackBody(r.Context(), resp, func(end httpio.BodyEnd) { x.bodyEnded(picked, end) })
	return resp, nil
}

// attempt returns the request that a try may change.
func (x *exchange) attempt(r *http.Request, body io.ReadCloser) *http.Request {
	out := r.WithContext(r.Context()) // a shallow copy
	out.URL = new(url.URL)
	*out.URL = *r.URL
	out.Body = body
	if x.tries > 1 {
		out.Header = r.Header.Clone() // the try before may still be reading the other
	}
	return out
}

// setHeader sets a header, or removes what an earlier try left of it.
func setHeader(h http.Header, name, value string) {
	if value == "" {
		delete(h, name)
	} else {
		h[name] = []string{value}
	}
}

// bodyEnded accounts for the end of the response.
func (x *exchange) bodyEnded(picked balancer.Picked, end httpio.BodyEnd) {
	outcome := balancer.Succeeded
	switch {
	case end == httpio.BodyAborted:
		outcome, x.reason = balancer.Abandoned, fault.Canceled
	case end == httpio.BodyLate:
		outcome, x.reason = balancer.Failed, fault.Timeout
	case end == httpio.BodyBroken:
		outcome, x.reason = balancer.Failed, fault.Reset
	case x.status >= http.StatusInternalServerError:
		outcome = balancer.Failed
	}
	picked.Done(time.Now(), outcome)
}

func outcomeOf(r fault.Reason) balancer.Outcome {
	switch {
	case r == fault.Canceled || r == fault.BadRequest:
		return balancer.Abandoned
	case r.Unsent():
		return balancer.Unconnected
	default:
		return balancer.Failed
	}
}

// send delivers the request to the replica: directly on this node, else through the agent of the replica's node.
func (en *engine) send(r *http.Request, picked balancer.Picked) (*http.Response, *load.Report, *fault.Error) {
	record := picked.Endpoint.Record()
	if record.Node == en.outbound.cfg.Node {
		resp, report, err := en.outbound.cfg.Inbound.Deliver(r, picked.Endpoint.ID)
		if err != nil {
			return nil, nil, httpio.FaultOf(r.Context(), err)
		}
		return resp, &report, nil
	}
	r.URL.Scheme, r.URL.Host = "http", record.Agent.String()
	r.Header.Set(httpio.HeaderEndpoint, string(picked.Endpoint.ID))
	resp, err := httpio.RoundTrip(en.peers.transport(record.Agent), r)
	if err != nil {
		if no, ok := errors.AsType[*httpio.Unconnected](err); ok && r.Context().Err() == nil {
			return nil, nil, fault.New(fault.ConnectFailed, "no connection to node %s: %v", record.Node, no.Err)
		}
		return nil, nil, httpio.FaultOf(r.Context(), err)
	}
	return received(resp)
}

// received takes the answer of another agent apart: the load report, and the fault if the agent could not deliver.
func received(resp *http.Response) (*http.Response, *load.Report, *fault.Error) {
	reason := fault.Reason(resp.Header.Get(fault.Header))
	var report *load.Report
	if r, err := load.ParseReport([]byte(resp.Header.Get(httpio.HeaderLoad))); err == nil {
		report = &r
	}
	httpio.StripHeaders(resp.Header)
	if reason == fault.None {
		return resp, report, nil
	}
	if !reason.Known() || reason == fault.Canceled { // we are still here
		reason = fault.Reset
	}
	detail, _ := io.ReadAll(io.LimitReader(resp.Body, 512))
	resp.Body.Close()
	return nil, nil, &fault.Error{Reason: reason, Detail: strings.TrimPrefix(strings.TrimSpace(string(detail)), "headroom: ")}
}
