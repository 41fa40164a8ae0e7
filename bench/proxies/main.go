//go:build linux

// Proxies measures what Headroom costs, beside other proxies and beside programs that do nothing but copy bytes. Run it by
// `make bench`.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"syscall"

	"github.com/headroom-mesh/headroom/bench/load"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == floorCommand {
		exit(runFloor(os.Args[2:]))
		return
	}
	// All is done in one thread, that with which the processes it starts end.
	runtime.LockOSThread()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	exit(run(ctx, flags(os.Args[1:])))
}

func exit(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// options are what the command line says.
type options struct {
	cells, peers string // names with commas between; all, if empty
	rounds       int
	bin          string // folder with the programs agent and meshctl
	cache        string // folder for the peers' programs
	out          string // file for JSON, if not empty
	results      string // folder for the tables and the plot
	profiles     string // folder for CPU profiles of the agents, if not empty
}

func flags(args []string) options {
	var o options
	f := flag.NewFlagSet("proxies", flag.ExitOnError)
	f.StringVar(&o.cells, "cells", "", "cells to measure, with commas between; parts of names will do; \"probing\" is one, too (default all)")
	f.StringVar(&o.peers, "peers", "", "proxies to measure beside Headroom, with commas between (default all)")
	f.IntVar(&o.rounds, "rounds", 10, "how many times each proxy is measured in each cell")
	f.StringVar(&o.bin, "bin", "bin", "folder with the programs agent and meshctl")
	f.StringVar(&o.cache, "cache", "bin/peers", "folder for programs that are downloaded")
	f.StringVar(&o.out, "out", "", "also write the figures to this file, as JSON")
	f.StringVar(&o.results, "results", "bin/bench", "folder for RESULTS.md and results.svg")
	f.StringVar(&o.profiles, "profiles", "", "also write CPU profiles of the agents to this folder")
	_ = f.Parse(args) // it exits
	return o
}

func run(ctx context.Context, o options) error {
	cells, probing, err := selectCells(o.cells)
	if err != nil {
		return err
	}
	b, err := newBench(o)
	if err != nil {
		return err
	}
	defer b.close()
	contestants, err := selectContestants(ctx, b, o.peers)
	if err != nil {
		return err
	}
	found := &results{machine: describeMachine(), versions: versions(contestants), rounds: o.rounds}
	for i, c := range cells {
		b.say("%d/%d %s", i+1, len(cells), c.name())
		rows, noise, err := b.measureCell(ctx, c, contestants)
		if err != nil {
			return err
		}
		found.add(rows, c.name(), noise)
		b.say("%s", strings.TrimSpace(found.cellTable(c.name())))
	}
	if probing {
		b.say("probing")
		if found.probing, err = b.measureProbing(ctx); err != nil {
			b.say("probing: %v", err)
		}
	}
	return found.write(o)
}

// versions names the proxies that have a version of their own.
func versions(contestants []contestant) []string {
	var all []string
	for _, c := range contestants {
		if c.version != "" {
			all = append(all, c.name+" "+c.version)
		}
	}
	return all
}

// cell is one kind of call, over one topology.
type cell struct {
	topology topology
	kind     load.Kind
}

func (c cell) name() string { return c.topology.name + "-" + c.kind.Name }

// topology is what is between callers and origin.
type topology struct {
	name string
	hops int
	mtls bool // between the hops
}

func topologies() []topology {
	return []topology{{"1hop-plain", 1, false}, {"2hop-plain", 2, false}, {"2hop-mtls", 2, true}}
}

func allCells() []cell {
	var all []cell
	for _, t := range topologies() {
		for _, k := range load.Kinds() {
			all = append(all, cell{t, k})
		}
	}
	return all
}

const probingCell = "probing"

// selectCells returns those that are named, wholly or in part.
func selectCells(names string) (cells []cell, probing bool, err error) {
	if names == "" {
		return allCells(), true, nil
	}
	chosen := map[string]bool{}
	for part := range strings.SplitSeq(names, ",") {
		if part == probingCell {
			probing = true
			continue
		}
		found := false
		for _, c := range allCells() {
			if strings.Contains(c.name(), part) {
				chosen[c.name()], found = true, true
			}
		}
		if !found {
			return nil, false, fmt.Errorf("there is no cell %q: want parts of TOPOLOGY-KIND, such as 2hop-mtls-h1-128, or %s", part, probingCell)
		}
	}
	for _, c := range allCells() {
		if chosen[c.name()] {
			cells = append(cells, c)
		}
	}
	return cells, probing, nil
}
