// Demo runs the main job of the mesh on this machine and prints what happened: three agents, sixteen replicas of one
// service of which two are slow, and one client whose requests are balanced by three rules in turn.
//
// Run it by `make demo`.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"
)

// The load, and how long each rule bears it. Rules take turns, so that a slow moment of the machine hits all of them.
const (
	requestsPerSecond = 300
	rounds            = 3
	warmUp            = 1500 * time.Millisecond
	measured          = 5500 * time.Millisecond
)

// rules returns the balancers to compare, Prequal last.
func rules() []string { return []string{"round_robin", "least_loaded", "prequal"} }

func main() {
	bin := flag.String("bin", "bin", "folder with the programs agent and meshctl")
	out := flag.String("out", "", "also write the figures to this file, as JSON")
	hold := flag.Bool("hold", false, "keep the mesh and the load running afterwards")
	check := flag.Bool("check", false, "fail unless prequal does as well as documented")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *bin, *out, *hold, *check); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, bin, out string, hold, check bool) error {
	fmt.Printf("A mesh of 3 agents, %d replicas of service %s (14 take about 50 ms, 2 about 800 ms), and a client that sends\n"+
		"%d requests a second whatever comes back.\n\n", fast+slow, service, requestsPerSecond)
	m, err := startMesh(ctx, bin)
	if err != nil {
		return err
	}
	defer m.stop()
	fmt.Printf("The mesh is up. Have a look from another terminal:\n%s\n", m.commands())
	results, err := compare(ctx, m)
	if err != nil || ctx.Err() != nil {
		return err
	}
	report(os.Stdout, results)
	if out != "" {
		if err := writeJSON(out, results); err != nil {
			return err
		}
	}
	if check {
		if err := verify(results); err != nil {
			return err
		}
	}
	if hold {
		return keepRunning(ctx, m)
	}
	return nil
}

// compare puts the same load on the service under each rule, several times in turn.
func compare(ctx context.Context, m *mesh) (map[string]*result, error) {
	results := map[string]*result{}
	line := newProgress(os.Stdout)
	for round := range rounds {
		for i, rule := range rules() {
			line.show("round %d/%d  %-12s  warming up", round+1, rounds, rule)
			r, err := measure(ctx, m, rule, int64(round))
			if err != nil || ctx.Err() != nil {
				return nil, err
			}
			left := time.Duration(rounds*len(rules())-round*len(rules())-i-1) * (measured + warmUp + time.Second)
			line.done("round %d/%d  %-12s  %s  (%s left)", round+1, rounds, rule, r.brief(), left.Round(time.Second))
			if results[rule] == nil {
				results[rule] = &result{}
			}
			results[rule].add(r)
		}
	}
	fmt.Println()
	return results, nil
}

// measure switches to a rule, lets it settle, and measures.
func measure(ctx context.Context, m *mesh, rule string, seed int64) (*result, error) {
	// No request of the rule before may be in flight: they would count as load of the replicas they are on.
	if err := m.setBalancer(ctx, rule); err != nil {
		return nil, err
	}
	before, samples := counters{}, []sample(nil)
	for s := range openLoop(ctx, m.client, m.url, requestsPerSecond, warmUp+measured, seed, func() { before, _ = m.counters(ctx) }, warmUp) {
		samples = append(samples, s)
	}
	after, err := m.counters(ctx)
	if err != nil {
		return nil, err
	}
	return &result{samples: samples, probes: after.probes - before.probes, requests: after.requests - before.requests}, nil
}

func keepRunning(ctx context.Context, m *mesh) error {
	fmt.Printf("\nThe mesh and the load keep running until Ctrl-C.\n%s\n", m.commands())
	line := newProgress(os.Stdout)
	var recent []sample
	last := time.Now()
	for s := range openLoop(ctx, m.client, m.url, requestsPerSecond, 365*24*time.Hour, 1, func() {}, 0) {
		recent = append(recent, s)
		if time.Since(last) > 2*time.Second {
			r := &result{samples: slices.Clone(recent)}
			line.show("%s", r.brief())
			recent, last = recent[:0], time.Now()
		}
	}
	fmt.Println()
	return nil
}
