//go:build linux

package meshtest_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/agent/meshtest"
	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
)

// TestTwoWritersOfOnePolicy has two operators, at two agents, change different fields of a policy at the same moment.
func TestTwoWritersOfOnePolicy(t *testing.T) {
	cfg := config(t)
	cfg.Nodes, cfg.Replicas = []string{"a", "b"}, 1
	_, agents := meshtest.Start(t, cfg)
	var stale string
	for round := range 20 {
		timeout, ratio := fmt.Sprintf("%ds", round+1), float64(round+1)/100
		var writers sync.WaitGroup
		writers.Go(func() { wantSet(t, agents["a"], "--timeout", timeout) })
		writers.Go(func() { wantSet(t, agents["b"], "--retry-budget", fmt.Sprint(ratio)) })
		writers.Wait()
		answer, err := agents["a"].Admin.GetPolicy(t.Context(), &meshv1.GetPolicyRequest{Service: meshtest.Service})
		if err != nil {
			t.Fatal(err)
		}
		spec := answer.Policy.Spec
		if got := spec.Timeout; got != timeout || spec.RetryBudget.GetRatio() != ratio {
			t.Errorf("round %d: timeout %v and ratio %v are stored, want %s and %v", round, got, spec.RetryBudget.GetRatio(), timeout, ratio)
		}
		if round == 10 {
			stale = agents["b"].MustMeshctl("policy", "get", "web", "-o", "yaml")
		}
	}
	file := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(file, []byte(stale), 0o600); err != nil {
		t.Fatal(err)
	}
	_, stderr, code := agents["a"].Meshctl("policy", "set", "-f", file)
	if code != 1 || !strings.Contains(stderr, "is no longer that of revision") {
		t.Errorf("a document with an old resource version: exit code %d, %q", code, stderr)
	}
}

// wantSet is for writers, which may not end the test.
func wantSet(t *testing.T, a *meshtest.Agent, flags ...string) {
	if _, stderr, code := a.Meshctl(append([]string{"policy", "set", meshtest.Service}, flags...)...); code != 0 {
		t.Errorf("policy set %v: exit code %d: %s", flags, code, stderr)
	}
}

// TestPolicySwitchUnderLoad goes through the balancers while requests are made.
func TestPolicySwitchUnderLoad(t *testing.T) {
	_, agents := meshtest.Start(t, config(t))
	load := agents["a"].Load(rate)
	balancers := [][]string{
		{"round_robin"}, {"prequal"}, {"least_loaded"}, {"ring_hash", "--hash-path"}, {"p2c"}, {"random"},
	}
	var slowest time.Duration
	for i := range 20 {
		began := time.Now()
		wantApplied(t, agents["b"], "3/3", append([]string{"--balancer"}, balancers[i%len(balancers)]...)...)
		slowest = max(slowest, time.Since(began))
		load.More(rate / 20)
	}
	o := load.Stop()
	o.WantNoLoss(t)
	t.Logf("%s; the slowest switch took %v", o, slowest)
}
