// Package ca makes certificates for agents, from a CA that is a folder.
package ca

import (
	"cmp"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/identity"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
)

const (
	// Life is how long a CA is valid if nothing else is said.
	Life = 10 * 365 * 24 * time.Hour
	// FileLife is that of a certificate that somebody has to put in place.
	FileLife = 365 * 24 * time.Hour
	// OwnLife is that of a certificate that an agent issues for itself.
	OwnLife = 24 * time.Hour
	// WorkloadLife is that of a certificate that an agent issues for a workload of its node.
	WorkloadLife = time.Hour

	// slack is how much the clock of another machine may be behind.
	slack = 10 * time.Minute

	keyFile = "ca.key"
)

// ErrNone means that a folder holds no CA.
var ErrNone = errors.New("no CA there")

// CA issues certificates.
type CA struct {
	Domain      identity.Domain
	Certificate *x509.Certificate
	// Roots is what agents are to trust, in PEM: the certificate of the CA, and those of others while one CA takes over
	// from another.
	Roots []byte

	key crypto.Signer
}

// Options are those of Init.
type Options struct {
	Domain identity.Domain // of a CA that is made, or that doesn't say of which it is
	Life   time.Duration   // 0 means Life
	// Force replaces the CA that is there: no certificate of it is worth anything then.
	Force bool
}

// Init makes a CA in a folder, which it makes too. It returns an error that is fs.ErrExist if there is one.
func Init(dir string, o Options, now time.Time) (*CA, error) {
	unlock, err := lock(dir)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if there := existing(dir); there != "" && !o.Force {
		return nil, fmt.Errorf("there is a CA already: %s: %w", there, fs.ErrExist)
	}
	return create(dir, o, now)
}

// OpenOrInit opens the CA of a folder, or makes one if the folder has none. Any number of agents may do so at once.
func OpenOrInit(dir string, o Options, now time.Time) (ca *CA, made bool, err error) {
	unlock, err := lock(dir)
	if err != nil {
		return nil, false, err
	}
	defer unlock()
	ca, err = open(dir, o.Domain)
	if errors.Is(err, ErrNone) {
		ca, err = create(dir, o, now)
		return ca, err == nil, err
	}
	return ca, false, err
}

// existing returns a file of the CA in a folder, if there is one.
func existing(dir string) string {
	for _, name := range []string{keyFile, identity.RootsFile} {
		if _, err := os.Lstat(filepath.Join(dir, name)); err == nil {
			return filepath.Join(dir, name)
		}
	}
	return ""
}

// create makes a CA, and tries it before it is stored: not all names of trust domains can be constraints.
func create(dir string, o Options, now time.Time) (*CA, error) {
	ca, err := selfSigned(o, now)
	if err == nil {
		err = ca.try(now)
	}
	if err != nil {
		return nil, fmt.Errorf("make a CA for trust domain %q: %w: is it a name that a host could have?", o.Domain.Name(), err)
	}
	return ca, ca.store(dir)
}

func selfSigned(o Options, now time.Time) (*CA, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	serial := newSerial()
	template := &x509.Certificate{
		SerialNumber: serial,
		// Two CAs of a domain are told apart by the name.
		Subject:               pkix.Name{CommonName: "Headroom CA " + hex.EncodeToString(serial.Bytes()[:4]), Organization: []string{o.Domain.Name()}},
		URIs:                  []*url.URL{o.Domain.ID().URL()},
		NotBefore:             now.Add(-slack),
		NotAfter:              now.Add(cmp.Or(o.Life, Life)),
		IsCA:                  true,
		BasicConstraintsValid: true,
		MaxPathLenZero:        true, // no CAs below it
		KeyUsage:              x509.KeyUsageCertSign,
		// Where it is trusted for more than a mesh, it is good for the IDs of its domain only.
		PermittedURIDomains:         []string{o.Domain.Name()},
		ExcludedDNSDomains:          []string{""},
		PermittedDNSDomainsCritical: true, // those of all kinds
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	certificate, err := x509.ParseCertificate(der)
	return &CA{Domain: o.Domain, Certificate: certificate, Roots: encode("CERTIFICATE", der), key: key}, err
}

// try issues a certificate that nobody gets.
func (ca *CA) try(now time.Time) error {
	id, err := identity.NodeID(ca.Domain, "trial")
	if err != nil {
		return err
	}
	files, err := ca.Issue(id, time.Hour, now)
	if err != nil {
		return err
	}
	_, err = identity.Parse(files.Roots, files.Certificate, files.Key, now)
	return err
}

func (ca *CA) store(dir string) error {
	key, err := encodeKey(ca.key)
	if err != nil {
		return err
	}
	// The key comes first: who finds the certificate finds all.
	return errors.Join(WriteFile(filepath.Join(dir, keyFile), key), WriteFile(filepath.Join(dir, identity.RootsFile), ca.Roots))
}

// readFolder reads the files of a CA.
func readFolder(dir string) (roots, key []byte, err error) {
	if roots, err = os.ReadFile(filepath.Join(dir, identity.RootsFile)); err != nil {
		return nil, nil, fmt.Errorf("read the CA: %w", err)
	}
	if key, err = os.ReadFile(filepath.Join(dir, keyFile)); err != nil {
		return nil, nil, fmt.Errorf("read the key of the CA: %w", err)
	}
	return roots, key, nil
}

// Open reads the CA of a folder: ca.key, and ca.crt with the certificate for it and any other roots. The error is
// ErrNone if the folder holds neither, or does not exist.
func Open(dir string) (*CA, error) { return open(dir, identity.Domain{}) }

func open(dir string, assumed identity.Domain) (*CA, error) {
	if existing(dir) == "" {
		return nil, fmt.Errorf("%s: %w", dir, ErrNone)
	}
	roots, key, err := readFolder(dir)
	if err != nil {
		return nil, err
	}
	ca, err := parse(roots, key, assumed)
	if err != nil {
		return nil, fmt.Errorf("the CA in %s: %w", dir, err)
	}
	return ca, nil
}

func parse(roots, key []byte, assumed identity.Domain) (*CA, error) {
	signer, err := decodeKey(key)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", keyFile, err)
	}
	certificates, err := ParseCertificates(roots)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", identity.RootsFile, err)
	}
	for _, c := range certificates {
		if public, ok := signer.Public().(interface{ Equal(crypto.PublicKey) bool }); !ok || !public.Equal(c.PublicKey) {
			continue
		}
		domain, err := domainOf(c, assumed)
		return &CA{Domain: domain, Certificate: c, Roots: roots, key: signer}, err
	}
	return nil, fmt.Errorf("no certificate in %s is that of the key in %s", identity.RootsFile, keyFile)
}

