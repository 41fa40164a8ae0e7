//go:build linux

package main

import (
	"bytes"
	"fmt"
	"image/color"
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// plot draws a line for each cell: what Headroom's CPU time is as a multiple of the others', with quartiles.
func (r *results) plot() ([]byte, error) {
	p := plot.New()
	p.Title.Text = "CPU time a call, Headroom's as a multiple of the others' (below 1 it costs less)"
	for _, style := range []*text.Style{&p.Title.TextStyle, &p.X.Tick.Label, &p.Y.Tick.Label, &p.Legend.TextStyle} {
		style.Font.Variant = "Sans"
	}
	p.X.Scale, p.X.Tick.Marker = plot.LogScale{}, multiples()
	p.X.Min, p.X.Max = 0.05, 4
	p.Y.Min, p.Y.Max = -0.6, float64(len(r.cells()))-0.4
	p.Y.Tick.Marker = plot.ConstantTicks(r.cellTicks())
	p.Legend.Top = true
	p.Add(plotter.NewGrid())
	one, err := plotter.NewLine(plotter.XYs{{X: 1, Y: p.Y.Min}, {X: 1, Y: p.Y.Max}})
	if err != nil {
		return nil, fmt.Errorf("draw the plot: %w", err)
	}
	p.Add(one)
	for i, name := range r.compared() {
		if err := r.addPoints(p, name, i, len(r.compared())); err != nil {
			return nil, fmt.Errorf("draw the plot of %s: %w", name, err)
		}
	}
	canvas := vgsvg.New(10*vg.Inch, vg.Length(len(r.cells()))*0.4*vg.Inch+1.2*vg.Inch)
	p.Draw(draw.New(canvas))
	var out bytes.Buffer
	if _, err := canvas.WriteTo(&out); err != nil {
		return nil, fmt.Errorf("draw the plot: %w", err)
	}
	// Fonts of the same measures, for readers without the first.
	return bytes.ReplaceAll(out.Bytes(), []byte("font-family:Liberation Sans;"), []byte("font-family:Liberation Sans,Arial,Helvetica,sans-serif;")), nil
}

func multiples() plot.ConstantTicks {
	var ticks plot.ConstantTicks
	for _, x := range []float64{0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 4} {
		ticks = append(ticks, plot.Tick{Value: x, Label: fmt.Sprint(x)})
	}
	return ticks
}

// height is where a cell is, the first one at the top.
func (r *results) height(cell string) float64 {
	return float64(len(r.cells()) - 1 - slices.Index(r.cells(), cell))
}

// cellTicks keeps names off the axis: not every reader has a font of the measures that they were placed by.
func (r *results) cellTicks() []plot.Tick {
	var ticks []plot.Tick
	for _, cell := range r.cells() {
		ticks = append(ticks, plot.Tick{Value: r.height(cell), Label: cell + "   "})
	}
	return ticks
}

// compared returns the names of the others, in the order of their rows.
func (r *results) compared() []string {
	var names []string
	for _, row := range r.rows {
		if row.proxy != headroomName && !slices.Contains(names, row.proxy) {
			names = append(names, row.proxy)
		}
	}
	return names
}

// points are ratios with their quartiles.
type points struct {
	plotter.XYs
	plotter.XErrors
}

// addPoints draws one of the others, a little above or below the middle of each line so that they don't hide one another.
func (r *results) addPoints(p *plot.Plot, name string, i, of int) error {
	var found points
	for _, cell := range r.cells() {
		ours, theirs := r.find(cell, headroomName), r.find(cell, name)
		if ours == nil || theirs == nil {
			continue
		}
		if q, ok := ratio(ours, theirs); ok {
			offset := 0.6 * (0.5 - (float64(i)+0.5)/float64(of))
			found.XYs = append(found.XYs, plotter.XY{X: clamp(q.Median), Y: r.height(cell) + offset})
			found.XErrors = append(found.XErrors, struct{ Low, High float64 }{clamp(q.Q1) - clamp(q.Median), clamp(q.Q3) - clamp(q.Median)})
		}
	}
	if len(found.XYs) == 0 {
		return nil
	}
	scatter, err := plotter.NewScatter(found.XYs)
	if err != nil {
		return err
	}
	bars, err := plotter.NewXErrorBars(found)
	if err != nil {
		return err
	}
	scatter.GlyphStyle = draw.GlyphStyle{Color: tint(i), Radius: 3, Shape: draw.CircleGlyph{}}
	bars.LineStyle.Color, bars.CapWidth = tint(i), 0
	p.Add(bars, scatter)
	p.Legend.Add(name, scatter)
	return nil
}

// clamp keeps what is far off at the edge of the plot.
func clamp(x float64) float64 { return min(max(x, 0.05), 4) }

// tint returns one of six colors that can be told apart by the color-blind, too.
func tint(i int) color.Color {
	tints := []color.RGBA{{0, 114, 178, 255}, {213, 94, 0, 255}, {0, 158, 115, 255}, {204, 121, 167, 255}, {230, 159, 0, 255}, {0, 0, 0, 255}}
	return tints[i%len(tints)]
}
