package relay

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/headroom-mesh/headroom/dataplane/h2"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// stream is a call by HTTP/2: a stream of the caller's, and one to where the call went. What comes on one goes out on the
// other as fast as that takes it; what it does not take waits here, which the window of the sender bounds. Streams are used
// again: who has one locks it, and looks if it is still the same call.
type stream struct {
	mu sync.Mutex
	// mu guards all fields below.

	*callers
	down *h2.Stream
	head streamHead
	call Call

	hop     Hop // of the last try
	up      outgoing
	upConn  *h2.Conn // of the last try, if it is by HTTP/2
	resent  int
	seeking bool         // a goroutine looks for a place, and it alone speaks to the Call
	stopped *fault.Error // why it is to give up
	cancel  func()       // what it waits for
	sought  bool         // a goroutine has had it

	limit    time.Time // zero: none
	timer    *time.Timer
	answered bool // the caller has the head of a response
	over     bool

	// The request's body: what was read of it and not yet sent, and what is kept to be sent again.

	toUp       queue
	upEnd      bool
	upTrailers fieldList // to be sent
	unwanted   bool      // there is nobody to send it to any more
	kept       []byte
	spilt      bool // more was read than is kept
	sent       int  // in the last try
	consumed   int

	// The response.

	answer       streamAnswer
	toDown       queue
	downEnd      bool
	downTrailers fieldList // as they came
	trailed      bool      // there are some

	fields []hpack.HeaderField // memory that is used again
	more   []h2.Field
}

func (m *memory) stream() *stream {
	if x, ok := m.streams.Get().(*stream); ok {
		return x
	}
	return new(stream)
}

// recycleLocked makes the stream ready for another call. It keeps no strings, nor large memory.
func (x *stream) recycleLocked() {
	for _, l := range [][]hpack.HeaderField{x.head.fields, x.upTrailers, x.downTrailers, x.fields} {
		clear(l[:cap(l)])
	}
	clear(x.more[:cap(x.more)])
	if cap(x.kept) > bufferSize {
		x.kept = nil
	}
	x.head = streamHead{fields: x.head.fields[:0]}
	x.upTrailers, x.downTrailers, x.fields, x.more = x.upTrailers[:0], x.downTrailers[:0], x.fields[:0], x.more[:0]
	x.callers, x.down, x.call, x.hop, x.up, x.upConn = nil, nil, nil, Hop{}, nil, nil
	x.resent, x.stopped, x.cancel, x.limit = 0, nil, nil, time.Time{}
	x.answered, x.over, x.upEnd, x.unwanted, x.spilt, x.downEnd, x.trailed = false, false, false, false, false, false, false
	x.sent, x.consumed, x.kept = 0, 0, x.kept[:0]
	x.answer = streamAnswer{}
}

// leaveLocked unlocks the stream and lets what was written go out: once the connection that is being read has nothing more,
// if it was an event of one.
func (x *stream) leaveLocked(reading *h2.Conn) {
	down, up, engine := x.down.Conn(), x.upConn, x.engine
	again := x.over && !x.sought
	if again {
		x.recycleLocked()
	}
	x.mu.Unlock()
	if again {
		engine.memory.streams.Put(x)
	}
	for _, c := range [2]*h2.Conn{down, up} {
		switch {
		case c == nil:
		case reading != nil:
			reading.FlushAfter(c)
		default:
			c.Flush()
		}
	}
}

// beginLocked places the call.
func (x *stream) beginLocked() {
	x.call = x.entry.Router.Begin(&x.head, time.Now())
	switch {
	case x.head.fields.get(":method") == "CONNECT":
		x.refuseLocked(fault.New(fault.UnsupportedRequest, "CONNECT is not supported by HTTP/2; use HTTP/1.1"))
		return
	case x.loopedLocked():
		x.refuseLocked(fault.New(fault.Loop, "the request came through this mesh %d times", maxVisits))
		return
	}
	if d, ok := grpcTimeout(x.head.fields.get("grpc-timeout")); ok && !x.entry.Agents {
		x.limitLocked(time.Now().Add(d))
	}
	x.placeLocked(nil)
}

