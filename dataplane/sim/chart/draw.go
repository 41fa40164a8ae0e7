package chart

import (
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"

	"github.com/headroom-mesh/headroom/dataplane/sim/scenario"
)

// quantile is one of those that are drawn.
type quantile struct {
	name  string
	of    func(scenario.Row) float64
	glyph draw.GlyphDrawer
}

func quantiles() []quantile {
	return []quantile{
		{"p50", func(r scenario.Row) float64 { return r.P50MS }, draw.RingGlyph{}},
		{"p90", func(r scenario.Row) float64 { return r.P90MS }, draw.BoxGlyph{}},
		{"p99", func(r scenario.Row) float64 { return r.P99MS }, draw.CircleGlyph{}},
		{"p99.9", func(r scenario.Row) float64 { return r.P999MS }, draw.SquareGlyph{}},
	}
}

// addSweep draws each quantile over the points, and the errors if there are any.
func (p *picture) addSweep(rows []scenario.Row, points []string, styles map[string]style) {
	x := positions(points)
	var panels []*plot.Plot
	for _, q := range quantiles() {
		panel := sweepPanel(q.name+", ms", rows, points, x, styles, q.of)
		panel.Add(limit{at: rows[0].TimeoutMS})
		panels = append(panels, panel)
	}
	if anyErrors(rows) {
		panels = append(panels, sweepPanel("errors, %", rows, points, x, styles, errorPercent))
		panels = append(panels, sweepPanel("RIF of replicas, p99", rows, points, x, styles, rifP99))
	}
	for pair := range slices.Chunk(panels, 2) {
		p.add(panelHeight, pair...)
	}
	p.addRules(rows, styles)
}

func errorPercent(r scenario.Row) float64 { return 100 * r.ErrorRate }

func rifP99(r scenario.Row) float64 { return r.RIFP99 }

func anyErrors(rows []scenario.Row) bool {
	return slices.ContainsFunc(rows, func(r scenario.Row) bool { return r.ErrorRate > 0 })
}

// positions returns where points are: at their numbers, if all are numbers in ascending order.
func positions(points []string) []float64 {
	var at []float64
	for i, name := range points {
		x, err := strconv.ParseFloat(name, 64)
		if err != nil || i > 0 && x <= at[i-1] {
			break
		}
		at = append(at, x)
	}
	if len(at) == len(points) {
		return at
	}
	at = nil
	for i := range points {
		at = append(at, float64(i))
	}
	return at
}

func sweepPanel(title string, rows []scenario.Row, points []string, x []float64, styles map[string]style, of func(scenario.Row) float64) *plot.Plot {
	panel := newPanel(title, rows[0].Case.Swept)
	panel.X.Min, panel.X.Max = x[0], x[len(x)-1]
	panel.X.Tick.Marker = plot.ConstantTicks(pointTicks(points, x))
	var numbers []float64
	for _, r := range rows {
		numbers = append(numbers, of(r))
	}
	fit(&panel.Y, numbers)
	panel.Add(grid{})
	for _, rule := range backwards(rulesOf(rows)) {
		l := lines{style: styles[rule], marks: true}
		for _, r := range rows {
			if r.Rule == rule {
				l.at = append(l.at, xy{X: x[slices.Index(points, r.Point)], Y: of(r)})
			}
		}
		panel.Add(l)
	}
	return panel
}

// backwards puts what is drawn first, and so below the rest, last.
func backwards(rules []string) []string {
	rules = slices.Clone(rules)
	slices.Reverse(rules)
	return rules
}

// pointTicks labels as many points as have room, on two lines where one is not enough.
func pointTicks(points []string, x []float64) []plot.Tick {
	const room = 60 // characters across the panel
	perCharacter := (x[len(x)-1] - x[0]) / room
	ends := [2]float64{math.Inf(-1), math.Inf(-1)} // of the last label on each line
	var ticks []plot.Tick
	for i, name := range points {
		tick := plot.Tick{Value: x[i]}
		half := float64(len(name)+2) / 2 * perCharacter
		for line, end := range ends {
			if x[i]-half >= end {
				tick.Label = strings.Repeat("\n", line) + name
				ends[line] = x[i] + half
				break
			}
		}
		ticks = append(ticks, tick)
	}
	return ticks
}

// addList draws the quantiles of each rule on a line of its own, and its errors beside them.
func (p *picture) addList(rows []scenario.Row, styles map[string]style) {
	panel := newPanel("latency, ms", "")
	var numbers []float64
	for _, r := range rows {
		numbers = append(numbers, r.P50MS, r.P999MS)
	}
	fit(&panel.X, numbers)
	nominal(panel, rows)
	panel.Add(grid{vertical: true}, limit{at: rows[0].TimeoutMS, vertical: true}, dots{rows, styles})
	height := 0.9*vg.Inch + vg.Length(len(rows))*rowHeight
	beside := barPanel("errors, %", " %", rows, styles, errorPercent)
	if !anyErrors(rows) {
		beside = barPanel("RIF of replicas, p99", "", rows, styles, rifP99)
	}
	p.add(height, panel, beside)
	for _, q := range quantiles() {
		p.legend = append(p.legend, entry{name: q.name, mark: draw.GlyphStyle{Color: ink, Radius: 3.2, Shape: q.glyph}})
	}
	p.legend = append(p.legend, entry{}) // fills the row
}

