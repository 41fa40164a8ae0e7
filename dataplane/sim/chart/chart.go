// Package chart draws what simulations measured.
package chart

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
	"gonum.org/v1/plot/vg/vgsvg"

	"github.com/headroom-mesh/headroom/dataplane/sim/scenario"
)

// Formats returns the forms of a picture.
func Formats() []string { return []string{"svg", "png"} }

const (
	width       = 10 * vg.Inch
	panelHeight = 2.9 * vg.Inch
	rowHeight   = 0.26 * vg.Inch // of a rule in a list of rules
	margin      = 0.2 * vg.Inch
	gap         = 0.25 * vg.Inch // between panels
)

// Draw draws rows of one scenario: several points as lines over the points, a single one as a list of rules. Where load or
// replicas change with time, what came of it is drawn over time too. Each rule has the same color in every picture.
func Draw(w io.Writer, format string, rows []scenario.Row) error {
	if len(rows) == 0 {
		return fmt.Errorf("draw a picture: there is nothing to draw")
	}
	p := newPicture(rows)
	var out interface {
		vg.CanvasSizer
		io.WriterTo
	}
	switch format {
	case "svg":
		out = vgsvg.New(width, p.height())
	case "png":
		out = vgimg.PngCanvas{Canvas: vgimg.NewWith(vgimg.UseWH(width, p.height()), vgimg.UseDPI(144))}
	default:
		return fmt.Errorf("draw a picture as %q: want svg or png", format)
	}
	p.draw(draw.New(out))
	var picture bytes.Buffer
	if _, err := out.WriteTo(&picture); err != nil {
		return fmt.Errorf("draw a picture: %w", err)
	}
	if _, err := w.Write(withOtherFonts(picture.Bytes())); err != nil {
		return fmt.Errorf("draw a picture: %w", err)
	}
	return nil
}

// withOtherFonts names fonts of the same measures in an SVG, for readers without the first.
func withOtherFonts(picture []byte) []byte {
	return bytes.ReplaceAll(picture, []byte("font-family:Liberation Sans;"), []byte("font-family:Liberation Sans,Arial,Helvetica,sans-serif;"))
}

// picture is panels, in rows of two or one, above a legend.
type picture struct {
	title  string
	panels [][]*plot.Plot
	tall   []vg.Length // of each row of panels
	legend []entry
}

func newPicture(rows []scenario.Row) *picture {
	p := &picture{title: rows[0].Scenario}
	if load := rows[0].Case.Config.Load; len(load.Stages) == 1 && !load.OfCapacity && rows[0].Point == "" {
		p.title += fmt.Sprintf(", %s requests a second", number(rows[0].Load))
	}
	styles := stylesOf(rows)
	if points := pointsOf(rows); len(points) > 1 {
		p.addSweep(rows, points, styles)
	} else {
		p.addList(rows, styles)
		if changes(rows[0]) {
			p.addTimes(rows, styles)
		}
	}
	return p
}

func (p *picture) add(height vg.Length, panels ...*plot.Plot) {
	p.panels = append(p.panels, panels)
	p.tall = append(p.tall, height)
}

func (p *picture) height() vg.Length {
	height := 2*margin + titleHeight + p.legendHeight()
	for _, h := range p.tall {
		height += h + gap
	}
	return height
}

func (p *picture) draw(c draw.Canvas) {
	c.SetColor(paper)
	c.Fill(c.Rectangle.Path())
	c = draw.Crop(c, margin, -margin, margin, -margin)
	c.FillText(text(13, draw.XLeft, draw.YTop), vg.Point{X: c.Min.X, Y: c.Max.Y}, p.title)
	top := c.Max.Y - titleHeight
	for first, last := 0, 0; first < len(p.panels); first = last {
		for last = first; last < len(p.panels) && p.tall[last] == p.tall[first] && len(p.panels[last]) == len(p.panels[first]); {
			last++
		}
		height := vg.Length(last-first)*(p.tall[first]+gap) - gap
		p.drawBlock(draw.Canvas{Canvas: c.Canvas, Rectangle: vg.Rectangle{
			Min: vg.Point{X: c.Min.X, Y: top - height},
			Max: vg.Point{X: c.Max.X, Y: top},
		}}, p.panels[first:last])
		top -= height + gap
	}
	p.drawLegend(draw.Crop(c, 0, 0, 0, top-c.Max.Y))
}

// drawBlock draws panels of equal size, so that their axes are below one another.
func (p *picture) drawBlock(c draw.Canvas, panels [][]*plot.Plot) {
	tiles := draw.Tiles{Rows: len(panels), Cols: len(panels[0]), PadX: gap, PadY: gap}
	for i, row := range plot.Align(panels, tiles, c) {
		for j, canvas := range row {
			panels[i][j].Draw(canvas)
		}
	}
}

// pointsOf returns the names of the points, in order.
func pointsOf(rows []scenario.Row) []string {
	var points []string
	for _, r := range rows {
		if !slices.Contains(points, r.Point) {
			points = append(points, r.Point)
		}
	}
	return points
}

// rulesOf returns the names of the rules, in order.
func rulesOf(rows []scenario.Row) []string {
	var rules []string
	for _, r := range rows {
		if !slices.Contains(rules, r.Rule) {
			rules = append(rules, r.Rule)
		}
	}
	return rules
}

// changes reports whether something changes with time.
func changes(r scenario.Row) bool {
	return len(r.Case.Config.Faults) > 0 || len(r.Case.Config.Load.Stages) > 1 ||
		slices.ContainsFunc(r.Case.Config.Load.Stages, func(s stage) bool { return s.To > 0 })
}

func number(x float64) string {
	if x < 0.01 {
		return strconv.FormatFloat(x, 'g', 3, 64)
	}
	return strconv.FormatFloat(math.Round(x*1000)/1000, 'f', -1, 64)
}
