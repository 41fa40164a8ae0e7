package identity

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
)

// Workload is an application, named by what it runs as. The zero value is none: the node itself.
type Workload struct {
	Namespace, ServiceAccount string
}

func (w Workload) String() string { return w.Namespace + "/" + w.ServiceAccount }

// WorkloadConn is a connection of which the listener that returns it knows which workload has made it.
type WorkloadConn struct {
	net.Conn
	Workload Workload
}

// NetConn returns the connection itself.
func (c WorkloadConn) NetConn() net.Conn { return c.Conn }

// WorkloadID returns the ID of a workload.
func WorkloadID(d Domain, w Workload) (ID, error) {
	id, err := spiffeid.FromSegments(d, "ns", w.Namespace, "sa", w.ServiceAccount)
	if err != nil {
		return ID{}, fmt.Errorf("workload %s can't be part of a SPIFFE ID: want letters, digits, '-', '_' and '.'", w)
	}
	return id, nil
}

// IsWorkload reports whether an ID is that of a workload. No agent goes by one.
func IsWorkload(id ID) bool {
	part := strings.Split(id.Path(), "/")
	return len(part) == 5 && part[1] == "ns" && part[3] == "sa"
}

// Issue makes a certificate for a workload, with the roots that go with it.
type Issue func(id ID, now time.Time) (*Set, error)

// IssuedBy lets a Set, which nobody uses yet, have certificates for workloads as well.
func (s *Set) IssuedBy(issue Issue) *Set {
	s.workloads = &workloads{issue: issue, sets: map[Workload]*Set{}}
	return s
}

// HasWorkloads reports whether there are certificates for workloads.
func (s *Set) HasWorkloads() bool { return s.workloads != nil }

// As returns what a workload proves itself with: a certificate of its own, or that of its node if there is none for workloads.
func (s *Set) As(w Workload, now time.Time) (*Set, error) {
	if w == (Workload{}) || !s.HasWorkloads() {
		return s, nil
	}
	return s.workloads.of(s.ID.TrustDomain(), w, now)
}

// IDOf returns the ID of a workload, or of the node.
func (s *Set) IDOf(w Workload) (ID, error) {
	if w == (Workload{}) {
		return s.ID, nil
	}
	return WorkloadID(s.ID.TrustDomain(), w)
}

// workloads has the certificates of those that have called lately. They go with the node's, which is replaced, too.
type workloads struct {
	issue Issue

	mu sync.Mutex
	// mu guards the field below.
	sets map[Workload]*Set
}

// of returns the certificate of a workload: another one when two thirds of its life are over.
func (ws *workloads) of(d Domain, w Workload, now time.Time) (*Set, error) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if s := ws.sets[w]; s != nil && now.Before(s.Renewal()) {
		return s, nil
	}
	id, err := WorkloadID(d, w)
	if err != nil {
		return nil, err
	}
	s, err := ws.issue(id, now)
	if err != nil {
		return nil, err
	}
	ws.sets[w] = s
	return s, nil
}

// Renewal is when two thirds of the life of the certificate are over.
func (s *Set) Renewal() time.Time { return s.Begins.Add(s.Expires.Sub(s.Begins) * 2 / 3) }

// mayServe is a Refusal if the certificate is not good for the end that is dialled: a workload only dials.
func mayServe(id ID, leaf *x509.Certificate) error {
	if IsWorkload(id) {
		return refuse(WrongName, "the certificate is that of %s, a workload, and an agent is expected there", id)
	}
	forServers := func(u x509.ExtKeyUsage) bool { return u == x509.ExtKeyUsageServerAuth || u == x509.ExtKeyUsageAny }
	if len(leaf.ExtKeyUsage) > 0 && !slices.ContainsFunc(leaf.ExtKeyUsage, forServers) {
		return refuse(Unfit, "the certificate of %s, issued by %q, is not for servers", id, leaf.Issuer)
	}
	return nil
}

// OfPeer returns who is at the other end of a connection, as its certificate said that was verified when it began. It
// returns the zero ID if the connection is in the clear.
func OfPeer(c net.Conn) ID {
	for c != nil {
		if t, ok := c.(interface{ ConnectionState() tls.ConnectionState }); ok {
			return ofState(t.ConnectionState())
		}
		over, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			break
		}
		c = over.NetConn()
	}
	return ID{}
}

func ofState(s tls.ConnectionState) ID {
	if len(s.PeerCertificates) == 0 {
		return ID{}
	}
	id, err := x509svid.IDFromCert(s.PeerCertificates[0])
	if err != nil {
		return ID{}
	}
	return id
}
