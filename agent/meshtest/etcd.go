//go:build linux

package meshtest

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/signal"
	"syscall"

	"github.com/headroom-mesh/headroom/registry/embedded"
)

const (
	envEtcdDir  = "HEADROOM_TEST_ETCD_DIR"
	envEtcdAddr = "HEADROOM_TEST_ETCD_ADDR"
)

func etcdEnv(dir string, addr netip.Addr) []string {
	return []string{envEtcdDir + "=" + dir, envEtcdAddr + "=" + addr.String()}
}

// ServeEtcd runs etcd until a signal comes, if this process was started for that, and reports whether it was. It is to
// be the first thing that TestMain calls.
func ServeEtcd() (served bool, err error) {
	dir := os.Getenv(envEtcdDir)
	if dir == "" {
		return false, nil
	}
	addr, err := netip.ParseAddr(os.Getenv(envEtcdAddr))
	if err != nil {
		return true, err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	return true, embedded.Run(ctx, embedded.Config{
		Dir:        dir,
		ClientAddr: netip.AddrPortFrom(addr, 2379).String(),
		PeerAddr:   netip.AddrPortFrom(addr, 2380).String(),
		Log:        slog.New(slog.NewTextHandler(os.Stderr, nil)),
	}, func(url string) { fmt.Println(url) })
}
