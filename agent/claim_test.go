package agent

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/headroom-mesh/headroom/registry"
)

// freePort returns a loopback address at which nothing listens, and that other programs of this machine don't get meanwhile.
func freePort(t *testing.T) netip.AddrPort {
	t.Helper()
	const first = 2 // not 127.0, where all others are
	ip := netip.AddrFrom4([4]byte{127, byte(first + rand.IntN(200)), byte(rand.IntN(256)), byte(1 + rand.IntN(254))})
	l, err := net.Listen("tcp", netip.AddrPortFrom(ip, 0).String())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).AddrPort()
}

// configOf returns a Config of an agent whose registry never answers.
func configOf(t *testing.T, node registry.NodeName, dataDir string) Config {
	return Config{
		Node: node, DataDir: dataDir, Etcd: []string{freePort(t).String()},
		Gossip: freePort(t), Mesh: freePort(t), Proxy: freePort(t), Admin: freePort(t), AdminHTTP: freePort(t),
		DrainDelay: 1,
	}
}

// wantRefused wants an agent to end at once, without a trace of having started anything.
func wantRefused(t *testing.T, cfg Config, words ...string) {
	t.Helper()
	var log bytes.Buffer
	cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
	a, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	err = a.Run(t.Context())
	for _, word := range words {
		if !strings.Contains(fmt.Sprint(err), word) {
			t.Errorf("error %v, want %q in it", err, word)
		}
	}
	if log.Len() > 0 {
		t.Errorf("it took part in something first:\n%s", log.String())
	}
}

func TestWhatAnotherAgentHasFailsTheStartBeforeAnythingBegins(t *testing.T) {
	dir := t.TempDir()
	a, err := New(configOf(t, "a", dir))
	if err != nil {
		t.Fatal(err)
	}
	claimed, err := a.claim(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	wantRefused(t, configOf(t, "b", dir), "data folder "+dir+" is in use by another agent: ", "; choose another with --data-dir")
	other := configOf(t, "b", t.TempDir())
	other.AdminSocket = filepath.Join(dir, "admin.sock")
	wantRefused(t, other, "admin.sock: another agent answers there", "--admin-socket")
	other = configOf(t, "b", t.TempDir())
	other.AdminHTTP = a.cfg.AdminHTTP
	wantRefused(t, other, a.cfg.AdminHTTP.String(), "--admin-http")
	other = configOf(t, "b", t.TempDir())
	other.Metrics = a.cfg.Mesh
	wantRefused(t, other, a.cfg.Mesh.String(), "--metrics")
	other = configOf(t, "b", t.TempDir())
	other.DNS, other.DNSListen = "listen", []netip.AddrPort{a.cfg.Mesh}
	wantRefused(t, other, a.cfg.Mesh.String(), "another program is there already", "--dns-listen")

	claimed.release()
	b, err := New(configOf(t, "b", dir))
	if err != nil {
		t.Fatal(err)
	}
	again, err := b.claim(t.Context())
	if err != nil {
		t.Errorf("after the first agent has gone: %v", err)
	}
	again.release()
}

func TestRunGivesUpWhatItClaimed(t *testing.T) {
	a, err := New(configOf(t, "a", t.TempDir()))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		if err := a.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	<-a.own.done
	cancel()
	running.Wait()
	if _, err := os.Stat(a.cfg.AdminSocket); !os.IsNotExist(err) {
		t.Errorf("the socket is still there: %v", err)
	}
	claimed, err := a.claim(t.Context())
	if err != nil {
		t.Error(err)
	}
	claimed.release()
}
