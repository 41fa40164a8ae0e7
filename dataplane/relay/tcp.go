package relay

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/headroom-mesh/headroom/dataplane/sniff"
)

// protocol finds out what the caller speaks. What was read for that is in s.in. Unknown means that the connection is over.
func (s *session) protocol() Protocol {
	if s.entry.Protocol != Unknown {
		return s.entry.Protocol
	}
	if s.entry.Service == nil {
		if !s.awaitFirst() {
			return Unknown
		}
		return s.detect()
	}
	service := s.entry.Service()
	if service.Protocol != Unknown {
		return service.Protocol
	}
	limit := time.Now().Add(max(service.DetectTimeout, time.Millisecond))
	s.conn.SetReadDeadline(limit)
	if s.awaitFirst() {
		return s.detect()
	}
	if s.isOver() || time.Now().Before(limit) {
		return Unknown
	}
	return TCP
}

// detect tells the protocol by the first bytes. If none came in time, it is that of a server that speaks first, or of a
// caller that is slow: serveTCP finds out.
func (s *session) detect() Protocol {
	for {
		switch sniff.Detect(s.in.bytes()) {
		case sniff.HTTP1:
			s.conn.SetReadDeadline(time.Time{})
			return HTTP1
		case sniff.HTTP2:
			s.conn.SetReadDeadline(time.Time{})
			return HTTP2
		case sniff.TLS:
			return TCP
		case sniff.Opaque:
			return s.opaque()
		}
		if err := s.in.fill(s.conn); err != nil {
			s.conn.SetReadDeadline(time.Time{})
			if s.entry.Service != nil && errors.Is(err, os.ErrDeadlineExceeded) && !s.isOver() {
				return TCP
			}
			return s.opaque()
		}
	}
}

func (s *session) isOver() bool { return s.place.word.Load()%states == over }

// opaque is what bytes are that say nothing: only one who knows where they go can take them. HTTP/1 refuses them.
func (s *session) opaque() Protocol {
	if s.entry.Service != nil {
		return TCP
	}
	return HTTP1
}

// taken returns what was read of the caller.
func (s *session) taken() []byte {
	if s.work == nil {
		return nil
	}
	return bytes.Clone(s.in.bytes())
}

// tcpHead is what is known of a connection of bytes.
type tcpHead struct {
	name   string // by which the caller asks for it, in TLS
	source netip.AddrPort
}

var _ Head = (*tcpHead)(nil)

func (h *tcpHead) Protocol() Protocol                        { return TCP }
func (h *tcpHead) Method(dst []byte) []byte                  { return dst }
func (h *tcpHead) Authority(dst []byte) []byte               { return append(dst, h.name...) }
func (h *tcpHead) Path(dst []byte) []byte                    { return dst }
func (h *tcpHead) Source() netip.AddrPort                    { return h.source }
func (h *tcpHead) Field(dst []byte, _ string) ([]byte, bool) { return dst, false }

// serveTCP carries the connection as one call.
func (s *session) serveTCP() {
	s.acquire()
	s.place.waits(nothing, time.Now())
	h := &tcpHead{source: s.source}
	if !s.readServerName(h) {
		return
	}
	s.conn.SetReadDeadline(time.Time{})
	now := time.Now()
	s.place.waits(answer, now)
	call := s.entry.Router.Begin(h, now)
	up, hop, failed := s.open(call)
	if failed != nil {
		call.End(Ending{Reason: failed.Reason}, time.Now())
		s.engine.cfg.Log.Debug("can't carry a connection", "peer", s.source, "reason", failed.Reason, "err", failed.Detail)
		s.abort()
		return
	}
	defer s.up.reset()
	defer up.drop()
	if s.in.r == s.in.w && s.speaksHTTP(up) {
		call.End(Ending{Reason: fault.Canceled}, time.Now())
		up.drop()
		s.up.reset()
		s.serveDetected()
		return
	}
	x := exchange{session: s, call: call, hop: &hop, up: up}
	call.End(x.tunnel(), time.Now())
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

// abort closes the connection in a way that nobody takes for an answer.
func (s *session) abort() {
	if tcp, ok := below(s.conn.Conn).(*net.TCPConn); ok {
		tcp.SetLinger(0)
	}
	s.conn.Close()
}

// speaksHTTP waits for who speaks first, and reports whether that is a caller who speaks HTTP: then nothing was sent to the
// replica. It returns at once if the service is known to speak bytes.
func (s *session) speaksHTTP(up *upstreamConn) bool {
	if s.entry.Service == nil {
		return false
	}
	service := s.entry.Service()
	if service.Protocol == TCP || s.up.w > s.up.r { // an agent's answer may have brought the replica's first bytes, too
		return false
	}
	ctx, cancel := context.WithCancel(context.Background())
	answered := make(chan struct{})
	s.server.wg.Go(func() {
		defer close(answered)
		s.up.fill(up.socket)
		if ctx.Err() == nil {
			s.conn.SetReadDeadline(past()) // the replica speaks first
		}
	})
	err := s.in.fill(s.conn)
	cancel()
	up.SetReadDeadline(past())
	<-answered
	up.SetReadDeadline(time.Time{})
	s.conn.SetReadDeadline(time.Time{})
	if err != nil || s.up.w > s.up.r {
		return false
	}
	s.conn.SetReadDeadline(time.Now().Add(max(service.DetectTimeout, time.Millisecond))) // for bytes that may be the start of several
	defer s.conn.SetReadDeadline(time.Time{})
	for {
		switch sniff.Detect(s.in.bytes()) {
		case sniff.HTTP1, sniff.HTTP2:
			return true
		case sniff.TLS, sniff.Opaque:
			return false
		}
		if s.in.fill(s.conn) != nil {
			return false
		}
	}
}

// serveDetected serves a caller of whom it is known by now that it speaks HTTP.
func (s *session) serveDetected() {
	if sniff.Detect(s.in.bytes()) == sniff.HTTP2 {
		begun := s.taken()
		s.release()
		s.serveHTTP2(begun)
		return
	}
	s.serveHTTP1()
}
