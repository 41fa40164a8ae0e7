//go:build linux

package meshtest_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/headroom-mesh/headroom/agent/meshtest"
)

func TestMain(m *testing.M) {
	if served, err := meshtest.ServeEtcd(); served {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	code := m.Run()
	if p, err := programs(); err == nil {
		os.RemoveAll(filepath.Dir(p.Agent))
	}
	os.Exit(code)
}

// programs builds the programs under test, once.
var programs = sync.OnceValues(func() (meshtest.Programs, error) {
	dir, err := os.MkdirTemp("", "headroom-test-")
	if err != nil {
		return meshtest.Programs{}, err
	}
	self, err := os.Executable()
	if err != nil {
		return meshtest.Programs{}, err
	}
	args := []string{"build", "-trimpath", "-ldflags", "-s -w", "-o", dir}
	if os.Getenv("HEADROOM_RACE") == "1" {
		args = []string{"build", "-race", "-o", dir}
	}
	const cmd = "github.com/headroom-mesh/headroom/cmd/"
	build := exec.Command("go", append(args, cmd+"agent", cmd+"meshctl")...)
	if os.Getenv("HEADROOM_RACE") != "1" {
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
	}
	if out, err := build.CombinedOutput(); err != nil {
		return meshtest.Programs{}, fmt.Errorf("build the programs: %w\n%s", err, out)
	}
	return meshtest.Programs{Agent: filepath.Join(dir, "agent"), Meshctl: filepath.Join(dir, "meshctl"), Etcd: self}, nil
})
