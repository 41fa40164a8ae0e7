//go:build kube

package kube

import (
	"bufio"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

const (
	meshed = "lifecycle-mesh"  // is in the mesh
	plain  = "lifecycle-plain" // has the same in it, and is not
	calm   = 5 * time.Second   // before and after each event
)

// TestLifecycle sends a steady load to a service in the mesh, and to the same without one, while everything is changed under
// it that operators change. No request may fail, but those that were in flight on something that was killed; and nothing may
// be worse than without the mesh.
func TestLifecycle(t *testing.T) {
	installForLifecycle(t)
	loadProgram(t, "./load", "headroom.test/load:1")
	manifest, err := os.ReadFile("testdata/lifecycle.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, ns := range []string{meshed, plain} {
		kubectl(t, "create", "namespace", ns)
		t.Cleanup(func() { kubectl(t, "delete", "namespace", ns, "--wait") })
		if ns == meshed {
			kubectl(t, "label", "namespace", ns, "headroom.dev/mesh=enabled")
		}
		apply(t, ns, string(manifest))
	}
	awaitSettled(t)
	apply(t, meshed, waitLong)
	kubectl(t, "--namespace", meshed, "wait", "--for=condition=Applied", "--timeout=60s", "servicepolicy/single")
	began := time.Now()
	var windows []window
	for _, e := range events {
		if only := os.Getenv("EVENT"); only != "" && !strings.Contains(e.name, only) && e.name != first {
			continue
		}
		time.Sleep(calm)
		w := window{event: e, began: time.Now()}
		e.do(t)
		awaitSettled(t)
		w.took = time.Since(w.began)
		if e.after != nil {
			t.Run("after "+e.name, e.after)
		}
		time.Sleep(calm)
		w.ended = time.Now()
		t.Logf("%s: %v", e.name, w.took.Round(time.Second))
		windows = append(windows, w)
	}
	time.Sleep(patience)
	lines := map[string][]line{meshed: sent(t, meshed, began), plain: sent(t, plain, began)}
	for _, w := range windows {
		t.Run(w.name, func(t *testing.T) { w.judge(t, lines) })
	}
	t.Run("churn of pods", churn)
}

// waitLong is for a machine that may take long to start a pod elsewhere.
const waitLong = `
apiVersion: headroom.dev/v1
kind: ServicePolicy
metadata: {name: single}
spec: {waitForReady: 30s}
`

// patience is that of the senders with one request: a machine with many pods on few cores is slow, and that is no failure.
const patience = 30 * time.Second

type event struct {
	name  string
	pods  int  // of each service end
	kills bool // something through which requests go, all at once
	do    func(t *testing.T)
	after func(t *testing.T) // what else there is to see when everything is as it is wanted
}

// first is an event that is always there: connections from before their services were in the mesh end in it, and those that
// come instead are captured.
const first = "restart of the deployments"

var events = []event{
	{name: first, pods: 3, do: func(t *testing.T) {
		for _, ns := range []string{meshed, plain} {
			kubectl(t, "--namespace", ns, "rollout", "restart", "deployment")
		}
	}},
	{name: "scale from 3 to 30 and back", pods: 27, do: func(t *testing.T) {
		scale(t, "polite", "30")
		scale(t, "polite", "3")
	}},
	{name: "scale of abrupt ones from 3 to 10 and back", pods: 7, do: func(t *testing.T) {
		scale(t, "abrupt", "10")
		scale(t, "abrupt", "3")
	}},
	{name: "restart of the agents", after: keptInMesh, do: func(t *testing.T) {
		kubectl(t, "--namespace", "headroom-system", "rollout", "restart", "daemonset/headroom")
	}},
	{name: "helm upgrade", after: keptInMesh, do: func(t *testing.T) {
		helm(t, "upgrade", "headroom", "../../deploy/helm", "--namespace", "headroom-system", "--reuse-values", "--wait",
			"--set-string", fmt.Sprintf("agent.podAnnotations.upgraded=%d", time.Now().Unix()))
	}},
	{name: "restart of etcd", do: func(t *testing.T) {
		kubectl(t, "--namespace", "headroom-system", "rollout", "restart", "statefulset/headroom-etcd")
	}},
	{name: "drain of a node", pods: 3, do: func(t *testing.T) {
		kubectl(t, "drain", "node2", "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=3m")
		kubectl(t, "uncordon", "node2")
	}},
	// The last one: kept connections that pods make while their node has no agent stay outside the mesh until they end, so
	// whatever came after would tell of plain Kubernetes.
	{name: "agent killed", kills: true, do: func(t *testing.T) {
		pid := strings.TrimSpace(cluster(t, "exec", "node1", "pgrep", "-x", "agent"))
		cluster(t, "exec", "node1", "kill", "-9", pid)
		eventually(t, time.Minute, func() error {
			now, err := run("", "./cluster.sh", "exec", "node1", "pgrep", "-x", "agent")
			if err == nil && strings.TrimSpace(now) == pid {
				err = fmt.Errorf("process %s is still there", pid)
			}
			return err
		})
	}},
}

// churn makes and removes pods, a hundred in all, and expects that nothing of them is left with the agents. What there is for
// the load would hide that: it ends.
func churn(t *testing.T) {
	for _, ns := range []string{meshed, plain} {
		kubectl(t, "--namespace", ns, "delete", "daemonset/sender", "--wait")
	}
	round := func() {
		for _, replicas := range []string{"25", "0"} {
			kubectl(t, "--namespace", meshed, "scale", "deployment/churn", "--replicas", replicas)
			kubectl(t, "--namespace", meshed, "rollout", "status", "--timeout=5m", "deployment/churn")
		}
		kubectl(t, "--namespace", meshed, "wait", "--for=delete", "--timeout=3m", "pods", "--selector", "app=churn")
	}
	round() // buffers grow to what they need
	before, now := vitals(t), map[string]vital(nil)
	for range 3 {
		round()
	}
	eventually(t, time.Minute, func() error {
		now = vitals(t)
		for node, v := range now {
			if was := before[node]; v.goroutines > was.goroutines+10 || v.files > was.files+5 || v.memory > was.memory*5/4 || v.tables != was.tables || v.spaces > was.spaces {
				return fmt.Errorf("%s: %v, want at most as much as before: %v", node, v, was)
			}
		}
		return nil
	})
	t.Logf("agents before three rounds of churn: %v, and after: %v", before, now)
}

// vital is what an agent has, and what there is on its node.
type vital struct {
	goroutines, files, memory int // memory in MB
	tables                    string
	spaces                    int // network namespaces
}

func (v vital) String() string {
	return fmt.Sprintf("%d goroutines, %d files, %d MB, %d network namespaces, %s", v.goroutines, v.files, v.memory, v.spaces, v.tables)
}

func vitals(t *testing.T) map[string]vital {
	t.Helper()
	all := map[string]vital{}
	for _, node := range []string{"node1", "node2"} {
		metrics := cluster(t, "exec", node, "curl", "-fsS", "http://127.0.0.1:15000/metrics")
		value := func(name string) (v float64) {
			for l := range strings.Lines(metrics) {
				if text, ok := strings.CutPrefix(l, name+" "); ok {
					fmt.Sscan(text, &v)
				}
			}
			return v
		}
		tables := strings.Fields(strings.ReplaceAll(cluster(t, "exec", node, "nft", "list", "tables"), "table ", ""))
		all[node] = vital{
			goroutines: int(value("go_goroutines")), files: int(value("process_open_fds")), memory: int(value("process_resident_memory_bytes") / 1e6),
			tables: strings.Join(tables, " "), spaces: len(strings.Fields(cluster(t, "exec", node, "ls", "/run/netns"))),
		}
	}
	return all
}

func scale(t *testing.T, deployment, replicas string) {
	t.Helper()
	for _, ns := range []string{meshed, plain} { // one after the other, for the sake of a small machine
		kubectl(t, "--namespace", ns, "scale", "deployment", deployment, "--replicas", replicas)
		kubectl(t, "--namespace", ns, "rollout", "status", "--timeout=5m", "deployment/"+deployment)
		eventually(t, 3*time.Minute, func() error {
			if pods := strings.Fields(kubectl(t, "--namespace", ns, "get", "pods", "--selector", "app="+deployment, "--output", "name")); fmt.Sprint(len(pods)) != replicas {
				return fmt.Errorf("%d pods, want %s", len(pods), replicas)
			}
			return nil
		})
	}
}

// awaitSettled waits until everything is as it is wanted.
func awaitSettled(t *testing.T) {
	t.Helper()
	for _, what := range [][2]string{
		{"headroom-system", "daemonset/headroom"}, {"headroom-system", "statefulset/headroom-etcd"},
		{meshed, "deployment/polite"}, {meshed, "deployment/abrupt"}, {meshed, "deployment/single"}, {meshed, "daemonset/sender"},
		{plain, "deployment/polite"}, {plain, "deployment/abrupt"}, {plain, "deployment/single"}, {plain, "daemonset/sender"},
	} {
		kubectl(t, "--namespace", what[0], "rollout", "status", "--timeout=5m", what[1])
	}
	eventually(t, 2*time.Minute, func() error { // those that others have taken over from may still finish what they have
		pods, err := run("", "kubectl", "--namespace", system, "get", "pods", "--selector", "app.kubernetes.io/component=agent",
			"--output", `jsonpath={range .items[*]}{.spec.nodeName} {.metadata.name}{"\n"}{end}`)
		if err == nil && strings.Count(pods, "\n") != 2 {
			err = fmt.Errorf("there are these agents, want one on each node:\n%s", pods)
		}
		return err
	})
}

// keptInMesh wants all connections of the senders in the mesh to be captured: those that they keep, too, which go on for as
// long as nobody ends them.
func keptInMesh(t *testing.T) {
	eventually(t, 30*time.Second, func() error {
		senders, err := run("", "kubectl", "--namespace", meshed, "get", "pods", "--selector", "app=sender",
			"--output", `jsonpath={range .items[*]}{.spec.nodeName} {.status.podIP}{"\n"}{end}`)
		if err != nil {
			return err
		}
		for sender := range strings.Lines(senders) {
			node, ip, _ := strings.Cut(strings.TrimSpace(sender), " ")
			out, err := run("", "./cluster.sh", "exec", node, "ip", "-all", "netns", "exec", "ss", "-tnH", "state", "established")
			if err != nil {
				return err
			}
			if calls, captured := connections(out, ip); calls == 0 || captured < calls {
				return fmt.Errorf("of %d connections of the sender on %s, %s, %d are in the mesh", calls, node, ip, captured)
			}
		}
		return nil
	})
}

// connections counts, in what ss tells of all network namespaces of a node, the connections of a pod to port 80, and those that an
// agent has accepted there: at its port, or the other one, of those that take over. Which is which their addresses don't always
// tell: where two of a pod have the same port the kernel gives one another.
func connections(out, ip string) (calls, captured int) {
	for _, namespace := range strings.Split(out, "netns: ") {
		here, accepted := 0, 0
		for l := range strings.Lines(namespace) {
			fields := strings.Fields(l) // two queues, this end, the other end
			if len(fields) < 4 {
				continue
			}
			switch near, far := fields[2], fields[3]; {
			case strings.HasSuffix(near, ":15006"), strings.HasSuffix(near, ":15007"):
				accepted++
			case strings.HasPrefix(near, ip+":") && strings.HasSuffix(far, ":80"):
				here++
			}
		}
		if here > 0 {
			calls, captured = calls+here, captured+accepted
		}
	}
	return calls, captured
}

// line is one of what senders print.
type line struct {
	Time       time.Time
	From       string
	Series     string
	OK, Failed int
	Took       float64
	Error      string
}

// sent returns what the senders of a namespace have done since.
func sent(t *testing.T, ns string, since time.Time) (lines []line) {
	t.Helper()
	log := kubectl(t, "--namespace", ns, "logs", "--selector", "app=sender", "--tail=-1", "--since-time", since.Format(time.RFC3339))
	for s := bufio.NewScanner(strings.NewReader(log)); s.Scan(); {
		var l line
		if err := json.Unmarshal(s.Bytes(), &l); err != nil {
			t.Fatalf("a sender says %q: %v", s.Text(), err)
		}
		lines = append(lines, l)
	}
	return lines
}

// window is the time of an event.
type window struct {
	event
	began, ended time.Time
	took         time.Duration
}

// judge compares what has become of the requests of both namespaces.
func (w window) judge(t *testing.T, lines map[string][]line) {
	with, without := w.tally(lines[meshed]), w.tally(lines[plain])
	for _, series := range slices.Sorted(maps.Keys(with)) {
		a, b := with[series], without[series]
		t.Logf("%-22s mesh: %4d sent, %2d cut off, %2d failed else, longest %4.0f ms; plain: %4d sent, %2d cut off, %2d failed else, longest %4.0f ms",
			strings.TrimPrefix(series, "http://"), a.sent, len(a.cutOff), len(a.failed), a.longest, b.sent, len(b.cutOff), len(b.failed), b.longest)
		if w.kills {
			a.forgiveInFlight()
		}
		if allowed := w.allowed(series, len(b.cutOff)+len(b.failed)); len(a.cutOff) > allowed {
			t.Errorf("%s: %d cut off, want at most %d:\n%v", series, len(a.cutOff), allowed, a.cutOff)
		}
		if len(a.failed) > 0 {
			t.Errorf("%s: these failed though nothing had them that ended:\n%v", series, a.failed)
		}
	}
}

// allowed returns how many requests may be cut off. Where nothing ends, none may. What ends at once takes with it what it has in
// flight, of which a connection of HTTP/2 carries several. One that ends well may, when there is little processor time to be
// had, close a connection on which a request has just come, one of each sender, which without a mesh happens, too.
func (w window) allowed(series string, without int) int {
	const several, senders = 3, 2
	switch {
	case w.pods == 0:
		return 0
	case strings.Contains(series, "abrupt"):
		return max(several*w.pods, without)
	}
	return max(senders+w.pods/10, without)
}

type tally struct {
	sent    int
	longest float64
	cutOff  failures // those whose connection broke before the answer
	failed  failures // those that failed in other ways
}

// failure is a request that failed.
type failure struct {
	line
	after time.Duration // since the event began
}

func (f failure) ended() time.Time {
	return f.Time.Add(time.Duration(f.Took * float64(time.Millisecond)))
}

type failures []failure

func (all failures) String() string {
	var b strings.Builder
	for _, f := range all {
		fmt.Fprintf(&b, "%s, %s, after %.1f s of the event, %.0f ms: %s\n", f.Time.Format("15:04:05.000"), f.From, f.after.Seconds(), f.Took, f.Error)
	}
	return b.String()
}

// dying is how long it may be from the kill until the kernel has closed all that the process had open.
const dying = 250 * time.Millisecond

// forgiveInFlight forgets those that were cut off as something was killed: none that began later.
func (a *tally) forgiveInFlight() {
	if len(a.cutOff) == 0 {
		return
	}
	first := slices.MinFunc(a.cutOff, func(f, g failure) int { return f.ended().Compare(g.ended()) })
	gone := first.ended().Add(dying)
	a.cutOff = slices.DeleteFunc(a.cutOff, func(f failure) bool { return f.Time.Before(gone) })
}

func (w window) tally(lines []line) map[string]*tally {
	all := map[string]*tally{}
	for _, l := range lines {
		if l.Time.Before(w.began) || l.Time.After(w.ended) {
			continue
		}
		of := all[l.Series]
		if of == nil {
			of = new(tally)
			all[l.Series] = of
		}
		of.sent += l.OK + l.Failed
		of.longest = max(of.longest, l.Took)
		if l.Error == "" {
			continue
		}
		into := &of.failed
		if broken(l.Error) {
			into = &of.cutOff
		}
		*into = append(*into, failure{l, l.Time.Sub(w.began)})
	}
	return all
}

// broken reports whether an error is of a connection that broke. The latter two are what Go's client says when it notices that
// as it writes.
func broken(err string) bool {
	return slices.ContainsFunc([]string{
		"EOF", "broke", "connection reset by peer",
		"http2: client connection force closed via ClientConn.Close", "http2: client connection lost",
	}, func(part string) bool { return strings.Contains(err, part) })
}

// installForLifecycle installs the chart, with an etcd that can lose one, unless it is installed.
func installForLifecycle(t *testing.T) {
	if _, err := run("", "helm", "status", release, "--namespace", system); err == nil {
		return
	}
	build(t)
	helm(t, "install", release, chart, "--namespace", system, "--create-namespace", "--values", "testdata/values.yaml",
		"--set", "etcd.replicas=3", "--wait", "--timeout=5m")
	t.Cleanup(func() { helm(t, "uninstall", release, "--namespace", system, "--wait") })
}
