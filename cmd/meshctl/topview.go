package main

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"charm.land/lipgloss/v2"
	"github.com/charmbracelet/x/ansi"
)

// styles are the looks of a text; the zero value has none.
type styles struct {
	strong, faint, good, warn, alarm lipgloss.Style
}

func terminalStyles(colors bool) styles {
	plain := lipgloss.NewStyle()
	if !colors {
		return styles{strong: plain.Bold(true), faint: plain.Faint(true), alarm: plain.Bold(true)}
	}
	return styles{
		strong: plain.Bold(true),
		faint:  plain.Faint(true),
		good:   plain.Foreground(lipgloss.Green),
		warn:   plain.Foreground(lipgloss.Yellow),
		alarm:  plain.Foreground(lipgloss.Red).Bold(true),
	}
}

// sheet says how to lay out a view.
type sheet struct {
	width  int  // of the lines; 0: any
	sort   int  // index into the orders
	live   bool // the order can be changed: mark it
	styles styles
}

// column is one column of the table of replicas.
type column struct {
	title string
	// keep tells which columns stay when there is little room: the higher, the longer.
	keep  int
	right bool // align right
	rare  bool // shown only if there is something in it
	cell  func(replicaView) string
	style func(replicaView, styles) lipgloss.Style
}

func columns() []column {
	return []column{
		{title: "ADDRESS", keep: 11, cell: func(r replicaView) string { return r.Address }},
		{title: "NODE", keep: 3, cell: func(r replicaView) string { return r.Node }},
		{title: "ZONE", keep: 1, rare: true, cell: func(r replicaView) string { return r.Zone }},
		{title: "STATE", keep: 5, cell: state, style: stateStyle},
		{title: "REQ/S", keep: 9, right: true, cell: func(r replicaView) string { return rate(r.Requests) }},
		{title: "ERR/S", keep: 4, right: true, cell: func(r replicaView) string { return rate(r.Errors) }, style: errorStyle},
		{title: "SHARE", keep: 6, right: true, cell: func(r replicaView) string { return orNone(r.Share, percent) }},
		{title: "RIF", keep: 10, right: true, cell: func(r replicaView) string { return orNone(r.RIF, count32) }},
		{title: "LATENCY", keep: 8, right: true, cell: func(r replicaView) string { return orNone(r.Latency, seconds) }},
		{title: "WEIGHT", keep: 7, right: true, rare: true, cell: func(r replicaView) string { return orNone(r.Weight, weight) }},
		{title: "COST", keep: 7, right: true, rare: true, cell: func(r replicaView) string { return orNone(r.Cost, seconds) }},
		{title: "SLOTS", keep: 7, right: true, rare: true, cell: func(r replicaView) string { return orNone(r.Slots, slots) }},
		{title: "HEAT", keep: 7, cell: func(r replicaView) string { return orNone(r.Hot, heat) }, style: hotStyle},
		{title: "PROBED", keep: 2, right: true, cell: func(r replicaView) string { return orNone(r.ProbeAge, seconds) }},
	}
}

func state(r replicaView) string {
	if r.Avoided == "" {
		return r.State
	}
	return fmt.Sprintf("%s by %d", r.Avoided, len(r.AvoidedBy))
}

func stateStyle(r replicaView, s styles) lipgloss.Style {
	switch {
	case r.Avoided != "" || r.State == "unhealthy":
		return s.alarm
	case r.State == "draining":
		return s.warn
	}
	return lipgloss.Style{}
}

func weight(w float64) string { return fmt.Sprintf("×%.2f", w) }

// slots shows those in use, of how many, and who waits.
func slots(s slotsView) string {
	text := fmt.Sprintf("%d/%d", s.InUse, s.Slots)
	if s.Waiting > 0 {
		text += fmt.Sprintf(" +%d", s.Waiting)
	}
	return text
}

func errorStyle(r replicaView, s styles) lipgloss.Style {
	if r.Errors > 0 {
		return s.alarm
	}
	return lipgloss.Style{}
}

func hotStyle(r replicaView, s styles) lipgloss.Style {
	switch {
	case r.Hot == nil:
		return lipgloss.Style{}
	case *r.Hot:
		return s.warn
	}
	return s.good
}

// order is a way to sort replicas.
type order struct {
	column  string // title of the column that it goes by
	compare func(a, b replicaView) int
}

