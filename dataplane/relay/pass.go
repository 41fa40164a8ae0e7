package relay

import (
	"bytes"
	"errors"
	"io"
	"net/netip"
	"os"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/headroom-mesh/headroom/dataplane/h1"
	"github.com/headroom-mesh/headroom/policy"
)

// maxVisits is how often a request may come through the mesh before that counts as a loop.
const maxVisits = 10

// How agents call themselves in the field Via.
const (
	viaName = " headroom"
	viaUs   = "1.1" + viaName
)

// looped reports whether the request has gone around in circles.
func (s *session) looped() bool {
	if s.entry.Agents {
		return false
	}
	n := 0
	for i := range s.head.Fields {
		if f := &s.head.Fields[i]; h1.Is(f.Name, "via") {
			n += visits(f.Value)
		}
	}
	return n >= maxVisits
}

// visits counts the elements of a Via field that stand for an agent.
func visits(via []byte) (n int) {
	for element := range bytes.SplitSeq(via, []byte(",")) {
		if bytes.HasSuffix(bytes.TrimRight(element, " \t"), []byte(viaName)) {
			n++
		}
	}
	return n
}

// appendHead appends the head of the request as the next station sees it.
func (s *session) appendHead(dst []byte, hop *Hop) []byte {
	switch hop.Forwarded {
	case policy.ForwardedXFF:
		s.head.Drop("x-forwarded-for") // which is part of the new one
	case policy.ForwardedRFC:
		s.head.Drop("forwarded")
	}
	if hop.hidesCertificate() {
		s.head.Drop(fieldCertificate)
	}
	dst = s.head.Append(dst)
	if !s.entry.Agents {
		dst = append(dst, "Via: "+viaUs+"\r\n"...)
	}
	if hop.Forwarded.Tells() {
		dst = s.appendForwarded(dst, hop.Forwarded)
	}
	if hop.Certified && !s.caller.ID.IsZero() {
		dst = s.appendCertificate(dst)
	}
	return append(appendFields(dst, hop.Fields), "\r\n"...)
}

func appendFields(dst []byte, fields []Field) []byte {
	for _, f := range fields {
		dst = h1.AppendField(dst, f.Name, f.Value)
	}
	return dst
}

// appendForwarded tells the replica where the caller is.
func (s *session) appendForwarded(dst []byte, how policy.Forwarded) []byte {
	if how == policy.ForwardedRFC {
		dst = s.appendJoined(dst, "Forwarded", "forwarded")
		dst = append(dst, "for="...)
		dst = appendNode(dst, s.source.Addr())
		return append(dst, ";proto=http\r\n"...)
	}
	dst = s.appendJoined(dst, "X-Forwarded-For", "x-forwarded-for")
	dst = s.source.Addr().AppendTo(dst)
	dst = append(dst, "\r\n"...)
	if _, ok := s.head.Field(nil, "x-forwarded-proto"); !ok {
		dst = append(dst, "X-Forwarded-Proto: http\r\n"...)
	}
	if _, ok := s.head.Field(nil, "x-forwarded-host"); !ok {
		dst = h1.AppendField(dst, "X-Forwarded-Host", s.head.Request.Authority)
	}
	return dst
}

// appendJoined begins a field with what the caller said in fields of that name, in one list, as many read only one.
func (s *session) appendJoined(dst []byte, name, lower string) []byte {
	dst = append(append(dst, name...), ": "...)
	for i := range s.head.Fields {
		if f := &s.head.Fields[i]; len(f.Value) > 0 && h1.Is(f.Name, lower) {
			dst = append(append(dst, f.Value...), ", "...)
		}
	}
	return dst
}

// appendNode appends an address as Forwarded has it (RFC 7239, 6).
func appendNode(dst []byte, a netip.Addr) []byte {
	if a.Is4() {
		return a.AppendTo(dst)
	}
	dst = a.AppendTo(append(dst, `"[`...))
	return append(dst, `]"`...)
}

