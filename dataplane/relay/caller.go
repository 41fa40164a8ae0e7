package relay

import (
	"net"

	"github.com/headroom-mesh/headroom/dataplane/identity"
)

// Caller is who makes a call.
type Caller struct {
	// ID is proven by the certificate of the connection or, if the caller is on this node, vouched for by this agent. Zero: nobody
	// knows.
	ID identity.ID
	// Workload is the one on this node that calls with a certificate of its own. Zero: none does.
	Workload identity.Workload
}

// ofWorkload returns the connection itself, and whose it is.
func ofWorkload(c net.Conn) (net.Conn, identity.Workload) {
	if w, ok := c.(identity.WorkloadConn); ok {
		return w.Conn, w.Workload
	}
	return c, identity.Workload{}
}

// callerOn finds out who calls on a connection.
func (e *Engine) callerOn(c net.Conn, w identity.Workload, entry *Entry) Caller {
	switch {
	case e.cfg.Identity == nil || entry.Strangers:
		return Caller{}
	case entry.Agents:
		return Caller{ID: identity.OfPeer(c)}
	}
	us := e.cfg.Identity.Current()
	if !us.HasWorkloads() {
		w = identity.Workload{}
	}
	id, _ := us.IDOf(w) // zero if the workload's name is none for a certificate, as whoever dials will say
	return Caller{ID: id, Workload: w}
}

// fieldCertificate tells a replica who calls, as Envoy has it. Only the agent beside it sets it.
const fieldCertificate = "x-forwarded-client-cert"

// hidesCertificate reports whether what the caller says there is dropped: the replica might believe it.
func (h *Hop) hidesCertificate() bool { return h.Certified || h.Forwarded.Tells() }

// certificateOf appends what the field says of a caller.
func (e *Engine) certificateOf(dst []byte, c *Caller) []byte {
	dst = append(append(dst, "By="...), e.cfg.Identity.Current().ID.String()...)
	return append(append(dst, ";URI="...), c.ID.String()...)
}

// appendCertificate appends the field.
func (s *session) appendCertificate(dst []byte) []byte {
	dst = append(dst, "X-Forwarded-Client-Cert: "...)
	return append(s.engine.certificateOf(dst, &s.caller), "\r\n"...)
}
