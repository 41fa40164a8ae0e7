//go:build linux

package conformance

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/agent/meshtest"
	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
)

// vitals are what an agent holds while nobody calls. Connections that it keeps for the next call are left out.
type vitals struct {
	goroutines, files int
	rif               int // requests in flight, as caller and as the replicas' agent
}

func (v vitals) String() string {
	return fmt.Sprintf("%d goroutines, %d files, %d requests in flight", v.goroutines, v.files, v.rif)
}

// settles notes what agents hold. It returns what checks that they come back to that.
func settles(t *testing.T, agents ...*meshtest.Agent) (check func()) {
	t.Helper()
	before := make([]vitals, len(agents))
	for i, a := range agents {
		before[i] = vitalsOf(t, a)
	}
	return func() {
		t.Helper()
		for i, a := range agents {
			wantSettled(t, a, before[i])
		}
	}
}

func wantSettled(t *testing.T, a *meshtest.Agent, want vitals) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(5 * time.Second); ; <-tick.C {
		got := vitalsOf(t, a)
		if got.goroutines <= want.goroutines && got.files <= want.files && got.rif == 0 {
			return
		}
		if time.Now().After(end) {
			_, stacks := a.Page("/debug/pprof/goroutine?debug=1")
			t.Errorf("%s does not settle: before %v; after %v\n%s", a.Name, want, got, stacks)
			return
		}
	}
}

func vitalsOf(t *testing.T, a *meshtest.Agent) vitals {
	t.Helper()
	_, page := a.Page("/metrics")
	kept := gauge(t, page, "headroom_relay_callers") + gauge(t, page, "headroom_relay_upstreams")
	return vitals{
		goroutines: gauge(t, page, "go_goroutines") - gauge(t, page, "headroom_relay_callers"),
		files:      gauge(t, page, "process_open_fds") - kept,
		rif:        inFlight(t, a),
	}
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
	var sum int
	for _, o := range top.Agents {
		for _, v := range o.Inbound {
			sum += int(v.Rif)
		}
		for _, v := range o.Outbound {
			for _, e := range v.Endpoints {
				sum += int(e.OwnRif)
			}
		}
	}
	return sum
}
