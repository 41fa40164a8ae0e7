package etcd

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/registry"
	"github.com/headroom-mesh/headroom/registry/registrytest"
	clientv3 "go.etcd.io/etcd/client/v3"
)

func TestPassword(t *testing.T) {
	t.Parallel()
	addr, _ := startEtcd(t, t.TempDir())
	protect(t, addr)
	config := func(node registry.NodeName, password string) Config {
		cfg := (&store{t: t, prefix: "/headroom/v1", proxy: startProxy(t, addr)}).config(node)
		if password != "" {
			cfg.Username, cfg.Password = "agent", password
		}
		return cfg
	}
	a, b := registrytest.Start(t, mustNew(t, config("a", "right"))), registrytest.Start(t, mustNew(t, config("b", "right")))
	a.Register(t, registrytest.Endpoint("web", "a"))
	set(t, a, "web", "3s")
	b.Await(t, "web", "a ready")

	foreign := config("c", "right")
	foreign.Prefix = "/other"
	for _, test := range []struct {
		name string
		cfg  Config
		want string
	}{
		{"wrong", config("c", "wrong"), "refused the user name or password"},
		{"none", config("c", ""), "wants a user name and a password"},
		{"not allowed", foreign, "may not read and write the keys below /other"},
	} {
		refused := registrytest.Start(t, mustNew(t, test.cfg))
		_, err := refused.Policy(t.Context(), "web")
		for errors.Is(err, registry.ErrUnavailable) && t.Context().Err() == nil { // checking a password takes etcd long
			_, err = refused.Policy(t.Context(), "web")
		}
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("with password %s: %v, want one that says %q", test.name, err, test.want)
		}
		if refused.Connected() {
			t.Errorf("with password %s: Connected() = true", test.name)
		}
		refused.Stop()
	}
}

// protect makes an etcd ask for passwords; user agent may use the keys of the mesh.
func protect(t *testing.T, addr string) {
	t.Helper()
	direct := directClient(t, clientv3.Config{Endpoints: []string{addr}})
	ctx := t.Context()
	steps := []func() error{
		func() error { _, err := direct.UserAdd(ctx, "root", "secret"); return err },
		func() error { _, err := direct.UserGrantRole(ctx, "root", "root"); return err },
		func() error { _, err := direct.RoleAdd(ctx, "mesh"); return err },
		func() error {
			end := clientv3.GetPrefixRangeEnd("/headroom/v1/")
			_, err := direct.RoleGrantPermission(ctx, "mesh", "/headroom/v1/", end,
				clientv3.PermissionType(clientv3.PermReadWrite))
			return err
		},
		func() error { _, err := direct.UserAdd(ctx, "agent", "right"); return err },
		func() error { _, err := direct.UserGrantRole(ctx, "agent", "mesh"); return err },
		func() error { _, err := direct.AuthEnable(ctx); return err },
	}
	for i, step := range steps {
		if err := step(); err != nil {
			t.Fatalf("step %d: %v", i, err)
		}
	}
}

func TestTLS(t *testing.T) {
	t.Parallel()
	ca, otherCA := newAuthority(t), newAuthority(t)
	s := newStore(t)
	addr := terminateTLS(t, ca, s.proxy.addr())
	config := func(node registry.NodeName) Config {
		cfg := s.config(node)
		cfg.Endpoints = []string{"https://" + addr}
		cfg.CAFile = ca.file
		cfg.CertFile, cfg.KeyFile = ca.issue(t, string(node))
		return cfg
	}
	a, b := registrytest.Start(t, mustNew(t, config("a"))), registrytest.Start(t, mustNew(t, config("b")))
	a.Register(t, registrytest.Endpoint("web", "a"))
	b.Await(t, "web", "a ready")

	wrongCA := config("c")
	wrongCA.CAFile = otherCA.file
	foreign := config("c")
	foreign.CertFile, foreign.KeyFile = otherCA.issue(t, "c")
	for _, test := range []struct {
		name, want string
		cfg        Config
	}{
		{"unknown CA of etcd", "TLS with etcd at https://" + addr, wrongCA},
		{"unknown CA of the agent", "certificate", foreign}, // may be seen as a broken connection only
	} {
		refused := registrytest.Start(t, mustNew(t, test.cfg))
		_, err := refused.Policy(t.Context(), "web")
		if !errors.Is(err, registry.ErrUnavailable) || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want one that says %q", test.name, err, test.want)
		}
		refused.Stop()
	}
}

// terminateTLS takes the place of an etcd with TLS that asks for certificates.
func terminateTLS(t *testing.T, ca *authority, target string) (addr string) {
	t.Helper()
	certFile, keyFile := ca.issue(t, "etcd")
	certificate, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		t.Fatal(err)
	}
	p := startProxy(t, target)
	inner := p.listener
	outer, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	inner.Close()
	p.running.Wait()
	pool := x509.NewCertPool()
	pool.AddCert(ca.certificate)
	p.listener = tls.NewListener(outer, &tls.Config{
		Certificates: []tls.Certificate{certificate},
		ClientAuth:   tls.RequireAndVerifyClientCert,
		ClientCAs:    pool,
		NextProtos:   []string{"h2"},
	})
	p.running.Go(p.accept)
	t.Cleanup(func() { outer.Close() })
	return outer.Addr().String()
}

