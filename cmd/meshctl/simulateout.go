package main

import (
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/headroom-mesh/headroom/dataplane/sim/scenario"
)

func (s *simulation) write(w io.Writer, form string, rows []scenario.Row) error {
	switch {
	case form == "json":
		text, err := json.Marshal(rows)
		if err != nil {
			return fmt.Errorf("write as JSON: %w", err)
		}
		return indentJSON(w, text)
	case form == "csv":
		return writeCSV(w, rows)
	case s.against != "":
		return writeSideBySide(w, rows)
	}
	return writeRows(w, rows)
}

// figure is a column of the table, and a line of a comparison.
type figure struct {
	name string // of the column
	of   func(scenario.Row) float64
	text func(scenario.Row, float64) string
}

// figuresShown returns the figures that make sense for some row.
func figuresShown(rows []scenario.Row) []figure {
	figures := []figure{
		{"REQUESTS", func(r scenario.Row) float64 { return r.Requests }, whole},
		{"ERRORS", func(r scenario.Row) float64 { return r.ErrorRate }, failedPart},
		{"P50", func(r scenario.Row) float64 { return r.P50MS }, latency},
		{"P90", func(r scenario.Row) float64 { return r.P90MS }, latency},
		{"P99", func(r scenario.Row) float64 { return r.P99MS }, latency},
		{"P99.9", func(r scenario.Row) float64 { return r.P999MS }, latency},
		{"RIF50", func(r scenario.Row) float64 { return r.RIFP50 }, decimal},
		{"RIF99", func(r scenario.Row) float64 { return r.RIFP99 }, decimal},
		{"PROBES", func(r scenario.Row) float64 { return r.ProbesPerRequest }, decimal},
	}
	if slices.ContainsFunc(rows, func(r scenario.Row) bool { return r.ThresholdMS > 0 }) {
		figures = append(figures, figure{"LATE", func(r scenario.Row) float64 { return r.Late }, failedPart})
	}
	if slices.ContainsFunc(rows, func(r scenario.Row) bool { return r.RecoveryS > 0 }) {
		figures = append(figures, figure{"RECOVERY", func(r scenario.Row) float64 { return float64(r.RecoveryS) }, recovery})
	}
	if slices.ContainsFunc(rows, func(r scenario.Row) bool { return len(r.Case.Config.Faults) > 0 }) {
		figures = append(figures, figure{"PEAK99", func(r scenario.Row) float64 { return r.PeakP99MS }, latency})
	}
	if slices.ContainsFunc(rows, func(r scenario.Row) bool { return r.Unwanted > 0 }) {
		figures = append(figures, figure{"OVERDUE", func(r scenario.Row) float64 { return r.OverdueMS }, overdue})
	}
	return figures
}

// overdue writes milliseconds, which may be none.
func overdue(_ scenario.Row, x float64) string {
	if x == 0 {
		return "0"
	}
	return threeDigits(x)
}

func recovery(_ scenario.Row, seconds float64) string {
	if math.IsInf(seconds, 1) {
		return "never"
	}
	return strconv.FormatFloat(seconds, 'f', 0, 64) + "s"
}

func whole(_ scenario.Row, x float64) string { return strconv.FormatFloat(x, 'f', 0, 64) }

func failedPart(_ scenario.Row, x float64) string {
	if x == 0 {
		return "0"
	}
	return threeDigits(100*x) + "%"
}

func decimal(_ scenario.Row, x float64) string {
	return strconv.FormatFloat(math.Round(x*100)/100, 'f', -1, 64)
}

// latency tells a quantile that is no latency, but the time limit.
func latency(r scenario.Row, x float64) string {
	if r.TimedOut(x) {
		return "TO"
	}
	return threeDigits(x)
}

// threeDigits writes x with three digits, or all before the point.
func threeDigits(x float64) string {
	digits := 2 - int(math.Floor(math.Log10(math.Max(math.Abs(x), 1e-9))))
	return strconv.FormatFloat(x, 'f', min(max(digits, 0), 4), 64)
}

