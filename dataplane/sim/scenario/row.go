package scenario

import (
	"math"
	"slices"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/sim"
)

// Row is what was measured of one rule at one point: of several runs, the median of each figure.
type Row struct {
	Scenario string  `json:"scenario"`
	Rule     string  `json:"rule"`
	Point    string  `json:"point"`
	Load     float64 `json:"load"` // see Case
	Figures
	TimeoutMS   float64 `json:"timeout_ms"`   // 0: none. Requests that timed out count with the time that took
	ThresholdMS float64 `json:"threshold_ms"` // 0: none
	Seed        uint64  `json:"seed"`
	Runs        int     `json:"runs"`
	// Low and High are the least and the greatest of each figure in all runs, if there are several.
	Low  *Figures `json:"low,omitempty"`
	High *Figures `json:"high,omitempty"`

	Case    Case         `json:"-"`
	Results []sim.Result `json:"-"` // of all runs
}

// Figures are what is measured of a run. Latencies are those that clients saw, in milliseconds.
type Figures struct {
	Requests  float64 `json:"requests"`
	ErrorRate float64 `json:"error_rate"`
	Goodput   float64 `json:"goodput"` // successful requests a second
	Late      float64 `json:"late"`    // part of the requests that failed or took longer than the threshold
	MeanMS    float64 `json:"mean_ms"`
	P50MS     float64 `json:"p50_ms"`
	P90MS     float64 `json:"p90_ms"`
	P99MS     float64 `json:"p99_ms"`
	P999MS    float64 `json:"p999_ms"`
	MaxMS     float64 `json:"max_ms"`
	// RIF is that of the replicas, over replicas and time.
	RIFMean float64 `json:"rif_mean"`
	RIFP50  float64 `json:"rif_p50"`
	RIFP90  float64 `json:"rif_p90"`
	RIFP99  float64 `json:"rif_p99"`
	// CPU is the used part of what is allocated to a replica of kind cpu, over replicas and time.
	CPUMean           float64 `json:"cpu_mean"`
	CPUP50            float64 `json:"cpu_p50"`
	CPUP90            float64 `json:"cpu_p90"`
	CPUP99            float64 `json:"cpu_p99"`
	ProbesPerRequest  float64 `json:"probes_per_request"`
	RetriesPerRequest float64 `json:"retries_per_request"`
	RecoveryS         Seconds `json:"recovery_s"`
	// ProbeAge is how old the probes were that choices went by, where the rule goes by probes.
	ProbeAgeMeanMS float64 `json:"probe_age_mean_ms"`
	ProbeAgeP50MS  float64 `json:"probe_age_p50_ms"`
	ProbeAgeP99MS  float64 `json:"probe_age_p99_ms"`
	// ProbesPerReplica is the probes that come to a replica in a second, over replicas.
	ProbesPerReplica    float64 `json:"probes_per_replica"`
	ProbesPerReplicaP99 float64 `json:"probes_per_replica_p99"`
	// Unwanted is the tries that were sent to a replica that took no requests, OverdueMS how long after it had stopped to,
	// at most.
	Unwanted  float64 `json:"unwanted"`
	OverdueMS float64 `json:"overdue_ms"`
	// Peaks are the highest in a second.
	PeakP99MS  float64 `json:"peak_p99_ms"`
	PeakRIFP99 float64 `json:"peak_rif_p99"`
	Errors     Errors  `json:"errors"`
	Groups     []Group `json:"groups"`
}

// Errors counts failed requests by how their last try failed.
type Errors struct {
	Timeout     float64 `json:"timeout"`
	Failed      float64 `json:"failed"`
	Refused     float64 `json:"refused"`
	Unconnected float64 `json:"unconnected"`
	Unplaced    float64 `json:"unplaced"`
	Unended     float64 `json:"unended"`
}

