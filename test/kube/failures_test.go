//go:build kube

package kube

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// balancing compares two rules on a service of which two in eight replicas are slow.
func balancing(t *testing.T) {
	kubectl(t, "--namespace", "shop", "rollout", "status", "deployment", "cart-fast", "--timeout=120s")
	kubectl(t, "--namespace", "shop", "rollout", "status", "deployment", "cart-slow", "--timeout=120s")
	eventually(t, 30*time.Second, func() error {
		out, err := meshctl("services")
		if err == nil && !strings.Contains(strings.Join(strings.Fields(out), " "), "cart.shop prequal default 8 0 0") {
			err = fmt.Errorf("meshctl doesn't show 8 replicas of cart.shop:\n%s", out)
		}
		return err
	})
	err := compare(t)
	for again := 0; err != nil && again < 2; again++ { // a slow moment of the machine makes all replicas slow
		t.Logf("once more, as %v", err)
		err = compare(t)
	}
	if err != nil {
		t.Error(err)
	}
	mustMeshctl(t, "policy", "delete", "shop/cart")
}

// compare holds prequal against what the documentation promises of it.
func compare(t *testing.T) error {
	t.Helper()
	results := map[string]outcome{}
	for _, rule := range []string{"round_robin", "prequal"} {
		mustMeshctl(t, "policy", "set", "shop/cart", "--balancer", rule, "--wait")
		load(t, "1500ms")
		results[rule] = load(t, "6s")
		t.Logf("%s: %s", rule, results[rule])
		if err := throughMesh(results[rule]); err != nil {
			t.Errorf("%s: %v", rule, err)
		}
	}
	prequal, other := results["prequal"], results["round_robin"]
	share, ratio := float64(slow(prequal))/float64(prequal.Requests), other.P99/prequal.P99
	if share >= 0.01 || ratio < 6 {
		return fmt.Errorf("prequal sent %.2f%% of requests to slow replicas, want less than 1%%; its p99 is %.1f times lower than that of round_robin, want 6", 100*share, ratio)
	}
	return nil
}

func load(t *testing.T, lasts string) (r outcome) {
	t.Helper()
	out := kubectl(t, "--namespace", "shop", "exec", "client", "--container", "web", "--", "/web", "load", "http://cart", "150", lasts)
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return r
}

func slow(r outcome) int {
	n := 0
	for replica, requests := range r.By {
		if strings.HasPrefix(replica, "cart-slow-") {
			n += requests
		}
	}
	return n
}

// withoutControlPlane cuts the power of all that Kubernetes is steered by. Nothing is steered meanwhile, and all else goes on.
func withoutControlPlane(t *testing.T) {
	begin := time.Now()
	t.Cleanup(func() { cluster(t, "start", "control") })
	cluster(t, "stop", "control")
	for until := time.Now().Add(10 * time.Second); time.Now().Before(until); {
		must(t, "", "./cluster.sh", "exec", "node1", "curl", "--silent", "--fail", "--max-time", "5", "--proxy", "http://127.0.0.1:15001", "http://checkout.shop.mesh")
	}
	cluster(t, "start", "control")
	eventually(t, time.Minute, func() error { _, err := run("", "kubectl", "get", "--raw", "/readyz"); return err })
	steady.want(t, 2, throughMesh)
	wantAll(t, begin, throughMesh)
	kubectl(t, "--namespace", system, "rollout", "status", "daemonset", release, "--timeout=60s")
}

// wantAll wants something of every second since a time.
func wantAll(t *testing.T, begin time.Time, wanted func(outcome) error) {
	t.Helper()
	for _, one := range steady.since(t, begin) {
		if err := wanted(one); err != nil {
			t.Errorf("%v: %s", err, one)
		}
	}
}

// withoutEtcd takes away the store of the mesh: traffic goes on, and whoever wants to change something is told.
func withoutEtcd(t *testing.T) {
	begin := time.Now()
	kubectl(t, "--namespace", system, "scale", "statefulset", release+"-etcd", "--replicas=0")
	kubectl(t, "--namespace", system, "wait", "--for=delete", "pod/"+release+"-etcd-0", "--timeout=60s")
	eventually(t, 30*time.Second, func() error {
		_, err := meshctl("policy", "set", "shop/checkout", "--timeout", "5s")
		if err == nil || !strings.Contains(err.Error(), "the registry is unreachable") {
			return fmt.Errorf("meshctl doesn't say that the store is away, but: %v", err)
		}
		return nil
	})
	kubectl(t, "--namespace", system, "scale", "statefulset", release+"-etcd", "--replicas=1")
	kubectl(t, "--namespace", system, "rollout", "status", "statefulset", release+"-etcd", "--timeout=60s")
	eventually(t, 30*time.Second, func() error {
		_, err := meshctl("policy", "set", "shop/checkout", "--timeout", "5s")
		return err
	})
	mustMeshctl(t, "policy", "set", "shop/checkout", "--timeout", "default", "--wait")
	wantAll(t, begin, throughMesh)
}