func writeRows(w io.Writer, rows []scenario.Row) error {
	figures := figuresShown(rows)
	hasPoints := rows[0].Point != ""
	head := []string{"RULE"}
	if hasPoints {
		head = []string{"POINT", "RULE"}
	}
	left := len(head)
	for _, f := range figures {
		head = append(head, f.name)
	}
	table := [][]string{head}
	for _, r := range rows {
		cells := []string{r.Rule}
		if hasPoints {
			cells = []string{r.Point, r.Rule}
		}
		for _, f := range figures {
			cells = append(cells, f.text(r, f.of(r)))
		}
		table = append(table, cells)
	}
	return writeAligned(w, table, left)
}

// writeAligned writes cells in columns: some on the left that are aligned there, and numbers.
func writeAligned(w io.Writer, table [][]string, left int) error {
	widths := make([]int, len(table[0]))
	for _, cells := range table {
		for i, cell := range cells {
			widths[i] = max(widths[i], len([]rune(cell)))
		}
	}
	var out strings.Builder
	for _, cells := range table {
		var line strings.Builder
		for i, cell := range cells {
			if i < left {
				widths[i] = -max(widths[i], -widths[i])
			}
			fmt.Fprintf(&line, "%*s  ", widths[i], cell)
		}
		out.WriteString(strings.TrimRight(line.String(), " ") + "\n")
	}
	_, err := io.WriteString(w, out.String())
	return err
}

// writeSideBySide compares the second of two rules with the first, at each point.
func writeSideBySide(w io.Writer, rows []scenario.Row) error {
	for i := 0; i+1 < len(rows); i += 2 {
		before, after := rows[i], rows[i+1]
		if i > 0 {
			fmt.Fprintln(w)
		}
		table := [][]string{{orDash(before.Point), before.Rule, after.Rule, "DIFFERENCE"}}
		if before.Point == "" {
			table[0][0] = ""
		}
		for _, f := range figuresShown(rows) {
			x, y := f.of(before), f.of(after)
			table = append(table, []string{f.name, f.text(before, x), f.text(after, y), difference(x, y)})
		}
		if err := writeAligned(w, table, 1); err != nil {
			return err
		}
	}
	return nil
}

func difference(before, after float64) string {
	switch {
	case before == after:
		return "0%"
	case before == 0 || math.IsInf(before, 1) || math.IsInf(after, 1):
		return "-" // no percentage says what nothing became
	}
	return fmt.Sprintf("%+.1f%%", 100*(after/before-1))
}

func writeCSV(w io.Writer, rows []scenario.Row) error {
	out := csv.NewWriter(w)
	for i, r := range rows {
		names, cells := []string{"scenario", "rule", "point"}, []string{r.Scenario, r.Rule, r.Point}
		for _, c := range r.Columns() {
			names, cells = append(names, c.Name), append(cells, strconv.FormatFloat(c.Value, 'f', -1, 64))
		}
		if i == 0 {
			_ = out.Write(names) // the writer keeps the first error for Error
		}
		_ = out.Write(cells)
	}
	out.Flush()
	return out.Error()
}

// progressBar shows on a terminal how far a command has come.
type progressBar struct {
	out   io.Writer
	drawn bool
}

// show returns what draws the bar, or nil if nobody would see it.
func (b *progressBar) show() func(done, all int) {
	if !isTerminal(b.out) {
		return nil
	}
	b.draw(0, 1)
	return b.draw
}

func (b *progressBar) draw(done, all int) {
	const width = 40
	full := width * done / all
	fmt.Fprintf(b.out, "\r\x1b[K[%s%s] %d%%", strings.Repeat("=", full), strings.Repeat(" ", width-full), 100*done/all)
	b.drawn = true
}

func (b *progressBar) clear() {
	if b.drawn {
		fmt.Fprint(b.out, "\r\x1b[K")
	}
}
