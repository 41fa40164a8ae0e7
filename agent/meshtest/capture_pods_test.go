//go:build linux

package meshtest_test

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/agent/meshtest"
)

// TestCapturePods has applications in network namespaces of their own call services: one is captured on its node, one where
// it is.
func TestCapturePods(t *testing.T) {
	m := capturable(t, meshtest.Config{Nodes: []string{"a", "b"}})
	node := m.Node("a")
	outer := node.Pod("outer", netip.MustParsePrefix("10.244.1.2/24"), netip.MustParsePrefix("fd01:1::2/64"))
	inner := node.Pod("inner", netip.MustParsePrefix("10.244.2.2/24"), netip.MustParsePrefix("fd01:2::2/64"))
	agents := startCapturing(m, map[string][]string{
		"a": {"--dns-listen", "0.0.0.0:15053", "--capture-netns", inner.Netns()},
	})
	a := agents["a"]
	ipv4, ipv6 := virtual(t, a)
	for _, pod := range []*meshtest.Node{outer, inner} {
		for _, host := range []string{ipv4, "[" + ipv6 + "]", "web.mesh"} {
			if out, code := curlInPod(t, pod, "http://"+host+"/"); code != 0 || !strings.Contains(out, "\nok") {
				t.Errorf("pod %s calls %s: exit code %d: %s", pod.Name, host, code, out)
			}
		}
	}
	status, problems, code := a.Meshctl("capture", "status")
	if code != 0 || !strings.Contains(status, inner.Netns()) {
		t.Errorf("capture status: exit code %d, want it to tell of %s\n%s%s", code, inner.Netns(), status, problems)
	}
	a.Kill()
	for _, pod := range []*meshtest.Node{outer, inner} {
		if out, code := curlInPod(t, pod, "http://"+ipv4+"/"); code != 7 {
			t.Errorf("pod %s calls after the agent was killed: exit code %d, want a refusal (7): %s", pod.Name, code, out)
		}
	}
}

// TestCaptureBalances has applications in two pods, one with addresses of IPv4, one of IPv6, call a service by its name alone.
// One of its replicas is slow: Prequal avoids it, and round robin does not.
func TestCaptureBalances(t *testing.T) {
	m := capturable(t, meshtest.Config{})
	pods := []*pod{
		newPod(m.Node("a"), "four", netip.MustParsePrefix("10.244.1.2/24"), "ip4"),
		newPod(m.Node("b"), "six", netip.MustParsePrefix("fd01:2::2/64"), "ip6"),
	}
	listen := []string{"--dns-listen", "0.0.0.0:15053", "--dns-listen", "[::]:15053"}
	a := startCapturing(m, map[string][]string{"a": listen, "b": listen})["a"]
	virtual(t, a)
	slow := replicasOf(m, "c")[0]
	slow.SetSlower(300 * time.Millisecond)
	share, p99 := map[string]float64{}, map[string]time.Duration{}
	for _, rule := range []string{"round_robin", "prequal"} {
		a.MustMeshctl("policy", "set", meshtest.Service, "--balancer", rule, "--wait")
		callService(t, pods, 100) // until the rule has seen the replicas
		var answers []call
		var calling sync.WaitGroup
		calling.Go(func() { answers = callService(t, pods, 600) })
		wantSeenByTop(t, a, rule, slow)
		calling.Wait()
		var took []time.Duration
		for _, c := range answers {
			if c.err != nil {
				t.Errorf("%s: %v", rule, c.err)
			}
			if c.replica == slow.String() {
				share[rule] += 1 / float64(len(answers))
			}
			took = append(took, c.ended.Sub(c.began))
		}
		slices.Sort(took)
		p99[rule] = took[len(took)*99/100]
		t.Logf("%s: %.1f%% of the requests came to the slow replica, p99 %v", rule, 100*share[rule], p99[rule])
	}
	fair := 1 / float64(len(m.Replicas))
	if share["round_robin"] < fair/2 || share["prequal"] > fair/2 || p99["prequal"] > p99["round_robin"]/2 {
		t.Errorf("want Prequal to avoid the replica that has a fair share of %.1f%% by round robin, and a p99 of less than half", 100*fair)
	}
	a.MustMeshctl("policy", "set", meshtest.Service, "--timeout", "100ms", "--wait")
	for _, pod := range pods {
		if _, err := ask(pod.client, "http://web.mesh/?take=2s"); err == nil || !strings.Contains(err.Error(), "504") {
			t.Errorf("pod %s: a request that takes longer than its policy allows: %v, want 504", pod.Name, err)
		}
	}
}

// pod is a network namespace with an application in it.
type pod struct {
	*meshtest.Node
	dial   func(ctx context.Context, network, address string) (net.Conn, error)
	client *http.Client
}

