package relay

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/headroom-mesh/headroom/dataplane/h1"
)

// serve carries the call whose head, of a length, is at the beginning of the buffer. It returns false if it was the last on
// this connection.
func (s *session) serve(headLength int) bool {
	s.in.hold(headLength)
	defer s.in.free()
	s.head.source, s.head.caller = s.source, &s.caller
	s.body.begin(&s.head.Request)
	s.ended = time.Time{}
	if !s.place.waitsSince(answer, s.engine.watch.now()) {
		return false
	}
	call := s.entry.Router.Begin(&s.head, time.Now())
	ending, keep := s.carry(call)
	if s.ended.IsZero() {
		s.ended = time.Now()
	}
	call.End(ending, s.ended)
	return keep && !s.ending.Load()
}

// carry sends the call to where it can be sent, and brings back the answer.
func (s *session) carry(call Call) (e Ending, keep bool) {
	if s.looped() {
		return s.refuse(fault.New(fault.Loop, "the request came through this mesh %d times", maxVisits))
	}
	var failed *fault.Error
	for {
		var no *fault.Error
		if s.hop, no = s.route(call, failed); no != nil {
			return s.refuse(no)
		}
		if e, keep, failed = s.try(call, &s.hop); failed == nil {
			return e, keep
		}
		if failed.Reason == fault.Canceled {
			return Ending{Reason: fault.Canceled}, false
		}
		if s.body.spilt {
			return s.refuse(spent(failed))
		}
	}
}

// spent returns what to tell the caller of a call that can't be sent again, as too much of its body is gone.
func spent(failed *fault.Error) *fault.Error {
	if !failed.Reason.Unsent() {
		return failed
	}
	return fault.New(fault.RetriesExhausted, "%s, and too much of the body was read to send it again", failed.Detail)
}

// route asks where to send the call.
func (s *session) route(call Call, failed *fault.Error) (Hop, *fault.Error) {
	if !call.Waits() {
		return call.Next(context.Background(), failed)
	}
	ctx, done := s.cancelable()
	defer done()
	return call.Next(ctx, failed)
}

// refuse answers the call with a fault.
func (s *session) refuse(f *fault.Error) (e Ending, keep bool) {
	e = Ending{Reason: f.Reason}
	if f.Reason == fault.Canceled || s.isGone() {
		return Ending{Reason: fault.Canceled}, false
	}
	keep = s.head.KeepAlive && s.body.done && f.Reason != fault.BadRequest && !s.isLast()
	if s.answerFault(f, keep, string(s.head.Request.Method) == http.MethodHead) != nil {
		return e, false
	}
	s.lingers = true
	return e, keep
}

// answerFault writes an answer of the mesh's own.
func (s *session) answerFault(f *fault.Error, keep, bodiless bool) error {
	status := f.Status()
	out := s.out[:0]
	out = append(out, "HTTP/1.1 "...)
	out = strconv.AppendInt(out, int64(status), 10)
	out = append(out, ' ')
	out = append(out, http.StatusText(status)...)
	out = append(out, "\r\n"...)
	text := fmt.Sprintf("headroom: %s\n", f.Detail)
	if s.entry.Agents {
		out = h1.AppendField(out, FieldReason, []byte(f.Reason))
		out = h1.AppendField(out, FieldDetail, []byte(oneLine(f.Detail)))
	} else {
		out = h1.AppendField(out, fault.Header, []byte(f.Reason))
	}
	out = append(out, "Content-Type: text/plain; charset=utf-8\r\n"...)
	out = append(out, "Content-Length: "...)
	out = strconv.AppendInt(out, int64(len(text)), 10)
	out = append(out, "\r\n"...)
	if !keep {
		out = append(out, "Connection: close\r\n"...)
	}
	out = append(out, "\r\n"...)
	if !bodiless {
		out = append(out, text...)
	}
	_, err := s.conn.Write(out)
	return err
}

// oneLine makes text fit for a field.
func oneLine(text string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, text)
}

// dial connects to where a call goes next.
func (s *session) dial(hop *Hop, p Protocol) (*upstreamConn, *fault.Error) {
	ctx, done := s.cancelable()
	defer done()
	if !hop.Deadline.IsZero() {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, hop.Deadline)
		defer cancel()
	}
	up, err := hop.To.dial(ctx, p)
	switch {
	case err == nil:
		return up, nil
	case s.isGone():
		return nil, fault.New(fault.Canceled, "the caller went away")
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return nil, lateFault()
	}
	return nil, unconnected(&hop.To.target, err)
}

