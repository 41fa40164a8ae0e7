//go:build linux

package meshtest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// Build builds the programs under test into a folder. The program that calls it serves as etcd: its TestMain has to call
// ServeEtcd.
func Build(dir string) (Programs, error) {
	self, err := os.Executable()
	if err != nil {
		return Programs{}, err
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
		return Programs{}, fmt.Errorf("build the programs: %w\n%s", err, out)
	}
	return Programs{Agent: filepath.Join(dir, "agent"), Meshctl: filepath.Join(dir, "meshctl"), Etcd: self}, nil
}
