//go:build kube

package kube

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
)

// TestPodsTalk has pods of two nodes call each other by the names and addresses that users know, also after a node lost
// its power. If it fails, then the cluster is to blame, not the mesh.
func TestPodsTalk(t *testing.T) {
	loadProgram(t, "./web", "headroom.test/web:1")
	manifest, err := os.ReadFile("testdata/web.yaml")
	if err != nil {
		t.Fatal(err)
	}
	ns := namespace(t, "smoke")
	apply(t, ns, string(manifest))
	kubectl(t, "--namespace", ns, "wait", "--for=condition=Ready", "--timeout=180s", "pods", "--all")
	callEachOther(t, ns)

	cluster(t, "stop", "node2")
	cluster(t, "start", "node2")
	eventually(t, 3*time.Minute, func() error {
		_, err := run("", "kubectl", "--namespace", ns, "exec", "web-2", "--", "/web", "get", "http://web-1")
		return err
	})
	callEachOther(t, ns)
}

func callEachOther(t *testing.T, ns string) {
	t.Helper()
	for from := 1; from <= 2; from++ {
		to := fmt.Sprintf("web-%d", 3-from)
		ips := strings.Fields(kubectl(t, "--namespace", ns, "get", "service", to, "--output", "jsonpath={.spec.clusterIPs[*]}"))
		if len(ips) != 2 {
			t.Fatalf("service %s has addresses %v, want one of IPv4 and one of IPv6", to, ips)
		}
		for _, host := range []string{to, to + "." + ns + ".svc.cluster.local", ips[0], "[" + ips[1] + "]"} {
			eventually(t, time.Minute, func() error {
				answer, err := run("", "kubectl", "--namespace", ns, "exec", fmt.Sprintf("web-%d", from), "--", "/web", "get", "http://"+host)
				if err == nil && !strings.HasPrefix(answer, to+" answers") {
					err = fmt.Errorf("web-%d called %s and was answered %q", from, host, answer)
				}
				return err
			})
		}
	}
}
