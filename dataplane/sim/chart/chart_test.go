package chart_test

import (
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"image/png"
	"io"
	"regexp"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/headroom-mesh/headroom/dataplane/sim"
	"github.com/headroom-mesh/headroom/dataplane/sim/chart"
	"github.com/headroom-mesh/headroom/dataplane/sim/scenario"
	"github.com/headroom-mesh/headroom/policy"
)

func row(rule, point string, ms float64) scenario.Row {
	r := scenario.Row{Scenario: "test", Rule: rule, Point: point, TimeoutMS: 1000}
	r.P50MS, r.P90MS, r.P99MS, r.P999MS = ms, 2*ms, 3*ms, 9*ms
	return r
}

func draw(t interface {
	Helper()
	Fatalf(string, ...any)
}, format string, rows []scenario.Row) string {
	t.Helper()
	var out bytes.Buffer
	if err := chart.Draw(&out, format, rows); err != nil {
		t.Fatalf("draw %s: %v", format, err)
	}
	return out.String()
}

// wellFormed reports what keeps an XML parser from reading text.
func wellFormed(text string) error {
	decoder := xml.NewDecoder(strings.NewReader(text))
	for {
		if _, err := decoder.Token(); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
	}
}

func wantTexts(t *testing.T, svg string, texts ...string) {
	t.Helper()
	if err := wellFormed(svg); err != nil {
		t.Error(err)
	}
	for _, text := range texts {
		if !strings.Contains(svg, ">"+text+"<") {
			t.Errorf("there is no %q in the picture", text)
		}
	}
}

func TestOnePointIsAListOfRules(t *testing.T) {
	rows := []scenario.Row{row("prequal", "", 50), row("a <b> & c", "", 80)}
	wantTexts(t, draw(t, "svg", rows), "prequal", "a &lt;b&gt; &amp; c", "latency, ms", "RIF of replicas, p99", "p99.9")
	rows[1].ErrorRate = 0.0123
	wantTexts(t, draw(t, "svg", rows), "errors, %", "1.23 %", "0 %")
}

func TestSeveralPointsAreLines(t *testing.T) {
	var rows []scenario.Row
	for _, point := range []string{"0.5", "1", "10"} {
		for _, rule := range []string{"prequal", "c3"} {
			r := row(rule, point, 50)
			r.Case.Swept = "load.rate"
			rows = append(rows, r)
		}
	}
	svg := draw(t, "svg", rows)
	wantTexts(t, svg, "0.5", "10", "p50, ms", "p99.9, ms", "load.rate", "prequal", "c3")
	if strings.Contains(svg, "errors") {
		t.Error("there is a panel for errors, of which there are none")
	}
	rows[0].ErrorRate = 0.5
	wantTexts(t, draw(t, "svg", rows), "errors, %")
}

func TestWhatChangesIsDrawnOverTime(t *testing.T) {
	r := row("prequal", "", 50)
	r.Case.Config = sim.Config{Duration: 3 * time.Second, Faults: []sim.Fault{{Kind: sim.Stall, At: time.Second}}}
	r.Results = []sim.Result{{Series: []sim.Bucket{
		{Requests: 10, P99: 50 * time.Millisecond},
		{Start: time.Second}, // nothing ended
		{Start: 2 * time.Second, Requests: 10, Errors: 5, P99: time.Second},
		{Start: 3 * time.Second, Requests: 1},
	}}}
	if svg := draw(t, "svg", []scenario.Row{r}); strings.Contains(svg, "errors") {
		t.Error("there is a panel for errors, of which there are none")
	}
	r.ErrorRate = 0.2
	wantTexts(t, draw(t, "svg", []scenario.Row{r}), "p99 over time, ms", "errors over time, %")
}

func TestPNG(t *testing.T) {
	picture, err := png.Decode(strings.NewReader(draw(t, "png", []scenario.Row{row("prequal", "", 50)})))
	if err != nil || picture.Bounds().Dx() != 1440 {
		t.Errorf("%v of %v", err, picture.Bounds())
	}
}

func TestSameRowsSamePicture(t *testing.T) {
	rows := []scenario.Row{row("prequal", "a", 50), row("prequal", "b", 60)}
	for _, format := range chart.Formats() {
		if first, second := draw(t, format, rows), draw(t, format, rows); first != second {
			t.Errorf("two pictures differ as %s", format)
		}
	}
}

func TestWhatCannotBeDrawn(t *testing.T) {
	if err := chart.Draw(io.Discard, "jpg", []scenario.Row{row("prequal", "", 50)}); err == nil || !strings.Contains(err.Error(), "want svg or png") {
		t.Errorf("as jpg: %v", err)
	}
	if err := chart.Draw(io.Discard, "svg", nil); err == nil {
		t.Error("nothing was drawn")
	}
}

var bar = regexp.MustCompile(`style="fill:(#[0-9A-F]{6})" />`)

// TestRulesKeepTheirColors compares the bars of one rule in different company.
func TestRulesKeepTheirColors(t *testing.T) {
	alone := bar.FindAllStringSubmatch(draw(t, "svg", []scenario.Row{row("c3", "", 50)}), -1)
	rows := []scenario.Row{row("mine", "", 50)}
	for _, b := range policy.Balancers() {
		rows = append(rows, row(string(b), "", 50))
	}
	rows = append(rows, row("mine too", "", 50), row("oracle", "", 50))
	together := draw(t, "svg", rows)
	wantTexts(t, together, "mine", "mine too", "late_binding")
	if color := alone[len(alone)-1][1]; !strings.Contains(together, color) {
		t.Errorf("the color %s of c3 is not in the picture of all rules", color)
	}
}

// TestAnyFiguresAreDrawn wants no figures to upset an axis.
func TestAnyFiguresAreDrawn(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		figure := rapid.OneOf(rapid.SampledFrom([]float64{0, 1, 1e-9, 1e12}), rapid.Float64Range(0, 1e4))
		var rows []scenario.Row
		for i := range rapid.IntRange(1, 3).Draw(t, "points") {
			for j := range rapid.IntRange(1, 4).Draw(t, "rules") {
				r := row(fmt.Sprint("rule ", j), fmt.Sprint(i), figure.Draw(t, "latency"))
				r.ErrorRate = rapid.Float64Range(0, 1).Draw(t, "errors")
				r.RIFP99 = figure.Draw(t, "RIF")
				r.TimeoutMS = figure.Draw(t, "limit")
				rows = append(rows, r)
			}
		}
		if err := wellFormed(draw(t, "svg", rows)); err != nil {
			t.Fatal(err)
		}
	})
}
