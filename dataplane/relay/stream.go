package relay

import (
	"context"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/headroom-mesh/headroom/dataplane/h2"
	"github.com/headroom-mesh/headroom/policy"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// stream is a call by HTTP/2: a stream of the caller's, and one to where the call went. What comes on one goes out on the
// other as fast as that takes it; what it does not take waits here, which the window of the sender bounds.
type stream struct {
	*callers
	down *h2.Stream
	head streamHead
	call Call

	mu sync.Mutex
	// mu guards the fields below.

	hop      Hop
	up       *h2.Stream // nil while the call is being placed
	deadline *time.Timer
	answered bool // the caller has the head of a response
	left     bool // the caller has gone
	over     bool
	resent   int
	placing  bool   // a goroutine looks for a place
	cancel   func() // ends what it waits for
	answer   streamAnswer

	// The request's body: what was read of it and not yet sent, and what is kept to be sent again.

	toUp       []byte
	upEnd      bool
	upTrailers []hpack.HeaderField
	kept       []byte
	spilt      bool

	// The response's body.

	toDown       []byte
	downEnd      bool
	downTrailers []hpack.HeaderField
	trailing     fieldList // for the Call
}

// begin places the call.
func (x *stream) begin() {
	now := time.Now()
	x.call = x.entry.Router.Begin(&x.head, now)
	switch {
	case x.head.fields.get(":method") == "CONNECT":
		x.refuse(fault.New(fault.UnsupportedRequest, "CONNECT is not supported by HTTP/2; use HTTP/1.1"))
	case x.visits() >= maxVisits && !x.entry.Agents:
		x.refuse(fault.New(fault.Loop, "the request came through this mesh %d times", maxVisits))
	case x.call.Waits():
		x.inBackground(func() { x.place(nil) })
	default:
		x.placeNow(nil)
	}
}

// inBackground runs a part of the call that takes time. Nothing else ends the call meanwhile, unless its time is out.
func (x *stream) inBackground(part func()) {
	x.mu.Lock()
	x.placing = true
	x.mu.Unlock()
	x.waiting.Go(func() {
		part()
		x.mu.Lock()
		x.placing = false
		gone := x.left
		x.mu.Unlock()
		if gone {
			x.callerLeft(http2.ErrCodeCancel)
		}
	})
}

func (x *stream) visits() int {
	n := 0
	for _, f := range x.head.fields {
		if f.Name == "via" && f.Value == viaHTTP2 {
			n++
		}
	}
	return n
}

const viaHTTP2 = "2 headroom"

// placeNow places the call where that needs no waiting; else a goroutine goes on with it.
func (x *stream) placeNow(failed *fault.Error) {
	hop, no := x.call.Next(x.ctx, failed)
	if no != nil {
		x.refuse(no)
		return
	}
	if !x.send(&hop) {
		x.inBackground(func() { x.connect(&hop) })
	}
}

// place places the call, though it takes time.
func (x *stream) place(failed *fault.Error) {
	ctx, cancel := context.WithCancel(x.ctx)
	defer cancel()
	if !x.whenOver(cancel) {
		x.end(fault.Canceled)
		return
	}
	hop, no := x.call.Next(ctx, failed)
	x.whenOver(nil)
	if no != nil {
		x.refuse(no)
		return
	}
	if !x.send(&hop) {
		x.connect(&hop)
	}
}

// whenOver lets the end of the call cancel what is waited for. It returns false if the call is over.
func (x *stream) whenOver(cancel func()) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.cancel = cancel
	return !x.left
}

// connect makes a connection for the call.
func (x *stream) connect(hop *Hop) {
	for {
		err := hop.To.dialHTTP2(x.ctx)
		if err != nil {
			x.again(fault.New(fault.ConnectFailed, "no connection to %s: %v", hop.To.target.Name, err))
			return
		}
		if x.send(hop) {
			return
		}
	}
}

// again places the call once more, if it can be sent again.
func (x *stream) again(failed *fault.Error) {
	x.mu.Lock()
	spilt, left := x.spilt, x.left
	x.up = nil
	x.toUp = append(x.toUp[:0], x.kept...)
	x.mu.Unlock()
	switch {
	case left:
		x.end(fault.Canceled)
	case spilt || failed.Reason == fault.Canceled:
		x.refuse(spent(failed))
	default:
		x.inBackground(func() { x.place(failed) })
	}
}

