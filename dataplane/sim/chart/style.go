package chart

import (
	"image/color"
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	plottext "gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"

	"github.com/headroom-mesh/headroom/dataplane/sim"
	"github.com/headroom-mesh/headroom/dataplane/sim/scenario"
	"github.com/headroom-mesh/headroom/policy"
)

type stage = sim.Stage

const (
	titleHeight = 0.3 * vg.Inch
	paper       = gray(255)
	ink         = gray(40)
	pale        = gray(225)
	shade       = gray(238)
)

// gray is a shade of gray.
type gray uint8

func (g gray) RGBA() (r, gr, b, a uint32) { return color.Gray{Y: uint8(g)}.RGBA() }

// text is how letters look.
func text(size vg.Length, x plottext.XAlignment, y plottext.YAlignment) plottext.Style {
	return plottext.Style{
		Color:   ink,
		Font:    font.Font{Typeface: "Liberation", Variant: "Sans", Size: size},
		XAlign:  x,
		YAlign:  y,
		Handler: plot.DefaultTextHandler,
	}
}

// style is how a rule looks.
type style struct {
	color color.Color
	dash  []vg.Length
	glyph draw.GlyphDrawer
	wide  vg.Length
}

func (s style) line() draw.LineStyle {
	return draw.LineStyle{Color: s.color, Width: s.wide, Dashes: s.dash}
}

func (s style) mark() draw.GlyphStyle {
	return draw.GlyphStyle{Color: s.color, Radius: 2.6, Shape: s.glyph}
}

// colors are Okabe's and Ito's, which people tell apart whatever colors they see, without the yellow, which is too pale.
func colors() []color.Color {
	return []color.Color{
		color.RGBA{0, 114, 178, 255}, color.RGBA{213, 94, 0, 255}, color.RGBA{0, 158, 115, 255}, color.RGBA{204, 121, 167, 255},
		color.RGBA{230, 159, 0, 255}, color.RGBA{86, 180, 233, 255}, color.RGBA{110, 110, 110, 255}, color.RGBA{0, 0, 0, 255},
	}
}

// known is the rules in the order in which they get styles: the first eight differ in color, the others in dashes too.
func known() []string {
	return []string{
		string(policy.BalancerPrequal), string(policy.BalancerRoundRobin), string(policy.BalancerLeastLoaded), string(policy.BalancerP2C),
		string(policy.BalancerWeightedRoundRobin), string(policy.BalancerC3), string(policy.BalancerRandom), string(policy.BalancerPeakEWMA),

		string(policy.BalancerPrequalSync), string(policy.BalancerYARP), string(policy.BalancerLinear), string(policy.BalancerRingHash),
		string(policy.BalancerMaglev), string(policy.BalancerLateBinding), string(policy.BalancerJoinIdleQueue), scenario.Oracle,
	}
}

// nth returns a style that no other number has.
func nth(n int) style {
	glyphs := []draw.GlyphDrawer{draw.CircleGlyph{}, draw.SquareGlyph{}, draw.PyramidGlyph{}, draw.BoxGlyph{}, draw.RingGlyph{}, draw.TriangleGlyph{}}
	dashes := [][]vg.Length{nil, {5, 2}, {1.5, 1.5}, {6, 2, 1.5, 2}}
	all := colors()
	s := style{color: all[n%len(all)], glyph: glyphs[n%len(glyphs)], dash: dashes[n/len(all)%len(dashes)], wide: 1.4}
	if n == 0 {
		s.wide = 2.4 // what it is about
	}
	return s
}

// stylesOf gives each rule a style. A rule that goes by a name of its own gets one that no other rule in the picture has.
func stylesOf(rows []scenario.Row) map[string]style {
	styles, taken := map[string]style{}, map[int]bool{}
	for _, rule := range rulesOf(rows) {
		if n := slices.Index(known(), rule); n >= 0 {
			styles[rule], taken[n] = nth(n), true
		}
	}
	free := 0
	for _, rule := range rulesOf(rows) {
		if _, done := styles[rule]; done {
			continue
		}
		for taken[free] {
			free++
		}
		styles[rule], taken[free] = nth(free), true
	}
	return styles
}
