package identity

import (
	"crypto/tls"
	"time"
)

// Both ends leave the key exchange to Go, which prefers the hybrid with ML-KEM: it takes 0.5 ms more a connection than
// X25519 alone, both ends together, but agents keep their connections, and what is recorded today stays unreadable.

// Server returns the configuration of the end that is dialled. It is to be kept: the keys of session tickets are part of
// it, which change every day.
func (s *Source) Server(protocols ...string) *tls.Config {
	c := common(protocols)
	c.ClientAuth = tls.RequireAnyClientCert
	c.GetCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return &s.Current().certificate, nil }
	c.VerifyConnection = func(state tls.ConnectionState) error {
		_, err := s.Current().verify(state.PeerCertificates, Names{}, time.Now())
		return err
	}
	return c
}

// Client returns the configuration for one connection to an agent that has one of the names.
func (s *Set) Client(protocol string, want Names) *tls.Config {
	c := common([]string{protocol})
	c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &s.certificate, nil }
	c.ClientSessionCache = s.sessions
	// Names of machines say nothing here: what counts is verified below.
	c.InsecureSkipVerify = true
	c.VerifyConnection = func(state tls.ConnectionState) error {
		id, err := s.verify(state.PeerCertificates, want, time.Now())
		if err != nil {
			return err
		}
		return mayServe(id, state.PeerCertificates[0])
	}
	return c
}

// common is the part that both ends share. VerifyConnection is called for resumed sessions too, VerifyPeerCertificate
// would not be.
func common(protocols []string) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		NextProtos: protocols,
		// Small first records help browsers to begin early; between agents they cost system calls.
		DynamicRecordSizingDisabled: true,
	}
}
