//go:build linux

package main

import (
	"fmt"
	"strings"
)

// bar is how much Headroom may cost, compared with another.
type bar struct {
	cell, proxy string
	most        float64
}

// bars are those for CPU time a call.
func bars() []bar {
	all := []bar{
		{"2hop-mtls-h1-128", "haproxy", 0.75}, {"2hop-mtls-h1-128", "nginx", 0.8}, {"2hop-mtls-h1-128", "envoy", 0.35}, {"2hop-mtls-h1-128", floorName, 1.15},
		{"2hop-plain-h1-128", "haproxy", 0.9}, {"2hop-plain-h1-128", "nginx", 1}, {"2hop-plain-h1-128", "envoy", 0.4}, {"2hop-plain-h1-128", floorName, 1.2},
		{"1hop-plain-h1-10k", "haproxy", 0.9}, {"1hop-plain-h1-10k", "nginx", 1.1}, {"1hop-plain-h1-10k", "envoy", 0.5},
		{"2hop-mtls-grpc-unary", "haproxy", 0.9}, {"2hop-mtls-grpc-unary", "nginx", 0.5}, {"2hop-mtls-grpc-unary", "envoy", 0.35},
	}
	for _, t := range topologies() {
		for _, kind := range []string{"down-1m", "up-1m", "tcp"} {
			cell := t.name + "-" + kind
			all = append(all, bar{cell, "haproxy", 1.1}, bar{cell, "nginx", 1.1}, bar{cell, "envoy", 0.8}, bar{cell, floorName, 1.1})
		}
	}
	return all
}

// verdict is a bar, and what came of it.
type verdict struct {
	what    string
	found   string
	wanted  string
	cleared bool
}

// verdicts holds the results against all bars that they have figures for.
func (r *results) verdicts() []verdict {
	var all []verdict
	for _, b := range bars() {
		ours, theirs := r.find(b.cell, headroomName), r.find(b.cell, b.proxy)
		if ours == nil || theirs == nil {
			continue
		}
		if q, ok := ratio(ours, theirs); ok {
			all = append(all, verdict{
				fmt.Sprintf("`%s`, CPU to %s", b.cell, b.proxy), fmt.Sprintf("%.2f (%.2f to %.2f)", q.Median, q.Q1, q.Q3),
				fmt.Sprintf("≤ %.2f", b.most), q.Median <= b.most,
			})
		}
	}
	all = append(all, r.latencyVerdicts()...)
	all = append(all, r.memoryVerdicts()...)
	if r.probing != nil {
		share := quartilesOf(r.probing.shares)
		all = append(all, verdict{
			fmt.Sprintf("probing, share of the agents' CPU at %d requests/s", probingRate), fmt.Sprintf("%.1f %%", 100*share.Median), "< 10 %", share.Median < 0.1,
		})
	}
	return all
}

func (r *results) latencyVerdicts() []verdict {
	const cell = "2hop-mtls-h1-128"
	var all []verdict
	ours := r.find(cell, headroomName)
	for _, b := range []bar{{cell, "haproxy", 1}, {cell, "envoy", 0.6}} {
		theirs := r.find(cell, b.proxy)
		if ours == nil || theirs == nil || ours.latency == nil || theirs.latency == nil {
			continue
		}
		share := ours.latency.p99 / theirs.latency.p99
		all = append(all, verdict{
			fmt.Sprintf("`%s`, added p99 to %s", cell, b.proxy), fmt.Sprintf("%.2f (%.0f µs to %.0f µs)", share, ours.latency.p99, theirs.latency.p99),
			fmt.Sprintf("≤ %.2f", b.most), share <= b.most,
		})
	}
	return all
}

func (r *results) memoryVerdicts() []verdict {
	var all []verdict
	for _, cell := range r.cells() {
		ours := r.find(cell, headroomName)
		if ours == nil || ours.memoryIdle == 0 || !strings.HasSuffix(cell, idleKind) {
			continue
		}
		all = append(all, verdict{
			fmt.Sprintf("`%s`, memory of all agents with %d idle connections", cell, idleCallers), mebibytes(ours.memoryIdle) + " MiB", "< 200 MiB", ours.memoryIdle < 200<<20,
		})
	}
	return all
}