// unconnected says that there is no connection.
func unconnected(to *Target, err error) *fault.Error {
	failed := fault.New(fault.ConnectFailed, "no connection to %s: %v", to.Name, err)
	if e, ok := errors.AsType[lasting](err); ok {
		failed.Lasting = e.Lasting()
	}
	return failed
}

// lasting is an error that knows whether it stays until somebody does something about it.
type lasting interface {
	error
	Lasting() bool
}

func lateFault() *fault.Error { return fault.New(fault.Timeout, "the service's timeout ran out") }

// try sends the call to one place. It returns the fault if nothing was answered.
func (s *session) try(call Call, hop *Hop) (e Ending, keep bool, failed *fault.Error) {
	if s.head.Protocol() == TCP {
		return s.connect(call, hop)
	}
	for again := true; again; {
		up := hop.To.lastUsed()
		if up == nil {
			break
		}
		e, keep, failed = s.exchange(call, hop, up)
		if failed == nil || failed.Reason != stale {
			return e, keep, failed
		}
		again = s.x.unsent
	}
	up, failed := s.dial(hop, HTTP1)
	if failed != nil {
		return e, false, failed
	}
	e, keep, failed = s.exchange(call, hop, up)
	if failed != nil && failed.Reason == stale {
		failed.Reason = fault.Reset
	}
	return e, keep, failed
}

// stale is the reason why a call is sent again on a new connection: the one that was used before was dead, and nothing
// came of the call.
const stale fault.Reason = "stale"

// exchange sends the request on a connection and passes the answer on. The connection is put by, or closed.
func (s *session) exchange(call Call, hop *Hop, up *upstreamConn) (e Ending, keep bool, failed *fault.Error) {
	if !s.waitsOn(up) {
		up.drop()
		return e, false, fault.New(fault.Canceled, "the caller went away")
	}
	if !hop.Deadline.IsZero() {
		up.SetDeadline(hop.Deadline)
		s.conn.SetWriteDeadline(hop.Deadline.Add(lateWrite))
	}
	x := &s.x
	x.begin(s, call, hop, up)
	if failed = x.send(); failed == nil {
		e, failed = x.receive()
	}
	x.stopUpload()
	x.putBy(x.delivered && x.whole && s.resp.KeepAlive && s.up.r == s.up.w && !x.tunneled)
	s.lingers = x.whole && !x.tunneled && failed == nil
	keep = s.lingers && x.keep && s.body.done
	return e, keep, failed
}

func (x *exchange) begin(s *session, call Call, hop *Hop, up *upstreamConn) {
	*x = exchange{session: s, call: call, hop: hop, up: up}
	s.ended = time.Time{}
}

// putBy keeps the connection for another call, if it is fit for one.
func (x *exchange) putBy(fit bool) {
	here := x.waitsOn(nil)
	x.session.up.reset()
	if !x.hop.Deadline.IsZero() {
		x.up.SetDeadline(time.Time{})
		x.conn.SetWriteDeadline(time.Time{})
	}
	if fit && here {
		x.up.keep()
	} else {
		x.up.drop()
	}
}

// lateWrite is how long a caller may take, once its time is out, to read what it is told of that.
const lateWrite = time.Second

// exchange is a request, and its answer, on one connection.
type exchange struct {
	*session
	call Call
	hop  *Hop
	up   *upstreamConn

	heard     bool // something came in answer
	unsent    bool // not one byte of the request was
	uploading bool
	uploaded  chan struct{} // closed when that is over
	taken     atomic.Bool   // the whole body was read
	delivered bool          // and written; read after uploaded, as is what follows
	callers   *fault.Error  // what is wrong with the caller's body

	whole    bool // the answer was passed on to its end
	keep     bool // the caller's connection is good for another call
	tunneled bool
}

// send sends the head, and as much of the body as has come. The rest follows while the answer is awaited.
func (x *exchange) send() *fault.Error {
	s := x.session
	out := s.appendHead(s.out[:0], x.hop)
	out = h1.AppendData(out, s.body.kept, s.body.framing)
	out, err := s.body.appendAvailable(out, &s.in)
	if err != nil {
		return callersFault(err)
	}
	if s.body.done {
		out = s.body.appendEnd(out)
	}
	s.out = out
	sent, err := x.say(out)
	x.unsent = sent == 0
	if err != nil {
		return x.broken(err, x.unsent)
	}
	x.delivered = s.body.done
	if !s.body.done {
		x.uploading, x.uploaded = true, make(chan struct{})
		s.server.wg.Go(func() {
			defer close(x.uploaded)
			x.upload()
		})
	}
	return nil
}

