package ca_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"io/fs"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/identity"
	"github.com/headroom-mesh/headroom/dataplane/identity/ca"
)

func domain(t *testing.T, name string) identity.Domain {
	t.Helper()
	d, err := identity.ParseDomain(name)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func nodeID(t *testing.T, d identity.Domain) identity.ID {
	t.Helper()
	id, err := identity.NodeID(d, "n1")
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func newCA(t *testing.T, dir string, o ca.Options, now time.Time) *ca.CA {
	t.Helper()
	if o.Domain.IsZero() {
		o.Domain = domain(t, identity.DefaultDomain)
	}
	authority, err := ca.Init(dir, o, now)
	if err != nil {
		t.Fatal(err)
	}
	return authority
}

// TestForeignCA takes a CA that some other tool made, such as the functions of Helm, and that does not say what it is for.
func TestForeignCA(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "somebody's"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	certificate, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for name, b := range map[string]*pem.Block{"ca.crt": {Type: "CERTIFICATE", Bytes: certificate}, "ca.key": {Type: "EC PRIVATE KEY", Bytes: private}} {
		if err := os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(b), 0o600); err != nil {
			t.Fatal(err)
		}
	}

	if _, err := ca.Open(dir); err == nil || !strings.Contains(err.Error(), "for which trust domain") {
		t.Errorf("opened without a trust domain: %v", err)
	}
	opened, made, err := ca.OpenOrInit(dir, ca.Options{Domain: domain(t, "prod")}, time.Now())
	if err != nil || made || opened.Domain.Name() != "prod" {
		t.Fatalf("%v, made: %v, %v", opened, made, err)
	}
	set, err := ca.Loader(dir, nodeID(t, opened.Domain))(time.Now())
	if err != nil || set.ID.String() != "spiffe://prod/node/n1" {
		t.Errorf("%v, %v", set, err)
	}
}

func TestTrustDomains(t *testing.T) {
	for _, name := range []string{"headroom.local", "prod", "a.b-c.example.com", "a_b", "x1"} {
		dir := filepath.Join(t.TempDir(), "deep", "ca")
		made := newCA(t, dir, ca.Options{Domain: domain(t, name)}, time.Now())
		opened, err := ca.Open(dir)
		if err != nil || opened.Domain != made.Domain || !opened.Certificate.Equal(made.Certificate) {
			t.Errorf("%s: opened %v, %v", name, opened, err)
		}
		for _, file := range []string{"ca.crt", "ca.key"} {
			if info, err := os.Stat(filepath.Join(dir, file)); err != nil || info.Mode().Perm() != 0o600 {
				t.Errorf("%s: %v, %v", file, info, err)
			}
		}
	}
	for _, name := range []string{"", "A", "a/b", "spiffe://a/b", "a b"} {
		if _, err := identity.ParseDomain(name); err == nil {
			t.Errorf("%q is taken for a trust domain", name)
		}
	}
	// SPIFFE has it, but a certificate can't be held to it.
	if _, err := ca.Init(t.TempDir(), ca.Options{Domain: domain(t, "a..b")}, time.Now()); err == nil || !strings.Contains(err.Error(), "is it a name that a host could have?") {
		t.Errorf("error %v", err)
	}
}

func TestInitSpareWhatIsThere(t *testing.T) {
	dir := t.TempDir()
	first := newCA(t, dir, ca.Options{}, time.Now())
	_, err := ca.Init(dir, ca.Options{Domain: first.Domain}, time.Now())
	if !errors.Is(err, fs.ErrExist) || !strings.Contains(err.Error(), dir) {
		t.Errorf("error %v", err)
	}
	if opened, err := ca.Open(dir); err != nil || !opened.Certificate.Equal(first.Certificate) {
		t.Errorf("the first CA is gone: %v", err)
	}
	newCA(t, dir, ca.Options{Force: true}, time.Now())
	if opened, err := ca.Open(dir); err != nil || opened.Certificate.Equal(first.Certificate) {
		t.Errorf("the first CA is still there: %v", err)
	}
	// Half of a CA is one, too.
	if err := os.Remove(filepath.Join(dir, "ca.crt")); err != nil {
		t.Fatal(err)
	}
	if _, _, err := ca.OpenOrInit(dir, ca.Options{Domain: first.Domain}, time.Now()); err == nil || !strings.Contains(err.Error(), "ca.crt") {
		t.Errorf("error %v", err)
	}
}

// TestManyMakeOneCA has agents that start at once on an empty folder.
func TestManyMakeOneCA(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "ca")
	made := make([]*ca.CA, 20)
	var agents sync.WaitGroup
	for i := range made {
		agents.Go(func() {
			var err error
			if made[i], _, err = ca.OpenOrInit(dir, ca.Options{Domain: domain(t, "headroom.local")}, time.Now()); err != nil {
				t.Error(err)
			}
		})
	}
	agents.Wait()
	for _, c := range made {
		if c == nil || !c.Certificate.Equal(made[0].Certificate) {
			t.Fatal("they have different ones")
		}
	}
	if files, err := os.ReadDir(dir); err != nil || len(files) != 2 {
		t.Errorf("left over: %v, %v", files, err)
	}
}

