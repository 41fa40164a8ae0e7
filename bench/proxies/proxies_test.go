//go:build linux

package main

import (
	"context"
	"encoding/json"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/bench/load"
)

// TestMain makes this program the floor's, too, as the real one is.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == floorCommand {
		exit(runFloor(os.Args[2:]))
		return
	}
	os.Exit(m.Run())
}

// TestOneCell measures the floor over two hops with TLS, from start to end.
func TestOneCell(t *testing.T) {
	if runtime.NumCPU() < 2 {
		t.Skip("wants two cores")
	}
	runtime.LockOSThread() // as processes end with the thread that started them
	defer runtime.UnlockOSThread()
	o := options{rounds: 1, results: t.TempDir(), out: filepath.Join(t.TempDir(), "figures.json")}
	b, err := newBench(o)
	if err != nil {
		t.Fatal(err)
	}
	defer b.close()
	floor, err := theFloor().contestant(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	cells, probing, err := selectCells("2hop-mtls-h1-128")
	if err != nil || probing {
		t.Fatal(err, probing)
	}
	rows, noise, err := b.measureCell(t.Context(), cells[0], []contestant{floor})
	if err != nil {
		t.Fatal(err)
	}
	found := &results{rounds: o.rounds}
	found.add(rows, cells[0].name(), noise)
	if err := found.write(o); err != nil {
		t.Fatal(err)
	}
	r := rows[0]
	if r.failure != "" || r.medianCPU() < 1 || r.memory < 1<<20 || r.latency == nil || r.latency.p50 <= 0 || r.rates[0] < 100 {
		t.Errorf("the floor's row: %+v", r)
	}
	for _, name := range []string{o.out, filepath.Join(o.results, "RESULTS.md"), filepath.Join(o.results, "results.svg")} {
		if text, err := os.ReadFile(name); err != nil || !strings.Contains(string(text), floorName) && !strings.HasSuffix(name, "svg") {
			t.Errorf("%s: %v %s", name, err, text)
		}
	}
}

// TestStartFails wants a proxy that does not start to be told, with its last words.
func TestStartFails(t *testing.T) {
	if runtime.NumCPU() < 2 {
		t.Skip("wants two cores")
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	b, err := newBench(options{rounds: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer b.close()
	broken := peer{name: "broken", configure: func(hop) ([]string, error) { return []string{"-c", "echo no such option >&2"}, nil }}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	p := b.enter(ctx, allCells()[0], contestant{name: "broken", start: func(_ context.Context, at place) (*running, error) { return broken.start("/bin/sh", at) }}, b.origin)
	b.awaitReady(ctx, load.Kinds()[0], p)
	if p.session != nil || !strings.Contains(p.row.failure, "is not ready") || !strings.Contains(p.row.failure, "no such option") {
		t.Errorf("failure: %q", p.row.failure)
	}
}

func TestSelectCells(t *testing.T) {
	tests := []struct {
		names, want string
		probing     bool
	}{
		{"2hop-mtls-h1-128", "2hop-mtls-h1-128", false},
		{"tcp", "1hop-plain-tcp 2hop-plain-tcp 2hop-mtls-tcp", false},
		{"mtls-h1,1hop-plain-tcp,probing", "1hop-plain-tcp 2hop-mtls-h1-128 2hop-mtls-h1-10k", true},
		{"probing", "", true},
	}
	for _, test := range tests {
		cells, probing, err := selectCells(test.names)
		var names []string
		for _, c := range cells {
			names = append(names, c.name())
		}
		if err != nil || strings.Join(names, " ") != test.want || probing != test.probing {
			t.Errorf("%s: %v, probing %t, error %v, want %s", test.names, names, probing, err, test.want)
		}
	}
	if cells, probing, err := selectCells(""); len(cells) != 21 || !probing || err != nil {
		t.Errorf("all: %d cells, probing %t, error %v", len(cells), probing, err)
	}
	if _, _, err := selectCells("3hop"); err == nil || !strings.Contains(err.Error(), `no cell "3hop"`) {
		t.Errorf("3hop: %v", err)
	}
}

// TestConfigurations wants every peer to have hops listen where callers look for them, and to use TLS where it is wanted.
func TestConfigurations(t *testing.T) {
	for _, p := range peers() {
		for _, top := range topologies() {
			at := place{cell: cell{topology: top}, dir: t.TempDir(), certs: "/certs", net: netip.MustParseAddr("127.1.1.0"), origin: []netip.Addr{netip.MustParseAddr("127.1.0.1"), netip.MustParseAddr("127.1.0.2")}}
			hops := at.hops()
			if len(hops) != top.hops || !slices.Equal(hops[len(hops)-1].To, at.origin) {
				t.Errorf("%s: hops %+v", top.name, hops)
			}
			for i, h := range hops {
				if err := os.MkdirAll(h.Dir, 0o755); err != nil {
					t.Fatal(err)
				}
				if _, err := p.configure(h); err != nil {
					t.Fatal(err)
				}
				text := contents(t, h.Dir)
				for _, to := range append(h.To, h.At) {
					if !strings.Contains(text, to.String()) {
						t.Errorf("%s, %s, hop %d: no %s in %s", p.name, top.name, i, to, text)
					}
				}
				if secure := strings.Contains(text, "/certs/hop"); secure != top.mtls {
					t.Errorf("%s, %s, hop %d: certificates: %t in %s", p.name, top.name, i, secure, text)
				}
			}
		}
	}
}

func contents(t *testing.T, dir string) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no files in %s: %v", dir, err)
	}
	var all strings.Builder
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		all.WriteString(string(text))
	}
	return all.String()
}

func TestQuartiles(t *testing.T) {
	if got, want := quartilesOf([]float64{4, 1, 3, 2, 5}), (quartiles{3, 2, 4}); got != want {
		t.Errorf("of five: %v, want %v", got, want)
	}
	if got, want := quartilesOf([]float64{1, 2}), (quartiles{1.5, 1.25, 1.75}); got != want {
		t.Errorf("of two: %v, want %v", got, want)
	}
	if got := quartilesOf(nil); !math.IsNaN(got.Median) {
		t.Errorf("of none: %v", got)
	}
}

// TestRatio wants rounds to be compared with themselves: here the machine was twice as slow in the second.
func TestRatio(t *testing.T) {
	ours := &row{cpu: map[int]float64{0: 10, 1: 20, 2: 10}}
	theirs := &row{cpu: map[int]float64{0: 20, 1: 40, 3: 1}}
	if q, ok := ratio(ours, theirs); !ok || q != (quartiles{0.5, 0.5, 0.5}) {
		t.Errorf("ratio %v, %t", q, ok)
	}
	if _, ok := ratio(ours, &row{}); ok {
		t.Error("there is a ratio to nothing")
	}
}

func twoRows() *results {
	const cell = "2hop-mtls-h1-128"
	r := &results{machine: "a machine", versions: []string{"haproxy 1.2.3"}, rounds: 2}
	r.add([]*row{
		{cell: cell, proxy: headroomName, cpu: map[int]float64{0: 30, 1: 31}, rates: []float64{1000}, busy: []float64{1}, latency: &latency{100, 200, 300, 5000}, memory: 80 << 20, memoryIdle: 150 << 20},
		{cell: cell, proxy: "haproxy", cpu: map[int]float64{0: 60, 1: 62}, rates: []float64{500}, busy: []float64{1}, latency: &latency{150, 190, 310, 5000}, memory: 40 << 20},
		{cell: cell, proxy: "caddy", failure: "did not\nstart"},
	}, cell, noise{steal: 0.01, others: 0.08})
	return r
}

func TestJSON(t *testing.T) {
	text, err := twoRows().json()
	if err != nil {
		t.Fatal(err)
	}
	var doc struct {
		Cells []struct {
			Cell, Proxy, Failed string
			CPU                 float64 `json:"cpu_us"`
			RPS                 float64
			P50                 float64 `json:"p50_us"`
			P99                 float64 `json:"p99_us"`
			RSS                 float64 `json:"rss_mib"`
			Ratio               map[string]struct{ Median, Q1, Q3 float64 }
		}
	}
	if err := json.Unmarshal(text, &doc); err != nil {
		t.Fatal(err)
	}
	ours := doc.Cells[0]
	if len(doc.Cells) != 3 || ours.Proxy != "headroom" || ours.CPU != 30.5 || ours.RPS != 1000 || ours.P50 != 100 || ours.P99 != 200 || ours.RSS != 80 || ours.Ratio["haproxy"].Median != 0.5 {
		t.Errorf("%+v in %s", doc, text)
	}
	if doc.Cells[1].Ratio != nil || doc.Cells[2].Failed == "" {
		t.Errorf("the others: %s", text)
	}
}

func TestTables(t *testing.T) {
	text := twoRows().markdown()
	for _, want := range []string{
		"| `2hop-mtls-h1-128`, CPU to haproxy | 0.50 (0.50 to 0.50) | ≤ 0.75 | met |",
		"| `2hop-mtls-h1-128`, added p99 to haproxy | 1.05 (200 µs to 190 µs) | ≤ 1.00 | **missed** |",
		"| `2hop-mtls-h1-128`, memory of all agents with 10000 idle connections | 150 MiB | < 200 MiB | met |",
		"| haproxy | 61.0 (60.5 to 61.5) | **0.50** (0.50 to 0.50) | 500 | 100 % | 150 / 190 / 310 | 40 |  |",
		"| caddy | did not start |",
		"**Provisional:** other processes took up to 9 % of the machine.",
		"other processes took 8.0 % of the machine, other machines 1.0 %",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	if picture, err := twoRows().plot(); err != nil || !strings.Contains(string(picture), "haproxy") {
		t.Errorf("the plot: %v", err)
	}
}

func TestReadingProc(t *testing.T) {
	if got, want := jiffiesIn([]byte("cpu  10 1 5 100 7 2 3 4 0 0\ncpu0 5\n")), (jiffies{21, 4, 132}); got != want {
		t.Errorf("jiffies %v, want %v", got, want)
	}
	if got := residentIn([]byte("Name:\ta\nVmHWM:\t  300 kB\nVmRSS:\t  200 kB\n")); got != 200<<10 {
		t.Errorf("resident %d", got)
	}
	pid := []int{os.Getpid()}
	before := cpuTime(pid)
	for x := 0.0; cpuTime(pid) < before+time.Millisecond; x++ {
		math.Sqrt(x)
	}
	if took := cpuTime(pid) - before; took > time.Second {
		t.Errorf("a millisecond of work took %s", took)
	}
}