// domainOf returns the trust domain of a CA, which is its SPIFFE ID. CAs that tools for all purposes make have none.
func domainOf(c *x509.Certificate, assumed identity.Domain) (identity.Domain, error) {
	if !c.IsCA {
		return identity.Domain{}, fmt.Errorf("the certificate of %q is not that of a CA", c.Subject)
	}
	if len(c.URIs) == 0 && !assumed.IsZero() {
		return assumed, nil
	}
	if len(c.URIs) != 1 {
		return identity.Domain{}, fmt.Errorf("the certificate of %q does not say for which trust domain it is: make a CA with 'meshctl ca init'", c.Subject)
	}
	id, err := spiffeid.FromURI(c.URIs[0])
	if err != nil {
		return identity.Domain{}, fmt.Errorf("the certificate of %q: %w", c.Subject, err)
	}
	return id.TrustDomain(), nil
}

// Files are what an agent needs, in PEM.
type Files struct {
	Roots, Certificate, Key []byte
}

// Issue makes a certificate. It never outlives the CA.
func (ca *CA) Issue(id identity.ID, life time.Duration, now time.Time) (Files, error) {
	if id.TrustDomain() != ca.Domain {
		return Files{}, fmt.Errorf("issue a certificate for %s: the CA is that of trust domain %s", id, ca.Domain)
	}
	if now.After(ca.Certificate.NotAfter) {
		return Files{}, fmt.Errorf("the CA %q has expired at %s: make a new one", ca.Certificate.Subject, ca.Certificate.NotAfter.UTC().Format(time.RFC3339))
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return Files{}, err
	}
	template := &x509.Certificate{
		SerialNumber: newSerial(),
		Subject:      pkix.Name{Organization: []string{ca.Domain.Name()}},
		URIs:         []*url.URL{id.URL()},
		NotBefore:    later(now.Add(-slack), ca.Certificate.NotBefore),
		NotAfter:     earlier(now.Add(life), ca.Certificate.NotAfter),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  usage(id),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, ca.Certificate, key.Public(), ca.key)
	if err != nil {
		return Files{}, fmt.Errorf("issue a certificate for %s: %w", id, err)
	}
	pemKey, err := encodeKey(key)
	return Files{Roots: ca.Roots, Certificate: encode("CERTIFICATE", der), Key: pemKey}, err
}

// usage is what a certificate is good for: workloads only dial.
func usage(id identity.ID) []x509.ExtKeyUsage {
	if identity.IsWorkload(id) {
		return []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	}
	return []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
}

func newSerial() *big.Int {
	var b [16]byte
	rand.Read(b[:])
	b[0] = b[0]&0x7f | 0x40 // positive, and always of the same length
	return new(big.Int).SetBytes(b[:])
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

func encode(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}

func encodeKey(key crypto.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("encode a key: %w", err)
	}
	return encode("PRIVATE KEY", der), nil
}

func decodeKey(text []byte) (crypto.Signer, error) {
	block, _ := pem.Decode(text)
	if block == nil {
		return nil, errors.New("want a key in PEM")
	}
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		if key, err := x509.ParseECPrivateKey(block.Bytes); err == nil {
			return key, nil
		}
		return nil, fmt.Errorf("want a key as PKCS #8: %w", err)
	}
	signer, ok := key.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("want a key that signs, not %T", key)
	}
	return signer, nil
}

// ParseCertificates reads all certificates of a PEM file, which may hold other things too, but at least one.
func ParseCertificates(text []byte) ([]*x509.Certificate, error) {
	var all []*x509.Certificate
	for {
		var block *pem.Block
		if block, text = pem.Decode(text); block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			continue
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("certificate %d: %w", len(all)+1, err)
		}
		all = append(all, c)
	}
	if len(all) == 0 {
		return nil, errors.New("want a certificate in PEM")
	}
	return all, nil
}