// placeLocked asks where to send the call, and sends it there: at once if that takes no waiting.
func (x *stream) placeLocked(failed *fault.Error) {
	if x.call.Waits() {
		x.seekLocked(nil, failed)
		return
	}
	hop, no := x.call.Next(context.Background(), failed)
	if no != nil {
		x.refuseLocked(no)
	} else if !x.sendLocked(&hop) {
		x.seekLocked(&hop, nil)
	}
}

// seekLocked lets a goroutine find a place for the call, at first at a hop if there is one.
func (x *stream) seekLocked(hop *Hop, failed *fault.Error) {
	if hop != nil {
		kept := *hop // what it refers to is the Call's, and stays
		hop = &kept
		x.limitLocked(hop.Deadline)
	}
	ctx, cancel := context.WithCancel(x.ctx)
	x.seeking, x.sought, x.cancel = true, true, cancel
	x.waiting.Go(func() {
		defer cancel()
		x.seek(ctx, hop, failed)
	})
}

// seek sends the call where there is a place for it, or answers with the fault.
func (x *stream) seek(ctx context.Context, hop *Hop, failed *fault.Error) {
	for {
		var no *fault.Error
		if hop == nil {
			var next Hop
			next, no = x.call.Next(ctx, failed)
			hop = &next
		}
		if x.settle(hop, no) {
			return
		}
		err := hop.To.dialHTTP2(ctx)
		if errors.Is(err, errNotHTTP2) && hop.To.failedHTTP2() {
			continue
		}
		if err != nil {
			hop, failed = nil, unconnected(&hop.To.target, err)
			if x.settle(nil, x.mustFail(failed)) {
				return
			}
		}
	}
}

// mustFail returns the fault to answer with if the call can't be sent again.
func (x *stream) mustFail(failed *fault.Error) *fault.Error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.spilt {
		return spent(failed)
	}
	return nil
}

// settle ends the search if the call is to end, or can be sent to a hop. From then on the call is everybody's again.
func (x *stream) settle(hop *Hop, no *fault.Error) bool {
	x.mu.Lock()
	if x.stopped != nil {
		no = x.stopped
	}
	if no == nil && (hop == nil || !x.sendLocked(hop)) {
		x.mu.Unlock()
		return false
	}
	if x.seeking = false; no != nil {
		x.refuseLocked(no)
	}
	x.leaveLocked(nil)
	return true
}

// sendLocked sends the head of the request, and what has come of its body. It returns false if there is no connection.
func (x *stream) sendLocked(hop *Hop) bool {
	bare := x.upEnd && x.toUp.len() == 0 && len(x.upTrailers) == 0
	x.requestLocked(hop)
	if hop.To.onlyHTTP1() {
		x.sendHTTP1Locked(hop, bare)
		return true
	}
	up := hop.To.openHTTP2(x, x.fields, x.more, bare)
	if up == nil {
		return false
	}
	x.hop, x.up, x.upConn, x.sent = *hop, up, up.Conn(), 0
	x.limitLocked(hop.Deadline)
	if !bare {
		x.pushUpLocked()
	}
	return true
}

// againLocked places a call once more that was not taken, if all that was sent of it is kept.
func (x *stream) againLocked(failed *fault.Error) {
	if x.spilt {
		x.refuseLocked(spent(failed))
		return
	}
	x.rewindLocked()
	x.placeLocked(failed)
}

func (x *stream) rewindLocked() {
	x.toUp = queue{}
	x.toUp.add(x.kept)
	x.up, x.sent = nil, 0
}

// mostResent is how often a call is sent to the same place again that did not look at it.
const mostResent = 3

