package prequal

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/headroom-mesh/headroom/dataplane/load"
)

// TestTranscripts plays the scripts in testdata/pool, which show the algorithm rule by rule. Each block is a scene:
//
//	pool KEY=VALUE...           a new, empty pool; size, probes, removals, delta, max-age, q, fleet (number of replicas)
//	then                        goes on with the pool of the scene before
//
// and on the lines that follow, one step each:
//
//	probe A rif=N lat=D         a probe of replica A is answered; without lat its latency is unknown
//	report A rif=N lat=D        a response of replica A brings its load
//	select [N]                  a request (N requests) asks for a replica
//	due N                       says how many probes to send on account of each of N requests
//	advance D                   time passes
//	fleet N [without A,B...]    the fleet now has N replicas; A and B have left
//	charge A                    a request went to replica A without being placed by the pool
//	forget A                    replica A could not be connected to
//	show                        prints the pool
//
// Rewrite the results after a change with: go test ./dataplane/prequal -rewrite
func TestTranscripts(t *testing.T) {
	datadriven.Walk(t, "testdata/pool", func(t *testing.T, path string) {
		var s *scene
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			if d.Cmd == "pool" {
				s = newScene(t, d)
			}
			s.out.Reset()
			for line := range strings.Lines(d.Input) {
				s.step(t, strings.TrimSpace(line))
			}
			return s.out.String()
		})
	})
}

// scene is a pool and the time in which it lives.
type scene struct {
	pool *Pool[string]
	now  time.Time
	out  strings.Builder
}

func newScene(t *testing.T, d *datadriven.TestData) *scene {
	cfg := published()
	fleet := 100
	d.MaybeScanArgs(t, "size", &cfg.PoolSize)
	d.MaybeScanArgs(t, "fleet", &fleet)
	for _, arg := range d.CmdArgs {
		switch arg.Key {
		case "probes":
			cfg.ProbesPerRequest = number(t, arg)
		case "removals":
			cfg.RemovalsPerRequest = number(t, arg)
		case "delta":
			cfg.Delta = number(t, arg)
		case "q":
			cfg.QRIF = number(t, arg)
		case "max-age":
			cfg.MaxAge = duration(t, arg.FirstVal(t))
		}
	}
	s := &scene{now: time.Unix(1000, 0)}
	s.pool = New[string](cfg, s.now, rand.New(rand.NewPCG(1, 1)), nil, nil)
	s.pool.Resize(fleet, func(string) bool { return true })
	return s
}

func number(t *testing.T, arg datadriven.CmdArg) (f float64) {
	if _, err := fmt.Sscan(arg.FirstVal(t), &f); err != nil {
		t.Fatalf("%s: %v", arg.Key, err)
	}
	return f
}

func duration(t *testing.T, s string) time.Duration {
	d, err := time.ParseDuration(s)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func (s *scene) step(t *testing.T, line string) {
	cmd, args, err := datadriven.ParseLine(line)
	if err != nil {
		t.Fatalf("%q: %v", line, err)
	}
	arg := func(i int) string {
		if i < len(args) {
			return args[i].Key
		}
		return ""
	}
	switch cmd {
	case "probe":
		s.pool.Add(s.now, arg(0), report(t, args[1:]))
	case "report":
		s.pool.Refresh(s.now, arg(0), report(t, args[1:]))
	case "select":
		for range count(arg(0)) {
			s.choose()
		}
	case "due":
		s.out.WriteString("probes due:")
		for range count(arg(0)) {
			fmt.Fprintf(&s.out, " %d", s.pool.ProbesDue())
		}
		s.out.WriteString("\n")
	case "advance":
		s.now = s.now.Add(duration(t, arg(0)))
	case "fleet":
		var gone []string
		for _, a := range args[1:] {
			gone = append(gone, a.Vals...)
		}
		s.pool.Resize(count(arg(0)), func(key string) bool { return !slices.Contains(gone, key) })
	case "charge":
		s.pool.Charge(arg(0))
	case "forget":
		s.pool.Forget(arg(0))
	case "show":
		s.show()
	default:
		t.Fatalf("%q: no such step", line)
	}
}

func count(s string) int {
	n := 1
	fmt.Sscan(s, &n)
	return n
}

func report(t *testing.T, args []datadriven.CmdArg) (r load.Report) {
	for _, arg := range args {
		switch arg.Key {
		case "rif":
			r.RIF = int32(number(t, arg))
		case "lat":
			r.Latency, r.Known = duration(t, arg.FirstVal(t)), true
		}
	}
	return r
}

// choose prints the replica selected, and which others left the pool thereby.
func (s *scene) choose() {
	s.pool.expire(s.now)
	before := keys(s.pool)
	key, class, ok := s.pool.Select(s.now)
	if !ok {
		s.out.WriteString("too few probes: any replica at random\n")
		return
	}
	fmt.Fprintf(&s.out, "%s, %s", key, [...]string{"cold", "hot"}[class])
	after := keys(s.pool)
	var gone []string
	for _, k := range before {
		if !slices.Contains(after, k) {
			gone = append(gone, k)
		}
	}
	if gone != nil {
		fmt.Fprintf(&s.out, "; leaves the pool: %s", strings.Join(gone, " "))
	}
	s.out.WriteString("\n")
}

func keys[K comparable](p *Pool[K]) (ks []K) {
	for _, e := range p.entries {
		ks = append(ks, e.key)
	}
	return ks
}

func (s *scene) show() {
	var lines []string
	s.pool.Probes(s.now, func(p Probe[string]) {
		latency, temperature := "?", "cold"
		if p.Report.Known {
			latency = p.Report.Latency.String()
		}
		if p.Hot {
			temperature = "hot"
		}
		uses := s.pool.entries[s.pool.find(p.Key)].uses
		lines = append(lines, fmt.Sprintf("%s rif=%d lat=%s age=%v uses=%d %s\n", p.Key, p.Report.RIF, latency, p.Age, uses, temperature))
	})
	slices.Sort(lines)
	s.out.WriteString(strings.Join(lines, ""))
	threshold := "none"
	if t, ok := s.pool.Threshold(); ok {
		threshold = fmt.Sprint(t)
	}
	fmt.Fprintf(&s.out, "%d of %d probes; threshold %s; each is used %.2f times on average\n",
		len(lines), s.pool.Capacity(), threshold, s.pool.reuse)
}