// Group is the part of one group of replicas.
type Group struct {
	Name  string  `json:"name"`
	Share float64 `json:"share"` // of the tries
	RIF   float64 `json:"rif"`   // of a replica, on average
	CPU   float64 `json:"cpu"`   // used part of the cores or slots, on average
	Hits  float64 `json:"hits"`  // of the caches
	Blind float64 `json:"blind"` // tries sent to a replica before anyone had had an answer from it
	Peak  float64 `json:"peak"`  // part of the tries of a second, at most
}

func newRow(c Case, seed uint64, results []sim.Result) Row {
	row := Row{
		Scenario: c.Scenario, Rule: c.Rule, Point: c.Point, Load: c.Load,
		TimeoutMS: inMS(c.timeout()), ThresholdMS: inMS(c.Config.Threshold), Seed: seed, Runs: len(results), Case: c, Results: results,
	}
	var all []Figures
	for _, r := range results {
		all = append(all, figures(c.Config, r))
	}
	row.Figures = combine(all, median)
	if len(all) > 1 {
		low, high := combine(all, slices.Min[[]float64]), combine(all, slices.Max[[]float64])
		row.Low, row.High = &low, &high
	}
	return row
}

func (c Case) timeout() time.Duration {
	if c.Config.Caller.Timeout > 0 {
		return c.Config.Caller.Timeout
	}
	return c.Config.Policy.Timeout
}

func inMS(d time.Duration) float64 { return d.Seconds() * 1000 }

func figures(c sim.Config, r sim.Result) Figures {
	f := Figures{
		Requests: float64(r.Requests), ErrorRate: r.ErrorRate, Goodput: r.Goodput, Late: r.Late,
		MeanMS: inMS(r.Latency.Mean), P50MS: inMS(r.Latency.P50), P90MS: inMS(r.Latency.P90), P99MS: inMS(r.Latency.P99),
		P999MS: inMS(r.Latency.P999), MaxMS: inMS(r.Latency.Max),
		RIFMean: r.RIF.Mean, RIFP50: r.RIF.P50, RIFP90: r.RIF.P90, RIFP99: r.RIF.P99,
		CPUMean: r.CPU.Mean, CPUP50: r.CPU.P50, CPUP90: r.CPU.P90, CPUP99: r.CPU.P99,
		ProbesPerRequest: r.ProbesPerRequest, RetriesPerRequest: float64(r.Retries) / float64(max(r.Requests, 1)),
		RecoveryS: recovery(c, r.Series),
		Errors: Errors{
			Timeout: float64(r.Errors.Timeout), Failed: float64(r.Errors.Failed), Refused: float64(r.Errors.Refused),
			Unconnected: float64(r.Errors.Unconnected), Unplaced: float64(r.Errors.Unplaced), Unended: float64(r.Errors.Unended),
		},
		ProbeAgeMeanMS: inMS(r.ProbeAge.Mean), ProbeAgeP50MS: inMS(r.ProbeAge.P50), ProbeAgeP99MS: inMS(r.ProbeAge.P99),
		ProbesPerReplica: r.ProbeLoad.Mean, ProbesPerReplicaP99: r.ProbeLoad.P99,
		Unwanted: float64(r.Unwanted), OverdueMS: inMS(r.Overdue),
		PeakP99MS: inMS(r.PeakP99), PeakRIFP99: float64(r.PeakRIF),
		Groups: []Group{},
	}
	for _, g := range r.Groups {
		f.Groups = append(f.Groups, Group{Name: g.Name, Share: g.Share, RIF: g.RIF, CPU: g.CPU, Hits: float64(g.Hits), Blind: float64(g.Blind), Peak: g.Peak})
	}
	return f
}

