package main

import (
	"encoding/xml"
	"errors"
	"io"
	"math"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/headroom-mesh/headroom/dataplane/sim/evidence"
	"github.com/headroom-mesh/headroom/dataplane/sim/scenario"
)

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestPageHasAllClaims holds the committed page to the claims that it is written from. What was measured is not compared: to
// measure it again takes too long.
func TestPageHasAllClaims(t *testing.T) {
	sections := strings.Split(read(t, "../evidence.md"), "\n## ")
	for i, e := range evidence.All() {
		if i+1 >= len(sections) {
			t.Fatalf("docs/evidence.md ends before %s: run make evidence", e.Scenario)
		}
		name, text, _ := strings.Cut(sections[i+1], "\n")
		if name != e.Scenario || !strings.Contains(text, wrapped(e.Remark)) {
			t.Errorf("docs/evidence.md has %s and another remark where %s belongs: run make evidence", name, e.Scenario)
		}
		if !strings.Contains(text, choices(t, e.Scenario)) {
			t.Errorf("docs/evidence.md says other things of %s than the comments in it: run make evidence", name)
		}
		for _, c := range e.Claims {
			if !slices.ContainsFunc(strings.Split(text, "\n"), claim{Claim: c}.isIn) {
				t.Errorf("docs/evidence.md lacks %s with %q as the source's: run make evidence", c.What(), c.Source)
			}
		}
	}
}

func choices(t *testing.T, name string) string {
	t.Helper()
	text, err := scenario.Text(name)
	if err != nil {
		t.Fatal(err)
	}
	return leadingComment(string(text))
}

// isIn reports whether a line of the page is about the claim: one of a list, or of a grid.
func (c claim) isIn(line string) bool {
	inList := strings.HasPrefix(line, "| "+c.What()+" | "+c.source()+" |") && strings.HasSuffix(line, "| "+c.wanted()+" |")
	inGrid := strings.HasPrefix(line, "| "+c.Rule+" |") || strings.HasPrefix(line, "| "+c.Point+" |")
	return inList || inGrid && c.Over == nil && strings.Contains(line, " ("+c.source()+") |")
}

func TestPicturesAreSmall(t *testing.T) {
	const most = 200_000
	for _, e := range evidence.All() {
		picture := read(t, e.Scenario+".svg")
		if len(picture) > most {
			t.Errorf("the picture of %s has %d bytes, want %d at most", e.Scenario, len(picture), most)
		}
		decoder := xml.NewDecoder(strings.NewReader(picture))
		for {
			if _, err := decoder.Token(); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("the picture of %s: %v", e.Scenario, err)
			}
		}
	}
}

// made returns a claim about a figure.
func made(name, unit, rule, point, source string, low, high, got float64) claim {
	cell := evidence.Cell{Figure: evidence.Figure{Name: name, Unit: unit}, Rule: rule, Point: point}
	return claim{evidence.Claim{Cell: cell, Source: source, Low: low, High: high}, got}
}

func TestAFewClaimsAreAList(t *testing.T) {
	missed := made("p50", "ms", "prequal", "", "", 10, 20, 30)
	missed.Missed = "It rained."
	text := page([]section{{
		Evidence: evidence.Evidence{Scenario: "weather", Remark: "Mind the wind."}, description: "rain", source: "a book", choices: "Wet.\n",
		claims: []claim{made("p99", "ms", "prequal", "0.9", "152", 0, 200, 150), missed},
	}})
	wantLines(t, text,
		"| [weather](#weather) | rain | 1 of 2 |",
		"## weather", "Wet.", "Source: a book.", "Mind the wind.",
		"| p99 under prequal at 0.9, ms | 152 | 150 | at most 200 |",
		"| p50 under prequal, ms | – | **30** | 10 to 20 |",
		"**Missed**: p50 under prequal, ms is 30, wanted 10 to 20. It rained.",
		"![rain](evidence/weather.svg)",
	)
}

func TestManyClaimsAreAGrid(t *testing.T) {
	rules := []string{"a", "b", "c", "d", "e", "f", "g"}
	var claims []claim
	for i, rule := range rules {
		claims = append(claims, made("p99", "ms", rule, "0.7", "10", 5, 20, float64(10+2*i)))
		claims = append(claims, made("p99", "ms", rule, "0.9", "11", 5, 20, 12))
	}
	wantLines(t, page([]section{{claims: claims}}),
		"| | 0.7 p99, ms | 0.9 p99, ms |",
		"| a | 10 (10) | 12 (11) |",
		"| g | **22** (10) | 12 (11) |",
	)
	for i := range claims {
		claims[i].Rule, claims[i].Point = claims[i].Point, claims[i].Rule
	}
	wantLines(t, page([]section{{claims: claims}}), "| g | **22** (10) | 12 (11) |")
}

func TestWhatIsOnlyCompared(t *testing.T) {
	text := page([]section{{
		Evidence: evidence.Evidence{Scenario: "weather"}, description: "rain",
		claims: []claim{made("p99", "ms", "c3", "", "1000", 0, math.Inf(1), 150), made("p99", "ms", "prequal", "", "", 0, 200, 150)},
	}})
	wantLines(t, text, "| [weather](#weather) | rain | 1 of 1 |", "| p99 under c3, ms | 1000 | *150* | – |")
}

func TestWrapped(t *testing.T) {
	words := strings.Repeat("wind and rain ", 40)
	got := wrapped(words)
	if strings.Join(strings.Fields(got), " ") != strings.TrimSpace(words) {
		t.Errorf("%q has other words", got)
	}
	for line := range strings.Lines(got) {
		if len(line) > 121 || line != strings.TrimSpace(line)+"\n" && !strings.HasSuffix(got, line) {
			t.Errorf("line %q", line)
		}
	}
}

func wantLines(t *testing.T, text string, lines ...string) {
	t.Helper()
	all := strings.Split(text, "\n")
	for _, line := range lines {
		if !slices.Contains(all, line) {
			t.Errorf("there is no line %q in\n%s", line, text)
		}
	}
}