// send sends the head of the request, and what has come of its body. It returns false if there is no connection for it.
func (x *stream) send(hop *Hop) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.left {
		return true
	}
	x.hop = *hop
	bare := x.upEnd && len(x.toUp) == 0 && len(x.upTrailers) == 0
	up := hop.To.openHTTP2(x, x.requestFields(hop), bare)
	if up == nil {
		return false
	}
	x.up = up
	x.limitLocked(hop.Deadline)
	if !bare {
		x.pushUpLocked()
	}
	return true
}

// requestFields returns the head of the request as the next station sees it.
func (x *stream) requestFields(hop *Hop) []hpack.HeaderField {
	fields := make([]hpack.HeaderField, 0, len(x.head.fields)+len(hop.Fields)+4)
	for _, f := range x.head.fields {
		if !strings.HasPrefix(f.Name, Prefix) {
			fields = append(fields, f)
		}
	}
	if !x.entry.Agents {
		fields = append(fields, hpack.HeaderField{Name: "via", Value: viaHTTP2})
	}
	if hop.Forwarded != "" && hop.Forwarded != policy.ForwardedNone {
		fields = x.appendForwarded(fields, hop.Forwarded)
	}
	return appendHTTP2(fields, hop.Fields)
}

func (x *stream) appendForwarded(fields []hpack.HeaderField, how policy.Forwarded) []hpack.HeaderField {
	from := x.source.Addr()
	if how == policy.ForwardedRFC {
		node := from.String()
		if !from.Is4() {
			node = `"[` + node + `]"`
		}
		return append(fields, hpack.HeaderField{Name: "forwarded", Value: "for=" + node + ";proto=http"})
	}
	fields = append(fields, hpack.HeaderField{Name: "x-forwarded-for", Value: from.String()})
	for name, value := range map[string]string{"x-forwarded-proto": "http", "x-forwarded-host": x.head.fields.get(":authority")} {
		if x.head.fields.get(name) == "" {
			fields = append(fields, hpack.HeaderField{Name: name, Value: value})
		}
	}
	return fields
}

func appendHTTP2(dst []hpack.HeaderField, fields []Field) []hpack.HeaderField {
	for _, f := range fields {
		dst = append(dst, hpack.HeaderField{Name: f.Name, Value: string(f.Value)})
	}
	return dst
}

// limitLocked ends the call when its time is out: the policy's, or the caller's own.
func (x *stream) limitLocked(limit time.Time) {
	if x.deadline != nil {
		return
	}
	if d, ok := grpcTimeout(x.head.fields.get("grpc-timeout")); ok {
		if own := time.Now().Add(d); limit.IsZero() || own.Before(limit) {
			limit = own
		}
	}
	if !limit.IsZero() {
		x.deadline = time.AfterFunc(time.Until(limit), x.late)
	}
}

// grpcTimeout reads the field grpc-timeout: up to eight digits, and a unit.
func grpcTimeout(v string) (time.Duration, bool) {
	if len(v) < 2 || len(v) > 9 {
		return 0, false
	}
	n, err := strconv.ParseUint(v[:len(v)-1], 10, 32)
	unit, ok := map[byte]time.Duration{'n': time.Nanosecond, 'u': time.Microsecond, 'm': time.Millisecond, 'S': time.Second, 'M': time.Minute, 'H': time.Hour}[v[len(v)-1]]
	if err != nil || !ok || v[0] == '+' || n > uint64(1<<62/unit) {
		return 0, false
	}
	return time.Duration(n) * unit, true
}

// fromCaller takes in a part of the request's body.
func (x *stream) fromCaller(p []byte, end bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.upEnd = x.upEnd || end
	if x.over {
		x.down.Consumed(len(p))
		return
	}
	if x.spilt = x.spilt || len(x.kept)+len(p) > keptLimit; !x.spilt {
		x.kept = append(x.kept, p...)
	} else {
		x.kept = nil
	}
	if x.up == nil || len(x.toUp) > 0 {
		x.toUp = append(x.toUp, p...)
		return
	}
	n := x.up.Write(p, end)
	x.down.Consumed(n)
	x.toUp = append(x.toUp, p[n:]...)
}

func (x *stream) trailersFromCaller(fields []hpack.HeaderField) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.upEnd, x.upTrailers = true, passed(nil, fields)
	if x.up != nil && !x.over {
		x.pushUpLocked()
	}
}

// pushUpLocked sends what waits.
func (x *stream) pushUpLocked() {
	trailers := len(x.upTrailers) > 0
	if len(x.toUp) > 0 || x.upEnd && !trailers {
		n := x.up.Write(x.toUp, x.upEnd && !trailers)
		x.down.Consumed(n)
		x.toUp = x.toUp[:copy(x.toUp, x.toUp[n:])]
	}
	if trailers && len(x.toUp) == 0 {
		x.up.WriteHeaders(x.upTrailers, true)
		x.upTrailers = nil
	}
}