// all returns every figure.
func (f *Figures) all() []*float64 {
	all := []*float64{
		&f.Requests, &f.ErrorRate, &f.Goodput, &f.Late, &f.MeanMS, &f.P50MS, &f.P90MS, &f.P99MS, &f.P999MS, &f.MaxMS,
		&f.RIFMean, &f.RIFP50, &f.RIFP90, &f.RIFP99, &f.CPUMean, &f.CPUP50, &f.CPUP90, &f.CPUP99,
		&f.ProbesPerRequest, &f.RetriesPerRequest, (*float64)(&f.RecoveryS),
		&f.ProbeAgeMeanMS, &f.ProbeAgeP50MS, &f.ProbeAgeP99MS, &f.ProbesPerReplica, &f.ProbesPerReplicaP99,
		&f.Unwanted, &f.OverdueMS, &f.PeakP99MS, &f.PeakRIFP99,
		&f.Errors.Timeout, &f.Errors.Failed, &f.Errors.Refused, &f.Errors.Unconnected, &f.Errors.Unplaced, &f.Errors.Unended,
	}
	for i := range f.Groups {
		g := &f.Groups[i]
		all = append(all, &g.Share, &g.RIF, &g.CPU, &g.Hits, &g.Blind, &g.Peak)
	}
	return all
}

// combine makes one of the figures of several runs, figure by figure.
func combine(runs []Figures, how func([]float64) float64) Figures {
	combined := runs[0]
	combined.Groups = slices.Clone(runs[0].Groups)
	values := make([][]float64, len(combined.all()))
	for _, run := range runs {
		for i, x := range run.all() {
			values[i] = append(values[i], *x)
		}
	}
	for i, x := range combined.all() {
		*x = rounded(how(values[i]))
	}
	return combined
}

func median(xs []float64) float64 {
	xs = slices.Sorted(slices.Values(xs))
	middle := len(xs) / 2
	if len(xs)%2 == 1 {
		return xs[middle]
	}
	return (xs[middle-1] + xs[middle]) / 2
}

// rounded keeps 6 digits after the point, which is more than a simulation knows.
func rounded(x float64) float64 { return math.Round(x*1e6) / 1e6 }

// TimedOut reports whether a quantile, in milliseconds, is not a latency, but the limit that so many requests ran into.
func (r Row) TimedOut(quantileMS float64) bool {
	const precision = 0.995 // of the histogram that quantiles come from
	return r.TimeoutMS > 0 && r.Errors.Timeout > 0 && r.Case.Config.Caller.Retries == 0 && quantileMS >= precision*r.TimeoutMS
}

// Column is a figure by its name.
type Column struct {
	Name  string
	Value float64
}

// Columns returns the figures that a table of all rows can have, under the names that they have in JSON.
func (r Row) Columns() []Column {
	return []Column{
		{"load", r.Load}, {"requests", r.Requests}, {"error_rate", r.ErrorRate}, {"goodput", r.Goodput}, {"late", r.Late},
		{"mean_ms", r.MeanMS}, {"p50_ms", r.P50MS}, {"p90_ms", r.P90MS}, {"p99_ms", r.P99MS}, {"p999_ms", r.P999MS}, {"max_ms", r.MaxMS},
		{"rif_mean", r.RIFMean}, {"rif_p50", r.RIFP50}, {"rif_p90", r.RIFP90}, {"rif_p99", r.RIFP99},
		{"cpu_mean", r.CPUMean}, {"cpu_p50", r.CPUP50}, {"cpu_p90", r.CPUP90}, {"cpu_p99", r.CPUP99},
		{"probes_per_request", r.ProbesPerRequest}, {"retries_per_request", r.RetriesPerRequest},
		{"probe_age_mean_ms", r.ProbeAgeMeanMS}, {"probe_age_p50_ms", r.ProbeAgeP50MS}, {"probe_age_p99_ms", r.ProbeAgeP99MS},
		{"probes_per_replica", r.ProbesPerReplica}, {"probes_per_replica_p99", r.ProbesPerReplicaP99},
		{"unwanted", r.Unwanted}, {"overdue_ms", r.OverdueMS}, {"peak_p99_ms", r.PeakP99MS}, {"peak_rif_p99", r.PeakRIFP99},
		{"recovery_s", float64(r.RecoveryS)}, {"timeout_ms", r.TimeoutMS}, {"threshold_ms", r.ThresholdMS}, {"seed", float64(r.Seed)}, {"runs", float64(r.Runs)},
	}
}
