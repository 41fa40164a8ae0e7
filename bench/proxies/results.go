//go:build linux

package main

import (
	"math"
	"slices"
	"time"

	"github.com/headroom-mesh/headroom/bench/load"
)

// row is what was measured of a proxy in a cell.
type row struct {
	cell, proxy string
	failure     string          // why there is not all of it
	lapses      int             // rounds in which it has failed
	cpu         map[int]float64 // µs a call, by round
	rates       []float64       // calls a second
	busy        []float64       // share of the core
	latency     *latency
	memory      int // bytes
	memoryIdle  int // bytes, with thousands of idle callers; 0 if not measured
}

// latency is what the proxy adds, in µs.
type latency struct {
	p50, p99, p999 float64
	calls          int
}

func (r *row) add(round int, rate load.Rate) {
	if r.cpu == nil {
		r.cpu = map[int]float64{}
	}
	r.cpu[round] = rate.Spent.Seconds() * 1e6 / float64(rate.Calls)
	r.rates = append(r.rates, float64(rate.Calls)/rate.Took.Seconds())
	r.busy = append(r.busy, rate.Spent.Seconds()/rate.Took.Seconds())
}

func (r *row) setLatency(through, direct load.Latencies) {
	if len(through) == 0 || len(direct) == 0 {
		return
	}
	added := func(q float64) float64 {
		return float64(through.Quantile(q)-direct.Quantile(q)) / float64(time.Microsecond)
	}
	r.latency = &latency{added(0.5), added(0.99), added(0.999), len(through)}
}

func (r *row) medianCPU() float64 { return quartilesOf(values(r.cpu)).Median }

// quartiles of a sample.
type quartiles struct {
	Median float64 `json:"median"`
	Q1     float64 `json:"q1"`
	Q3     float64 `json:"q3"`
}

func quartilesOf(sample []float64) quartiles {
	sample = slices.Sorted(slices.Values(sample))
	return quartiles{quantile(sample, 0.5), quantile(sample, 0.25), quantile(sample, 0.75)}
}

// quantile interpolates. It is not a number if there is no sample.
func quantile(sorted []float64, q float64) float64 {
	if len(sorted) == 0 {
		return math.NaN()
	}
	at := q * float64(len(sorted)-1)
	low := int(at)
	high := min(low+1, len(sorted)-1)
	return sorted[low] + (at-float64(low))*(sorted[high]-sorted[low])
}

func values(byRound map[int]float64) []float64 {
	var all []float64
	for _, v := range byRound {
		all = append(all, v)
	}
	return all
}

// ratio compares what two proxies cost in the same rounds: the machine drifts, and its drift is out of it then. It
// returns false if they have no round in common.
func ratio(a, b *row) (quartiles, bool) {
	var ratios []float64
	for round, cost := range a.cpu {
		if other := b.cpu[round]; other > 0 {
			ratios = append(ratios, cost/other)
		}
	}
	return quartilesOf(ratios), len(ratios) > 0
}

// results are what is told at the end.
type results struct {
	machine  string
	versions []string
	rounds   int
	rows     []*row
	noise    map[string]noise // by cell
	probing  *probing         // nil: not measured
}

func (r *results) add(rows []*row, cell string, n noise) {
	if r.noise == nil {
		r.noise = map[string]noise{}
	}
	r.rows = append(r.rows, rows...)
	r.noise[cell] = n
}

// cells returns the names, in order.
func (r *results) cells() []string {
	var names []string
	for _, row := range r.rows {
		if !slices.Contains(names, row.cell) {
			names = append(names, row.cell)
		}
	}
	return names
}

func (r *results) in(cell string) []*row {
	var rows []*row
	for _, row := range r.rows {
		if row.cell == cell {
			rows = append(rows, row)
		}
	}
	return rows
}

// find returns a row of which there are costs, or nil.
func (r *results) find(cell, proxy string) *row {
	for _, row := range r.in(cell) {
		if row.proxy == proxy && len(row.cpu) > 0 {
			return row
		}
	}
	return nil
}
