//go:build linux

package main

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/headroom-mesh/headroom/bench/certs"
	"github.com/headroom-mesh/headroom/bench/load"
)

// How long things are measured.
const (
	warmUp        = 150 * time.Millisecond // connections stay open between rounds
	measured      = 750 * time.Millisecond
	paced         = 700 * time.Millisecond
	pacedRounds   = 3 // at most
	maxLapses     = 2 // rounds in which a proxy may fail and yet stay
	readyWithin   = 20 * time.Second
	idleCallers   = 10_000
	replicas      = 4
	maxOpenFiles  = 65_536
	idleKind      = "h1-128"
	profileLength = 5 * time.Second
)

// bench is what all measurements need.
type bench struct {
	options
	cores cores
	dir   string // for all files, gone at the end
	net   netip.Addr
	loop  *load.Loop
	// origin are the addresses of replicas. They are served by the loop.
	origin []netip.Addr
	places byte
}

func newBench(o options) (*bench, error) {
	bin, err := filepath.Abs(o.bin)
	if err != nil {
		return nil, err
	}
	o.bin = bin
	allowFiles(maxOpenFiles)
	b := &bench{options: o}
	if b.dir, err = os.MkdirTemp("", "headroom-bench-"); err != nil {
		return nil, err
	}
	if err := b.setUp(); err != nil {
		b.close()
		return nil, err
	}
	return b, nil
}

func (b *bench) setUp() (err error) {
	if b.cores, err = pin(); err != nil {
		return err
	}
	if b.loop, err = load.NewLoop(); err != nil {
		return err
	}
	// A net of its own among the loopback addresses keeps it out of the way of whatever else runs here.
	b.net = netip.AddrFrom4([4]byte{127, byte(100 + rand.IntN(100)), 0, 0})
	if err := b.serve(replicas); err != nil {
		return err
	}
	return certs.Make(b.dir)
}

// serve makes the loop serve as many replicas.
func (b *bench) serve(n int) error {
	for len(b.origin) < n {
		b4 := b.net.As4()
		b4[3] = byte(len(b.origin) + 1)
		ip := netip.AddrFrom4(b4)
		if err := b.loop.Serve(ip); err != nil {
			return err
		}
		b.origin = append(b.origin, ip)
	}
	return nil
}

func (b *bench) close() {
	b.cores.unpin()
	if b.loop != nil {
		b.loop.Close()
	}
	os.RemoveAll(b.dir)
}

func (b *bench) say(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }

// place returns a place that no proxy was in before.
func (b *bench) place(c cell, name string, origin []netip.Addr) (place, error) {
	b.places++
	b4 := b.net.As4()
	b4[2] = b.places
	dir := filepath.Join(b.dir, fmt.Sprintf("%s-%s", c.name(), name))
	return place{c, dir, b.dir, b.bin, netip.AddrFrom4(b4), origin, b.cores}, os.MkdirAll(dir, 0o755)
}
