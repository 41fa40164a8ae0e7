package outbound

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/balancer"
)

// TestOutsideIsLogged expects one line when requests begin to leave the mesh, and one when they have been in it for a while.
func TestOutsideIsLogged(t *testing.T) {
	var out bytes.Buffer
	log := slog.New(slog.NewTextHandler(&out, nil))
	s := newService("cart.shop", balancer.Place{}, 1, newMetrics(nil).service("cart.shop"))
	now := time.Unix(1000, 0)
	leaves := func() { s.leaves(now, log) }
	stays := func() { s.stays(now, log) }
	for _, step := range []struct {
		what  string
		after time.Duration
		do    func()
		want  string // "": nothing
	}{
		{"all is well", 0, stays, ""},
		{"the first leaves", time.Second, leaves, "level=WARN"},
		{"another leaves", time.Second, leaves, ""},
		{"one stays", time.Second, stays, ""},
		{"one leaves still", backAfter, leaves, ""},
		{"one stays at once", 0, stays, ""},
		{"one stays later", backAfter, stays, "in the mesh again"},
		{"another stays", time.Second, stays, ""},
		{"it begins anew", time.Second, leaves, "level=WARN"},
	} {
		out.Reset()
		now = now.Add(step.after)
		step.do()
		if said := out.String(); (said == "") != (step.want == "") || !strings.Contains(said, step.want) ||
			said != "" && !strings.Contains(said, "service=cart.shop") {
			t.Errorf("%s: %q is logged, want %q", step.what, said, step.want)
		}
	}
}
