package inbound

import (
	"bytes"
	"context"
	"net"
	"strconv"
	"syscall"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/dataplane/relay"
	"github.com/headroom-mesh/headroom/dataplane/sockets"
	"github.com/headroom-mesh/headroom/registry"
)

const (
	// connectTimeout bounds the connection to a replica. It is on this node: one that does not accept at once is stuck.
	connectTimeout = time.Second
	// idleTimeout is how long a connection to a replica stays open without a request. It is shorter than what servers
	// allow, some only two seconds: a request must not meet a connection that the replica is just closing.
	idleTimeout = 1500 * time.Millisecond
)

// target says how a replica is reached.
func target(e registry.Endpoint, proxyHeader bool, mark uint32) relay.Target {
	return relay.Target{
		Name: "replica " + string(e.ID()),
		Dial: func(ctx context.Context, _ relay.Protocol) (net.Conn, error) {
			d := net.Dialer{Timeout: connectTimeout, Control: markFor(e, mark)}
			network, address := e.Network()
			return d.DialContext(ctx, network, address)
		},
		Speaks:      relay.Declared(e.Protocol),
		ProxyHeader: proxyHeader,
		Once:        e.State == registry.Draining,
		IdleTimeout: idleTimeout,
	}
}

// markFor returns what marks connections to a replica. Those to a Unix socket need no mark: nothing redirects them.
func markFor(e registry.Endpoint, mark uint32) func(string, string, syscall.RawConn) error {
	if e.Socket != "" {
		return nil
	}
	return sockets.Mark(mark)
}

// Begin takes in a call from another agent, which has picked the replica.
func (in *Inbound) Begin(h relay.Head, now time.Time) relay.Call {
	d := in.deliveries.Get().(*delivery)
	d.inbound, d.head, d.begun = in, h, now
	return d
}

// Direct returns what takes calls that were meant for one replica of this node, by those who know of no mesh.
func (in *Inbound) Direct(id registry.EndpointID) relay.Entry {
	return relay.Entry{Router: direct{in, id}, Strangers: true, Service: func() relay.Service {
		r := in.Replica(id)
		if r == nil {
			return relay.Service{}
		}
		return relay.Service{Protocol: relay.Declared(r.Endpoint.Protocol), DetectTimeout: r.policy.DetectTimeout}
	}}
}

// direct routes calls to one replica.
type direct struct {
	*Inbound
	id registry.EndpointID
}

// Begin takes in a call from outside the mesh.
func (d direct) Begin(h relay.Head, now time.Time) relay.Call {
	c := d.deliveries.Get().(*delivery)
	c.inbound, c.head, c.begun, c.direct = d.Inbound, h, now, d.id
	return c
}

// delivery is a call from another agent, or from outside the mesh. Deliveries are used again.
type delivery struct {
	inbound *Inbound
	direct  registry.EndpointID // the replica, for calls from outside the mesh
	head    relay.Head
	begun   time.Time
	flight  Flight
	status  int // of the answer
	scratch [128]byte
	fields  [1]relay.Field
}

var _ relay.Call = (*delivery)(nil)

// Waits is false: the replica is here.
func (d *delivery) Waits() bool { return false }

// Next returns where the replica is. There is no other.
func (d *delivery) Next(_ context.Context, failed *fault.Error) (relay.Hop, *fault.Error) {
	if failed != nil {
		return relay.Hop{}, failed
	}
	replica, no := d.replica()
	if no != nil {
		return relay.Hop{}, no
	}
	if d.direct != "" {
		d.flight.begin(d.inbound, replica, d.begun, 0, "")
		return relay.Hop{To: replica.upstream, Forwarded: replica.policy.Forwarded, Certified: replica.policy.Forwarded.Tells()}, nil
	}
	d.flight.begin(d.inbound, replica, d.begun, d.key(), d.reservation())
	return relay.Hop{To: replica.upstream, Certified: replica.policy.Forwarded.Tells()}, nil
}

func (d *delivery) replica() (*Replica, *fault.Error) {
	replicas := *d.inbound.replicas.Load()
	if d.direct != "" {
		if r := replicas[d.direct]; r != nil {
			return r, nil
		}
		return nil, fault.New(fault.UnknownEndpoint, "there is no replica %q on this node", d.direct)
	}
	id, _ := d.head.Field(d.scratch[:0], relay.FieldEndpoint)
	if r := replicas[registry.EndpointID(id)]; r != nil {
		return r, nil
	}
	return nil, fault.New(fault.UnknownEndpoint, "there is no replica %q on this node", id)
}

