package transport

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/identity"
	"github.com/headroom-mesh/headroom/dataplane/sockets"
	"github.com/prometheus/client_golang/prometheus"
)

// MutualConfig configures a Mutual.
type MutualConfig struct {
	Identity *identity.Source
	// Permissive also takes connections in the clear, and dials agents so that have no TLS: for the time in which a mesh
	// gets its certificates. Default: TLS only.
	Permissive bool
	// NamesAt returns the names that the agent at an address may have. Default: any of the trust domain.
	NamesAt func(agent netip.AddrPort) identity.Names
	// Mark is set on the connections that are dialed (sockets.Mark). Default none.
	Mark    uint32
	Metrics prometheus.Registerer // nil: not exported
}

// Mutual is a Transport over TLS 1.3, whose two ends prove who they are. The protocol is agreed on by ALPN. As a client
// learns of its refusal only after the handshake, Dial waits for a first byte, by which the server says that all is well:
// what is sent on a connection that Dial has returned has not been sent in vain.
type Mutual struct {
	cfg     MutualConfig
	server  *tls.Config
	peers   peers
	metrics *mutualMetrics
}

var _ Transport = (*Mutual)(nil)

// welcome is what a server says first.
const welcome = 0x06

// tlsHandshake is the first byte of a connection that begins TLS.
const tlsHandshake = 0x16

// refusal is an error about which somebody has to do something: the two ends don't take one another.
type refusal struct {
	reason string // a word
	text   string
	err    error // may be nil
}

func (r *refusal) Error() string { return r.text }

func (r *refusal) Unwrap() error { return r.err }

// Lasting reports whether it may not also be that the other end is just about to end.
func (r *refusal) Lasting() bool { return r.reason != notTLS }

// NewMutual returns a Mutual for connections in either direction.
func NewMutual(cfg MutualConfig) *Mutual {
	if cfg.NamesAt == nil {
		cfg.NamesAt = func(netip.AddrPort) identity.Names { return identity.Names{} }
	}
	var names []string
	for _, p := range protocols() {
		names = append(names, string(p))
	}
	return &Mutual{cfg: cfg, server: cfg.Identity.Server(names...), metrics: newMutualMetrics(cfg.Metrics)}
}

// Dial connects to an agent for one protocol. The connection is a *tls.Conn, unless it is one in the clear.
func (m *Mutual) Dial(ctx context.Context, agent netip.AddrPort, p Protocol) (net.Conn, error) {
	return m.dial(ctx, agent, p, identity.Workload{})
}

// As returns what dials with a workload's certificate, or the node's if there is none for workloads.
func (m *Mutual) As(w identity.Workload) Dialer {
	if w == (identity.Workload{}) {
		return m
	}
	return forWorkload{m, w}
}

type forWorkload struct {
	*Mutual
	workload identity.Workload
}

// Dial is like that of Mutual.
func (f forWorkload) Dial(ctx context.Context, agent netip.AddrPort, p Protocol) (net.Conn, error) {
	return f.dial(ctx, agent, p, f.workload)
}

func (m *Mutual) dial(ctx context.Context, agent netip.AddrPort, p Protocol, w identity.Workload) (net.Conn, error) {
	if m.cfg.Permissive && m.peers.isPlain(agent, time.Now()) {
		return m.dialPlain(ctx, agent, p)
	}
	c, err := m.dialTLS(ctx, agent, p, w)
	if err == nil {
		return c, nil
	}
	if r, ok := errors.AsType[*refusal](err); ok {
		if r.reason == notTLS && m.cfg.Permissive && m.peers.failed(agent, time.Now()) {
			return m.dialPlain(ctx, agent, p)
		}
		m.metrics.refused(outbound, r.reason)
	}
	return nil, err
}

func (m *Mutual) dialPlain(ctx context.Context, agent netip.AddrPort, p Protocol) (net.Conn, error) {
	c, err := Plain{Mark: m.cfg.Mark}.Dial(ctx, agent, p)
	if err == nil {
		m.metrics.began(outbound, inTheClear)
	}
	return c, err
}

func (m *Mutual) dialTLS(ctx context.Context, agent netip.AddrPort, p Protocol, w identity.Workload) (net.Conn, error) {
	us, err := m.cfg.Identity.Current().As(w, time.Now())
	if err != nil {
		return nil, fmt.Errorf("get a certificate for workload %s: %w", w, err)
	}
	raw, err := dial(ctx, agent, p, m.cfg.Mark)
	if err != nil {
		return nil, err
	}
	c := tls.Client(raw, us.Client(string(p), m.cfg.NamesAt(agent)))
	err = within(ctx, raw, func() error { return m.greet(c, us) })
	if err != nil {
		raw.Close()
		return nil, fmt.Errorf("begin %s with agent %v: %w", p, agent, err)
	}
	if m.cfg.Permissive {
		m.peers.succeeded(agent)
	}
	m.metrics.began(outbound, kind(c))
	return c, nil
}

// greet returns when the other end has taken our certificate.
func (m *Mutual) greet(c *tls.Conn, us *identity.Set) error {
	if err := c.Handshake(); err != nil {
		return dialled(err)
	}
	var first [1]byte
	if _, err := io.ReadFull(c, first[:]); err != nil {
		if isAlert(err) {
			return &refusal{reason: "refused", err: err, text: refusedText(us, err)}
		}
		return fmt.Errorf("wait for the agent to take our certificate: %w", err)
	}
	if first[0] != welcome {
		return &refusal{reason: "protocol", text: fmt.Sprintf("it began with byte %#x: not an agent of a compatible version of headroom", first[0])}
	}
	return nil
}