// upload sends the rest of the request's body.
func (x *exchange) upload() {
	s := x.session
	for !s.body.done {
		if s.in.r == s.in.w && x.canCarryUp() && !x.carryUp() {
			return
		}
		if err := s.in.fill(s.conn); err != nil {
			x.callerFails(err)
			return
		}
		out, err := s.body.appendAvailable(s.up1[:0], &s.in)
		if err != nil {
			x.callerFails(err)
			return
		}
		if s.body.done {
			out = s.body.appendEnd(out)
			x.taken.Store(true)
		}
		s.up1 = out
		if len(out) == 0 {
			continue
		}
		if _, err := x.up.Write(out); err != nil {
			return // the answer tells, or that there is none
		}
	}
	x.delivered = true
}

// carryUp moves all but the end of the body, and reports whether it did. The end goes the ordinary way: so it is known that
// all was read before the replica, which has it then, can answer.
func (x *exchange) carryUp() bool {
	s := x.session
	s.body.spilt = true
	most := s.body.left - bufferSize
	var n int64
	var err error
	var failing *socket
	if s.conn.plain != nil && x.up.plain != nil {
		n, err = x.up.plain.ReadFrom(&io.LimitedReader{R: s.conn.plain, N: most})
	} else if n, failing, err = carryOn(x.up.socket, s.conn, most, &s.server.pieces); failing == x.up.socket {
		return false // the answer tells, or that there is none
	}
	s.body.left -= n
	if n == most {
		return true
	}
	if !errors.Is(err, os.ErrDeadlineExceeded) && (err == nil || failing == s.conn || s.conn.hungUp()) {
		x.callerFails(io.ErrUnexpectedEOF)
	}
	return false
}

// callerFails notes that the rest of the body will never come, and ends the wait for the answer.
func (x *exchange) callerFails(err error) {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return // it is not wanted any more
	}
	x.callers = callersFault(err)
	x.up.SetReadDeadline(past())
}

// stopUpload ends the upload: after it the session alone reads the caller's connection.
func (x *exchange) stopUpload() {
	if !x.uploading {
		return
	}
	select {
	case <-x.uploaded:
	default:
		x.conn.SetReadDeadline(past())
		x.up.SetWriteDeadline(past())
		<-x.uploaded
		x.conn.SetReadDeadline(time.Time{})
	}
}

// pass passes the answer on to the caller.
func (x *exchange) pass(fields []Field) Ending {
	s := x.session
	framing := s.resp.Framing
	if framing == h1.Chunked || framing == h1.UntilClose {
		framing = h1.Chunked
		if s.head.Minor == 0 {
			framing = h1.UntilClose
		}
	}
	x.keep = s.head.KeepAlive && framing != h1.UntilClose && !s.isLast() && (!x.uploading || x.taken.Load())
	out := s.resp.Append(s.out[:0], framing)
	out = appendFields(out, fields)
	switch {
	case !x.keep:
		out = append(out, "Connection: close\r\n"...)
	case s.head.Minor == 0:
		out = append(out, "Connection: keep-alive\r\n"...)
	}
	s.out = append(out, "\r\n"...)
	return x.passBody(framing)
}

// passBody passes on the body, after what s.out holds.
func (x *exchange) passBody(framing h1.Framing) Ending {
	s := x.session
	var err error
	switch s.resp.Framing {
	case h1.None:
		err = x.flush()
	case h1.Length:
		err = x.passLength(s.resp.Length)
	case h1.Chunked:
		s.reply.Reset()
		err = x.passChunked(framing)
	default:
		err = x.passRest(framing)
	}
	if err != nil && framing == h1.UntilClose {
		x.conn.discredit() // else the body would look whole
	}
	return x.ending(err)
}

// errCaller is what is wrong if the caller does not take its answer.
var errCaller = errors.New("the caller is gone")

