package relay

import (
	"errors"
	"net/http"
	"net/netip"
	"os"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/headroom-mesh/headroom/dataplane/h1"
	"github.com/headroom-mesh/headroom/dataplane/sniff"
)

// tcpHead is what is known of a connection of bytes.
type tcpHead struct {
	name   string // by which the caller asks for it, in TLS
	source netip.AddrPort
	caller *Caller
}

var _ Head = (*tcpHead)(nil)

func (h *tcpHead) Protocol() Protocol                        { return TCP }
func (h *tcpHead) Method(dst []byte) []byte                  { return dst }
func (h *tcpHead) Authority(dst []byte) []byte               { return append(dst, h.name...) }
func (h *tcpHead) Path(dst []byte) []byte                    { return dst }
func (h *tcpHead) Source() netip.AddrPort                    { return h.source }
func (h *tcpHead) Caller() *Caller                           { return h.caller }
func (h *tcpHead) Field(dst []byte, _ string) ([]byte, bool) { return dst, false }

// serveTCP carries the connection as one call, unless the caller speaks HTTP after all.
func (s *session) serveTCP() {
	s.acquire()
	h := &tcpHead{source: s.source, caller: &s.caller}
	if !s.readServerName(h) {
		return
	}
	now := time.Now()
	if !s.place.waits(nothing, now) { // nobody looks whether the caller has hung up: it may have closed its direction only
		return
	}
	call := s.entry.Router.Begin(h, now)
	e, http := s.carryTCP(call)
	call.End(e, time.Now())
	switch {
	case http:
		s.serveDetected()
	case e.Reason != fault.None:
		s.conn.reset()
	}
}

// readServerName finds out whom TLS is for, where only that tells.
func (s *session) readServerName(h *tcpHead) bool {
	for s.entry.Service == nil {
		name, p := sniff.ServerName(s.in.bytes())
		if p != sniff.More {
			h.name = name
			return true
		}
		if s.in.fill(s.conn) != nil {
			return false
		}
	}
	return true
}

// carryTCP reports whether the caller speaks HTTP: then nothing has come of the call.
func (s *session) carryTCP(call Call) (e Ending, http bool) {
	up, hop, failed := s.open(call)
	if failed == nil {
		defer up.drop()
		http, failed = s.speaksHTTP(up)
	}
	switch {
	case failed != nil:
		s.engine.cfg.Log.Debug("can't carry a connection", "peer", s.source, "reason", failed.Reason, "err", failed.Detail)
		return Ending{Reason: failed.Reason}, false
	case http:
		return Ending{Reason: fault.Canceled}, true
	}
	x := exchange{session: s, call: call, hop: &hop, up: up}
	return x.tunnel(), false
}

// open opens a connection for the call.
func (s *session) open(call Call) (up *upstreamConn, hop Hop, failed *fault.Error) {
	for {
		if hop, failed = s.route(call, failed); failed != nil {
			return nil, hop, failed
		}
		if up, _, failed = s.reach(call, &hop, s.source); failed == nil || failed.Reason == fault.Canceled {
			return up, hop, failed
		}
	}
}

// connect makes a tunnel for CONNECT.
func (s *session) connect(call Call, hop *Hop) (e Ending, keep bool, failed *fault.Error) {
	up, fields, failed := s.reach(call, hop, s.callerOf(&s.head))
	if failed != nil {
		return e, false, failed
	}
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
	if up, failed = s.dial(hop, TCP); failed != nil {
		return nil, nil, failed
	}
	if failed = introduce(up, from); failed == nil {
		fields, failed = call.Answered(connected{}, time.Now())
	}
	if failed != nil {
		up.drop()
		return nil, nil, failed
	}
	return up, fields, nil
}

// introduce tells a replica that wants to know whose connection this is.
func introduce(up *upstreamConn, from netip.AddrPort) *fault.Error {
	target := &up.upstream.target
	if !target.ProxyHeader {
		return nil
	}
	if _, err := up.Write(sniff.AppendProxyHeader(nil, from, addrPort(up.RemoteAddr()))); err != nil {
		return unconnected(target, err)
	}
	return nil
}

// connected is the answer of a replica that takes a connection.
type connected struct{}

func (connected) Status() int                               { return http.StatusOK }
func (connected) Field(dst []byte, _ string) ([]byte, bool) { return dst, false }

// reachByAgent asks the agent of the replica to connect.
func (s *session) reachByAgent(call Call, hop *Hop, from netip.AddrPort) (*upstreamConn, []Field, *fault.Error) {
	if up := hop.To.idleConn(); up != nil {
		fields, failed := s.ask(call, hop, up, from)
		if failed == nil || failed.Reason != stale {
			return keptIf(failed == nil, up), fields, failed
		}
		up.drop()
	}
	up, failed := s.dial(hop, HTTP1)
	if failed != nil {
		return nil, nil, failed
	}
	fields, failed := s.ask(call, hop, up, from)
	if failed != nil && failed.Reason == stale {
		failed.Reason = fault.ConnectFailed // nothing was sent to the replica
	}
	return keptIf(failed == nil, up), fields, failed
}

// keptIf returns the connection, or drops it.
func keptIf(ok bool, up *upstreamConn) *upstreamConn {
	if ok {
		return up
	}
	up.drop()
	return nil
}

// ask asks an agent, by CONNECT, for a connection to the replica.
func (s *session) ask(call Call, hop *Hop, up *upstreamConn, from netip.AddrPort) ([]Field, *fault.Error) {
	s.up.reset()
	if !s.waitsOn(up) {
		return nil, fault.New(fault.Canceled, "the caller went away")
	}
	defer s.waitsOn(nil)
	if !hop.Deadline.IsZero() {
		up.SetDeadline(hop.Deadline)
	}
	out := append(s.out[:0], "CONNECT replica.mesh:0 HTTP/1.1\r\nHost: replica.mesh:0\r\n"...)
	if from.IsValid() {
		out = h1.AppendField(out, FieldSource, from.AppendTo(nil))
	}
	s.out = append(appendFields(out, hop.Fields), "\r\n"...)
	if _, err := up.Write(s.out); err != nil {
		return nil, s.unconnected(hop, err)
	}
	if failed := s.readAnswer(hop, up); failed != nil {
		return nil, failed
	}
	fields, failed := call.Answered(&s.resp, time.Now())
	if failed == nil && s.resp.Code/100 != 2 {
		failed = fault.New(fault.MalformedResponse, "%s answers CONNECT with %d", hop.To.target.Name, s.resp.Code)
	}
	return fields, failed
}

// readAnswer reads what an agent answers to CONNECT.
func (s *session) readAnswer(hop *Hop, up *upstreamConn) *fault.Error {
	for {
		n, err := s.resp.Parse(s.up.bytes(), []byte(http.MethodConnect))
		if err != nil {
			return fault.New(fault.MalformedResponse, "%s answers what is not HTTP: %v", hop.To.target.Name, err)
		}
		if n > 0 {
			s.up.use(n)
			return nil
		}
		if err := s.up.fill(up.socket); err != nil {
			return s.unconnected(hop, err)
		}
	}
}

// unconnected returns the fault that it amounts to if the connection to an agent breaks before it has connected.
func (s *session) unconnected(hop *Hop, err error) *fault.Error {
	switch {
	case s.isGone():
		return fault.New(fault.Canceled, "the caller went away")
	case !hop.Deadline.IsZero() && errors.Is(err, os.ErrDeadlineExceeded):
		return lateFault()
	}
	return fault.New(stale, "the connection to %s broke: %v", hop.To.target.Name, innermost(err))
}
