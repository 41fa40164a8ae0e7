package chart

import (
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"

	"github.com/headroom-mesh/headroom/dataplane/sim/scenario"
)

const (
	entryWidth  = 1.9 * vg.Inch
	entryHeight = 0.2 * vg.Inch
	columns     = 5
	sample      = 24 // of a line
)

// entry explains a line, or a mark.
type entry struct {
	name string
	line *draw.LineStyle // nil: none
	mark draw.GlyphStyle
}

func (p *picture) addRules(rows []scenario.Row, styles map[string]style) {
	for _, rule := range rulesOf(rows) {
		line := styles[rule].line()
		p.legend = append(p.legend, entry{rule, &line, styles[rule].mark()})
	}
}

func (p *picture) legendHeight() vg.Length {
	return vg.Length((len(p.legend)+columns-1)/columns) * entryHeight
}

func (p *picture) drawLegend(c draw.Canvas) {
	for i, e := range p.legend {
		at := vg.Point{
			X: c.Min.X + vg.Length(i%columns)*entryWidth,
			Y: c.Max.Y - (vg.Length(i/columns)+0.5)*entryHeight,
		}
		if e.name == "" {
			continue
		}
		if e.line != nil {
			c.StrokeLine2(*e.line, at.X, at.Y, at.X+sample, at.Y)
		}
		c.DrawGlyphNoClip(e.mark, vg.Point{X: at.X + sample/2, Y: at.Y})
		c.FillText(text(9, draw.XLeft, draw.YCenter), vg.Point{X: at.X + sample + 5, Y: at.Y}, e.name)
	}
}
