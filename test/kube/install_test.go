//go:build kube

package kube

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

const (
	release = "headroom"
	system  = "headroom-system"
	chart   = "../../deploy/helm"
)

// TestHeadroom does with the mesh what its users do, and what happens to them. Its parts follow one another on one cluster,
// while pods of a shop, which were there before, call each other.
func TestHeadroom(t *testing.T) {
	build(t)
	openShop(t)
	t.Cleanup(func() {
		helm(t, "uninstall", release, "--namespace", system, "--ignore-not-found", "--wait")
		kubectl(t, "delete", "namespace", system, "--ignore-not-found", "--wait")
	})
	for _, part := range []struct {
		name string
		test func(*testing.T)
	}{
		{"misspelt values", misspelt},
		{"other machine", otherMachine},
		{"install", install},
		{"enrol", enrol},
		{"addresses", addresses},
		{"exempt", exempt},
		{"helm test", helmTest},
		{"meshctl", meshctlTells},
		{"policies", policies},
		{"balancing", balancing},
		{"without control plane", withoutControlPlane},
		{"without etcd", withoutEtcd},
		{"broken upgrade", brokenUpgrade},
		{"agent killed", agentKilled},
		{"agent deleted", agentDeleted},
		{"without rights", withoutRights},
		{"uninstall", uninstall},
		{"upgrade", upgrade},
		{"uninstall again", uninstall},
	} {
		if t.Run(part.name, part.test) {
			continue
		}
		showAgents(t)
		if part.name == "install" {
			t.FailNow() // nothing else can be as wanted
		}
	}
}

// build makes the programs and their images, and gives these to the nodes. Meshctl is then in PATH.
func build(t *testing.T) {
	dir := t.TempDir()
	must(t, "", "env", "CGO_ENABLED=0", "go", "build", "-C", "../..", "-trimpath", "-ldflags=-s -w", "-o", dir+"/", "./cmd/agent", "./cmd/meshctl")
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	image(t, "linux/amd64", "headroom:test", filepath.Join(dir, "agent"), filepath.Join(dir, "meshctl"))
	image(t, "linux/amd64", "etcd:test", strings.TrimSpace(must(t, "", "which", "etcd")))
	loadProgram(t, "./web", "headroom.test/web:1")
}

// image makes an image of programs that says it is for a platform.
func image(t *testing.T, platform, name string, programs ...string) {
	t.Helper()
	dir := t.TempDir()
	args := []string{"run", "-C", "../..", "./deploy/image", "-name", "headroom.test/" + name, "-platforms", platform, "-out", dir}
	must(t, "", "go", append(args, programs...)...)
	cluster(t, "load", filepath.Join(dir, strings.ReplaceAll(platform, "/", "-")+".tar"))
}

// openShop starts pods before there is a mesh.
func openShop(t *testing.T) {
	manifest, err := os.ReadFile("testdata/shop.yaml")
	if err != nil {
		t.Fatal(err)
	}
	namespace(t, "shop")
	apply(t, "shop", string(manifest))
	kubectl(t, "--namespace", "shop", "wait", "--for=condition=Ready", "--timeout=180s", "pods", "--all")
	for _, c := range []caller{lasting, steady} {
		c.want(t, 2, direct)
	}
}

func misspelt(t *testing.T) {
	wantRefused(t, "agent.logLevell=debug", "/agent", "logLevell")
	wantRefused(t, "etcd.replicas=2", "/etcd/replicas", "1", "3")
}

// wantRefused wants helm to say what is wrong with a value, before anything is installed.
func wantRefused(t *testing.T, value string, words ...string) {
	t.Helper()
	_, err := run("", "helm", "install", release, chart, "--namespace", system, "--create-namespace", "--set", value)
	if err == nil {
		t.Fatalf("helm takes %s", value)
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("of %s helm says nothing of %s: %v", value, word, err)
		}
	}
}

func install(t *testing.T) {
	helm(t, "install", release, chart, "--namespace", system, "--create-namespace", "--values", "testdata/values.yaml", "--wait", "--timeout", "3m")
}

func showAgents(t *testing.T) {
	t.Helper()
	t.Log(run("", "kubectl", "--namespace", system, "get", "all,events", "--output", "wide"))
	t.Log(run("", "kubectl", "--namespace", system, "logs", "--selector", "app.kubernetes.io/component=agent", "--tail", "50", "--prefix"))
}

