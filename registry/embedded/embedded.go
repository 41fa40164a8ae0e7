// Package embedded runs etcd inside the agent: a cluster of one member, for a laptop or a small mesh.
package embedded

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"google.golang.org/grpc"
)

const (
	// readyTime is how long etcd may take to answer after it was started.
	readyTime = 30 * time.Second
	// closeTime is how long etcd may take to stop.
	closeTime = 8 * time.Second
)

// Config says where the store keeps its data and listens. The zero value of every field but Dir is its default.
type Config struct {
	// Dir holds the data. It is made if it doesn't exist. Required.
	Dir string
	// Name is the name of the member. Default "headroom".
	Name string
	// ClientAddr is where agents and etcdctl connect, IP:PORT; port 0 takes any free one. Default 127.0.0.1:2379.
	ClientAddr string
	// PeerAddr is where other members would connect, IP:PORT; port 0 takes any free one. Default 127.0.0.1:2380.
	PeerAddr string
	// Log gets what operators should know. Default: nothing is logged.
	Log *slog.Logger
}

func (c Config) withDefaults() Config {
	if c.Name == "" {
		c.Name = "headroom"
	}
	if c.ClientAddr == "" {
		c.ClientAddr = "127.0.0.1:2379"
	}
	if c.PeerAddr == "" {
		c.PeerAddr = "127.0.0.1:2380"
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

// Validate reports all that is wrong.
func (c Config) Validate() error {
	c = c.withDefaults()
	var problems []error
	if c.Dir == "" {
		problems = append(problems, errors.New("dir: want the directory for the data"))
	}
	if _, err := netip.ParseAddrPort(c.ClientAddr); err != nil {
		problems = append(problems, fmt.Errorf("clientAddr: want IP:PORT, got %q", c.ClientAddr))
	}
	if _, err := netip.ParseAddrPort(c.PeerAddr); err != nil {
		problems = append(problems, fmt.Errorf("peerAddr: want IP:PORT, got %q", c.PeerAddr))
	}
	return errors.Join(problems...)
}

// Run runs the store until ctx ends or the store fails. It calls ready once, with the URL for clients, when the store
// answers.
func Run(ctx context.Context, cfg Config, ready func(clientURL string)) error {
	if err := cfg.Validate(); err != nil {
		return fmt.Errorf("embedded etcd: %w", err)
	}
	cfg = cfg.withDefaults()
	locked, err := claim(cfg.Dir)
	if err != nil {
		return fmt.Errorf("embedded etcd: %w", err)
	}
	defer locked.Close()
	if err := check(cfg.Dir); err != nil {
		return fmt.Errorf("embedded etcd: %w", damaged(cfg.Dir, err))
	}
	stopped := func() bool { return ctx.Err() != nil }
	clients := newConns()
	server, err := start(cfg, &bridge{log: cfg.Log, stopped: stopped}, clients)
	if err != nil {
		return fmt.Errorf("embedded etcd: %w", err)
	}
	defer func() {
		clients.close()
		if !closes(server.Close) {
			cfg.Log.Error("etcd does not stop", "reason", "it hangs; what it has acknowledged is on disk")
		}
	}()
	if err := awaitReady(ctx, server.Server.ReadyNotify(), server.Err()); err != nil {
		return fmt.Errorf("embedded etcd on the data in %s: %w", cfg.Dir, err)
	}
	if ctx.Err() != nil {
		return nil
	}
	ready("http://" + server.Clients[0].Addr().String())
	return wait(ctx, server)
}

// awaitReady returns nil when etcd answers, and when ctx ends.
func awaitReady(ctx context.Context, ready <-chan struct{}, failed <-chan error) error {
	select {
	case <-ready:
		return nil
	case <-ctx.Done():
		return nil
	case err := <-failed:
		return err
	case <-time.After(readyTime):
		return fmt.Errorf("it is not ready after %v: its log says why; if the data is damaged, restore it from a backup",
			readyTime)
	}
}

// closes reports whether etcd stops in time. It may wait for ever for its own start to end; then the goroutine that
// closes it is left behind. No other goroutine ever is.
func closes(server func()) bool {
	closed := make(chan struct{})
	var closing sync.WaitGroup
	closing.Go(func() {
		defer close(closed)
		server()
	})
	select {
	case <-closed:
		return true
	case <-time.After(closeTime):
		return false
	}
}

func wait(ctx context.Context, server *embed.Etcd) error {
	select {
	case <-ctx.Done():
		return nil
	case err := <-server.Err():
		return fmt.Errorf("embedded etcd: %w", err)
	case <-server.Server.StopNotify():
		return errors.New("embedded etcd stopped by itself: its log says why")
	}
}

// claim keeps other processes away from dir as long as the returned file is open. etcd would wait for them forever.
func claim(dir string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the data directory: %w", err)
	}
	locked, err := lock(filepath.Join(dir, "headroom.lock"), os.O_CREATE)
	if err != nil {
		return nil, err
	}
	database, err := lock(filepath.Join(dir, "member", "snap", "db"), 0)
	if errors.Is(err, fs.ErrNotExist) {
		return locked, nil
	}
	if err != nil {
		locked.Close()
		return nil, err
	}
	return locked, database.Close() // etcd itself locks it next
}

func lock(path string, flags int) (*os.File, error) {
	file, err := os.OpenFile(path, os.O_RDWR|flags, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the data directory for writing: %w", err)
	}
	if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		file.Close()
		return nil, fmt.Errorf("data directory %s is in use by another process (%s is locked): "+
			"stop that process or choose another directory: %w", filepath.Dir(path), path, err)
	}
	return file, nil
}

// start turns the panics of etcd, which it keeps for data that it can't read, into errors.
func start(cfg Config, log zapcore.Core, clients *conns) (server *embed.Etcd, err error) {
	defer func() {
		if p := recover(); p != nil {
			server, err = nil, damaged(cfg.Dir, fmt.Errorf("%v", p))
		}
	}()
	server, err = embed.StartEtcd(configure(cfg, log, clients))
	if errors.Is(err, syscall.EADDRINUSE) {
		err = fmt.Errorf("listen on %s and %s: another process, perhaps an etcd, has one of these ports: "+
			"stop it or choose other ports: %w", cfg.ClientAddr, cfg.PeerAddr, err)
	}
	return server, err
}

func configure(cfg Config, log zapcore.Core, clients *conns) *embed.Config {
	client := []url.URL{{Scheme: "http", Host: cfg.ClientAddr}}
	peer := []url.URL{{Scheme: "http", Host: cfg.PeerAddr}}
	c := embed.NewConfig()
	c.Name = cfg.Name
	c.Dir = cfg.Dir
	c.ListenClientUrls, c.AdvertiseClientUrls = client, client
	c.ListenPeerUrls, c.AdvertisePeerUrls = peer, peer
	c.InitialCluster = c.InitialClusterFromName(cfg.Name)
	c.AutoCompactionMode = embed.CompactorModePeriodic
	c.AutoCompactionRetention = time.Hour.String()
	c.GRPCAdditionalServerOptions = []grpc.ServerOption{grpc.Creds(clients)}
	c.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.New(log, zap.WithFatalHook(panicking{})))
	return c
}