// key returns the hash of the call's key, 0 if none is told.
func (d *delivery) key() uint64 {
	text, told := d.head.Field(d.scratch[:0], relay.FieldKey)
	if !told {
		return 0
	}
	k, _ := strconv.ParseUint(string(text), 16, 64)
	return k
}

func (d *delivery) reservation() string {
	id, _ := d.head.Field(d.scratch[:0], relay.FieldReservation)
	return string(id)
}

// Answered tells the other agent the load that the replica bears.
func (d *delivery) Answered(h relay.Answer, now time.Time) ([]relay.Field, *fault.Error) {
	report := d.flight.Answered(h, now)
	d.status = h.Status()
	if d.direct != "" {
		return nil, nil
	}
	d.fields[0] = relay.Field{Name: relay.FieldLoad, Value: report.Append(d.scratch[:0])}
	return d.fields[:], nil
}

// End counts the call out.
func (d *delivery) End(e relay.Ending, now time.Time) {
	in := d.inbound
	if in.accessLog != nil {
		d.log(e.Reason, now)
	}
	d.flight.End(e, now)
	*d = delivery{}
	in.deliveries.Put(d)
}

// log tells what became of the call, and who has made it.
func (d *delivery) log(reason fault.Reason, now time.Time) {
	if d.status == 0 {
		d.status = reason.Status()
	}
	endpoint := ""
	if r := d.flight.replica; r != nil {
		endpoint = string(r.Endpoint.ID())
	}
	path, _, _ := bytes.Cut(d.head.Path(nil), []byte("?"))
	d.inbound.accessLog.Info("delivery", "source", d.head.Caller().ID.String(), "method", string(d.head.Method(nil)), "path", string(path),
		"endpoint", endpoint, "status", d.status, "reason", string(reason), "took", now.Sub(d.begun))
}

// Flight is a call in flight at a replica of this node. The zero value is none.
type Flight struct {
	inbound *Inbound
	replica *Replica
	slot    *Reservation
	token   load.Token
	start   time.Time
	key     uint64    // 0: none
	failed  bool      // as the answer says
	read    [128]byte // what was read last, of a head
}

// Begin counts a call in at a replica, which serves a key, and has a slot reserved for it if that is not "".
func (f *Flight) Begin(in *Inbound, id registry.EndpointID, now time.Time, key uint64, reservation string) (to *relay.Upstream, no *fault.Error) {
	replica := in.Replica(id)
	if replica == nil {
		return nil, fault.New(fault.UnknownEndpoint, "there is no replica %q on this node", id)
	}
	f.begin(in, replica, now, key, reservation)
	return replica.upstream, nil
}

func (f *Flight) begin(in *Inbound, r *Replica, now time.Time, key uint64, reservation string) {
	*f = Flight{inbound: in, replica: r, slot: in.slot(r.line, reservation), token: r.Load.Begin(now), start: now, key: key}
}

// Answered takes in the head of the response. It returns the replica's load without this call.
func (f *Flight) Answered(h relay.Answer, now time.Time) load.Report {
	f.utilized(now, h)
	f.failed = relay.Failed(h.Status(), h, f.read[:0])
	if !f.failed && f.key != 0 && f.replica.keys != nil {
		f.replica.keys.Served(f.key)
	}
	return f.replica.Load.ReportLeaving(now)
}

// End counts the call out.
func (f *Flight) End(e relay.Ending, now time.Time) {
	if f.replica == nil {
		return
	}
	if e.Trailers != nil {
		f.utilized(now, e.Trailers)
		f.failed = f.failed || relay.Failed(0, e.Trailers, f.read[:0])
	}
	outcome := f.outcome(e.Reason)
	f.replica.Load.End(now, f.token, outcome)
	f.replica.metrics.finished(outcome, now.Sub(f.start))
	if f.replica.line.leave(f.slot) {
		f.inbound.idle(f.replica)
	}
	*f = Flight{}
}

// outcome says what the end means for the replica: that a caller gave up, for want of time or otherwise, or can't form a
// request, is not held against it.
func (f *Flight) outcome(r fault.Reason) load.Outcome {
	switch {
	case r == fault.Canceled || r == fault.Timeout || r == fault.BadRequest:
		return load.Canceled
	case r != fault.None || f.failed:
		return load.Failed
	}
	return load.OK
}

// utilized notes what the replica says of itself.
func (f *Flight) utilized(now time.Time, fields relay.Fields) {
	if u := reportedUtilization(fields, f.read[:0]); u > 0 {
		f.replica.Load.Utilize(now, u)
	}
}
