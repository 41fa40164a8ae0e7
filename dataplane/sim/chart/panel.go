package chart

import (
	"math"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

func newPanel(title, x string) *plot.Plot {
	p := plot.New()
	p.Title.Text = title
	p.Title.TextStyle = text(10.5, draw.XCenter, draw.YTop)
	p.Title.Padding = 6
	p.X.Label.Text = x
	for _, axis := range []*plot.Axis{&p.X, &p.Y} {
		axis.Color, axis.Tick.Color = ink, ink
		axis.Padding = 0
	}
	p.X.Label.TextStyle = text(9.5, draw.XCenter, draw.YTop)
	p.X.Tick.Label = text(9, draw.XCenter, draw.YTop)
	p.Y.Tick.Label = text(9, draw.XRight, draw.YCenter)
	return p
}

// fit gives an axis the bounds and ticks that its numbers need. If they differ by more than a factor of 5, so that small
// ones would be lost below the large ones, it is logarithmic, over six powers of ten at most.
func fit(axis *plot.Axis, numbers []float64) {
	least, most := math.Inf(1), 0.0
	for _, x := range numbers {
		if x > 0 {
			least, most = min(least, x), max(most, x)
		}
	}
	if most > 5*least {
		axis.Scale = plot.LogScale{}
		axis.Min, axis.Max = max(least, most/1e6)/1.3, most*1.3
		axis.Tick.Marker = plot.TickerFunc(logTicks)
		return
	}
	axis.Min, axis.Max = 0, max(most*1.1, 1e-3)
	axis.Tick.Marker = plot.TickerFunc(linearTicks)
}

// logTicks are at 1, 2 and 5 times powers of ten; at powers of ten alone, if the axis is long.
func logTicks(low, high float64) []plot.Tick {
	var ticks []plot.Tick
	long := math.Log10(high/low) > 2.6
	for power := math.Pow(10, math.Floor(math.Log10(low))); power <= high; power *= 10 {
		for i := 1.0; i < 10; i++ {
			label := ""
			if i == 1 || !long && (i == 2 || i == 5) {
				label = number(power * i)
			}
			if x := power * i; x >= low && x <= high {
				ticks = append(ticks, plot.Tick{Value: x, Label: label})
			}
		}
	}
	return ticks
}

// linearTicks are four to eight round numbers.
func linearTicks(low, high float64) []plot.Tick {
	step := math.Pow(10, math.Floor(math.Log10((high-low)/4)))
	for _, factor := range []float64{2, 2.5, 2} { // 2, 5 and 10 times
		if (high-low)/step > 8 {
			step *= factor
		}
	}
	var ticks []plot.Tick
	for i := math.Ceil(low / step); i*step <= high*(1+1e-9); i++ {
		ticks = append(ticks, plot.Tick{Value: i * step, Label: number(i * step)})
	}
	return ticks
}

// xy is a point of a line.
type xy struct{ X, Y float64 }

// lines is plotted as one line and marks for each style; points that aren't numbers interrupt it.
type lines struct {
	style style
	at    []xy
	marks bool
}

func (l lines) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	var strokes [][]vg.Point
	var stroke []vg.Point
	for _, at := range l.at {
		if math.IsNaN(at.Y) {
			strokes, stroke = append(strokes, stroke), nil
			continue
		}
		point := vg.Point{X: x(at.X), Y: y(within(at.Y, p.Y))}
		stroke = append(stroke, point)
		if l.marks {
			c.DrawGlyph(l.style.mark(), point)
		}
	}
	c.StrokeLines(l.style.line(), append(strokes, stroke)...)
}

// within keeps zeros on a logarithmic axis: at its lower end.
func within(x float64, axis plot.Axis) float64 { return min(max(x, axis.Min), axis.Max) }

// grid is lines across the panel at its labelled ticks.
type grid struct{ vertical bool }

func (g grid) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	thin := draw.LineStyle{Color: pale, Width: 0.5}
	axis := p.Y
	if g.vertical {
		axis = p.X
	}
	for _, tick := range axis.Tick.Marker.Ticks(axis.Min, axis.Max) {
		switch {
		case tick.Label == "":
		case g.vertical:
			c.StrokeLine2(thin, x(tick.Value), c.Min.Y, x(tick.Value), c.Max.Y)
		default:
			c.StrokeLine2(thin, c.Min.X, y(tick.Value), c.Max.X, y(tick.Value))
		}
	}
}

// limit is a line across the panel at the time limit, if there is one and the panel reaches up to it.
type limit struct {
	at       float64
	vertical bool
}

func (l limit) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	dotted := draw.LineStyle{Color: ink, Width: 0.8, Dashes: []vg.Length{1, 2}}
	note := text(8, draw.XRight, draw.YBottom)
	switch {
	case l.at == 0:
	case l.vertical && l.at <= p.X.Max:
		c.StrokeLine2(dotted, x(l.at), c.Min.Y, x(l.at), c.Max.Y)
		c.FillText(note, vg.Point{X: x(l.at) - 2, Y: c.Min.Y + 2}, "time limit")
	case !l.vertical && l.at <= p.Y.Max:
		c.StrokeLine2(dotted, c.Min.X, y(l.at), c.Max.X, y(l.at))
		c.FillText(note, vg.Point{X: c.Max.X - 2, Y: y(l.at) + 1}, "time limit")
	}
}

// spans are times during which something is wrong.
type spans [][2]float64

func (s spans) Plot(c draw.Canvas, p *plot.Plot) {
	x, _ := p.Transforms(&c)
	for _, span := range s {
		from, to := x(max(span[0], p.X.Min)), x(min(span[1], p.X.Max))
		if to > from {
			c.FillPolygon(shade, []vg.Point{{X: from, Y: c.Min.Y}, {X: to, Y: c.Min.Y}, {X: to, Y: c.Max.Y}, {X: from, Y: c.Max.Y}})
		}
	}
}