// newPod makes a pod whose resolver is at an address that nobody has, and to which it has a route.
func newPod(n *meshtest.Node, name string, at netip.Prefix, kind string) *pod {
	nobody := map[string]string{"ip4": "10.99.0.53:53", "ip6": "[fd99::53]:53"}[kind]
	p := &pod{Node: n.Pod(name, at)}
	p.dial = byName(p.Node, resolverAt(p.Node, nobody), kind)
	p.client = &http.Client{Transport: &http.Transport{DialContext: p.dial, DisableKeepAlives: true}, Timeout: 10 * time.Second}
	return p
}

// callService has so many requests made by name, by several applications in each pod at once.
func callService(t *testing.T, pods []*pod, requests int) []call {
	t.Helper()
	const atOnce = 10
	var calling sync.WaitGroup
	answers := make([][]call, atOnce)
	for i := range answers {
		calling.Go(func() {
			for range requests / atOnce {
				if c := answers[i]; len(c) > 0 && c[len(c)-1].err != nil {
					return
				}
				c := call{began: time.Now()}
				c.replica, c.err = ask(pods[i%len(pods)].client, "http://web.mesh/")
				c.ended = time.Now()
				answers[i] = append(answers[i], c)
			}
		})
	}
	calling.Wait()
	return slices.Concat(answers...)
}

// wantSeenByTop wants meshctl top to show what the applications do, by which rule, and what becomes of a slow replica.
func wantSeenByTop(t *testing.T, a *meshtest.Agent, rule string, slow *meshtest.Replica) {
	t.Helper()
	var view struct {
		Services []struct {
			Requests float64 `json:"requestsPerSecond"`
			Seen     struct{ Balancer string }
			Replicas []struct {
				Address string
				Node    string
				Share   float64
			}
		}
	}
	out := a.MustMeshctl("top", meshtest.Service, "-o", "json")
	if err := json.Unmarshal([]byte(out), &view); err != nil || len(view.Services) != 1 {
		t.Fatalf("top: %v, want one service in %s", err, out)
	}
	s := view.Services[0]
	if s.Requests < 10 || s.Seen.Balancer != rule || len(s.Replicas) != 9 {
		t.Errorf("top shows %.0f requests a second, rule %s, %d replicas: want more than 10, %s, 9", s.Requests, s.Seen.Balancer, len(s.Replicas), rule)
	}
	for _, r := range s.Replicas {
		if avoided := r.Share < 1.0/18; r.Node == slow.Node && r.Address == slow.Address.String() && avoided != (rule == "prequal") {
			t.Errorf("top shows a share of %.0f%% of the slow replica by rule %s", 100*r.Share, rule)
		}
	}
}

// TestCaptureByName has applications in pods call a server that speaks first, and one of gRPC, by their names.
func TestCaptureByName(t *testing.T) {
	m := capturable(t, meshtest.Config{Nodes: []string{"a", "b"}, Replicas: 1})
	pods := []*pod{
		newPod(m.Node("a"), "four", netip.MustParsePrefix("10.244.1.2/24"), "ip4"),
		newPod(m.Node("a"), "six", netip.MustParsePrefix("fd01:2::2/64"), "ip6"),
	}
	m.WriteService(m.Node("b"), "accounts.yaml", localService("accounts", "tcp", startGreeter(t, m.Node("b"))))
	m.WriteService(m.Node("b"), "ledger.yaml", localService("ledger", "grpc", startHealth(t, m.Node("b"))))
	a := startCapturing(m, map[string][]string{"a": {"--dns-listen", "0.0.0.0:15053", "--dns-listen", "[::]:15053"}})["a"]
	virtualOf(t, a, "accounts")
	virtualOf(t, a, "ledger")
	for _, pod := range pods {
		c, err := pod.dial(t.Context(), "tcp", "accounts.mesh:3306")
		if err != nil {
			t.Fatalf("pod %s: %v", pod.Name, err)
		}
		l := newLine(t, c)
		if got := l.read(t); got != "welcome" {
			t.Errorf("pod %s: accounts.mesh greets with %q", pod.Name, got)
		}
		if got := l.say(t, "hello"); got != "hello" {
			t.Errorf("pod %s: accounts.mesh answers %q", pod.Name, got)
		}
		wantHealthy(t, pod.dial, "ledger.mesh:50051")
	}
}

// curlInPod calls curl where the resolver is at an address that nobody has.
func curlInPod(t *testing.T, pod *meshtest.Node, url string) (out string, code int) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "resolv.conf")
	if err := os.WriteFile(file, []byte("nameserver 10.77.0.53\noptions timeout:2 attempts:1\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	p := pod.Start("curl", nil, "unshare", "-m", "sh", "-c", `mount --bind "$0" /etc/resolv.conf && exec curl -q -sS -i --max-time 5 "$1"`, file, url)
	code = p.Wait(10 * time.Second)
	return p.Output() + p.Log(), code
}
