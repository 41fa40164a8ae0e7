package evidence

import (
	"fmt"
	"math"
	"strconv"

	"github.com/headroom-mesh/headroom/dataplane/sim/scenario"
)

// Figure is something that is measured.
type Figure struct {
	Name string // as in "p99"
	Unit string // as in "ms", or ""
	of   func(scenario.Row) float64
}

// Title is the name with the unit.
func (f Figure) Title() string {
	if f.Unit == "" {
		return f.Name
	}
	return f.Name + ", " + f.Unit
}

func p50() Figure  { return Figure{"p50", "ms", func(r scenario.Row) float64 { return r.P50MS }} }
func p90() Figure  { return Figure{"p90", "ms", func(r scenario.Row) float64 { return r.P90MS }} }
func p99() Figure  { return Figure{"p99", "ms", func(r scenario.Row) float64 { return r.P99MS }} }
func p999() Figure { return Figure{"p99.9", "ms", func(r scenario.Row) float64 { return r.P999MS }} }
func mean() Figure { return Figure{"mean", "ms", func(r scenario.Row) float64 { return r.MeanMS }} }

// failures are the requests that failed. Those that hit a time limit are among them.
func failures() Figure {
	return Figure{"failed requests", "%", func(r scenario.Row) float64 { return 100 * r.ErrorRate }}
}

// late requests took longer than the scenario's threshold, or failed.
func late() Figure {
	return Figure{"late requests", "%", func(r scenario.Row) float64 { return 100 * r.Late }}
}

// recovery is how long after the faults all was well again.
func recovery() Figure {
	return Figure{"recovery", "s", func(r scenario.Row) float64 { return float64(r.RecoveryS) }}
}

// hits are the part of the requests that find their item in a cache.
func hits() Figure {
	return Figure{"cache hits", "%", func(r scenario.Row) float64 {
		sum := 0.0
		for _, g := range r.Groups {
			sum += g.Hits
		}
		return 100 * sum / r.Requests
	}}
}

func goodput() Figure {
	return Figure{"successful requests", "a second", func(r scenario.Row) float64 { return r.Goodput }}
}

func probes() Figure {
	return Figure{"probes", "a request", func(r scenario.Row) float64 { return r.ProbesPerRequest }}
}

// share is the part of the tries that go to a group of replicas.
func share(group int, name string) Figure {
	return Figure{"tries sent to " + name, "%", func(r scenario.Row) float64 { return 100 * r.Groups[group].Share }}
}

// Cell is a figure of one rule at one point of a scenario, or the ratio of two.
type Cell struct {
	Figure
	Rule, Point string
	Over        *Cell
}

// under is the figure of a rule, where a scenario has one point only.
func (f Figure) under(rule string) Cell { return Cell{Figure: f, Rule: rule} }

// at is the cell at a point of a sweep.
func (c Cell) at(point string) Cell {
	c.Point = point
	return c
}

// over is how many times a cell is as great as another.
func (c Cell) over(other Cell) Cell {
	c.Over = &other
	return c
}

// What says what the cell is.
func (c Cell) What() string {
	switch {
	case c.Over != nil:
		return c.name() + " / " + c.Over.name()
	case c.Unit != "":
		return c.name() + ", " + c.Unit
	}
	return c.name()
}

func (c Cell) name() string {
	name := c.Name + " under " + c.Rule
	if c.Point != "" {
		name += " at " + c.Point
	}
	return name
}

// Value returns what was measured.
func (c Cell) Value(rows Rows) (float64, error) {
	row, err := rows.at(c.Rule, c.Point)
	if err != nil {
		return 0, err
	}
	value := c.of(row)
	if c.Over == nil {
		return value, nil
	}
	other, err := c.Over.Value(rows)
	return value / other, err
}

// Format writes a value with three digits, or all those before the point. What takes for ever is never.
func (c Cell) Format(value float64) string {
	if math.IsInf(value, 1) {
		return "never"
	}
	if value >= 1000 {
		return strconv.FormatFloat(value, 'f', 0, 64)
	}
	return fmt.Sprintf("%.3g", value)
}