// brokenUpgrade has agents replaced by what can't run on these nodes. Kubernetes waits in vain for the first one to be ready:
// the agents stay that there are, and so does the traffic, until the upgrade is taken back.
func brokenUpgrade(t *testing.T) {
	before, begin := agents(t), time.Now()
	_, err := run("", "helm", "upgrade", release, chart, "--namespace", system, "--values", "testdata/values.yaml",
		"--set", "image.tag=arm64", "--wait", "--timeout", "10s")
	if err == nil || !strings.Contains(err.Error(), "DaemonSet/headroom-system/headroom not ready") {
		t.Errorf("helm doesn't say what isn't ready: %v", err)
	}
	eventually(t, 30*time.Second, func() error {
		if out := kubectl(t, "--namespace", system, "get", "pods"); !strings.Contains(out, "CrashLoopBackOff") {
			return fmt.Errorf("no agent fails to start:\n%s", out)
		}
		return nil
	})
	if now := agents(t); len(now) != len(before)+1 {
		t.Errorf("there are the agents %v beside those from before, %v: want one of the next, on one node", now, before)
	}
	steady.want(t, 3, throughMesh)
	helm(t, "rollback", release, "--namespace", system, "--wait", "--timeout", "2m")
	eventually(t, time.Minute, func() error {
		if now := agents(t); !slices.Equal(now, before) {
			return fmt.Errorf("the agents are %v, want those from before, %v", now, before)
		}
		return nil
	})
	wantAll(t, begin, throughMesh)
}

// agents tells of all, by name, how often they were restarted.
func agents(t *testing.T) []string {
	t.Helper()
	return strings.Split(strings.TrimSpace(kubectl(t, "--namespace", system, "get", "pods", "--selector", "app.kubernetes.io/component=agent",
		"--sort-by", ".metadata.name", "--output", `jsonpath={range .items[*]}{.metadata.name}: {.status.containerStatuses[0].restartCount}{"\n"}{end}`)), "\n")
}

// agentKilled leaves pods with what Kubernetes does for them, until an agent is back: soon after the first time that it has
// ended so, not so soon after the second.
func agentKilled(t *testing.T) {
	last := ""
	for range 2 {
		eventually(t, 30*time.Second, func() error {
			pid, err := run("", "./cluster.sh", "exec", "node1", "pgrep", "-x", "agent")
			if err != nil || pid == last {
				return fmt.Errorf("there is no agent yet but %q: %v", last, err)
			}
			if _, err = run("", "./cluster.sh", "exec", "node1", "kill", "-9", strings.TrimSpace(pid)); err == nil {
				last = pid
			}
			return err
		})
	}
	killed := time.Now()
	steady.want(t, 2, direct)
	kubectl(t, "--namespace", system, "rollout", "status", "daemonset", release, "--timeout=90s")
	steady.want(t, 2, throughMesh)
	steady.unharmed(t, killed.Add(time.Second)) // but for what was in flight then
}

// agentDeleted replaces the agent of a node while pods there send. The next one starts as soon as that one is told to end.
func agentDeleted(t *testing.T) {
	begin := time.Now()
	kubectl(t, "--namespace", system, "delete", agentOn(t, "node1"), "--wait")
	kubectl(t, "--namespace", system, "rollout", "status", "daemonset", release, "--timeout=90s")
	steady.want(t, 2, throughMesh)
	steady.unharmed(t, begin)
}

// agentOn names the agent of a node, and not one that it has taken over from, which may not have ended yet.
func agentOn(t *testing.T, node string) string {
	t.Helper()
	return strings.TrimSpace(kubectl(t, "--namespace", system, "get", "pods", "--selector", "app.kubernetes.io/component=agent",
		"--field-selector", "spec.nodeName="+node, "--output",
		`go-template={{range .items}}{{if not .metadata.deletionTimestamp}}{{"pod/"}}{{.metadata.name}}{{"\n"}}{{end}}{{end}}`))
}

// withoutRights starts an agent that may not see pods.
func withoutRights(t *testing.T) {
	allow := func(resources string) {
		t.Helper()
		kubectl(t, "patch", "clusterrole", release+"-agent", "--type=json", "--patch", `[{"op": "replace", "path": "/rules/0/resources", "value": [`+resources+`]}]`)
	}
	defer allow(`"namespaces", "services", "pods", "nodes"`)
	allow(`"namespaces", "services", "nodes"`)
	kubectl(t, "--namespace", system, "delete", agentOn(t, "node2"), "--wait")
	eventually(t, time.Minute, func() error {
		out, err := meshctl("check", "--output", "json")
		if err == nil || !strings.Contains(out, `cannot list resource \"pods\"`) && !strings.Contains(out, `cannot watch resource \"pods\"`) {
			return fmt.Errorf("meshctl check doesn't say what the agent lacks: %v: %s", err, out)
		}
		return nil
	})
	if log := kubectl(t, "--namespace", system, "logs", agentOn(t, "node2")); !strings.Contains(log, "its role must permit to list and watch it") {
		t.Errorf("the agent doesn't say what it lacks:\n%s", log)
	}
	allow(`"namespaces", "services", "pods", "nodes"`)
	kubectl(t, "--namespace", system, "rollout", "status", "daemonset", release, "--timeout=90s")
	eventually(t, 30*time.Second, func() error { _, err := meshctl("check"); return err })
}