func (x *exchange) flush() error {
	if len(x.out) == 0 {
		return nil
	}
	_, err := x.conn.Write(x.out)
	x.session.out = x.out[:0]
	if err != nil {
		return errCaller
	}
	return nil
}

// passLength passes on a body of a length.
func (x *exchange) passLength(left int64) error {
	s := x.session
	for {
		data := s.up.bytes()
		if int64(len(data)) > left {
			data = data[:left]
		}
		took := len(data)
		left -= int64(took)
		if len(s.out)+took <= cap(s.out) {
			s.out = append(s.out, data...)
			data = nil
		}
		s.up.use(took)
		if err := x.flushAnd(data); err != nil {
			return err
		}
		if left == 0 {
			return nil
		}
		if left >= worthCarrying {
			return x.carryDown(left)
		}
		if err := s.up.fill(x.up.socket); err != nil {
			return err
		}
	}
}

// flushAnd writes what was gathered, and then data.
func (x *exchange) flushAnd(data []byte) error {
	if err := x.flush(); err != nil || len(data) == 0 {
		return err
	}
	if _, err := x.conn.Write(data); err != nil {
		return errCaller
	}
	return nil
}

// carryDown moves the rest of the body.
func (x *exchange) carryDown(left int64) error {
	if x.conn.plain == nil || x.up.plain == nil {
		_, failing, err := carryOn(x.conn, x.up.socket, left, &x.server.pieces)
		if failing == x.conn {
			return errCaller
		}
		return err
	}
	n, err := x.conn.plain.ReadFrom(&io.LimitedReader{R: x.up.plain, N: left})
	switch {
	case err != nil && x.conn.hungUp():
		return errCaller
	case err != nil:
		return err
	case n < left:
		return io.ErrUnexpectedEOF
	}
	return nil
}

// passChunked passes on a chunked body, each chunk as it comes.
func (x *exchange) passChunked(framing h1.Framing) error {
	s := x.session
	for {
		data, n, done, err := s.reply.Next(s.up.bytes())
		if err != nil {
			return err
		}
		s.out = h1.AppendData(s.out, data, framing)
		s.up.use(n)
		if done {
			if framing == h1.Chunked {
				s.out = s.reply.AppendEnd(s.out)
			}
			return x.flush()
		}
		if n > 0 && len(s.out) < bufferSize {
			continue
		}
		if err := x.flush(); err != nil {
			return err
		}
		if n == 0 {
			if err := s.up.fill(x.up.socket); err != nil {
				return err
			}
		}
	}
}

// passRest passes on a body that ends with the connection.
func (x *exchange) passRest(framing h1.Framing) error {
	s := x.session
	for {
		s.out = h1.AppendData(s.out, s.up.bytes(), framing)
		s.up.use(len(s.up.bytes()))
		if err := x.flush(); err != nil {
			return err
		}
		err := s.up.fill(x.up.socket)
		if errors.Is(err, io.EOF) {
			if framing == h1.Chunked {
				s.out = append(s.out, "0\r\n\r\n"...)
			}
			return x.flush()
		}
		if err != nil {
			return err
		}
	}
}

// ending returns how the answer ended.
func (x *exchange) ending(err error) Ending {
	e := Ending{}
	if x.resp.Framing == h1.Chunked && len(x.reply.Trailers()) > 0 {
		e.Trailers = &x.reply
	}
	switch {
	case err == nil:
		x.whole = true
	case errors.Is(err, errCaller) || x.isGone() || x.conn.hungUp():
		e.Reason = fault.Canceled
		if !x.hop.Deadline.IsZero() && !time.Now().Before(x.hop.Deadline) {
			e.Reason = fault.Timeout
		}
	case !x.hop.Deadline.IsZero() && errors.Is(err, os.ErrDeadlineExceeded):
		e.Reason = fault.Timeout
	default:
		e.Reason = fault.Reset
		x.stopUpload()
		if x.callers != nil {
			e.Reason = fault.Canceled
		}
	}
	return e
}
