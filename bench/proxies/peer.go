//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"

	"github.com/headroom-mesh/headroom/bench/load"
)

// contestant is a proxy to measure.
type contestant struct {
	name    string
	version string
	// start starts it in a place. It need not be ready at once.
	start func(context.Context, place) (*running, error)
}

// peer is a proxy of others. To add one: a function that returns it, in a file of its own, and a line in peers.
type peer struct {
	name string
	// install returns the path of its program.
	install func(ctx context.Context, cache string) (string, error)
	// version are the arguments that make it print its version; none, if it has no version of its own.
	version []string
	// lacks are protocols that it does not proxy.
	lacks []load.Protocol
	// configure writes its files and returns its arguments. It listens at hop.At on a port for each protocol, and passes on
	// to the same ports at hop.To; with TLS 1.3 and certificates checked on both sides where TLSIn and TLSOut say so.
	configure func(hop) (args []string, err error)
}

func peers() []peer {
	return []peer{haproxy(), nginx(), envoy(), caddy(), traefik()}
}

// selectContestants installs those that are named: all, if none is. Headroom is always among them.
func selectContestants(ctx context.Context, b *bench, names string) ([]contestant, error) {
	wanted := strings.FieldsFunc(names, func(r rune) bool { return r == ',' })
	known := []string{headroomName}
	contestants := []contestant{headroom()}
	for _, p := range append(peers(), theFloor()) {
		known = append(known, p.name)
		if len(wanted) > 0 && !slices.Contains(wanted, p.name) {
			continue
		}
		c, err := p.contestant(ctx, b.cache)
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if err != nil {
			b.say("%s is left out: %v", p.name, err)
			continue
		}
		contestants = append(contestants, c)
	}
	for _, name := range wanted {
		if !slices.Contains(known, name) {
			return nil, fmt.Errorf("there is no peer %q: want some of %s", name, strings.Join(known, ", "))
		}
	}
	return contestants, nil
}

func (p peer) contestant(ctx context.Context, cache string) (contestant, error) {
	program, err := p.install(ctx, cache)
	if err != nil {
		return contestant{}, err
	}
	version, err := p.versionOf(ctx, program)
	if err != nil {
		return contestant{}, err
	}
	start := func(_ context.Context, at place) (*running, error) { return p.start(program, at) }
	return contestant{p.name, version, start}, nil
}

func (p peer) versionOf(ctx context.Context, program string) (string, error) {
	if len(p.version) == 0 {
		return "", nil
	}
	out, err := exec.CommandContext(ctx, program, p.version...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w: %s", program, strings.Join(p.version, " "), err, out)
	}
	return versionNumber.FindString(string(out)), nil
}

// errLacks is why a cell stays empty that nobody could fill.
var errLacks = errors.New("does not proxy this protocol")

// start starts a process for each hop, the last one first.
func (p peer) start(program string, at place) (*running, error) {
	if slices.Contains(p.lacks, at.kind.Protocol) {
		return nil, errLacks
	}
	r := &running{entry: netip.AddrPortFrom(at.address(0), at.kind.Protocol.Port()), authority: "bench.mesh"}
	for i, h := range slices.Backward(at.hops()) {
		if err := os.MkdirAll(h.Dir, 0o755); err != nil {
			return r, err
		}
		args, err := p.configure(h)
		if err != nil {
			return r, err
		}
		// Those that are made with Go have as many threads at work as the others.
		started, err := start(at.cores.proxies, []string{"GOMAXPROCS=1", "HOME=" + h.Dir}, h.Dir, fmt.Sprintf("%s%d", p.name, i), program, args...)
		if err != nil {
			return r, err
		}
		r.counted = append(r.counted, started)
	}
	return r, nil
}
