package main

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
	"google.golang.org/grpc"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"meshctl": main})
}

// TestScripts runs the transcripts in testdata, each against a fake agent of its own. In them, "agent rivals N" makes
// others write a policy first, N times; "agent lagging" makes an agent never apply anything. "cluster has FILE" makes a fake
// Kubernetes cluster, of $KUBE, have what a file says.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Setup:               setup,
		UpdateScripts:       os.Getenv("UPDATE_SCRIPTS") != "",
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"exits": exits,
			"cluster": func(ts *testscript.TestScript, _ bool, args []string) {
				ts.Check(ts.Value(clusterKey{}).(*fakeCluster).set(ts, args))
			},
			"agent": func(ts *testscript.TestScript, _ bool, args []string) {
				ts.Check(ts.Value(agentKey{}).(*fakeAgent).set(strings.Join(args, " ")))
			},
		},
	})
}

// exits runs a command that must end with the given code.
func exits(ts *testscript.TestScript, _ bool, args []string) {
	err := ts.Exec(args[1], args[2:]...)
	failure, ok := errors.AsType[*exec.ExitError](err)
	if !ok || strconv.Itoa(failure.ExitCode()) != args[0] {
		ts.Fatalf("%v: want exit code %s", err, args[0])
	}
}

type (
	agentKey   struct{}
	clusterKey struct{}
)

func setup(env *testscript.Env) error {
	agent := newFakeAgent()
	server, address, err := agent.listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	env.Defer(server.Stop)
	socket := filepath.Join(env.WorkDir, "agent.sock")
	local, _, err := agent.listen("unix", socket)
	if err != nil {
		return err
	}
	env.Defer(local.Stop)
	other, otherAddress, err := serve(grpc.NewServer(), "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	env.Defer(other.Stop)
	kubernetes := &fakeCluster{agent: address}
	stop, err := kubernetes.start(env.WorkDir)
	if err != nil {
		return err
	}
	env.Defer(stop)
	env.Values[clusterKey{}] = kubernetes
	env.Setenv("KUBE", filepath.Join(env.WorkDir, "kubeconfig"))
	env.Setenv("OTHER", otherAddress) // something that speaks gRPC, but is no agent
	env.Values[agentKey{}] = agent
	env.Setenv("HEADROOM_AGENT", address)
	env.Setenv("GORACE", "atexit_sleep_ms=0") // or every command takes a second longer under the race detector
	env.Setenv("SOCKET", "unix://"+socket)
	return nil
}
