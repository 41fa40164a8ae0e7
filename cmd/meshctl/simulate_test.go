package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/headroom-mesh/headroom/dataplane/sim/scenario"
)

// TestSimulateInATerminal wants a bar while it plays, and nothing left of it afterwards.
func TestSimulateInATerminal(t *testing.T) {
	if testing.Short() {
		t.Skip("needs tmux")
	}
	s := newTerminal(t, 80, 24, "sleep 1;", meshctlLink(t), "simulate", "fast-slow", "--set", "warmup=null", "--set", "duration=1s")
	raw := filepath.Join(t.TempDir(), "raw")
	s.tmux("pipe-pane", "-t", s.name, "cat > "+raw)
	s.await("round_robin", "prequal", "ended with 0")
	if sent, err := os.ReadFile(raw); err != nil || !bytes.Contains(sent, []byte("[====")) {
		t.Errorf("no bar was drawn: %v, %q", err, sent)
	}
	screen := s.tmux("capture-pane", "-p", "-t", s.name)
	if strings.Contains(screen, "[=") {
		t.Errorf("the bar is still there:\n%s", screen)
	}
}

func TestProgressBar(t *testing.T) {
	var out bytes.Buffer
	bar := progressBar{out: &out}
	if bar.show() != nil {
		t.Error("a bar would be drawn where no terminal is")
	}
	bar.clear()
	if out.Len() > 0 {
		t.Errorf("wrote %q", &out)
	}
	bar.draw(3, 4)
	want := "\r\x1b[K[" + strings.Repeat("=", 30) + strings.Repeat(" ", 10) + "] 75%"
	if out.String() != want {
		t.Errorf("drew %q, want %q", &out, want)
	}
}

func TestNumbersAreReadable(t *testing.T) {
	for _, test := range []struct {
		of   func(scenario.Row, float64) string
		x    float64
		want string
	}{
		{latency, 0, "0.0000"}, {latency, 0.25, "0.250"}, {latency, 5.254, "5.25"}, {latency, 53.06, "53.1"}, {latency, 802.16, "802"}, {latency, 12345, "12345"},
		{failedPart, 0, "0"}, {failedPart, 0.0000123, "0.0012%"}, {failedPart, 0.0455, "4.55%"}, {failedPart, 1, "100%"},
		{decimal, 3, "3"}, {decimal, 0.999, "1"}, {decimal, 2.345, "2.35"}, {whole, 150000, "150000"},
	} {
		if got := test.of(scenario.Row{}, test.x); got != test.want {
			t.Errorf("%v is written as %q, want %q", test.x, got, test.want)
		}
	}
	for _, test := range []struct {
		before, after float64
		want          string
	}{{0, 0, "0%"}, {2, 3, "+50.0%"}, {4, 3, "-25.0%"}, {0, 3, "-"}} {
		if got := difference(test.before, test.after); got != test.want {
			t.Errorf("from %v to %v it is %q, want %q", test.before, test.after, got, test.want)
		}
	}
}
