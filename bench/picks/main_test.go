package main

import (
	"os"
	"strings"
	"testing"

	"github.com/headroom-mesh/headroom/policy"
)

const printed = `goos: linux
BenchmarkPick/p2c         	 4795172	       70.0 ns/op	       0 B/op	       0 allocs/op
BenchmarkPick/p2c         	 4795172	       90.4 ns/op	       0 B/op	       0 allocs/op
BenchmarkPick/p2c-2       	 4795172	       60.0 ns/op	       0 B/op	       1 allocs/op
BenchmarkPick/c3          	 4795172	       150 ns/op	       0 B/op	       0 allocs/op
BenchmarkPick/c3-2        	 4795172	       100 ns/op	       0 B/op	       0 allocs/op
PASS
`

func TestFiguresAreWrittenDown(t *testing.T) {
	rules, err := parse(printed)
	if err != nil {
		t.Fatal(err)
	}
	got := withTable("before\n"+head+"| `p2c` | old |\n| `gone` | old |\n\nafter", rules)
	want := "before\n" + head + "| `p2c` | 80 | 60 | 70 to 90 | 60 to 60 | 1 |\n| `c3` | 150 | 100 | 150 to 150 | 100 to 100 | 0 |\n\nafter"
	if got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	got = withColumn("x\n| [`c3`](#c3) | goes | needs | 1 | 0 | best | not |\n", rules)
	if want := "x\n| [`c3`](#c3) | goes | needs | 1 | 150 | best | not |\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestWhatWasNotMeasured(t *testing.T) {
	for _, out := range []string{"", strings.Split(printed, "\n")[1]} {
		if _, err := parse(out); err == nil {
			t.Errorf("%q was taken for figures", out)
		}
	}
}

// TestPagesHaveRoom wants the tables to be there that figures are written to, with a line for each rule.
func TestPagesHaveRoom(t *testing.T) {
	measured := read(t, "../README.md")
	if !strings.Contains(measured, head) {
		t.Error("bench/README.md has no table")
	}
	for _, b := range policy.Balancers() {
		if !strings.Contains(measured, "\n| `"+string(b)+"` | ") {
			t.Errorf("bench/README.md has no figures of %s: run make bench-picks", b)
		}
		rules := []rule{{name: string(b), one: []float64{12345}}}
		if !strings.Contains(withColumn(read(t, "../../docs/balancers.md"), rules), "| 12345 |") {
			t.Errorf("docs/balancers.md has no place for the figure of %s", b)
		}
	}
}

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
