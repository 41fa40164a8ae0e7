//go:build kube

package kube

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
)

// outcome is what "web calls" tells of one second, and "web load" of all.
type outcome struct {
	Until    time.Time      `json:"until"`
	Requests int            `json:"requests"`
	Meshed   int            `json:"meshed"`
	Reused   int            `json:"reused"`
	P50      float64        `json:"p50_ms"`
	P99      float64        `json:"p99_ms"`
	By       map[string]int `json:"by"`
	Errors   map[string]int `json:"errors"`
}

func (a outcome) String() string {
	return fmt.Sprintf("%d requests until %s, %d through the mesh, p50 %.0f ms, p99 %.0f ms, by %v, errors %v",
		a.Requests, a.Until.Format(time.TimeOnly), a.Meshed, a.P50, a.P99, a.By, a.Errors)
}

// caller is a container of the pod client that runs "web calls".
type caller string

const (
	lasting caller = "lasting" // over one connection, which is older than the mesh
	steady  caller = "steady"  // over a connection for each request
)

// since returns the tallies of the seconds that began after a time.
func (c caller) since(t *testing.T, begin time.Time) []outcome {
	t.Helper()
	var all []outcome
	log := kubectl(t, "--namespace", "shop", "logs", "client", "--container", string(c), "--since-time", begin.UTC().Format(time.RFC3339))
	for line := range strings.Lines(log) {
		var one outcome
		if err := json.Unmarshal([]byte(line), &one); err != nil {
			t.Fatalf("%s says %q: %v", c, line, err)
		}
		if one.Until.Add(-1100 * time.Millisecond).After(begin) {
			all = append(all, one)
		}
	}
	return all
}

// want waits until all that was sent in so many whole seconds is as wanted.
func (c caller) want(t *testing.T, seconds int, wanted func(outcome) error) {
	t.Helper()
	begin := time.Now()
	eventually(t, time.Duration(seconds+30)*time.Second, func() error {
		all := c.since(t, begin)
		if len(all) < seconds {
			return fmt.Errorf("%s has told of %d seconds", c, len(all))
		}
		for _, one := range all[len(all)-seconds:] {
			if err := wanted(one); err != nil {
				return fmt.Errorf("%s: %w: %s", c, err, one)
			}
		}
		return nil
	})
}

// unharmed fails if a request has failed since a time.
func (c caller) unharmed(t *testing.T, begin time.Time) {
	t.Helper()
	for _, one := range c.since(t, begin) {
		if err := answered(one); err != nil {
			t.Errorf("%s: %v: %s", c, err, one)
		}
	}
}

func answered(a outcome) error {
	if a.Requests == 0 || len(a.Errors) > 0 {
		return errors.New("not all was answered")
	}
	return nil
}

func throughMesh(a outcome) error {
	if a.Meshed < a.Requests {
		return errors.New("not all went through the mesh")
	}
	return answered(a)
}

func direct(a outcome) error {
	if a.Meshed > 0 {
		return errors.New("not all went past the mesh")
	}
	return answered(a)
}

func overOldConnection(a outcome) error {
	if a.Reused < a.Requests {
		return errors.New("not all went over the connection that there was")
	}
	return direct(a)
}

// get sends a request from a pod of the shop.
func get(pod, url string) (string, error) {
	return run("", "kubectl", "--namespace", "shop", "exec", pod, "--container", "web", "--", "/web", "get", url)
}

// field returns the value of a field of a request, as the answer tells it.
func field(answer, name string) string {
	for line := range strings.Lines(answer) {
		if n, value, found := strings.Cut(strings.TrimSpace(line), ": "); found && strings.EqualFold(n, name) {
			return value
		}
	}
	return ""
}

// wantThrough wants a pod's request to be answered, and whether it came through the mesh.
func wantThrough(t *testing.T, pod, url string, mesh bool) {
	t.Helper()
	eventually(t, 30*time.Second, func() error {
		answer, err := get(pod, url)
		if err == nil && (field(answer, "Via") != "") != mesh {
			err = fmt.Errorf("%s called %s; through the mesh: want %t, and was answered\n%s", pod, url, mesh, answer)
		}
		return err
	})
}

// clusterIPs returns the addresses of a service of the shop, as they are written in URLs.
func clusterIPs(t *testing.T, service string) []string {
	t.Helper()
	ips := strings.Fields(kubectl(t, "--namespace", "shop", "get", "service", service, "--output", "jsonpath={.spec.clusterIPs[*]}"))
	for i, ip := range ips {
		if strings.Contains(ip, ":") {
			ips[i] = "[" + ip + "]"
		}
	}
	return ips
}

// restarts returns how often containers of the shop were started again, by pod.
func restarts(t *testing.T) map[string]string {
	t.Helper()
	out := kubectl(t, "--namespace", "shop", "get", "pods", "--output",
		`jsonpath={range .items[*]}{.metadata.name} {.metadata.uid} {.status.containerStatuses[*].restartCount}{"\n"}{end}`)
	all := map[string]string{}
	for line := range strings.Lines(out) {
		name, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		all[name] = rest
	}
	return all
}
