// Package certs makes the certificates with which hops know one another in the bench.
package certs

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"time"
)

// Name is what the certificate is for.
const Name = "hop.bench"

// Files in the folder: the CA, and a certificate of it for both ends of connections, with its key. Both is the two in one.
const (
	CA   = "ca.crt"
	Cert = "hop.crt"
	Key  = "hop.key"
	Both = "hop.pem"
)

// Make makes the files.
func Make(dir string) error {
	ca, caKey, err := issue(&x509.Certificate{
		Subject: pkix.Name{CommonName: "bench"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}, nil, nil)
	if err != nil {
		return err
	}
	cert, key, err := issue(&x509.Certificate{
		Subject: pkix.Name{CommonName: Name}, DNSNames: []string{Name}, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}, ca, caKey)
	if err != nil {
		return err
	}
	encodedKey, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return fmt.Errorf("encode a key: %w", err)
	}
	certPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Raw})
	keyPEM := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: encodedKey})
	return errors.Join(
		os.WriteFile(filepath.Join(dir, CA), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: ca.Raw}), 0o600),
		os.WriteFile(filepath.Join(dir, Cert), certPEM, 0o600),
		os.WriteFile(filepath.Join(dir, Key), keyPEM, 0o600),
		os.WriteFile(filepath.Join(dir, Both), bytes.Join([][]byte{certPEM, keyPEM}, nil), 0o600),
	)
}

// issue signs a certificate with the key of the issuer, or with its own if there is none.
func issue(c, issuer *x509.Certificate, issuerKey *ecdsa.PrivateKey) (*x509.Certificate, *ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("make a key: %w", err)
	}
	if issuer == nil {
		issuer, issuerKey = c, key
	}
	c.SerialNumber = big.NewInt(time.Now().UnixNano())
	c.NotBefore, c.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(30*24*time.Hour)
	der, err := x509.CreateCertificate(rand.Reader, c, issuer, &key.PublicKey, issuerKey)
	if err != nil {
		return nil, nil, fmt.Errorf("sign a certificate: %w", err)
	}
	c, err = x509.ParseCertificate(der)
	return c, key, err
}

// TLS reads the files for the two ends of a connection: mutual TLS 1.3, with sessions that are resumed.
func TLS(dir string) (in, out *tls.Config, err error) {
	cert, err := tls.LoadX509KeyPair(filepath.Join(dir, Cert), filepath.Join(dir, Key))
	if err != nil {
		return nil, nil, fmt.Errorf("read the certificate: %w", err)
	}
	ca, err := os.ReadFile(filepath.Join(dir, CA))
	if err != nil {
		return nil, nil, fmt.Errorf("read the CA: %w", err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	base := &tls.Config{
		Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS13, ServerName: Name, RootCAs: roots, ClientCAs: roots,
		DynamicRecordSizingDisabled: true,
	}
	in, out = base.Clone(), base.Clone()
	in.ClientAuth = tls.RequireAndVerifyClientCert
	out.ClientSessionCache = tls.NewLRUClientSessionCache(0)
	return in, out, nil
}
