package embedded_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/registry"
	"github.com/headroom-mesh/headroom/registry/embedded"
	"github.com/headroom-mesh/headroom/registry/etcd"
	"github.com/headroom-mesh/headroom/registry/registrytest"
)

func config(t *testing.T, dir string) embedded.Config {
	return embedded.Config{
		Dir:        dir,
		ClientAddr: "127.0.0.1:0",
		PeerAddr:   "127.0.0.1:0",
		Log:        slog.New(slog.NewTextHandler(t.Output(), nil)),
	}
}

// run returns the URL of a running store and what stops it.
func run(t *testing.T, cfg embedded.Config) (url string, stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ready := make(chan string, 1)
	var running sync.WaitGroup
	running.Go(func() {
		defer close(ready)
		if err := embedded.Run(ctx, cfg, func(url string) { ready <- url }); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	stop = sync.OnceFunc(func() {
		cancel()
		running.Wait()
	})
	t.Cleanup(stop)
	return <-ready, stop
}

// fail runs a store that must not start, and returns its error.
func fail(t *testing.T, cfg embedded.Config) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	err := embedded.Run(ctx, cfg, func(url string) {
		t.Errorf("ready at %s", url)
		cancel()
	})
	if err == nil {
		t.Fatal("Run = nil, want an error")
	}
	return err.Error()
}

func wantParts(t *testing.T, got string, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if !strings.Contains(got, part) {
			t.Errorf("%q doesn't mention %q", got, part)
		}
	}
}

func connect(t *testing.T, url string) *registrytest.Agent {
	t.Helper()
	r, err := etcd.New(etcd.Config{Endpoints: []string{url}, Node: "a"})
	if err != nil {
		t.Fatal(err)
	}
	return registrytest.Start(t, r)
}

// freeAddr is an address that nobody listens on now.
func freeAddr(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	return listener.Addr().String()
}

func TestRestartElsewhere(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "made")
	url, stop := run(t, config(t, dir))
	if _, err := connect(t, url).SetPolicy(t.Context(), registrytest.Policy("web", "3s", "")); err != nil {
		t.Fatal(err)
	}
	stop()
	moved := config(t, dir)
	moved.ClientAddr, moved.PeerAddr = freeAddr(t), freeAddr(t)
	url, _ = run(t, moved)
	if want := "http://" + moved.ClientAddr; url != want {
		t.Errorf("ready at %s, want %s", url, want)
	}
	a := connect(t, url)
	a.AwaitThat(t, "the policy is still there", func(s *registry.Snapshot) bool {
		return s.Services["web"] != nil && s.Services["web"].Policy.Timeout == 3*time.Second
	})
	if _, err := a.SetPolicy(t.Context(), registrytest.Policy("web", "4s", "")); err != nil {
		t.Errorf("write after the restart: %v", err)
	}
}

func TestStopsWhileWatched(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	cfg := config(t, t.TempDir())
	cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
	url, stop := run(t, cfg)
	a := connect(t, url)
	a.Register(t, registrytest.Endpoint("web", "a"))
	began := time.Now()
	stop()
	if took := time.Since(began); took > 3*time.Second {
		t.Errorf("it took %v to stop", took)
	}
	if strings.Contains(log.String(), "level=ERROR") {
		t.Errorf("stopping was logged as an error:\n%s", &log)
	}
}

func TestPortInUse(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	addr := listener.Addr().String()

	client := config(t, t.TempDir())
	client.ClientAddr = addr
	wantParts(t, fail(t, client), addr, "another process", "choose other ports")
	peer := config(t, t.TempDir())
	peer.PeerAddr = addr
	wantParts(t, fail(t, peer), addr, "another process", "choose other ports")
}

func TestDirectoryInUse(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	run(t, config(t, dir))
	wantParts(t, fail(t, config(t, dir)), dir, "in use by another process", "choose another directory")
}

func TestDirectoryCannotBeMade(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	wantParts(t, fail(t, config(t, filepath.Join(file, "data"))), "make the data directory", file)
}