func (x *stream) upstreamTakesMore(s *h2.Stream) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.up == s && !x.over && (len(x.toUp) > 0 || len(x.upTrailers) > 0) {
		x.pushUpLocked()
	}
}

// fromUpstream takes in the head of a response.
func (x *stream) fromUpstream(s *h2.Stream, fields []hpack.HeaderField, end bool) {
	x.mu.Lock()
	if x.up != s || x.over {
		x.mu.Unlock()
		return
	}
	status, _ := strconv.Atoi(fields[0].Value)
	if status < 200 {
		x.down.WriteHeaders(passed(nil, fields), false)
		x.mu.Unlock()
		return
	}
	x.answer = streamAnswer{fields, status}
	added, no := x.call.Answered(&x.answer, time.Now())
	if no != nil {
		x.up = nil
		x.mu.Unlock()
		if !end {
			s.Reset(http2.ErrCodeCancel)
		}
		x.again(no)
		return
	}
	x.answered = true
	x.down.WriteHeaders(appendHTTP2(passed(make([]hpack.HeaderField, 0, len(fields)+1), fields), added), end)
	x.mu.Unlock()
	if end {
		x.complete()
	}
}

// passed appends the fields that are for the other end, too.
func passed(dst, fields []hpack.HeaderField) []hpack.HeaderField {
	for _, f := range fields {
		if !strings.HasPrefix(f.Name, Prefix) && !strings.HasPrefix(f.Name, "endpoint-load-metrics") {
			dst = append(dst, f)
		}
	}
	return dst
}

// body takes in a part of the response's body.
func (x *stream) body(s *h2.Stream, p []byte, end bool) {
	x.mu.Lock()
	if x.up != s || x.over {
		x.mu.Unlock()
		s.Consumed(len(p))
		return
	}
	n := 0
	if len(x.toDown) == 0 {
		n = x.down.Write(p, end)
		s.Consumed(n)
	}
	x.toDown = append(x.toDown, p[n:]...)
	x.downEnd = end
	done := end && len(x.toDown) == 0
	x.mu.Unlock()
	if done {
		x.complete()
	}
}

func (x *stream) trailers(s *h2.Stream, fields []hpack.HeaderField) {
	x.mu.Lock()
	if x.up != s || x.over {
		x.mu.Unlock()
		return
	}
	x.trailing, x.downEnd, x.downTrailers = fields, true, passed(nil, fields)
	done := x.pushDownLocked()
	x.mu.Unlock()
	if done {
		x.complete()
	}
}

// pushDownLocked passes on what waits, and reports whether that was all.
func (x *stream) pushDownLocked() (done bool) {
	trailers := x.trailing != nil
	if len(x.toDown) > 0 {
		n := x.down.Write(x.toDown, x.downEnd && !trailers)
		if x.up != nil {
			x.up.Consumed(n)
		}
		x.toDown = x.toDown[:copy(x.toDown, x.toDown[n:])]
	}
	if len(x.toDown) > 0 || !x.downEnd {
		return false
	}
	if trailers {
		if len(x.downTrailers) > 0 {
			x.down.WriteHeaders(x.downTrailers, true)
		} else {
			x.down.Write(nil, true)
		}
	}
	return true
}

func (x *stream) callerTakesMore() {
	x.mu.Lock()
	done := false
	if !x.over && len(x.toDown) > 0 {
		done = x.pushDownLocked()
	}
	x.mu.Unlock()
	if done {
		x.complete()
	}
}

// complete ends a call whose response was passed on whole.
func (x *stream) complete() {
	x.mu.Lock()
	up, unfinished := x.up, !x.upEnd || len(x.toUp) > 0
	x.mu.Unlock()
	if unfinished { // the response came early, and nobody wants the rest (RFC 9113, 8.1)
		if up != nil {
			up.Reset(http2.ErrCodeNo)
		}
		x.down.Reset(http2.ErrCodeNo)
	}
	x.end(fault.None)
}

// callerLeft ends a call that the caller does not want any more.
func (x *stream) callerLeft(http2.ErrCode) {
	x.mu.Lock()
	x.left = true
	up, cancel, placing := x.up, x.cancel, x.placing
	x.mu.Unlock()
	if up != nil {
		up.Reset(http2.ErrCodeCancel)
	}
	if cancel != nil {
		cancel()
	}
	if up != nil || !placing {
		x.end(fault.Canceled)
	}
}

