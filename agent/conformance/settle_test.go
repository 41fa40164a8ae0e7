//go:build linux

package conformance

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/agent/meshtest"
	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
)

// vitals are what an agent holds while nobody calls.
type vitals struct {
	// goroutines and files leave out those of connections that are kept for the next call.
	goroutines, files int
	// serving are goroutines of connections, and connections how many there are.
	serving, connections int
	rif                  int // requests in flight, as caller and as the replicas' agent
	details              string
}

func (v vitals) String() string {
	return fmt.Sprintf("%d goroutines and %d files, beside %d goroutines for %d connections, %d requests in flight",
		v.goroutines, v.files, v.serving, v.connections, v.rif)
}

// settled reports whether an agent is back at what it held before. A connection has up to two goroutines.
func (v vitals) settled(before vitals) bool {
	return v.goroutines <= before.goroutines && v.files <= before.files && v.serving <= 2*v.connections && v.rif == 0
}

// settles notes what agents hold, once that is the same for a while. It returns what checks that they come back to that.
func settles(t *testing.T, agents ...*meshtest.Agent) (check func(*testing.T)) {
	t.Helper()
	before := make([]vitals, len(agents))
	for i, a := range agents {
		meshtest.Eventually(t, patience, a.Name+" is quiet", func() bool {
			last := before[i]
			before[i] = vitalsOf(t, a)
			return before[i].settled(last) && last.settled(before[i])
		})
	}
	return func(t *testing.T) {
		t.Helper()
		for i, a := range agents {
			wantSettled(t, a, before[i])
		}
	}
}

func wantSettled(t *testing.T, a *meshtest.Agent, before vitals) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(5 * time.Second); ; <-tick.C {
		now := vitalsOf(t, a)
		if now.settled(before) {
			return
		}
		if time.Now().After(end) {
			t.Errorf("%s does not settle:\nbefore %v\nnow    %v\nbefore\n%s\nnow\n%s", a.Name, before, now, before.details, now.details)
			return
		}
		a.Page("/debug/pprof/heap?gc=1") // pipes for splice(2) are kept until the second collection of garbage
	}
}

func vitalsOf(t *testing.T, a *meshtest.Agent) vitals {
	t.Helper()
	var v vitals
	status, profile := a.Page("/debug/pprof/goroutine?debug=1")
	_, page := a.Page("/metrics")
	if status != http.StatusOK {
		t.Fatal(profile)
	}
	for stack := range strings.SplitSeq(profile, "\n\n") {
		v.add(stack)
	}
	v.connections = gauge(t, page, "headroom_relay_callers") + gauge(t, page, "headroom_relay_upstreams")
	v.files = gauge(t, page, "process_open_fds") - v.connections
	v.rif = inFlight(t, a)
	v.details += openFiles(a.PID())
	return v
}

// openFiles lists the files of a process, and where its connections lead.
func openFiles(pid int) string {
	dir := fmt.Sprintf("/proc/%d/", pid)
	sockets := map[string]string{} // by inode
	for _, table := range []string{"net/tcp", "net/tcp6", "net/unix"} {
		text, _ := os.ReadFile(dir + table) // what there is
		for line := range strings.Lines(string(text)) {
			fields := strings.Fields(line)
			switch {
			case table == "net/unix" && len(fields) > 7:
				sockets["socket:["+fields[6]+"]"] = fields[7]
			case table != "net/unix" && len(fields) > 9:
				sockets["socket:["+fields[9]+"]"] = fmt.Sprintf("%s to %s, state %s", fields[1], fields[2], fields[3])
			}
		}
	}
	files, _ := os.ReadDir(dir + "fd")
	var list strings.Builder
	for _, f := range files {
		target, _ := os.Readlink(dir + "fd/" + f.Name())
		fmt.Fprintf(&list, "%5s %s %s\n", f.Name(), target, sockets[target])
	}
	return list.String()
}

// add counts the goroutines of one stack: "N @ ADDRESSES", and a line for each call.
func (v *vitals) add(stack string) {
	if rest, ok := strings.CutPrefix(stack, "goroutine profile: "); ok {
		_, stack, _ = strings.Cut(rest, "\n")
	}
	count, calls, _ := strings.Cut(stack, " @ ")
	n, err := strconv.Atoi(count)
	if err != nil {
		return // the end
	}
	if strings.Contains(calls, "/relay.(*session).run") || strings.Contains(calls, "/dataplane/h2.(*Conn)") {
		v.serving += n
	} else {
		v.goroutines += n
	}
	v.details += fmt.Sprintf("%5d %s\n", n, caller(calls))
}

// caller returns the innermost call of a stack that is in this module, or else the innermost of all.
func caller(calls string) string {
	first := ""
	for line := range strings.Lines(calls) {
		fields := strings.Fields(line)
		if len(fields) < 3 || fields[0] != "#" {
			continue
		}
		if strings.Contains(line, "headroom-mesh/headroom/") {
			return fields[2]
		}
		if first == "" {
			first = fields[2]
		}
	}
	return first
}

func gauge(t *testing.T, page, name string) int {
	t.Helper()
	for line := range strings.Lines(page) {
		if text, ok := strings.CutPrefix(line, name+" "); ok {
			n, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
			if err != nil {
				t.Fatal(err)
			}
			return int(n)
		}
	}
	t.Fatalf("no metric %s", name)
	return 0
}

func inFlight(t *testing.T, a *meshtest.Agent) int {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	top, err := a.Admin.Top(ctx, &meshv1.TopRequest{})
	if err != nil {
		t.Fatal(err)
	}
	sum := 0
	for _, o := range top.Agents {
		for _, replica := range o.Inbound {
			sum += int(replica.Rif)
		}
		for _, view := range o.Outbound {
			for _, e := range view.Endpoints {
				sum += int(e.OwnRif)
			}
		}
	}
	return sum
}