func TestIssue(t *testing.T) {
	now := time.Now()
	authority := newCA(t, t.TempDir(), ca.Options{Life: 48 * time.Hour}, now)
	id := nodeID(t, authority.Domain)
	files, err := authority.Issue(id, time.Hour, now)
	if err != nil {
		t.Fatal(err)
	}
	set, err := identity.Parse(files.Roots, files.Certificate, files.Key, now)
	if err != nil || set.ID != id || set.Expires.Sub(now).Round(time.Minute) != time.Hour {
		t.Errorf("got %+v, %v", set, err)
	}
	// It is good already where the clock is a bit behind, and never longer than the CA.
	if _, err := identity.Parse(files.Roots, files.Certificate, files.Key, now.Add(-5*time.Minute)); err != nil {
		t.Error(err)
	}
	files, err = authority.Issue(id, 1000*time.Hour, now)
	if err != nil {
		t.Fatal(err)
	}
	if set, err := identity.Parse(files.Roots, files.Certificate, files.Key, now); err != nil || !set.Expires.Equal(authority.Certificate.NotAfter) {
		t.Errorf("expires at %v, the CA at %v; %v", set.Expires, authority.Certificate.NotAfter, err)
	}
	if _, err := authority.Issue(id, time.Hour, now.Add(72*time.Hour)); err == nil || !strings.Contains(err.Error(), "has expired at") {
		t.Errorf("an expired CA: %v", err)
	}
	if _, err := authority.Issue(nodeID(t, domain(t, "elsewhere")), time.Hour, now); err == nil || !strings.Contains(err.Error(), "the CA is that of trust domain headroom.local") {
		t.Errorf("a foreign ID: %v", err)
	}
}

func TestDamagedCAs(t *testing.T) {
	good := t.TempDir()
	newCA(t, good, ca.Options{}, time.Now())
	other := t.TempDir()
	newCA(t, other, ca.Options{}, time.Now())
	read := func(dir, name string) []byte {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	for _, tt := range []struct {
		name       string
		roots, key []byte
		want       string
	}{
		{name: "nothing", want: "no CA there"},
		{name: "no key", roots: read(good, "ca.crt"), want: "read the key of the CA"},
		{name: "other key", roots: read(good, "ca.crt"), key: read(other, "ca.key"), want: "no certificate in ca.crt is that of the key in ca.key"},
		{name: "key is none", roots: read(good, "ca.crt"), key: []byte("x"), want: "ca.key: want a key in PEM"},
		{name: "certificate is none", roots: []byte("x"), key: read(good, "ca.key"), want: "ca.crt: want a certificate in PEM"},
		{name: "half written", roots: read(good, "ca.crt")[:200], key: read(good, "ca.key"), want: "ca.crt: want a certificate in PEM"},
	} {
		dir := t.TempDir()
		for name, content := range map[string][]byte{"ca.crt": tt.roots, "ca.key": tt.key} {
			if content == nil {
				continue
			}
			if err := ca.WriteFile(filepath.Join(dir, name), content); err != nil {
				t.Fatal(err)
			}
		}
		_, err := ca.Open(dir)
		if err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), dir) {
			t.Errorf("%s: error %v, want %q and the folder in it", tt.name, err, tt.want)
		}
	}
}

