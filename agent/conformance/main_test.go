//go:build linux

package conformance

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/headroom-mesh/headroom/agent/meshtest"
	"google.golang.org/grpc/grpclog"
)

func TestMain(m *testing.M) {
	if served, err := meshtest.ServeEtcd(); served {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	grpclog.SetLoggerV2(newSurvivor())
	code := m.Run()
	if p, err := programs(); err == nil {
		os.RemoveAll(filepath.Dir(p.Agent))
	}
	os.Exit(code)
}

// h2specProgram is where programs builds the suite h2spec.
const h2specProgram = "h2spec"

// programs builds all programs, once.
var programs = sync.OnceValues(func() (meshtest.Programs, error) {
	dir, err := os.MkdirTemp("", "headroom-test-")
	if err != nil {
		return meshtest.Programs{}, err
	}
	build := exec.Command("go", "build", "-modfile=api/tools.mod", "-o", filepath.Join(dir, h2specProgram), "github.com/summerwind/h2spec/cmd/h2spec")
	build.Dir = filepath.Join("..", "..")
	if out, err := build.CombinedOutput(); err != nil {
		return meshtest.Programs{}, fmt.Errorf("build h2spec: %w\n%s", err, out)
	}
	return meshtest.Build(dir)
})