// refusedText says what this end knows of the reason: TLS has no words for more.
func refusedText(us *identity.Set, err error) string {
	if us.Expired(time.Now()) {
		return fmt.Sprintf("it refuses our certificate: that of %s expired at %s", us.ID, us.Expires.UTC().Format(time.RFC3339))
	}
	return fmt.Sprintf("it refuses our certificate, that of %s, issued by %q; its log says why (%v)", us.ID, us.Issuer, err)
}

const notTLS = "not_tls"

// dialled gives words to why a handshake failed where it was begun.
func dialled(err error) error {
	r, refused := errors.AsType[*identity.Refusal](err)
	_, garbled := errors.AsType[tls.RecordHeaderError](err)
	switch {
	case refused:
		return &refusal{reason: string(r.Reason), err: err, text: "not taken for that agent: " + r.Error()}
	case isAlert(err) && strings.Contains(err.Error(), "no application protocol"):
		return &refusal{reason: "protocol", err: err, text: "it does not know this protocol: is it an older version?"}
	case garbled, errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return &refusal{reason: notTLS, err: err, text: fmt.Sprintf("it does not answer in TLS (%v): does it run with --mtls off?", err)}
	}
	return fmt.Errorf("TLS handshake: %w", err)
}

// isAlert reports whether the other end has said that something is wrong.
func isAlert(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return ok && op.Op == "remote error"
}

// Accept finishes on c what the other end's Dial began.
func (m *Mutual) Accept(ctx context.Context, raw net.Conn) (net.Conn, Protocol, error) {
	c, p, err := m.accept(ctx, raw)
	if err == nil {
		return c, p, nil
	}
	raw.Close()
	if r, ok := errors.AsType[*refusal](err); ok {
		m.metrics.refused(inbound, r.reason)
	}
	return nil, "", fmt.Errorf("accept from %v: %w", raw.RemoteAddr(), err)
}

func (m *Mutual) accept(ctx context.Context, raw net.Conn) (net.Conn, Protocol, error) {
	watch(raw)
	var first byte
	err := within(ctx, raw, func() (err error) {
		first, raw, err = peek(raw)
		return err
	})
	switch {
	case err != nil:
		return nil, "", fmt.Errorf("read the first byte: %w", err)
	case first == tlsHandshake:
		return m.acceptTLS(ctx, raw)
	case !m.cfg.Permissive && first == preface("")[0]:
		return nil, "", &refusal{reason: inTheClear, text: "it is in the clear, and this agent takes none (--mtls strict): give the other one a certificate (--tls, --ca), or start this one with --mtls permissive until it has one"}
	}
	c, p, err := Plain{}.Accept(ctx, raw)
	if err == nil {
		m.metrics.began(inbound, inTheClear)
	}
	return c, p, err
}

func (m *Mutual) acceptTLS(ctx context.Context, raw net.Conn) (net.Conn, Protocol, error) {
	c := tls.Server(sockets.Wired(raw), m.server)
	err := within(ctx, raw, func() error {
		if err := c.Handshake(); err != nil {
			return accepted(err)
		}
		if err := mayAsk(c); err != nil {
			return err
		}
		_, err := c.Write([]byte{welcome})
		return err
	})
	if err != nil {
		return nil, "", err
	}
	if tcp, ok := raw.RemoteAddr().(*net.TCPAddr); ok && m.cfg.Permissive {
		m.peers.heard(tcp.AddrPort().Addr().Unmap())
	}
	m.metrics.began(inbound, kind(c))
	return c, Protocol(c.ConnectionState().NegotiatedProtocol), nil
}

// mayAsk refuses to workloads all but what carries requests: probes and RPC are for agents.
func mayAsk(c *tls.Conn) error {
	p := Protocol(c.ConnectionState().NegotiatedProtocol)
	if id := identity.OfPeer(c); identity.IsWorkload(id) && !p.carriesRequests() {
		return &refusal{reason: string(identity.WrongName), text: fmt.Sprintf("refused: the certificate is that of %s, a workload, and %s is for agents", id, p)}
	}
	return nil
}

// accepted gives words to why a handshake failed where it was accepted.
func accepted(err error) error {
	r, refused := errors.AsType[*identity.Refusal](err)
	switch {
	case refused:
		return &refusal{reason: string(r.Reason), err: err, text: "refused: " + r.Error()}
	case isAlert(err):
		return &refusal{reason: "refused", err: err, text: fmt.Sprintf("it does not take our certificate; its log, or the answers to its callers, say why (%v)", err)}
	case strings.Contains(err.Error(), "didn't provide a certificate"):
		return &refusal{reason: string(identity.Missing), err: err, text: "refused: no certificate was shown"}
	case strings.Contains(err.Error(), "unsupported application protocols"):
		return &refusal{reason: "protocol", err: err, text: fmt.Sprintf("it wants a protocol that this agent does not know; is it a newer version? (%v)", err)}
	}
	return fmt.Errorf("TLS handshake: %w", err)
}

// How a connection began.
const (
	fullHandshake = "full"
	resumed       = "resumed"
	inTheClear    = "plain"
)

func kind(c *tls.Conn) string {
	if c.ConnectionState().DidResume {
		return resumed
	}
	return fullHandshake
}