// late ends a call whose time is out.
func (x *stream) late() {
	x.mu.Lock()
	up, over := x.up, x.over
	x.up = nil
	x.mu.Unlock()
	if over {
		return
	}
	if up != nil {
		up.Reset(http2.ErrCodeCancel)
	}
	x.refuse(lateFault())
}

// upstreamReset ends a try.
func (x *stream) upstreamReset(s *h2.Stream, code http2.ErrCode, unsent bool) {
	x.mu.Lock()
	if x.up != s || x.over {
		x.mu.Unlock()
		return
	}
	x.up = nil
	answered, left := x.answered, x.left
	hop := x.hop
	x.mu.Unlock()
	if unsent && !answered && !left {
		x.inBackground(func() { x.resend(&hop) })
		return
	}
	if answered && code == http2.ErrCodeNo { // all of the answer is there, or will not come
		code = http2.ErrCodeInternal
	}
	reason := fault.Reset
	if answered {
		x.down.Reset(resetCode(code))
		x.end(reason)
		return
	}
	x.refuse(fault.New(reason, "the stream to the replica was reset: %v", code))
}

// resetCode is what the caller is told: what the replica said, unless that concerns the connection that failed.
func resetCode(code http2.ErrCode) http2.ErrCode {
	if code == http2.ErrCodeConnect {
		return http2.ErrCodeInternal
	}
	return code
}

// resend sends a call to the same place again, on another connection: it was not looked at.
func (x *stream) resend(hop *Hop) {
	x.mu.Lock()
	spilt := x.spilt
	x.toUp = append(x.toUp[:0], x.kept...)
	x.resent++
	tries := x.resent
	x.mu.Unlock()
	if spilt || tries > 2 {
		x.refuse(fault.New(fault.Reset, "%s refuses streams", hop.To.target.Name))
		return
	}
	if !x.send(hop) {
		x.connect(hop)
	}
}

// refuse answers the call with a fault, or breaks the answer off that it has begun.
func (x *stream) refuse(f *fault.Error) {
	x.mu.Lock()
	answered, left := x.answered, x.left
	x.answered = true
	x.mu.Unlock()
	switch {
	case left:
		x.end(fault.Canceled)
		return
	case answered:
		x.down.Reset(http2.ErrCodeCancel)
	default:
		x.answerFault(f)
	}
	x.end(f.Reason)
}

func (x *stream) answerFault(f *fault.Error) {
	x.mu.Lock()
	unfinished := !x.upEnd
	x.mu.Unlock()
	fields := []hpack.HeaderField{{Name: ":status", Value: strconv.Itoa(f.Status())}}
	grpc := strings.HasPrefix(x.head.fields.get("content-type"), "application/grpc")
	if grpc {
		fields[0].Value = "200"
		fields = append(fields, hpack.HeaderField{Name: "content-type", Value: "application/grpc"},
			hpack.HeaderField{Name: "grpc-status", Value: strconv.Itoa(f.Reason.GRPC())},
			hpack.HeaderField{Name: "grpc-message", Value: grpcMessage("headroom: " + f.Detail)})
	}
	fields = append(fields, hpack.HeaderField{Name: FieldReason, Value: string(f.Reason)})
	if x.entry.Agents {
		fields = append(fields, hpack.HeaderField{Name: FieldDetail, Value: oneLine(f.Detail)})
	}
	if grpc || x.entry.Agents {
		x.down.WriteHeaders(fields, true)
	} else {
		text := fmt.Sprintf("headroom: %s\n", f.Detail)
		fields = append(fields, hpack.HeaderField{Name: "content-type", Value: "text/plain; charset=utf-8"},
			hpack.HeaderField{Name: "content-length", Value: strconv.Itoa(len(text))})
		x.down.WriteHeaders(fields, false)
		if n := x.down.Write([]byte(text), true); n < len(text) { // its window is tiny
			x.down.Reset(http2.ErrCodeCancel)
		}
	}
	if unfinished {
		x.down.Reset(http2.ErrCodeNo)
	}
}

// grpcMessage encodes text for the field grpc-message.
func grpcMessage(text string) string { return strings.ReplaceAll(url.QueryEscape(text), "+", "%20") }

// end accounts for the call, once.
func (x *stream) end(reason fault.Reason) {
	x.mu.Lock()
	if x.over {
		x.mu.Unlock()
		return
	}
	x.over = true
	x.toUp, x.toDown, x.kept = nil, nil, nil
	if x.deadline != nil {
		x.deadline.Stop()
	}
	e := Ending{Reason: reason}
	if x.trailing != nil {
		e.Trailers = x.trailing
	}
	x.mu.Unlock()
	x.call.End(e, time.Now())
}