func orders() []order {
	return []order{
		{"ADDRESS", func(a, b replicaView) int { return cmp.Compare(a.Address, b.Address) }},
		{"REQ/S", func(a, b replicaView) int { return cmp.Compare(b.Requests, a.Requests) }},
		{"RIF", func(a, b replicaView) int { return compareKnown(b.RIF, a.RIF) }},
		{"LATENCY", func(a, b replicaView) int { return compareKnown(b.Latency, a.Latency) }},
		{"ERR/S", func(a, b replicaView) int { return cmp.Compare(b.Errors, a.Errors) }},
		{"NODE", func(a, b replicaView) int { return cmp.Compare(a.Node, b.Node) }},
	}
}

// compareKnown puts what is unknown below everything else.
func compareKnown[T cmp.Ordered](a, b *T) int {
	switch {
	case a == nil && b == nil:
		return 0
	case a == nil:
		return -1
	case b == nil:
		return 1
	}
	return cmp.Compare(*a, *b)
}

func (s sheet) sorted(replicas []replicaView) []replicaView {
	replicas = slices.Clone(replicas)
	slices.SortStableFunc(replicas, orders()[s.sort].compare) // they come in the order of their names
	return replicas
}

// table lays out the replicas of a service: a line of titles, then a line for each.
func (s sheet) table(replicas []replicaView) []string {
	replicas = s.sorted(replicas)
	shown, widths := s.fitting(replicas)
	lines := []string{s.titles(shown, widths)}
	for _, r := range replicas {
		var cells []string
		for i, c := range shown {
			text := align(orDash(c.cell(r)), widths[i], c.right)
			if c.style != nil {
				text = c.style(r, s.styles).Render(text)
			}
			cells = append(cells, text)
		}
		lines = append(lines, strings.TrimRight(strings.Join(cells, gap), " "))
	}
	return lines
}

const gap = "  "

// fitting drops columns until the rest has room.
func (s sheet) fitting(replicas []replicaView) ([]column, []int) {
	shown := slices.DeleteFunc(columns(), func(c column) bool {
		return c.rare && !slices.ContainsFunc(replicas, func(r replicaView) bool { return c.cell(r) != "" })
	})
	for {
		widths, total := s.widths(shown, replicas)
		if s.width == 0 || total <= s.width || len(shown) == 1 {
			return shown, widths
		}
		least := slices.MinFunc(shown, func(a, b column) int { return cmp.Compare(a.keep, b.keep) })
		shown = slices.DeleteFunc(shown, func(c column) bool { return c.keep == least.keep })
	}
}

func (s sheet) widths(shown []column, replicas []replicaView) (widths []int, total int) {
	for i, c := range shown {
		width := ansi.StringWidth(s.title(c))
		for _, r := range replicas {
			width = max(width, ansi.StringWidth(orDash(c.cell(r))))
		}
		widths = append(widths, width)
		if total += width; i > 0 {
			total += len(gap)
		}
	}
	return widths, total
}

// title marks the column that the table is sorted by.
func (s sheet) title(c column) string {
	if s.live && c.title == orders()[s.sort].column {
		return c.title + "*"
	}
	return c.title
}

func (s sheet) titles(shown []column, widths []int) string {
	var titles []string
	for i, c := range shown {
		titles = append(titles, align(s.title(c), widths[i], c.right))
	}
	return s.styles.faint.Render(strings.TrimRight(strings.Join(titles, gap), " "))
}

func align(text string, width int, right bool) string {
	pad := strings.Repeat(" ", max(0, width-ansi.StringWidth(text)))
	if right {
		return pad + text
	}
	return text + pad
}

// cut cuts the lines that are still too wide.
func (s sheet) cut(lines []string) []string {
	for i, line := range lines {
		if s.width > 0 {
			lines[i] = ansi.Truncate(line, s.width, "…")
		}
	}
	return lines
}

// head describes a service in two lines.
func (s sheet) head(v topView, service serviceView) []string {
	next := []string{rate(service.Requests) + " req/s"}
	if service.Seen != nil {
		next = slices.Insert(next, 0, policies(service))
	}
	traffic := append([]string{s.styles.strong.Render(s.shortened(service.Service, next))}, next...)
	traffic = append(traffic,
		s.maybeAlarm(service.Errors > 0, rate(service.Errors)+" err/s"),
		s.maybeAlarm(len(v.Missing) > 0, fmt.Sprintf("agents %d/%d", len(v.Agents), len(v.Agents)+len(v.Missing))),
		rate(service.Retries)+" retries/s",
	)
	return []string{s.segments(traffic), s.segments(balancing(service))}
}