// enrol brings the shop into the mesh. Nothing is started again, and connections that there are go on.
func enrol(t *testing.T) {
	before := restarts(t)
	begin := time.Now()
	kubectl(t, "label", "namespace", "shop", "headroom.dev/mesh=enabled")
	steady.want(t, 3, throughMesh)
	lasting.want(t, 3, overOldConnection)
	steady.unharmed(t, begin)
	if after := restarts(t); fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("pods were %v, and are %v", before, after)
	}
}

// addresses calls the service by all its names and addresses.
func addresses(t *testing.T) {
	hosts := []string{"checkout", "checkout.shop", "checkout.shop.svc", "checkout.shop.svc.cluster.local"}
	ips := clusterIPs(t, "checkout")
	if len(ips) != 2 {
		t.Errorf("the service has addresses %v, want one of IPv4 and one of IPv6", ips)
	}
	for _, host := range append(hosts, ips...) {
		wantThrough(t, "client", "http://"+host, true)
	}
	for _, host := range []string{"checkout.shop.mesh", "checkout.shop", "checkout.shop.svc.cluster.local"} {
		eventually(t, 10*time.Second, func() error {
			answer, err := run("", "./cluster.sh", "exec", "node1", "curl", "--silent", "--show-error", "--fail", "--proxy", "http://127.0.0.1:15001", "http://"+host)
			if err == nil && field(answer, "Via") == "" {
				err = fmt.Errorf("the proxy was asked for %s, and answered %q", host, answer)
			}
			return err
		})
	}
}

// exempt calls from pods that are not in the mesh, and services that it leaves alone.
func exempt(t *testing.T) {
	ip := clusterIPs(t, "checkout")[0]
	wantThrough(t, "outsider", "http://"+ip, false)
	wantThrough(t, "host", "http://"+ip, false)
	wantThrough(t, "client", "http://headless:8080", false)
	pod := kubectl(t, "--namespace", "shop", "get", "pod", "checkout-1", "--output", "jsonpath={.status.podIP}")
	apply(t, "shop", `{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {name: elsewhere, labels: {kubernetes.io/service-name: elsewhere}},
		addressType: IPv4, ports: [{name: http, port: 8080}], endpoints: [{addresses: [`+pod+`]}]}`)
	wantThrough(t, "client", "http://elsewhere", false)
	kubectl(t, "--namespace", "shop", "wait", "--for=condition=Ready", "--timeout=5s", "pods", "--all") // the kubelet's probes
}

func helmTest(t *testing.T) {
	out := helm(t, "test", release, "--namespace", system, "--logs", "--timeout", "3m")
	if !strings.Contains(out, "50 requests: 50 answered, 50 through the mesh; replicas: 2, nodes: 2") {
		t.Error(out)
	}
	if out, err := run("", "kubectl", "get", "namespace", "headroom-test", "--output", "jsonpath={.status.phase}"); err == nil && out != "Terminating" {
		t.Errorf("the test has left its namespace: %s", out)
	}
}

// meshctlTells reaches agents through the API server.
func meshctlTells(t *testing.T) {
	for _, want := range []struct {
		args  []string
		words []string
	}{
		{[]string{"check"}, []string{"2 of 2 alive", "in the mesh: shop", "shop/outsider (label", "shop/host (it uses", "shop/elsewhere (no selector)"}},
		{[]string{"members"}, []string{"node1 alive zone1", "node2 alive zone2"}},
		{[]string{"services"}, []string{"checkout.shop prequal default 2 0 0"}},
		{[]string{"endpoints", "shop/checkout"}, []string{"node1", "node2", "ready"}},
		{[]string{"top", "shop/checkout", "--output", "json"}, []string{`"service": "checkout.shop"`, `"missing": []`}},
	} {
		eventually(t, 10*time.Second, func() error {
			out, err := meshctl(want.args...)
			if err != nil {
				return err
			}
			for _, word := range want.words {
				if !strings.Contains(strings.Join(strings.Fields(out), " "), word) {
					return fmt.Errorf("meshctl %v says nothing of %q:\n%s", want.args, word, out)
				}
			}
			return nil
		})
	}
}

// meshctl asks the cluster's agents, whatever runs on this machine.
func meshctl(args ...string) (string, error) {
	return run("", "meshctl", append([]string{"--namespace-of-agents", system}, args...)...)
}