// nominal gives the panel a line for each rule, the first on top.
func nominal(panel *plot.Plot, rows []scenario.Row) {
	var ticks []plot.Tick
	for i, r := range rows {
		ticks = append(ticks, plot.Tick{Value: float64(-i), Label: r.Rule})
	}
	panel.Y.Min, panel.Y.Max = 0.4-float64(len(rows)), 0.6
	panel.Y.Tick.Marker = plot.ConstantTicks(ticks)
	panel.Y.Tick.Length = 0
}

// dots are the quantiles of rules.
type dots struct {
	rows   []scenario.Row
	styles map[string]style
}

func (d dots) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	for i, r := range d.rows {
		s := d.styles[r.Rule]
		at := func(ms float64) vg.Point { return vg.Point{X: x(within(ms, p.X)), Y: y(float64(-i))} }
		c.StrokeLines(draw.LineStyle{Color: s.color, Width: s.wide}, []vg.Point{at(r.P50MS), at(r.P999MS)})
		for _, q := range quantiles() {
			c.DrawGlyph(draw.GlyphStyle{Color: s.color, Radius: 3.2, Shape: q.glyph}, at(q.of(r)))
		}
	}
}

func barPanel(title, unit string, rows []scenario.Row, styles map[string]style, of func(scenario.Row) float64) *plot.Plot {
	panel := newPanel(title, "")
	most := 0.0
	for _, r := range rows {
		most = max(most, of(r))
	}
	panel.X.Min, panel.X.Max = 0, max(1.25*most, 1e-3) // room for the labels
	panel.X.Tick.Marker = plot.TickerFunc(linearTicks)
	nominal(panel, rows)
	names := panel.Y.Tick.Marker.(plot.ConstantTicks)
	for i := range names {
		names[i].Label = " " // the panel on the left has them
	}
	panel.Add(grid{vertical: true}, bars{rows, styles, of, unit})
	return panel
}

// bars are numbers of rules.
type bars struct {
	rows   []scenario.Row
	styles map[string]style
	of     func(scenario.Row) float64
	unit   string
}

func (b bars) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	for i, r := range b.rows {
		end := x(b.of(r))
		low, high := y(float64(-i)-0.28), y(float64(-i)+0.28)
		c.FillPolygon(b.styles[r.Rule].color, []vg.Point{{X: x(0), Y: low}, {X: end, Y: low}, {X: end, Y: high}, {X: x(0), Y: high}})
		label := strconv.FormatFloat(b.of(r), 'g', 3, 64) + b.unit
		c.FillText(text(8.5, draw.XLeft, draw.YCenter), vg.Point{X: end + 4, Y: y(float64(-i))}, label)
	}
}

// addTimes draws what was seen over time, in the first run.
func (p *picture) addTimes(rows []scenario.Row, styles map[string]style) {
	p99 := timePanel("p99 over time, ms", rows, styles, func(r scenario.Row, i int) float64 {
		b := r.Results[0].Series[i]
		if b.Requests == 0 {
			return math.NaN()
		}
		return b.P99.Seconds() * 1000
	})
	errors := timePanel("errors over time, %", rows, styles, func(r scenario.Row, i int) float64 {
		b := r.Results[0].Series[i]
		if b.Requests == 0 {
			return math.NaN()
		}
		return 100 * float64(b.Errors) / float64(b.Requests)
	})
	if anyErrors(rows) {
		p.add(panelHeight, p99, errors)
	} else {
		p.add(panelHeight, p99)
	}
	p.addRules(rows, styles)
}

func timePanel(title string, rows []scenario.Row, styles map[string]style, of func(scenario.Row, int) float64) *plot.Plot {
	c := rows[0].Case.Config
	end := c.Warmup + c.Duration
	panel := newPanel(title, "s")
	panel.X.Min, panel.X.Max = 0, end.Seconds()
	panel.X.Tick.Marker = plot.TickerFunc(linearTicks)
	var numbers []float64
	var all []lines
	for _, r := range rows {
		l := lines{style: styles[r.Rule]}
		for i, b := range r.Results[0].Series {
			if b.Start >= end {
				break
			}
			y := of(r, i)
			l.at = append(l.at, xy{X: b.Start.Seconds(), Y: y})
			numbers = append(numbers, y)
		}
		all = append(all, l)
	}
	fit(&panel.Y, numbers)
	panel.Add(wrong(rows[0], end), grid{})
	for _, l := range slices.Backward(all) {
		panel.Add(l)
	}
	return panel
}

// wrong returns when something is.
func wrong(r scenario.Row, end time.Duration) spans {
	var all spans
	for _, f := range r.Case.Config.Faults {
		until := end
		if f.Lasts > 0 {
			until = f.At + f.Lasts
		}
		all = append(all, [2]float64{f.At.Seconds(), until.Seconds()})
	}
	return all
}