// shortened cuts a long name, but not to nothing, so that the texts have room on its line.
func (s sheet) shortened(name string, texts []string) string {
	const least = 8
	room := s.width
	for _, text := range texts {
		room -= len(gap) + ansi.StringWidth(text)
	}
	if s.width == 0 {
		return name
	}
	return ansi.Truncate(name, max(least, room), "…")
}

func (s sheet) maybeAlarm(alarm bool, text string) string {
	if alarm {
		return s.styles.alarm.Render(text)
	}
	return text
}

func policies(service serviceView) string {
	var names []string
	for _, r := range service.Revisions {
		names = append(names, revision(r))
	}
	return service.Seen.Balancer + ", policy " + strings.Join(names, " and ")
}

func balancing(service serviceView) (segments []string) {
	b := service.Seen
	if b == nil {
		return []string{"no agent has called it yet"}
	}
	if b.HotThreshold != nil {
		segments = append(segments, fmt.Sprintf("hot above RIF %d", *b.HotThreshold))
	}
	if b.PoolCapacity > 0 {
		segments = append(segments, fmt.Sprintf("pool %d/%d", b.Pooled, b.PoolCapacity))
	}
	if b.IdleSlots != nil {
		segments = append(segments, fmt.Sprintf("%d idle slots known", *b.IdleSlots))
	}
	if service.ProbesPerRequest != nil && *service.ProbesPerRequest > 0 {
		segments = append(segments, fmt.Sprintf("%.1f probes/request", *service.ProbesPerRequest))
	}
	return append(segments, fmt.Sprintf("%.0f retries left", b.RetryBalance), "seen by "+b.By)
}

// silent names the agents that gave no answer, a few of them.
func silent(v topView) (lines []string) {
	for _, missing := range v.Missing {
		lines = append(lines, "no answer from "+printable(missing))
	}
	return few(lines)
}

// notes says what is wrong with replicas that fail their checks, a few of them.
func notes(service serviceView) (lines []string) {
	for _, r := range service.Replicas {
		if r.CheckError != "" {
			lines = append(lines, r.Address+" fails its check: "+printable(r.CheckError))
		}
	}
	return few(lines)
}

func few(lines []string) []string {
	const most = 3
	if len(lines) <= most {
		return lines
	}
	return append(lines[:most-1], fmt.Sprintf("and %d more", len(lines)-most+1))
}

// printable keeps what others wrote on its line.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, text)
}

// segments puts as many of the texts on a line as have room.
func (s sheet) segments(texts []string) string {
	line := texts[0]
	for _, text := range texts[1:] {
		if s.width > 0 && ansi.StringWidth(line)+len(gap)+ansi.StringWidth(text) > s.width {
			break
		}
		line += gap + text
	}
	return line
}

// Words for values.

func orNone[T any](v *T, text func(T) string) string {
	if v == nil {
		return ""
	}
	return text(*v)
}

func rate(x float64) string {
	switch {
	case x == 0:
		return "0"
	case x < 0.1:
		return "<0.1"
	case x < 10:
		return strconv.FormatFloat(x, 'f', 1, 64)
	}
	return strconv.FormatFloat(x, 'f', 0, 64)
}

func percent(x float64) string { return strconv.FormatFloat(100*x, 'f', 0, 64) + "%" }

func count32(n int32) string { return strconv.Itoa(int(n)) }

func heat(hot bool) string {
	if hot {
		return "hot"
	}
	return "cold"
}

// seconds writes a short time with two or three digits.
func seconds(x float64) string {
	d := time.Duration(x * float64(time.Second)).Round(time.Microsecond)
	switch {
	case d < time.Millisecond:
		return fmt.Sprintf("%dµs", d.Microseconds())
	case d < 10*time.Millisecond:
		return fmt.Sprintf("%.1fms", 1000*d.Seconds())
	case d < time.Second-time.Millisecond/2: // or it is rounded to 1000ms
		return fmt.Sprintf("%.0fms", 1000*d.Seconds())
	case d < 100*time.Second:
		return fmt.Sprintf("%.1fs", d.Seconds())
	}
	return fmt.Sprintf("%.0fm", d.Minutes())
}