func TestBrokenData(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	_, stop := run(t, config(t, dir))
	stop()
	logs, err := filepath.Glob(filepath.Join(dir, "member", "wal", "*.wal"))
	if err != nil || len(logs) == 0 {
		t.Fatalf("no write-ahead log: %v", err)
	}
	for _, path := range logs {
		if err := os.WriteFile(path, bytes.Repeat([]byte{0xff}, 4096), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	wantParts(t, fail(t, config(t, dir)), "etcd data in "+dir+" is damaged", "restore it from a backup")
}

func TestDamagedData(t *testing.T) {
	t.Parallel()
	for name, damage := range map[string]func(dir string) error{
		"truncated log": func(dir string) error {
			logs, err := filepath.Glob(filepath.Join(dir, "member", "wal", "*.wal"))
			for _, path := range logs {
				err = errors.Join(err, os.Truncate(path, 3000))
			}
			return err
		},
		"no log": func(dir string) error { return os.RemoveAll(filepath.Join(dir, "member", "wal")) },
		"garbage": func(dir string) error {
			return os.WriteFile(filepath.Join(dir, "member", "snap", "db"), []byte("garbage"), 0o600)
		},
		"much garbage": func(dir string) error {
			return os.WriteFile(filepath.Join(dir, "member", "snap", "db"), bytes.Repeat([]byte("garbage"), 1<<14), 0o600)
		},
		"truncated database": func(dir string) error {
			return os.Truncate(filepath.Join(dir, "member", "snap", "db"), 8192)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			url, stop := run(t, config(t, dir))
			a := connect(t, url)
			for range 100 {
				if _, err := a.SetPolicy(t.Context(), registrytest.Policy("web", "3s", "")); err != nil {
					t.Fatal(err)
				}
			}
			a.Stop()
			stop()
			if err := damage(dir); err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			wantParts(t, fail(t, config(t, dir)), "etcd data in "+dir+" is damaged or unreadable",
				"restore it from a backup or remove the folder")
			if took := time.Since(began); took > 5*time.Second {
				t.Errorf("the error took %v", took)
			}
		})
	}
}

// copyStore copies the data of a running store: the log last, as it is ahead of the database.
func copyStore(t *testing.T, from, to string) {
	t.Helper()
	path := filepath.Join("member", "snap", "db")
	var database, again []byte
	var err error
	for database == nil || !bytes.Equal(database, again) { // not in the middle of a write
		database, err = os.ReadFile(filepath.Join(from, path))
		if err == nil {
			again, err = os.ReadFile(filepath.Join(from, path))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(
		os.MkdirAll(filepath.Join(to, "member", "snap"), 0o700),
		os.WriteFile(filepath.Join(to, path), database, 0o600),
		os.CopyFS(filepath.Join(to, "member", "wal"), os.DirFS(filepath.Join(from, "member", "wal"))),
	); err != nil {
		t.Fatal(err)
	}
}

// The machine may fail at any moment: what is on disk then is no damage.
func TestStartAfterCrash(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	url, stop := run(t, config(t, dir))
	a := connect(t, url)
	for i := range 3 {
		for range 50 {
			if _, err := a.SetPolicy(t.Context(), registrytest.Policy("web", "3s", "")); err != nil {
				t.Fatal(err)
			}
		}
		crashed := filepath.Join(t.TempDir(), strconv.Itoa(i))
		copyStore(t, dir, crashed)
		_, stopCopy := run(t, config(t, crashed))
		stopCopy()
	}
	a.Stop()
	stop()
}

func TestConfig(t *testing.T) {
	t.Parallel()
	if err := (embedded.Config{Dir: "data"}).Validate(); err != nil {
		t.Errorf("the defaults: %v", err)
	}
	err := embedded.Config{ClientAddr: "localhost:1", PeerAddr: "2380"}.Validate()
	if err == nil {
		t.Fatal("Validate = nil")
	}
	wantParts(t, err.Error(), "dir: ", `clientAddr: want IP:PORT, got "localhost:1"`, `peerAddr: want IP:PORT, got "2380"`)
	wantParts(t, fail(t, embedded.Config{}), "embedded etcd: dir: ")
}

func TestStopsBeforeItIsReady(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := embedded.Run(ctx, config(t, t.TempDir()), func(string) {}); err != nil {
		t.Errorf("Run = %v", err)
	}
}
