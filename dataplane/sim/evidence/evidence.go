// Package evidence holds what the sources of the built-in scenarios say beside what the simulator shows: each figure with
// how near it must come. The tests and the page that docs/evidence writes are made of the same claims.
//
// A new scenario is a file in scenario/builtin, whose comments say where its figures come from and what was chosen where
// the source is silent, and a function like those beside this one, which All names.
package evidence

import (
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/headroom-mesh/headroom/dataplane/sim/scenario"
)

// Evidence is what a scenario must show.
type Evidence struct {
	Scenario string
	// Quick is what tests set, so as to be faster without changing what is shown.
	Quick  []scenario.Setting
	Claims []Claim
	// Remark is what a reader should know of the figures as a whole, if anything.
	Remark string
}

// All returns the evidence, in the order in which it is best read.
func All() []Evidence {
	return []Evidence{
		ramp(), nineRules(), probeRate(), qRIF(), linear(), antagonists(), beyondPaper(),
		fastSlow(), fastSlowRamp(), stall(), sinkhole(), smallFleet(), hugeRequests(), hotCache(), hiccup(),
		scaleUp(), restart(), drain(), thousands(),
	}
}

// Of returns the evidence of a scenario.
func Of(name string) (Evidence, error) {
	all := All()
	i := slices.IndexFunc(all, func(e Evidence) bool { return e.Scenario == name })
	if i < 0 {
		return Evidence{}, fmt.Errorf("there is no evidence of a scenario %q", name)
	}
	return all[i], nil
}

// Play plays the scenario, with some fields set, and returns its rows.
func (e Evidence) Play(ctx context.Context, settings []scenario.Setting, o scenario.Options) (Rows, error) {
	s, err := scenario.Builtin(e.Scenario)
	if err != nil {
		return nil, err
	}
	if s, err = s.With(settings); err != nil {
		return nil, fmt.Errorf("set fields of %s: %w", e.Scenario, err)
	}
	cases, err := s.Plan(nil)
	if err != nil {
		return nil, fmt.Errorf("plan %s: %w", e.Scenario, err)
	}
	return scenario.Run(ctx, cases, o)
}

// Rows are what was measured of a scenario.
type Rows []scenario.Row

func (r Rows) at(rule, point string) (scenario.Row, error) {
	i := slices.IndexFunc(r, func(row scenario.Row) bool { return row.Rule == rule && row.Point == point })
	if i < 0 {
		return scenario.Row{}, fmt.Errorf("there is no rule %q at point %q", rule, point)
	}
	return r[i], nil
}

// Claim is a figure of a scenario, and what it must be.
type Claim struct {
	Cell
	Source    string  // the figure in the source; "" if it gives none
	Low, High float64 // the figure here must be within
	// Missed says why it isn't, where it isn't. It must not be there if the figure is as it must be.
	Missed string
}

// Holds reports whether the figure is what it must be.
func (c Claim) Holds(got float64) bool { return c.Low <= got && got <= c.High }

// Bounds says in words what the figure must be.
func (c Claim) Bounds() string {
	low, high := c.Format(c.Low), c.Format(c.High)
	switch {
	case c.Low == c.High:
		return low
	case math.IsInf(c.High, 1):
		return "at least " + low
	case c.Low == 0 || math.IsInf(c.Low, -1):
		return "at most " + high
	}
	return low + " to " + high
}

// near wants a figure within some percent of that of the source.
func near(c Cell, source, percent float64) Claim {
	return between(c, source*(1-percent/100), source*(1+percent/100), c.Format(source))
}

// atMost wants a figure not to exceed a bound.
func atMost(c Cell, high float64, source string) Claim { return between(c, 0, high, source) }

// atLeast wants a figure not to be below a bound.
func atLeast(c Cell, low float64, source string) Claim { return between(c, low, math.Inf(1), source) }

// timesOut wants so many requests to run into the limit, in milliseconds, that the quantile is no latency.
func timesOut(c Cell, limit float64) Claim {
	const precision = 0.995 // of the histogram that quantiles come from
	return between(c, precision*limit, math.Inf(1), "time limit")
}

func between(c Cell, low, high float64, source string) Claim {
	return Claim{Cell: c, Source: source, Low: low, High: high}
}

// missed marks a claim as one that doesn't hold, and says why.
func (c Claim) missed(why string) Claim {
	c.Missed = why
	return c
}
