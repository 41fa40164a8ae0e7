package embedded

import (
	"context"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// run returns the client URL of a running store and a function that stops it.
func run(t *testing.T, cfg Config) (string, func()) {
	t.Helper()
	cfg.Log = slog.New(slog.NewTextHandler(t.Output(), nil))
	ctx, cancel := context.WithCancel(t.Context())
	ready := make(chan string, 1)
	done := make(chan error, 1)
	go func() { done <- Run(ctx, cfg, func(url string) { ready <- url }) }()
	stop := sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(stop)
	select {
	case url := <-ready:
		return url, stop
	case err := <-done:
		done <- err
		t.Fatal("not ready")
	}
	return "", nil
}

func TestRun(t *testing.T) {
	url, stop := run(t, Config{Dir: t.TempDir(), ClientAddr: "127.0.0.1:0", PeerAddr: "127.0.0.1:0"})
	t.Log(url)
	stop()
}

var _ = []any{net.Listen, os.Args, filepath.Join, strings.Cut}
