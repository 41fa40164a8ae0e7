package identity

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spiffe/go-spiffe/v2/bundle/x509bundle"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
)

// maxSessions bounds the sessions that are kept for resumption: one an agent that was dialled.
const maxSessions = 4096

// Set is a certificate with its key, and the roots that those of others are held to. It does not change.
type Set struct {
	ID     ID
	Issuer string
	// Begins and Expires bound the validity of the certificate.
	Begins, Expires time.Time

	certificate tls.Certificate
	roots       *x509bundle.Bundle
	// sessions are good for no other set: a resumed one stands on the certificates that it began with.
	sessions tls.ClientSessionCache
	// workloads have certificates of their own. Nil: they have none.
	workloads *workloads
}

// Parse makes a Set of three PEM files. The certificate must be the key's and be signed by a root, but may have expired.
func Parse(roots, certificate, key []byte, now time.Time) (*Set, error) {
	svid, err := x509svid.Parse(certificate, key)
	if err != nil {
		return nil, fmt.Errorf("the certificate with its key: %w", bare(err))
	}
	bundle, err := x509bundle.Parse(svid.ID.TrustDomain(), roots)
	if err != nil {
		return nil, fmt.Errorf("the roots: %w", bare(err))
	}
	if bundle.Empty() {
		return nil, errors.New("the roots: no certificate in them")
	}
	leaf := svid.Certificates[0]
	s := &Set{
		ID: svid.ID, Issuer: leaf.Issuer.String(), Begins: leaf.NotBefore, Expires: leaf.NotAfter,
		certificate: tls.Certificate{PrivateKey: svid.PrivateKey, Leaf: leaf},
		roots:       bundle,
		sessions:    tls.NewLRUClientSessionCache(maxSessions),
	}
	for _, c := range svid.Certificates {
		s.certificate.Certificate = append(s.certificate.Certificate, c.Raw)
	}
	if _, err := s.verify(svid.Certificates, Names{}, s.closest(now)); err != nil {
		return nil, fmt.Errorf("no other agent would take it: %w", err)
	}
	return s, nil
}

// bare removes the name of the library from the head of what it says.
func bare(err error) error {
	text := err.Error()
	for _, name := range []string{"x509svid: ", "x509bundle: "} {
		text = strings.TrimPrefix(text, name)
	}
	return errors.New(text)
}

// closest returns the time within the validity of the certificate that is closest to now.
func (s *Set) closest(now time.Time) time.Time {
	switch {
	case now.After(s.Expires):
		return s.Expires
	case now.Before(s.Begins):
		return s.Begins
	}
	return now
}

// Leaf returns the certificate itself.
func (s *Set) Leaf() *x509.Certificate { return s.certificate.Leaf }

// Expired reports whether others refuse the certificate for its age.
func (s *Set) Expired(now time.Time) bool { return now.After(s.Expires) }

// Reason says in a word why a certificate was refused.
type Reason string

const (
	Missing   Reason = "missing"  // none was shown
	NoID      Reason = "no_id"    // it holds no SPIFFE ID
	Expired   Reason = "expired"  // or not valid yet
	Foreign   Reason = "foreign"  // another trust domain's, or not signed by our roots
	WrongName Reason = "wrong_id" // not that of who is expected there
	Unfit     Reason = "unfit"    // for any other reason
)

// Refusal is the error of who does not take the certificate of the other end.
type Refusal struct {
	Reason Reason
	text   string
}

func (r *Refusal) Error() string { return r.text }

func refuse(r Reason, format string, args ...any) *Refusal {
	return &Refusal{r, fmt.Sprintf(format, args...)}
}

// verify returns whose chain this is. Errors are Refusals.
func (s *Set) verify(chain []*x509.Certificate, want Names, now time.Time) (ID, error) {
	if len(chain) == 0 {
		return ID{}, refuse(Missing, "no certificate was shown")
	}
	leaf := chain[0]
	id, err := x509svid.IDFromCert(leaf)
	if err != nil {
		return ID{}, refuse(NoID, "the certificate of %q, issued by %q, has no SPIFFE ID", leaf.Subject, leaf.Issuer)
	}
	if ours := s.ID.TrustDomain(); id.TrustDomain() != ours {
		return id, refuse(Foreign, "the certificate of %s, issued by %q, is from another trust domain: ours is %s", id, leaf.Issuer, ours)
	}
	if _, _, err := x509svid.Verify(chain, s.roots, x509svid.WithTime(now)); err != nil {
		return id, s.unverified(id, leaf, now, err)
	}
	if !want.include(id) {
		return id, refuse(WrongName, "the certificate is that of %s, and %s is expected there", id, want.in(id.TrustDomain()))
	}
	return id, nil
}

// unverified says why a certificate does not hold. The order matters: what expired long ago may have been signed by a
// root that is gone, too.
func (s *Set) unverified(id ID, leaf *x509.Certificate, now time.Time, err error) *Refusal {
	invalid, isInvalid := errors.AsType[x509.CertificateInvalidError](err)
	_, isUnknown := errors.AsType[x509.UnknownAuthorityError](err)
	switch {
	case now.After(leaf.NotAfter):
		return refuse(Expired, "the certificate of %s expired at %s, %s ago", id, stamp(leaf.NotAfter), age(now.Sub(leaf.NotAfter)))
	case now.Before(leaf.NotBefore):
		return refuse(Expired, "the certificate of %s is valid from %s, in %s: is a clock wrong?", id, stamp(leaf.NotBefore), age(leaf.NotBefore.Sub(now)))
	case isInvalid && invalid.Reason == x509.Expired:
		return refuse(Expired, "the certificate of %s is signed by one that is not valid now: %q, from %s to %s",
			id, invalid.Cert.Subject, stamp(invalid.Cert.NotBefore), stamp(invalid.Cert.NotAfter))
	case isUnknown:
		return refuse(Foreign, "the certificate of %s is not signed by our roots: it was issued by %q, ours are %s", id, leaf.Issuer, s.rootNames())
	}
	return refuse(Unfit, "the certificate of %s, issued by %q: %v", id, leaf.Issuer, bare(err))
}

func (s *Set) rootNames() string {
	var names []string
	for _, root := range s.roots.X509Authorities() {
		names = append(names, fmt.Sprintf("%q", root.Subject))
	}
	return strings.Join(names, ", ")
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// age rounds to what a reader cares for.
func age(d time.Duration) string {
	if d > 48*time.Hour {
		return fmt.Sprintf("%d days", int(d.Hours()/24))
	}
	return d.Round(time.Second).String()
}
