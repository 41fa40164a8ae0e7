package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/term"
)

// result is what one rule did, over all rounds.
type result struct {
	samples          []sample
	probes, requests uint64
}

func (r *result) add(o *result) {
	r.samples = append(r.samples, o.samples...)
	r.probes += o.probes
	r.requests += o.requests
}

// figures are what is shown of a result.
type figures struct {
	Requests         int     `json:"requests"`
	Errors           int     `json:"errors"`
	P50              float64 `json:"p50_ms"`
	P99              float64 `json:"p99_ms"`
	P999             float64 `json:"p999_ms"`
	SlowShare        float64 `json:"slow_share"`
	ProbesPerRequest float64 `json:"probes_per_request"`
}

func (r *result) figures() figures {
	var latencies []time.Duration
	f := figures{Requests: len(r.samples)}
	slowOnes := 0
	for _, s := range r.samples {
		latencies = append(latencies, s.latency)
		if s.failed {
			f.Errors++
		}
		if s.slow {
			slowOnes++
		}
	}
	if f.Requests == 0 {
		return f
	}
	slices.Sort(latencies)
	quantile := func(q float64) float64 {
		i := min(int(q*float64(len(latencies))), len(latencies)-1)
		return float64(latencies[i].Microseconds()) / 1000
	}
	f.P50, f.P99, f.P999 = quantile(0.5), quantile(0.99), quantile(0.999)
	f.SlowShare = float64(slowOnes) / float64(f.Requests)
	if r.requests > 0 {
		f.ProbesPerRequest = float64(r.probes) / float64(r.requests)
	}
	return f
}

func (r *result) brief() string {
	f := r.figures()
	return fmt.Sprintf("%d requests, %d errors, p50 %.0f ms, p99 %.0f ms, slow pair %.1f%%", f.Requests, f.Errors, f.P50, f.P99, 100*f.SlowShare)
}

func report(w io.Writer, results map[string]*result) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "rule\trequests\terrors\tp50 ms\tp99 ms\tp99.9 ms\tto slow pair\tprobes/request\t")
	for _, rule := range rules() {
		f := results[rule].figures()
		fmt.Fprintf(t, "%s\t%d\t%d\t%.0f\t%.0f\t%.0f\t%.2f%%\t%.2f\t\n", rule, f.Requests, f.Errors, f.P50, f.P99, f.P999, 100*f.SlowShare, f.ProbesPerRequest)
	}
	t.Flush()
	fmt.Fprintln(w)
	p := results["prequal"].figures()
	for _, rule := range rules()[:2] {
		f := results[rule].figures()
		fmt.Fprintf(w, "p99 under prequal is %.1f times lower than under %s.\n", f.P99/p.P99, rule)
		if f.SlowShare < 0.01 {
			fmt.Fprintf(w, "  %s sent less than 1%% of requests to the slow pair, so its p99 does not show them; its p99.9 does: %.0f ms, %.1f times prequal's.\n",
				rule, f.P999, f.P999/p.P999)
		}
	}
}

// verify holds the figures against what the documentation promises.
func verify(results map[string]*result) error {
	var problems []error
	p := results["prequal"].figures()
	for rule, r := range results {
		f := r.figures()
		if f.Errors > 0 {
			problems = append(problems, fmt.Errorf("%s: %d errors, want none", rule, f.Errors))
		}
		if rule != "prequal" && f.SlowShare >= 0.01 && f.P99 < 6*p.P99 {
			problems = append(problems, fmt.Errorf("p99 under prequal is only %.1f times lower than under %s, want 6", f.P99/p.P99, rule))
		}
	}
	if p.SlowShare >= 0.01 {
		problems = append(problems, fmt.Errorf("prequal sent %.2f%% of requests to the slow pair, want less than 1%%", 100*p.SlowShare))
	}
	return errors.Join(problems...)
}

// progress shows what is going on: on one line on a terminal, else a line for each thing done.
type progress struct {
	w        io.Writer
	terminal bool
}

func newProgress(f *os.File) *progress {
	return &progress{w: f, terminal: term.IsTerminal(int(f.Fd()))}
}

func (p *progress) show(format string, args ...any) {
	if p.terminal {
		fmt.Fprintf(p.w, "\r\033[K%s", fmt.Sprintf(format, args...))
	}
}

func (p *progress) done(format string, args ...any) {
	p.show("%s", "")
	fmt.Fprintln(p.w, strings.TrimSpace(fmt.Sprintf(format, args...)))
}
