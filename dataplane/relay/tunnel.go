package relay

import (
	"io"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/headroom-mesh/headroom/dataplane/h1"
	"github.com/headroom-mesh/headroom/dataplane/sniff"
)

// upgrade passes on the change of protocols, and then bytes.
func (x *exchange) upgrade(fields []Field) Ending {
	s := x.session
	out := s.resp.Append(s.out[:0], h1.None)
	out = appendFields(out, fields)
	out = append(out, "Connection: Upgrade\r\n"...)
	out = h1.AppendField(out, "Upgrade", s.resp.Upgrade)
	s.out = append(out, "\r\n"...)
	x.stopUpload()
	if x.flush() != nil {
		return Ending{Reason: fault.Canceled}
	}
	if !s.body.done { // nobody could tell the rest of the request from what comes after it
		return Ending{Reason: fault.Reset}
	}
	return x.tunnel()
}

// tunnel passes bytes both ways until both ends are done.
func (x *exchange) tunnel() Ending {
	s := x.session
	x.tunneled = true
	s.place.waits(nothing, time.Now())
	x.up.SetDeadline(time.Time{})
	s.conn.SetDeadline(time.Time{})
	var wg sync.WaitGroup
	var upErr, downErr error
	wg.Go(func() {
		upErr = pour(x.up.socket, s.conn, s.in.bytes())
	})
	downErr = pour(s.conn, x.up.socket, s.up.bytes())
	wg.Wait()
	s.in.use(len(s.in.bytes()))
	switch {
	case s.isGone():
		return Ending{Reason: fault.Canceled}
	case upErr != nil || downErr != nil:
		return Ending{Reason: fault.Reset}
	}
	return Ending{}
}

// pour copies all that comes from one connection to another, and then tells the other that there is no more. If that
// fails, both are of no use any more.
func pour(to, from *socket, early []byte) error {
	_, err := to.Write(early)
	if err == nil {
		err = copyRest(to, from)
	}
	if err == nil && to.closeWrite() == nil {
		return nil
	}
	to.Close()
	from.Close()
	return err
}

func copyRest(to, from *socket) error {
	if to.plain != nil && from.plain != nil {
		_, err := to.plain.ReadFrom(from.plain)
		return err
	}
	_, err := io.CopyBuffer(struct{ io.Writer }{to.Conn}, struct{ io.Reader }{from.Conn}, make([]byte, 2*bufferSize))
	return err
}

// connected is the answer of a replica that takes a connection.
type connected struct{}

func (connected) Status() int                               { return http.StatusOK }
func (connected) Field(dst []byte, _ string) ([]byte, bool) { return dst, false }

// connect makes a tunnel for CONNECT.
func (s *session) connect(call Call, hop *Hop) (e Ending, keep bool, failed *fault.Error) {
	up, fields, failed := s.reach(call, hop, s.callerOf(&s.head))
	if failed != nil {
		return e, false, failed
	}
	defer s.up.reset()
	defer up.drop()
	x := exchange{session: s, call: call, hop: hop, up: up}
	s.out = append(s.out[:0], "HTTP/1.1 200 OK\r\n"...)
	s.out = append(appendFields(s.out, fields), "\r\n"...)
	if x.flush() != nil {
		return Ending{Reason: fault.Canceled}, false, nil
	}
	return x.tunnel(), false, nil
}

// callerOf returns where a call for a tunnel comes from: another agent says so.
func (s *session) callerOf(h Head) netip.AddrPort {
	if s.entry.Agents {
		var scratch [64]byte
		text, _ := h.Field(scratch[:0], FieldSource)
		from, _ := netip.ParseAddrPort(string(text))
		return from
	}
	return s.source
}

// reach opens a connection for bytes to where the call goes, at first or in the end by way of an agent.
func (s *session) reach(call Call, hop *Hop, from netip.AddrPort) (up *upstreamConn, fields []Field, failed *fault.Error) {
	if hop.To.target.Agent {
		return s.reachByAgent(call, hop, from)
	}
	up, failed = s.dial(hop, TCP)
	if failed != nil {
		return nil, nil, failed
	}
	if hop.To.target.ProxyHeader {
		if _, err := up.Write(sniff.AppendProxyHeader(nil, from, addrPort(up.RemoteAddr()))); err != nil {
			up.drop()
			return nil, nil, fault.New(fault.ConnectFailed, "no connection to %s: %v", hop.To.target.Name, err)
		}
	}
	fields, failed = call.Answered(connected{}, time.Now())
	return up, fields, failed
}

// reachByAgent asks the agent of the replica to connect.
func (s *session) reachByAgent(call Call, hop *Hop, from netip.AddrPort) (*upstreamConn, []Field, *fault.Error) {
	if up := hop.To.idleConn(); up != nil {
		fields, failed := s.ask(call, hop, up, from)
		if failed == nil {
			return up, fields, nil
		}
		up.drop()
		if failed.Reason != stale {
			return nil, nil, failed
		}
	}
	up, failed := s.dial(hop, HTTP1)
	if failed != nil {
		return nil, nil, failed
	}
	fields, failed := s.ask(call, hop, up, from)
	if failed != nil {
		up.drop()
		if failed.Reason == stale {
			failed.Reason = fault.ConnectFailed // nothing was sent to the replica
		}
		return nil, nil, failed
	}
	return up, fields, nil
}

// ask asks an agent, by CONNECT, for a connection to the replica.
func (s *session) ask(call Call, hop *Hop, up *upstreamConn, from netip.AddrPort) ([]Field, *fault.Error) {
	if !s.waitsOn(up) {
		return nil, fault.New(fault.Canceled, "the caller went away")
	}
	defer s.waitsOn(nil)
	out := append(s.out[:0], "CONNECT replica.mesh:0 HTTP/1.1\r\nHost: replica.mesh:0\r\n"...)
	if from.IsValid() {
		out = h1.AppendField(out, FieldSource, from.AppendTo(nil))
	}
	s.out = append(appendFields(out, hop.Fields), "\r\n"...)
	if _, err := up.Write(s.out); err != nil {
		return nil, fault.New(stale, "the connection to %s broke: %v", hop.To.target.Name, err)
	}
	for {
		n, err := s.resp.Parse(s.up.bytes(), []byte(http.MethodConnect))
		if err != nil {
			return nil, fault.New(fault.MalformedResponse, "%s answers what is not HTTP: %v", hop.To.target.Name, err)
		}
		if n > 0 {
			s.up.use(n)
			break
		}
		if err := s.up.fill(up.socket); err != nil {
			if s.isGone() {
				return nil, fault.New(fault.Canceled, "the caller went away")
			}
			return nil, fault.New(stale, "the connection to %s broke: %v", hop.To.target.Name, err)
		}
	}
	fields, failed := call.Answered(&s.resp, time.Now())
	if failed == nil && s.resp.Code/100 != 2 {
		failed = fault.New(fault.MalformedResponse, "%s answers CONNECT with %d", hop.To.target.Name, s.resp.Code)
	}
	return fields, failed
}