// authority issues certificates.
type authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
	file        string
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{CommonName: "test CA"},
		NotAfter:              time.Now().Add(time.Hour),
		IsCA:                  true,
		BasicConstraintsValid: true,
	}
	key, der := sign(t, template, nil)
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	file := writePEM(t, "CERTIFICATE", der)
	return &authority{certificate: certificate, key: key, file: file}
}

func (a *authority) issue(t *testing.T, name string) (certFile, keyFile string) {
	t.Helper()
	key, der := sign(t, &x509.Certificate{
		SerialNumber: big.NewInt(2),
		Subject:      pkix.Name{CommonName: name},
		NotAfter:     time.Now().Add(time.Hour),
		IPAddresses:  []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}, a)
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return writePEM(t, "CERTIFICATE", der), writePEM(t, "PRIVATE KEY", private)
}

// sign makes a certificate that signs itself if by is nil.
func sign(t *testing.T, template *x509.Certificate, by *authority) (*ecdsa.PrivateKey, []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	if by == nil {
		by = &authority{certificate: template, key: key}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, by.certificate, &key.PublicKey, by.key)
	if err != nil {
		t.Fatal(err)
	}
	return key, der
}

func writePEM(t *testing.T, kind string, der []byte) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "file.pem")
	content := pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestUnreachable(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := listener.Addr().String()
	listener.Close()
	cfg := (&store{t: t, prefix: "/x", proxy: startProxy(t, addr)}).config("a")
	cfg.Endpoints = []string{"http://" + addr}
	began := time.Now()
	_, err = registrytest.Start(t, mustNew(t, cfg)).Policy(t.Context(), "web")
	if !errors.Is(err, registry.ErrUnavailable) || !strings.Contains(err.Error(), "http://"+addr) ||
		!strings.Contains(err.Error(), "connection refused") {
		t.Errorf("Policy = %v, want one that says who refused the connection", err)
	}
	if took := time.Since(began); took > callTimeout {
		t.Errorf("the error came after %v", took)
	}
	_, err = mustNew(t, cfg).Policy(canceled(t), "web")
	if !errors.Is(err, context.Canceled) {
		t.Errorf("Policy of a caller that has gone: %v", err)
	}
}

func canceled(t *testing.T) context.Context {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	return ctx
}

func TestConfig(t *testing.T) {
	t.Parallel()
	ca := newAuthority(t)
	certFile, keyFile := ca.issue(t, "a")
	for _, test := range []struct {
		name string
		cfg  Config
		want []string // parts of the error; none: no error
	}{
		{"defaults", Config{Node: "a"}, nil},
		{"everything", Config{
			Node: "a", Endpoints: []string{"https://etcd-0:2379", "https://[::1]:2379"}, Username: "u", Password: "p",
			CAFile: ca.file, CertFile: certFile, KeyFile: keyFile, Prefix: "/x", LeaseTTL: 2 * time.Second,
		}, nil},
		{"no node", Config{}, []string{"node"}},
		{"bad node", Config{Node: "a/b"}, []string{`node "a/b"`}},
		{"many problems", Config{
			Node: "a", Endpoints: []string{"localhost", "http://x:1/path"}, Username: "u", Prefix: "x/", LeaseTTL: time.Second,
		}, []string{"endpoints[0]", "endpoints[1]", "username, password", "prefix", "leaseTTL"}},
		{"mixed", Config{Node: "a", Endpoints: []string{"http://x:1", "https://y:1"}}, []string{"https:// for all"}},
		{"TLS files without TLS", Config{Node: "a", CAFile: ca.file}, []string{"https:// only"}},
		{"no such CA", Config{Node: "a", Endpoints: []string{"https://x:1"}, CAFile: "/nonexistent"}, []string{"caFile"}},
		{"no CA", Config{Node: "a", Endpoints: []string{"https://x:1"}, CAFile: keyFile}, []string{"found none"}},
		{"key of another", Config{
			Node: "a", Endpoints: []string{"https://x:1"}, CertFile: ca.file, KeyFile: keyFile,
		}, []string{"certFile, keyFile"}},
		{"half a pair", Config{Node: "a", Endpoints: []string{"https://x:1"}, CertFile: certFile}, []string{"both or neither"}},
	} {
		err := test.cfg.Validate()
		if (err != nil) != (len(test.want) > 0) {
			t.Errorf("%s: Validate = %v", test.name, err)
		}
		for _, part := range test.want {
			if err != nil && !strings.Contains(err.Error(), part) {
				t.Errorf("%s: %q doesn't mention %q", test.name, err, part)
			}
		}
	}
}
