package etcd

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/registry"
	"github.com/headroom-mesh/headroom/registry/embedded"
	"github.com/headroom-mesh/headroom/registry/registrytest"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

// shared is the address of an etcd for all tests that need none of their own.
var shared string

func TestMain(m *testing.M) {
	os.Exit(withShared(m.Run))
}

func withShared(run func() int) int {
	dir, err := os.MkdirTemp("", "etcd")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	ctx, cancel := context.WithCancel(context.Background())
	ready := make(chan string)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() {
		defer close(ready)
		cfg := embedded.Config{Dir: dir, ClientAddr: "127.0.0.1:0", PeerAddr: "127.0.0.1:0"}
		if err := embedded.Run(ctx, cfg, func(url string) { ready <- url }); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
	})
	shared = strings.TrimPrefix(<-ready, "http://")
	if shared == "" {
		return 1
	}
	return run()
}

// store is a part of an etcd, reached through a proxy that can be switched off.
type store struct {
	t      *testing.T
	prefix string
	proxy  *proxy
	direct *clientv3.Client
	ttl    time.Duration
}

func newStore(t *testing.T) *store {
	s := &store{t: t, prefix: fmt.Sprintf("/%s/%d", t.Name(), time.Now().UnixNano()), proxy: startProxy(t, shared)}
	s.direct = directClient(t, clientv3.Config{Endpoints: []string{shared}})
	return s
}

func directClient(t *testing.T, cfg clientv3.Config) *clientv3.Client {
	t.Helper()
	cfg.Logger = zap.NewNop()
	client, err := clientv3.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	return client
}

func (s *store) config(node registry.NodeName) Config {
	return Config{
		Endpoints: []string{"http://" + s.proxy.addr()},
		Prefix:    strings.ReplaceAll(s.prefix, " ", "_"),
		LeaseTTL:  s.ttl,
		Node:      node,
		Owner:     string(node),
		Log:       slog.New(slog.NewTextHandler(s.t.Output(), nil)).With("agent", node),
	}
}

func (s *store) Connect(node registry.NodeName) registry.Registry {
	return mustNew(s.t, s.config(node))
}

func mustNew(t *testing.T, cfg Config) *Registry {
	t.Helper()
	r, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func (s *store) Put(key string, value []byte) {
	if _, err := s.direct.Put(s.t.Context(), s.config("test").Prefix+"/"+key, string(value)); err != nil {
		s.t.Errorf("put %s: %v", key, err)
	}
}

func (s *store) Expire(node registry.NodeName) {
	for lease := range s.leases(node) {
		if _, err := s.direct.Revoke(s.t.Context(), lease); err != nil {
			s.t.Errorf("revoke the lease of %s: %v", node, err)
		}
	}
}

func (s *store) leases(node registry.NodeName) map[clientv3.LeaseID]bool {
	leases := map[clientv3.LeaseID]bool{}
	response, err := s.direct.Get(s.t.Context(), s.config("test").Prefix+"/endpoints/", clientv3.WithPrefix())
	if err != nil {
		s.t.Errorf("list endpoints: %v", err)
		return nil
	}
	for _, kv := range response.Kvs {
		if strings.Contains(string(kv.Key), "/"+string(node)+"/") {
			leases[clientv3.LeaseID(kv.Lease)] = true
		}
	}
	return leases
}

func (s *store) SetAway(away bool) { s.proxy.setAway(away) }

func TestConformance(t *testing.T) {
	registrytest.TestRegistry(t, func(t *testing.T) registrytest.Store { return newStore(t) })
}

// proxy forwards connections unless it is away: then it closes them.
type proxy struct {
	listener net.Listener
	target   atomic.Value // string
	running  sync.WaitGroup

	// mu guards the fields below
	mu    sync.Mutex
	away  bool
	conns map[net.Conn]bool
}

func startProxy(t *testing.T, target string) *proxy {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{listener: listener, conns: map[net.Conn]bool{}}
	p.target.Store(target)
	p.running.Go(p.accept)
	t.Cleanup(func() {
		listener.Close()
		p.setAway(true)
		p.running.Wait()
	})
	return p
}

func (p *proxy) addr() string { return p.listener.Addr().String() }

func (p *proxy) setAway(away bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.away = away
	for conn := range p.conns {
		conn.Close()
	}
	clear(p.conns)
}

func (p *proxy) accept() {
	for {
		conn, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.running.Go(func() { p.forward(conn) })
	}
}

func (p *proxy) forward(from net.Conn) {
	defer from.Close()
	to, err := net.Dial("tcp", p.target.Load().(string))
	if err != nil {
		return
	}
	defer to.Close()
	if !p.keep(from, to) {
		return
	}
	var copying sync.WaitGroup
	copying.Go(func() { copyAndClose(from, to) })
	copying.Go(func() { copyAndClose(to, from) })
	copying.Wait()
}

func copyAndClose(from, to net.Conn) {
	io.Copy(to, from)
	to.Close()
	from.Close()
}

func (p *proxy) keep(conns ...net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, conn := range conns {
		p.conns[conn] = true
	}
	return !p.away
}