func mustMeshctl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := meshctl(args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// policies are written by meshctl and by kubectl, of which one is told that the other was first.
func policies(t *testing.T) {
	mustMeshctl(t, "policy", "set", "shop/checkout", "--forwarded", "x_forwarded_for", "--wait")
	answer, err := get("client", "http://checkout")
	if got, want := field(answer, "X-Forwarded-Client-Cert"), "URI=spiffe://headroom.local/ns/shop/sa/buyer"; err != nil || !strings.Contains(got, want) {
		t.Errorf("replicas learn of their caller %q, want %q: %v", got, want, err)
	}
	apply(t, "shop", `{apiVersion: headroom.dev/v1, kind: ServicePolicy, metadata: {name: checkout}, spec: {balancer: round_robin}}`)
	wantPolicy(t, "Conflict")
	mustMeshctl(t, "policy", "delete", "shop/checkout")
	wantPolicy(t, "round_robin", "2/2", "Stored")
	if _, err := meshctl("policy", "set", "shop/checkout", "--balancer", "p2c"); err == nil || !strings.Contains(err.Error(), "kubectl edit servicepolicy -n shop checkout") {
		t.Errorf("meshctl writes what Kubernetes manages, or doesn't say how to: %v", err)
	}
	_, err = run(`{apiVersion: headroom.dev/v1, kind: ServicePolicy, metadata: {name: other}, spec: {balancer: best}}`,
		"kubectl", "apply", "--namespace", "shop", "--filename", "-")
	if err == nil || !strings.Contains(err.Error(), "spec.balancer") {
		t.Errorf("kubectl takes a policy that is wrong, or doesn't say where: %v", err)
	}
	kubectl(t, "--namespace", "shop", "delete", "servicepolicy", "checkout")
	eventually(t, 10*time.Second, func() error {
		if out := mustMeshctl(t, "policy", "list"); strings.Contains(out, "checkout") {
			return fmt.Errorf("the policy is still there: %s", out)
		}
		return nil
	})
}

// wantPolicy wants kubectl to show words in the line of the shop's policy.
func wantPolicy(t *testing.T, words ...string) {
	t.Helper()
	eventually(t, 30*time.Second, func() error {
		out, err := run("", "kubectl", "--namespace", "shop", "get", "servicepolicies")
		for _, word := range words {
			if err == nil && !strings.Contains(out, word) {
				err = fmt.Errorf("kubectl doesn't show %s: %s", word, out)
			}
		}
		return err
	})
}

// uninstall takes the mesh away, and looks for what is left.
func uninstall(t *testing.T) {
	begin := time.Now()
	helm(t, "uninstall", release, "--namespace", system, "--wait")
	steady.want(t, 2, direct)
	lasting.want(t, 2, overOldConnection)
	steady.unharmed(t, begin)
	eventually(t, time.Minute, nothingLeft)
	for _, node := range []string{"node1", "node2"} {
		wantClean(t, node)
	}
	kubectl(t, "delete", "namespace", system, "--wait")
}

// nothingLeft looks for objects that are the mesh's, by their names and in its namespace.
func nothingLeft() error {
	kinds, err := run("", "kubectl", "api-resources", "--verbs=list", "--output=name")
	if err != nil {
		return err
	}
	if strings.Contains(kinds, "headroom.dev") {
		return fmt.Errorf("the definition of ServicePolicies is there")
	}
	all, err := run("", "kubectl", "get", strings.Join(strings.Fields(kinds), ","), "--all-namespaces", "--ignore-not-found", "--output",
		`jsonpath={range .items[*]}{.kind} {.metadata.namespace}/{.metadata.name} {.spec.claimRef.name}{"\n"}{end}`)
	if err != nil {
		return err
	}
	var left []string
	for line := range strings.Lines(all) {
		kind, name, _ := strings.Cut(strings.TrimSpace(line), " ") // and of a volume that of its claim
		if kind != "Event" && strings.Contains(name, "headroom") && !ofNamespace(kind, name) {
			left = append(left, line)
		}
	}
	if len(left) > 0 {
		return fmt.Errorf("there are still\n%s", strings.Join(left, ""))
	}
	return nil
}

// ofNamespace reports whether an object is the mesh's namespace, which helm has made and leaves, or what Kubernetes puts in all.
func ofNamespace(kind, name string) bool {
	return kind == "Namespace" && name == "/"+system || name == system+"/kube-root-ca.crt" || name == system+"/default"
}

// wantClean looks for rules, routes, files and processes on a node and in its pods.
func wantClean(t *testing.T, node string) {
	t.Helper()
	for _, command := range []string{
		"nft list tables | grep headroom",
		"ip route show table all proto 104; ip -6 route show table all proto 104",
		"ip -all netns exec nft list tables | grep headroom",
		"ip -all netns exec ip route show table all proto 104 | grep -v ^netns; ip -all netns exec ip -6 route show table all proto 104 | grep -v ^netns",
		"ls -d /var/lib/headroom /etc/headroom 2>/dev/null",
		"pgrep -lx agent",
	} {
		out := must(t, "", "./cluster.sh", "exec", node, "sh", "-c", "{ "+command+"; } || true")
		if out = strings.TrimSpace(out); out != "" {
			t.Errorf("%s: %s: %s", node, command, out)
		}
	}
}

// otherMachine installs an image that is not for these nodes. Helm says what isn't there, and Kubernetes says why.
func otherMachine(t *testing.T) {
	agent := filepath.Join(t.TempDir(), "agent")
	must(t, "", "env", "CGO_ENABLED=0", "GOARCH=arm64", "go", "build", "-o", agent, "./pause")
	image(t, "linux/arm64", "headroom:arm64", agent)
	_, err := run("", "helm", "install", release, chart, "--namespace", system, "--create-namespace", "--values", "testdata/values.yaml",
		"--set", "image.tag=arm64", "--wait", "--timeout", "5s")
	if err == nil || !strings.Contains(err.Error(), "DaemonSet/headroom-system/headroom not ready") {
		t.Errorf("helm doesn't say what isn't ready: %v", err)
	}
	eventually(t, 30*time.Second, func() error {
		log, err := run("", "kubectl", "--namespace", system, "logs", "daemonset/"+release)
		if err == nil && !strings.Contains(log, "exec format error") {
			err = fmt.Errorf("the log of an agent that is not for this machine: %q", log)
		}
		return err
	})
	eventually(t, 30*time.Second, func() error {
		_, err := meshctl("check")
		if err == nil || !strings.Contains(err.Error(), "CrashLoopBackOff; see 'kubectl logs -n "+system) {
			return fmt.Errorf("meshctl doesn't say how the agents are: %w", err)
		}
		return nil
	})
	helm(t, "uninstall", release, "--namespace", system, "--wait")
	eventually(t, time.Minute, nothingLeft)
}

// upgrade begins with the first chart that there was, and keeps what is secret, the policies, and the traffic.
func upgrade(t *testing.T) {
	helm(t, "install", release, "testdata/headroom-0.1.0.tgz", "--namespace", system, "--create-namespace", "--values", "testdata/values.yaml", "--wait", "--timeout", "3m")
	eventually(t, 30*time.Second, func() error {
		_, err := meshctl("policy", "set", "shop/checkout", "--timeout", "7s", "--wait")
		return err
	})
	before := secrets(t)
	steady.want(t, 2, throughMesh)
	begin := time.Now()
	helm(t, "upgrade", release, chart, "--namespace", system, "--values", "testdata/values.yaml", "--set", "agent.logLevel=debug", "--wait", "--timeout", "3m")
	kubectl(t, "--namespace", system, "rollout", "status", "daemonset", release, "--timeout=120s")
	steady.want(t, 2, throughMesh)
	steady.unharmed(t, begin)
	if after := secrets(t); after != before {
		t.Error("the upgrade has changed secrets: agents of before and after can't talk to each other")
	}
	if args := kubectl(t, "--namespace", system, "get", agentOn(t, "node1"), "--output", "jsonpath={.spec.containers[0].args}"); !strings.Contains(args, "--log-level=debug") {
		t.Errorf("the upgrade has not changed what it was to change: %s", args)
	}
	if policy := mustMeshctl(t, "policy", "get", "shop/checkout"); !strings.Contains(policy, "timeout: 7s") {
		t.Errorf("the policy is not what it was: %s", policy)
	}
}

// secrets returns what all Secrets of the mesh hold.
func secrets(t *testing.T) string {
	t.Helper()
	return kubectl(t, "--namespace", system, "get", "secrets", "--field-selector", "type!=helm.sh/release.v1", "--output", "jsonpath={range .items[*]}{.metadata.name} {.data}{end}")
}
