//go:build linux

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
)

// write prints the bars, and writes the files.
func (r *results) write(o options) error {
	fmt.Print(r.verdictTable())
	if r.probing != nil {
		fmt.Printf("\n%s", r.probing.describe())
	}
	if err := os.MkdirAll(o.results, 0o755); err != nil {
		return fmt.Errorf("write the results: %w", err)
	}
	picture, err := r.plot()
	if err != nil {
		return err
	}
	tables, plot := filepath.Join(o.results, "RESULTS.md"), filepath.Join(o.results, "results.svg")
	err = errors.Join(os.WriteFile(tables, []byte(r.markdown()), 0o644), os.WriteFile(plot, picture, 0o644))
	if o.out != "" {
		text, encodeErr := r.json()
		err = errors.Join(err, encodeErr, os.WriteFile(o.out, text, 0o644))
	}
	if err != nil {
		return fmt.Errorf("write the results: %w", err)
	}
	fmt.Printf("\nAll figures: %s. Plot: %s.\n", tables, plot)
	return nil
}

func (r *results) markdown() string {
	var b strings.Builder
	fmt.Fprintf(&b, "# What proxies cost\nWritten by `make bench`; [how it is measured](README.md). %s; %d rounds; %s.\n\n", r.machine, r.rounds, strings.Join(r.versions, ", "))
	if busiest := r.busiest(); busiest > quietEnough {
		fmt.Fprintf(&b, "**Provisional:** other processes took up to %.0f %% of the machine. Ratios suffer little from that, latencies and calls/s much.\n\n", 100*busiest)
	}
	b.WriteString("![CPU time of Headroom as a multiple of the others'](results.svg)\n\n## Bars\n")
	b.WriteString(r.verdictTable())
	b.WriteString("\n## Cells\n")
	for _, cell := range r.cells() {
		b.WriteString(r.cellTable(cell) + "\n")
	}
	if r.probing != nil {
		b.WriteString("## Probing\n" + r.probing.describe())
	}
	return b.String()
}

// quietEnough is the share of the machine that others may take without a word about it.
const quietEnough = 0.05

func (r *results) busiest() float64 {
	most := 0.0
	for _, n := range r.noise {
		most = max(most, n.others+n.steal)
	}
	return most
}

func (r *results) verdictTable() string {
	var b strings.Builder
	b.WriteString("| what | found, median (quartiles) | bar | |\n|---|---|---|---|\n")
	for _, v := range r.verdicts() {
		mark := "met"
		if !v.cleared {
			mark = "**missed**"
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", v.what, v.found, v.wanted, mark)
	}
	return b.String()
}

func (r *results) cellTable(cell string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "### `%s`\n| proxy | CPU µs a call | Headroom's to it | calls/s | core busy | added p50 / p99 / p99.9 µs | MiB | MiB, %d idle |\n|---|--:|--:|--:|--:|--:|--:|--:|\n", cell, idleCallers)
	ours := r.find(cell, headroomName)
	for _, row := range r.in(cell) {
		b.WriteString(row.line(ours))
	}
	n := r.noise[cell]
	b.WriteString("\nNoise: ")
	if floor := r.find(cell, floorName); floor != nil {
		q := quartilesOf(values(floor.cpu))
		fmt.Fprintf(&b, "half of the floor's rounds within %.0f %%; ", 100*(q.Q3-q.Q1)/q.Median)
	}
	fmt.Fprintf(&b, "other processes took %.1f %% of the machine, other machines %.1f %%.\n", 100*n.others, 100*n.steal)
	return b.String()
}

