package main

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

const intro = `# Evidence

<!-- Written by make evidence: do not edit. -->

Every scenario that is built in, played with the balancing code that agents run: what its source says, beside what the
simulator shows. ` + "`make evidence`" + ` writes this page; ` + "`meshctl simulate NAME --seed 1`" + ` shows all that was measured of one
scenario. The same claims are tests, with the same bounds. What rules do and when to use which: [balancers](balancers.md).

| scenario | shows | as wanted |
|---|---|---|
`

func page(sections []section) string {
	var out strings.Builder
	out.WriteString(intro)
	for _, s := range sections {
		wanted := s.wanted()
		fmt.Fprintf(&out, "| [%s](#%s) | %s | %d of %d |\n", s.Scenario, s.Scenario, s.description, wanted-len(s.missed()), wanted)
	}
	for _, s := range sections {
		s.write(&out)
	}
	return out.String()
}

func (c claim) holds() bool { return c.Holds(c.got) }

// informs reports whether a claim only shows a figure: nothing is wanted of it.
func (c claim) informs() bool { return c.Low <= 0 && math.IsInf(c.High, 1) }

// wanted returns of how many figures something is wanted.
func (s section) wanted() int {
	n := 0
	for _, c := range s.claims {
		if !c.informs() {
			n++
		}
	}
	return n
}

func (s section) missed() []claim {
	return slices.DeleteFunc(slices.Clone(s.claims), claim.holds)
}

func (s section) write(out *strings.Builder) {
	fmt.Fprintf(out, "\n## %s\n%s\nSource: %s.\n", s.Scenario, s.choices, strings.TrimSuffix(s.source, "."))
	if s.Remark != "" {
		fmt.Fprintf(out, "\n%s\n", wrapped(s.Remark))
	}
	single, ratios := s.split()
	if isGrid := len(single) > mostInList; isGrid {
		newGrid(single).write(out)
		writeList(out, ratios)
	} else {
		writeList(out, s.claims)
	}
	s.writeMissed(out)
	fmt.Fprintf(out, "\n![%s](evidence/%s.svg)\n", s.description, s.Scenario)
}

// mostInList is how many claims are better read as a list than as a grid.
const mostInList = 12

// split tells figures from ratios of two.
func (s section) split() (single, ratios []claim) {
	for _, c := range s.claims {
		if c.Over == nil {
			single = append(single, c)
		} else {
			ratios = append(ratios, c)
		}
	}
	return single, ratios
}

func writeList(out *strings.Builder, claims []claim) {
	if len(claims) == 0 {
		return
	}
	out.WriteString("\n| | source | here | wanted |\n|---|--:|--:|--:|\n")
	for _, c := range claims {
		fmt.Fprintf(out, "| %s | %s | %s | %s |\n", c.What(), c.source(), c.value(), c.wanted())
	}
}

func (c claim) wanted() string {
	if c.informs() {
		return "–"
	}
	return c.Bounds()
}

// source returns the figure of the source, or a dash.
func (c claim) source() string {
	if c.Source == "" {
		return "–"
	}
	return c.Source
}

// value returns what was measured, in bold if it isn't what was wanted, in italics if nothing was.
func (c claim) value() string {
	switch {
	case c.informs():
		return "*" + c.Format(c.got) + "*"
	case !c.holds():
		return "**" + c.Format(c.got) + "**"
	}
	return c.Format(c.got)
}

// writeMissed tells of the claims that don't hold, those with the same reason together.
func (s section) writeMissed(out *strings.Builder) {
	var reasons []string
	missed := map[string][]string{}
	for _, c := range s.missed() {
		if missed[c.Missed] == nil {
			reasons = append(reasons, c.Missed)
		}
		missed[c.Missed] = append(missed[c.Missed], fmt.Sprintf("%s is %s, wanted %s", c.What(), c.Format(c.got), c.Bounds()))
	}
	for _, reason := range reasons {
		fmt.Fprintf(out, "\n%s\n", wrapped("**Missed**: "+strings.Join(missed[reason], "; ")+". "+reason))
	}
}

// wrapped breaks text into lines.
func wrapped(text string) string {
	const width = 120
	var out strings.Builder
	line := 0
	for word := range strings.FieldsSeq(text) {
		switch {
		case line == 0:
		case line+1+len(word) > width:
			out.WriteString("\n")
			line = 0
		default:
			out.WriteString(" ")
			line++
		}
		out.WriteString(word)
		line += len(word)
	}
	return out.String()
}

// grid has a line for each rule, or each point if there are more of these.
type grid struct {
	byPoint bool
	rows    []string
	columns []string
	cells   map[[2]string]claim
}

func newGrid(claims []claim) *grid {
	rules, points := map[string]bool{}, map[string]bool{}
	for _, c := range claims {
		rules[c.Rule], points[c.Point] = true, true
	}
	g := &grid{byPoint: len(points) > len(rules), cells: map[[2]string]claim{}}
	for _, c := range claims {
		row, column := g.place(c)
		g.cells[[2]string{row, column}] = c
		if !slices.Contains(g.rows, row) {
			g.rows = append(g.rows, row)
		}
		if !slices.Contains(g.columns, column) {
			g.columns = append(g.columns, column)
		}
	}
	return g
}

// place returns the row and the column of a claim.
func (g *grid) place(c claim) (row, column string) {
	row, other := c.Rule, c.Point
	if g.byPoint {
		row, other = other, row
	}
	return row, strings.TrimSpace(other + " " + c.Title())
}

func (g *grid) write(out *strings.Builder) {
	out.WriteString("\nIn brackets: the source. In bold: missed. In italics: only to compare, nothing is wanted of it.\n\n| |")
	for _, column := range g.columns {
		fmt.Fprintf(out, " %s |", column)
	}
	out.WriteString("\n|---|" + strings.Repeat("--:|", len(g.columns)) + "\n")
	for _, row := range g.rows {
		fmt.Fprintf(out, "| %s |", row)
		for _, column := range g.columns {
			if c, ok := g.cells[[2]string{row, column}]; ok {
				fmt.Fprintf(out, " %s (%s) |", c.value(), c.source())
			} else {
				out.WriteString(" |")
			}
		}
		out.WriteString("\n")
	}
}