// say writes the request, and reads what comes of it if it is whole.
func (x *exchange) say(out []byte) (sent int, err error) {
	if x.body.done && x.up.wire != nil {
		again := !x.body.spilt && h1.Idempotent(x.head.Request.Method)
		return x.up.ask(out, &x.session.up, x.up.doubtful(again))
	}
	if x.up.kept && !x.up.quiet() {
		return 0, errDead
	}
	return x.up.Write(out)
}

// broken returns the fault that a failure before any answer amounts to.
func (x *exchange) broken(err error, unsent bool) *fault.Error {
	s := x.session
	switch {
	case s.isGone():
		return fault.New(fault.Canceled, "the caller went away")
	case x.callers != nil:
		return x.callers
	case !x.hop.Deadline.IsZero() && errors.Is(err, os.ErrDeadlineExceeded):
		return lateFault()
	case !s.body.spilt && !x.heard && (unsent || h1.Idempotent(s.head.Request.Method)):
		return fault.New(stale, "the connection to the replica broke: %v", innermost(err))
	}
	return fault.New(fault.Reset, "the connection to the replica broke: %v", innermost(err))
}

// innermost returns what is of interest to callers in an error of a connection.
func innermost(err error) error {
	if op, ok := errors.AsType[*net.OpError](err); ok {
		err = op.Err
	}
	if call, ok := errors.AsType[*os.SyscallError](err); ok {
		err = call.Err
	}
	return err
}

// callersFault returns what an error of reading the caller's body amounts to. It keeps the caller's failures from being
// laid at the replica's door.
func callersFault(err error) *fault.Error {
	if malformed, ok := errors.AsType[*h1.Error](err); ok {
		return fault.New(fault.BadRequest, "the body of the request is malformed: %v", malformed)
	}
	return fault.New(fault.Canceled, "the caller broke off its request: %v", innermost(err))
}

// receive reads the answer and passes it on.
func (x *exchange) receive() (e Ending, failed *fault.Error) {
	s := x.session
	for {
		if failed := x.readHead(); failed != nil {
			return e, failed
		}
		if s.resp.Code >= 200 || s.resp.Code == http.StatusSwitchingProtocols {
			break
		}
		s.out = append(s.resp.Append(s.out[:0], h1.None), "\r\n"...)
		if s.head.Minor > 0 {
			if _, err := s.conn.Write(s.out); err != nil {
				return Ending{Reason: fault.Canceled}, nil
			}
		}
	}
	if f := x.checkSwitch(); f != nil {
		return e, f
	}
	now := time.Now()
	fields, no := x.call.Answered(&s.resp, now)
	if s.resp.Framing == h1.Length && s.resp.Length <= int64(len(s.up.bytes())) {
		s.ended = now // all of it has come
	}
	if no != nil {
		x.whole = x.discard()
		return e, no
	}
	if s.resp.Code == http.StatusSwitchingProtocols {
		return x.upgrade(fields), nil
	}
	return x.pass(fields), nil
}

// readHead reads the head of an answer.
func (x *exchange) readHead() *fault.Error {
	s := x.session
	for {
		if s.up.r < s.up.w {
			x.heard = true
			n, err := s.resp.Parse(s.up.bytes(), s.head.Request.Method)
			if err != nil {
				return fault.New(fault.MalformedResponse, "the replica's response is malformed: %v", err)
			}
			if n > 0 {
				s.up.use(n)
				return nil
			}
		}
		if err := s.up.fillLine(x.up.socket); err != nil {
			x.stopUpload()
			return x.broken(err, false)
		}
	}
}

// discard reads what another agent has to say to people, and reports whether that was all.
func (x *exchange) discard() bool {
	s := x.session
	for s.resp.Framing == h1.Length && s.resp.Length <= bufferSize {
		if n := int64(len(s.up.bytes())); n >= s.resp.Length {
			s.up.use(int(s.resp.Length))
			return true
		}
		if s.up.fill(x.up.socket) != nil {
			break
		}
	}
	return s.resp.Framing == h1.None
}

// checkSwitch says what is wrong with a change of protocols.
func (x *exchange) checkSwitch() *fault.Error {
	s := x.session
	switch {
	case s.resp.Code != http.StatusSwitchingProtocols:
		return nil
	case x.uploading && !x.taken.Load():
		return fault.New(fault.MalformedResponse, "the replica switched protocols before it had the whole request")
	}
	if s.resp.Upgrade == nil || !strings.EqualFold(string(s.resp.Upgrade), string(s.head.Upgrade)) {
		return fault.New(fault.MalformedResponse, "the replica switched to protocol %q when %q was asked for", s.resp.Upgrade, s.head.Upgrade)
	}
	return nil
}