// resendLocked sends a call again, on another connection: it was not looked at.
func (x *stream) resendLocked() {
	x.resent++
	switch {
	case x.spilt:
		x.refuseLocked(fault.New(fault.Reset, "%s did not take the request, which is too large to be sent again", x.hop.To.target.Name))
	case x.resent > mostResent:
		x.againLocked(fault.New(fault.ConnectFailed, "%s refuses requests", x.hop.To.target.Name))
	default:
		x.rewindLocked()
		if hop := x.hop; !x.sendLocked(&hop) {
			x.seekLocked(&hop, nil)
		}
	}
}

// limitLocked ends the call when its time is out, if it would not end before.
func (x *stream) limitLocked(limit time.Time) {
	if limit.IsZero() || !x.limit.IsZero() && !limit.Before(x.limit) {
		return
	}
	x.limit = limit
	if x.timer == nil {
		x.timer = time.AfterFunc(time.Until(limit), x.late)
	} else {
		x.timer.Reset(time.Until(limit))
	}
}

// late ends the call if its time is out. It may be called for a call that was here before.
func (x *stream) late() {
	x.mu.Lock()
	if x.over || x.limit.IsZero() || time.Now().Before(x.limit) {
		x.mu.Unlock()
		return
	}
	x.failLocked(lateFault())
	x.leaveLocked(nil)
}

// fromCallerLocked takes in a part of the request's body.
func (x *stream) fromCallerLocked(p []byte, end bool) {
	x.upEnd = end
	if x.unwanted {
		x.down.Consumed(len(p))
		return
	}
	if x.spilt = x.spilt || x.answered || len(x.kept)+len(p) > keptLimit; !x.spilt {
		x.kept = append(x.kept, p...)
	}
	if x.up == nil || x.toUp.len() > 0 {
		x.toUp.add(p)
		return
	}
	n := x.up.Write(p, end)
	x.sentLocked(n)
	x.toUp.add(p[n:])
}

// sentLocked lets the caller send more, unless it was let for a try before.
func (x *stream) sentLocked(n int) {
	if x.sent += n; x.sent > x.consumed {
		x.down.Consumed(x.sent - x.consumed)
		x.consumed = x.sent
	}
}

func (x *stream) trailersFromCallerLocked(fields []hpack.HeaderField) {
	x.upEnd = true
	x.upTrailers = passed(x.upTrailers[:0], fields)
	if x.up != nil {
		x.pushUpLocked()
	}
}

// pushUpLocked sends what waits.
func (x *stream) pushUpLocked() {
	if x.up == nil {
		return
	}
	bare := len(x.upTrailers) == 0
	if x.toUp.len() > 0 || x.upEnd && bare {
		n := x.up.Write(x.toUp.bytes(), x.upEnd && bare)
		x.sentLocked(n)
		x.toUp.use(n)
	}
	if !bare && x.toUp.len() == 0 {
		x.up.WriteHeaders(x.upTrailers, nil, true)
	}
}

// answerLocked takes in the head of a response.
func (x *stream) answerLocked(fields []hpack.HeaderField, end bool) {
	status := statusOf(fields)
	x.fields = passed(x.fields[:0], fields)
	if status < 200 {
		x.down.WriteHeaders(x.fields, nil, false)
		return
	}
	x.answer = streamAnswer{fields, status}
	added, no := x.call.Answered(&x.answer, time.Now())
	if no != nil {
		if !end || !x.upEnd {
			x.up.Reset(http2.ErrCodeCancel)
		}
		x.up = nil
		x.againLocked(no)
		return
	}
	x.answered, x.downEnd, x.kept = true, end, x.kept[:0]
	x.more = appendMore(x.more[:0], added)
	x.down.WriteHeaders(x.fields, x.more, end)
	if end {
		x.completeLocked()
	}
}

