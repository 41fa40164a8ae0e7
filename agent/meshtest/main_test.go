//go:build linux

package meshtest_test

import (
	"fmt"
	"os"
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
	return meshtest.Build(dir)
})