func (r *row) line(ours *row) string {
	if len(r.cpu) == 0 {
		return fmt.Sprintf("| %s | %s | | | | | | |\n", r.proxy, oneLine(r.failure))
	}
	q := quartilesOf(values(r.cpu))
	compared := ""
	if ours != nil && ours != r {
		if c, ok := ratio(ours, r); ok {
			compared = fmt.Sprintf("**%.2f** (%.2f to %.2f)", c.Median, c.Q1, c.Q3)
		}
	}
	line := fmt.Sprintf("| %s | %.1f (%.1f to %.1f) | %s | %.0f | %.0f %% | %s | %s | %s |\n", r.proxy, q.Median, q.Q1, q.Q3, compared,
		quartilesOf(r.rates).Median, 100*quartilesOf(r.busy).Median, r.latency, mebibytes(r.memory), mebibytes(r.memoryIdle))
	if r.failure != "" {
		line += fmt.Sprintf("| | failed in %d rounds, at last: %s | | | | | | |\n", r.lapses, oneLine(r.failure))
	}
	return line
}

// String returns p99.9 only if there were calls enough to tell.
func (l *latency) String() string {
	if l == nil {
		return ""
	}
	if l.calls < 3000 {
		return fmt.Sprintf("%.0f / %.0f / –", l.p50, l.p99)
	}
	return fmt.Sprintf("%.0f / %.0f / %.0f", l.p50, l.p99, l.p999)
}

func mebibytes(bytes int) string {
	if bytes == 0 {
		return ""
	}
	return fmt.Sprintf("%.0f", float64(bytes)/(1<<20))
}

// oneLine makes text fit in a cell of a table.
func oneLine(text string) string {
	text = strings.NewReplacer("\n", " ", "|", "/").Replace(text)
	return text[:min(len(text), 300)]
}

// jsonRow is a row as others read it.
type jsonRow struct {
	Cell    string               `json:"cell"`
	Proxy   string               `json:"proxy"`
	CPU     float64              `json:"cpu_us"`
	Rate    float64              `json:"rps"`
	P50     *float64             `json:"p50_us,omitempty"`
	P99     *float64             `json:"p99_us,omitempty"`
	P999    *float64             `json:"p999_us,omitempty"`
	Memory  float64              `json:"rss_mib,omitempty"`
	Idle    float64              `json:"rss_10k_idle_mib,omitempty"`
	Busy    float64              `json:"core_busy,omitempty"`
	Failure string               `json:"failed,omitempty"`
	Ratio   map[string]quartiles `json:"ratio,omitempty"`
}

func (r *results) json() ([]byte, error) {
	doc := struct {
		Machine  string             `json:"machine"`
		Versions []string           `json:"versions"`
		Rounds   int                `json:"rounds"`
		Cells    []jsonRow          `json:"cells"`
		Probing  map[string]float64 `json:"probing,omitempty"`
	}{Machine: r.machine, Versions: r.versions, Rounds: r.rounds, Cells: []jsonRow{}}
	for _, row := range r.rows {
		doc.Cells = append(doc.Cells, r.jsonRow(row))
	}
	if r.probing != nil {
		doc.Probing = map[string]float64{"share": quartilesOf(r.probing.shares).Median, "probes_per_s": r.probing.rate()}
	}
	return json.MarshalIndent(doc, "", "  ")
}

func (r *results) jsonRow(row *row) jsonRow {
	j := jsonRow{
		Cell: row.cell, Proxy: row.proxy, CPU: orZero(row.medianCPU()), Rate: orZero(quartilesOf(row.rates).Median), Busy: orZero(quartilesOf(row.busy).Median),
		Memory: float64(row.memory) / (1 << 20), Idle: float64(row.memoryIdle) / (1 << 20), Failure: row.failure,
	}
	if l := row.latency; l != nil {
		j.P50, j.P99, j.P999 = &l.p50, &l.p99, &l.p999
	}
	if row.proxy != headroomName {
		return j
	}
	j.Ratio = map[string]quartiles{}
	for _, other := range r.in(row.cell) {
		if q, ok := ratio(row, other); ok && other != row {
			j.Ratio[other.proxy] = q
		}
	}
	return j
}

// orZero stands in for what is not a number, which JSON does not know.
func orZero(x float64) float64 {
	if math.IsNaN(x) {
		return 0
	}
	return x
}