// bodyLocked takes in a part of the response's body.
func (x *stream) bodyLocked(p []byte, end bool) {
	n := 0
	if x.toDown.len() == 0 {
		n = x.down.Write(p, end)
		x.up.Consumed(n)
	}
	x.toDown.add(p[n:])
	if x.downEnd = end; end && x.toDown.len() == 0 {
		x.completeLocked()
	}
}

func (x *stream) trailersLocked(fields []hpack.HeaderField) {
	x.downEnd, x.trailed = true, true
	x.downTrailers = append(x.downTrailers[:0], fields...)
	x.pushDownLocked()
}

// pushDownLocked passes on what waits of the response.
func (x *stream) pushDownLocked() {
	if x.toDown.len() > 0 {
		n := x.down.Write(x.toDown.bytes(), x.downEnd && !x.trailed)
		if x.up != nil {
			x.up.Consumed(n)
		}
		x.toDown.use(n)
	}
	if x.toDown.len() > 0 || !x.downEnd {
		return
	}
	if x.trailed {
		x.passTrailersLocked()
	}
	x.completeLocked()
}

func (x *stream) passTrailersLocked() {
	if x.fields = passed(x.fields[:0], x.downTrailers); len(x.fields) > 0 {
		x.down.WriteHeaders(x.fields, nil, true)
	} else {
		x.down.Write(nil, true)
	}
}

// completeLocked ends a call whose response was passed on whole. If that came early, nobody wants the rest of the request
// (RFC 9113, 8.1).
func (x *stream) completeLocked() {
	if !x.upEnd || x.toUp.len() > 0 || x.unwanted {
		if x.up != nil {
			x.up.Reset(http2.ErrCodeCancel)
		}
		if !x.upEnd {
			x.down.Reset(http2.ErrCodeNo)
		}
	}
	x.endLocked(fault.None)
}

// upstreamResetLocked ends a try.
func (x *stream) upstreamResetLocked(code http2.ErrCode, why h2.Cause) {
	x.up = nil
	switch {
	case x.downEnd: // and nobody wants the rest of the request
		x.unwanted = true
		x.sentLocked(x.toUp.len())
		x.toUp = queue{}
	case !x.answered && (why == h2.Unseen || why == h2.Broken && x.resent == 0 && x.repeatableLocked()):
		x.resendLocked()
	case why == h2.Broken:
		x.refuseLocked(fault.New(fault.Reset, "the connection to %s broke", x.hop.To.target.Name))
	case why == h2.Malformed:
		x.refuseLocked(fault.New(fault.MalformedResponse, "the response of %s is malformed", x.hop.To.target.Name))
	default:
		x.down.Reset(code)
		x.endLocked(fault.Reset)
	}
}

// failLocked ends the call with a fault: at once, or as soon as the goroutine knows that looks for a place.
func (x *stream) failLocked(f *fault.Error) {
	if !x.seeking {
		x.refuseLocked(f)
		return
	}
	if x.stopped == nil {
		x.stopped = f
	}
	x.cancel()
}

// refuseLocked answers the call with a fault, or breaks off the answer that it has begun.
func (x *stream) refuseLocked(f *fault.Error) {
	if x.up != nil {
		x.up.Reset(http2.ErrCodeCancel)
	}
	switch {
	case f.Reason == fault.Canceled:
		x.down.Reset(http2.ErrCodeCancel) // if it is still there
	case !x.answered:
		x.answerFaultLocked(f)
	default:
		x.breakOffLocked(f)
	}
	x.endLocked(f.Reason)
}

// endLocked accounts for the call.
func (x *stream) endLocked(reason fault.Reason) {
	x.over = true
	x.toUp, x.toDown = queue{}, queue{}
	if x.timer != nil && !x.limit.IsZero() {
		x.timer.Stop()
	}
	e := Ending{Reason: reason}
	if x.trailed {
		e.Trailers = &x.downTrailers
	}
	x.call.End(e, time.Now())
}
