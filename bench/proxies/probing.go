//go:build linux

package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"time"
)

const (
	probingRate     = 10_000 // requests a second
	probingReplicas = 40     // more than a pool holds of small fleets, which need few probes
	probingTime     = 2 * time.Second
)

// probing is what probes cost both agents, beside their requests.
type probing struct {
	shares        []float64 // of their CPU time, a round each
	with, without []float64 // µs a request
	probes        int       // counted in all rounds
	took          time.Duration
}

func (p *probing) rate() float64 { return float64(p.probes) / p.took.Seconds() }

func (p *probing) describe() string {
	share := quartilesOf(p.shares)
	return fmt.Sprintf("Two agents with mutual TLS, %d replicas, %d requests/s with answers of 128 bytes: %.1f µs of CPU a request with %.0f probes/s, %.1f µs without;\n"+
		"%.1f %% (%.1f to %.1f) of the agents' CPU time goes into probing.\n", probingReplicas, probingRate, quartilesOf(p.with).Median, p.rate(), quartilesOf(p.without).Median,
		100*share.Median, 100*share.Q1, 100*share.Q3)
}

// measureProbing switches probes off and on again, in turns.
func (b *bench) measureProbing(ctx context.Context) (*probing, error) {
	if err := b.serve(probingReplicas); err != nil {
		return nil, err
	}
	var c cell
	for _, one := range allCells() {
		if one.name() == "2hop-mtls-"+idleKind {
			c = one
		}
	}
	p := b.enter(ctx, c, headroom(), b.origin[:probingReplicas])
	defer p.leave()
	b.awaitReady(ctx, c.kind, p)
	result := &probing{}
	for round := range b.rounds {
		for _, off := range []bool{round%2 == 0, round%2 != 0} {
			if err := b.probeRound(ctx, p, result, off, uint64(round)); err != nil {
				return nil, err
			}
		}
		n := len(result.with)
		result.shares = append(result.shares, 1-result.without[n-1]/result.with[n-1])
	}
	return result, nil
}

func (b *bench) probeRound(ctx context.Context, p *player, result *probing, off bool, seed uint64) error {
	if p.row.failure != "" {
		return fmt.Errorf("%s", p.row.failure)
	}
	setting := "default"
	if off {
		setting = "0"
	}
	if err := b.meshctl(ctx, p, "policy", "set", benchService, "--probes-per-request", setting, "--wait"); err != nil {
		return err
	}
	if _, err := p.session.Pace(probingRate, warmUp, seed); err != nil {
		return err
	}
	probes, begin, spent := countProbes(ctx, p), time.Now(), cpuTime(p.pids)
	took, err := p.session.Pace(probingRate, probingTime, seed)
	if err != nil {
		return err
	}
	cost := float64((cpuTime(p.pids) - spent).Microseconds()) / float64(len(took))
	if off {
		result.without = append(result.without, cost)
		return nil
	}
	result.took += time.Since(begin)
	result.probes += countProbes(ctx, p) - probes
	result.with = append(result.with, cost)
	return nil
}

func (b *bench) meshctl(ctx context.Context, p *player, args ...string) error {
	args = append([]string{"--agent", fmt.Sprintf("%s:%d", p.running.entry.Addr(), adminPort)}, args...)
	out, err := exec.CommandContext(ctx, filepath.Join(b.bin, "meshctl"), args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("meshctl %v: %w: %s", args, err, out)
	}
	return nil
}

var probesMetric = regexp.MustCompile(`(?m)^headroom_probe_sent_total(?:\{.*\})? ([0-9.e+]+)$`)

// countProbes asks the callers' agent how many probes it has sent.
func countProbes(ctx context.Context, p *player) int {
	text, err := fetch(ctx, fmt.Sprintf("http://%s:%d/metrics", p.running.entry.Addr(), adminHTTPPort))
	if err != nil {
		return 0
	}
	total := 0.0
	for _, found := range probesMetric.FindAllSubmatch(text, -1) {
		n, _ := strconv.ParseFloat(string(found[1]), 64)
		total += n
	}
	return int(total)
}

func fetch(ctx context.Context, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", url, resp.Status)
	}
	return io.ReadAll(resp.Body)
}
