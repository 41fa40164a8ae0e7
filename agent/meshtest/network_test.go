//go:build linux

package meshtest_test

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/headroom-mesh/headroom/agent/meshtest"
)

// TestStaleNamespaces wants what a killed test left behind to go, and nothing else.
func TestStaleNamespaces(t *testing.T) {
	config(t)
	const stale = "headroom-test-999999999-TestKilled-a" // no process has such a number
	if out, err := exec.Command("ip", "netns", "add", stale).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	other := meshtest.NewNetwork(t)
	out, err := exec.Command("ip", "netns", "list").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if strings.Contains(string(out), stale) {
		t.Errorf("%s is left", stale)
	}
	if !strings.Contains(string(out), other.Name()) {
		t.Errorf("%q lacks the namespaces of a test that runs, %s", out, other.Name())
	}
}
