//go:build kube

// Package kube tests the chart on a real cluster, which cluster.sh runs on this machine.
package kube

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestMain(m *testing.M) { os.Exit(runWithCluster(m)) }

// runWithCluster brings a cluster up for the tests and down after them. With KUBECONFIG set, it uses that one and leaves
// it be.
func runWithCluster(m *testing.M) int {
	bin, err := run("", "./build.sh", "cluster")
	if err != nil {
		return failed(err)
	}
	os.Setenv("PATH", strings.TrimSpace(bin)+":"+os.Getenv("PATH"))
	if os.Getenv("KUBECONFIG") != "" {
		return m.Run()
	}
	defer run("", "./cluster.sh", "down")
	if _, err := run("", "./cluster.sh", "up"); err != nil {
		return failed(err)
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return failed(err)
	}
	os.Setenv("KUBECONFIG", filepath.Join(cache, "headroom-kube", "cluster"+cmp.Or(os.Getenv("CLUSTER"), "0"), "kubeconfig"))
	return m.Run()
}

func failed(err error) int {
	fmt.Fprintln(os.Stderr, err)
	return 1
}

// run returns what a program prints.
func run(stdin string, program string, args ...string) (string, error) {
	var output, messages bytes.Buffer
	c := exec.Command(program, args...)
	c.Stdin, c.Stdout, c.Stderr = strings.NewReader(stdin), &output, &messages
	if err := c.Run(); err != nil {
		return output.String(), fmt.Errorf("%s %s: %w: %s%s", program, strings.Join(args, " "), err, messages.String(), output.String())
	}
	return output.String(), nil
}

func must(t *testing.T, stdin string, program string, args ...string) string {
	t.Helper()
	output, err := run(stdin, program, args...)
	if err != nil {
		t.Fatal(err)
	}
	return output
}

func kubectl(t *testing.T, args ...string) string {
	t.Helper()
	return must(t, "", "kubectl", args...)
}

func helm(t *testing.T, args ...string) string {
	t.Helper()
	return must(t, "", "helm", args...)
}

// cluster calls cluster.sh, as in cluster(t, "stop", "node2").
func cluster(t *testing.T, args ...string) string {
	t.Helper()
	return must(t, "", "./cluster.sh", args...)
}

func apply(t *testing.T, namespace, manifest string) {
	t.Helper()
	must(t, manifest, "kubectl", "apply", "--namespace", namespace, "--filename", "-")
}

// namespace makes a namespace for as long as the test runs. If the test fails, it shows what happened there.
func namespace(t *testing.T, name string) string {
	t.Helper()
	kubectl(t, "create", "namespace", name)
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(kubectl(t, "--namespace", name, "get", "all,endpointslices,events", "--output", "wide"))
		}
		kubectl(t, "delete", "namespace", name, "--wait")
	})
	return name
}

// loadProgram makes an image of a Go program of this module and gives it to the nodes.
func loadProgram(t *testing.T, pkg, tag string) {
	t.Helper()
	dir := t.TempDir()
	binary, image := filepath.Join(dir, filepath.Base(pkg)), filepath.Join(dir, "image.tar")
	must(t, "", "env", "CGO_ENABLED=0", "go", "build", "-o", binary, pkg)
	if err := os.WriteFile(image, []byte(must(t, "", "./image.sh", binary, tag)), 0o600); err != nil {
		t.Fatal(err)
	}
	cluster(t, "load", image)
}

// eventually tries until there is no error, and fails with the last one.
func eventually(t *testing.T, within time.Duration, try func() error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	again := time.NewTicker(200 * time.Millisecond)
	defer again.Stop()
	for {
		err := try()
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			t.Fatalf("not within %v: %v", within, err)
		case <-again.C:
		}
	}
}