// TestLoader renews at two thirds of the life, and when the CA changes.
func TestLoader(t *testing.T) {
	now := time.Now()
	dir := t.TempDir()
	old := newCA(t, dir, ca.Options{}, now)
	load := ca.Loader(dir, nodeID(t, old.Domain))
	at := func(after time.Duration) *identity.Set {
		t.Helper()
		set, err := load(now.Add(after))
		if err != nil {
			t.Fatal(err)
		}
		return set
	}
	first := at(0)
	if at(15*time.Hour) != first {
		t.Error("renewed too early")
	}
	second := at(17 * time.Hour)
	if second == first || !second.Expires.After(first.Expires) {
		t.Error("not renewed")
	}
	if at(18*time.Hour) != second {
		t.Error("renewed twice")
	}

	// A root is added, then its key takes over.
	young := t.TempDir()
	newCA(t, young, ca.Options{}, now)
	roots, err := os.ReadFile(filepath.Join(young, "ca.crt"))
	if err != nil {
		t.Fatal(err)
	}
	both := append(bytes.Clone(old.Roots), roots...)
	if err := ca.WriteFile(filepath.Join(dir, "ca.crt"), both); err != nil {
		t.Fatal(err)
	}
	third := at(18 * time.Hour)
	if third == second || third.Issuer != second.Issuer {
		t.Errorf("issued by %s, want %s still", third.Issuer, second.Issuer)
	}
	key, err := os.ReadFile(filepath.Join(young, "ca.key"))
	if err != nil {
		t.Fatal(err)
	}
	if err := ca.WriteFile(filepath.Join(dir, "ca.key"), key); err != nil {
		t.Fatal(err)
	}
	if fourth := at(18 * time.Hour); fourth.Issuer == third.Issuer {
		t.Error("the young CA has not taken over")
	}
	if err := os.Remove(filepath.Join(dir, "ca.key")); err != nil {
		t.Fatal(err)
	}
	if _, err := load(now); err == nil {
		t.Error("nothing is said of the missing key")
	}
}

// TestWorkloads issues certificates for workloads beside the agent's own.
func TestWorkloads(t *testing.T) {
	now := time.Now()
	dir := t.TempDir()
	authority := newCA(t, dir, ca.Options{}, now)
	load := ca.Loader(dir, nodeID(t, authority.Domain))
	node := func() *identity.Set {
		t.Helper()
		set, err := load(now)
		if err != nil {
			t.Fatal(err)
		}
		return set
	}
	cart := identity.Workload{Namespace: "shop", ServiceAccount: "cart"}
	as := func(w identity.Workload, after time.Duration) *identity.Set {
		t.Helper()
		set, err := node().As(w, now.Add(after))
		if err != nil {
			t.Fatal(err)
		}
		return set
	}
	first := as(cart, 0)
	if first.ID.String() != "spiffe://headroom.local/ns/shop/sa/cart" || first.Expires.Sub(now).Round(time.Minute) != time.Hour {
		t.Errorf("%s until %v", first.ID, first.Expires)
	}
	if use := first.Leaf().ExtKeyUsage; len(use) != 1 || use[0] != x509.ExtKeyUsageClientAuth {
		t.Errorf("good for %v, want clients only", use)
	}
	if as(identity.Workload{Namespace: "other", ServiceAccount: "cart"}, 0).ID == first.ID {
		t.Error("another namespace's has the same ID")
	}
	if as(identity.Workload{}, 0) != node() {
		t.Error("the node itself has another certificate")
	}
	if as(cart, 30*time.Minute) != first {
		t.Error("renewed too early")
	}
	if second := as(cart, 40*time.Minute); second == first || !second.Expires.After(first.Expires) || as(cart, 41*time.Minute) != second {
		t.Error("not renewed once two thirds of its life are over, or twice")
	}
	for _, bad := range []identity.Workload{{Namespace: "shop"}, {ServiceAccount: "cart"}, {Namespace: "..", ServiceAccount: "cart"}, {Namespace: "shop/sa/admin", ServiceAccount: "x"}} {
		if set, err := node().As(bad, now); err == nil || !strings.Contains(err.Error(), "workload "+bad.String()) {
			t.Errorf("%v is taken for a workload: %v, %v", bad, set, err)
		}
	}

	// A CA that takes over issues those of workloads, too.
	newCA(t, dir, ca.Options{Force: true}, now)
	if third := as(cart, 0); third.Issuer == first.Issuer || third.Issuer != node().Issuer {
		t.Errorf("issued by %s, the node's by %s", third.Issuer, node().Issuer)
	}
}

// TestManyWorkloadsAtOnce gives all who ask for one the same certificate.
func TestManyWorkloadsAtOnce(t *testing.T) {
	dir := t.TempDir()
	authority := newCA(t, dir, ca.Options{}, time.Now())
	node, err := ca.Loader(dir, nodeID(t, authority.Domain))(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	sets := make([]*identity.Set, 20)
	var all sync.WaitGroup
	for i := range sets {
		all.Go(func() {
			sets[i], _ = node.As(identity.Workload{Namespace: "shop", ServiceAccount: "cart"}, time.Now())
		})
	}
	all.Wait()
	for _, s := range sets {
		if s == nil || s != sets[0] {
			t.Fatal("they have different ones")
		}
	}
}
