//go:build linux

package main

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/headroom-mesh/headroom/bench/load"
)

// player is a contestant in a cell.
type player struct {
	name    string
	running *running
	session *load.Session // nil: it has failed
	pids    []int
	row     *row
}

// fail takes it out of the cell.
func (p *player) fail(err error) {
	p.row.failure = err.Error()
	if p.running != nil {
		if words := p.running.lastWords(); words != "" {
			p.row.failure += ": " + words
		}
	}
	p.leave()
}

// lapse notes that it has failed once more.
func (p *player) lapse(err error) int {
	p.row.failure = err.Error()
	p.row.lapses++
	return p.row.lapses
}

func (p *player) leave() {
	if p.session != nil {
		p.session.Close()
		p.session = nil
	}
	if p.running != nil {
		p.running.stop()
		p.running = nil
	}
}

// measureCell measures all contestants, in turns.
func (b *bench) measureCell(ctx context.Context, c cell, contestants []contestant) ([]*row, noise, error) {
	var players []*player
	defer func() {
		for _, p := range players {
			p.leave()
		}
	}()
	for _, one := range contestants {
		players = append(players, b.enter(ctx, c, one, b.origin[:replicas]))
	}
	for _, p := range players {
		b.awaitReady(ctx, c.kind, p)
	}
	noise, err := b.saturate(ctx, players)
	if err != nil {
		return nil, noise, err
	}
	if err := b.pace(ctx, c.kind, players); err != nil {
		return nil, noise, err
	}
	b.profile(ctx, c, players)
	b.weigh(c.kind, players)
	var rows []*row
	for _, p := range players {
		rows = append(rows, p.row)
	}
	return rows, noise, ctx.Err()
}

// enter starts a contestant.
func (b *bench) enter(ctx context.Context, c cell, one contestant, origin []netip.Addr) *player {
	p := &player{name: one.name, row: &row{cell: c.name(), proxy: one.name}}
	at, err := b.place(c, one.name, origin)
	if err == nil {
		p.running, err = one.start(ctx, at)
	}
	if err != nil {
		p.fail(err)
	}
	return p
}

// awaitReady waits until a contestant passes calls on, and opens its connections.
func (b *bench) awaitReady(ctx context.Context, kind load.Kind, p *player) {
	if p.running == nil {
		return
	}
	err := b.awaitAnswer(ctx, kind, p.running)
	if err == nil {
		p.session, err = b.loop.Open(kind, p.running.authority, p.running.entry)
	}
	if err != nil {
		p.fail(fmt.Errorf("is not ready: %w", err))
		return
	}
	p.pids = family(p.running.counted)
}

func (b *bench) awaitAnswer(ctx context.Context, kind load.Kind, r *running) error {
	kind.Connections = 1
	for begin := time.Now(); ; {
		err := b.tryOnce(kind, r)
		if err == nil || time.Since(begin) > readyWithin || ctx.Err() != nil {
			return err
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func (b *bench) tryOnce(kind load.Kind, r *running) error {
	session, err := b.loop.Open(kind, r.authority, r.entry)
	if err != nil {
		return err
	}
	defer session.Close()
	return session.Try()
}

// saturate lets each contestant have a go in every round. Whoever was first is last in the next round.
func (b *bench) saturate(ctx context.Context, players []*player) (noise, error) {
	tell := watchNoise()
	before := spent(players)
	for round := range b.rounds {
		for i := range players {
			p := players[(round+i)%len(players)]
			if p.session == nil {
				continue
			}
			rate, err := p.session.Saturate(warmUp, measured, func() time.Duration { return cpuTime(p.pids) })
			if ctx.Err() != nil {
				return noise{}, ctx.Err()
			}
			if err == nil && rate.Calls == 0 {
				err = fmt.Errorf("no call came to its end in %s", measured)
			}
			if err == nil {
				p.row.add(round, rate)
			} else if p.lapse(err) > maxLapses {
				p.fail(err)
			}
		}
	}
	return tell(spent(players) - before), nil
}

func spent(players []*player) time.Duration {
	total := time.Duration(0)
	for _, p := range players {
		total += cpuTime(p.pids)
	}
	return total
}

// pace measures what contestants add to latency, also in turns: among them, the origin answers calls itself.
func (b *bench) pace(ctx context.Context, kind load.Kind, players []*player) error {
	var to []netip.AddrPort
	for _, ip := range b.origin[:replicas] {
		to = append(to, netip.AddrPortFrom(ip, kind.Protocol.Port()))
	}
	session, err := b.loop.Open(kind, "bench.mesh", to...)
	if err != nil {
		return err
	}
	direct := &player{session: session, row: &row{}}
	defer direct.leave()
	took := map[*player][]load.Latencies{}
	for round := range min(b.rounds, pacedRounds) {
		for _, p := range append(slices.Clone(players), direct) {
			if p.session == nil || ctx.Err() != nil {
				continue
			}
			l, err := p.session.Pace(kind.Rate, paced, uint64(round))
			if err == nil {
				took[p] = append(took[p], l)
			} else if err = fmt.Errorf("at %.0f calls a second: %w", kind.Rate, err); p.lapse(err) > maxLapses {
				p.fail(err)
			}
		}
	}
	without := load.Merge(took[direct]...)
	for _, p := range players {
		p.row.setLatency(load.Merge(took[p]...), without)
	}
	return ctx.Err()
}

// weigh reads how much memory contestants have, after all that, and in one kind of cell with thousands of idle callers.
func (b *bench) weigh(kind load.Kind, players []*player) {
	for _, p := range players {
		if p.session == nil {
			continue
		}
		p.row.memory = memory(p.pids)
		if kind.Name != idleKind || p.name == floorName { // which needs twice as many files as may be open on many machines
			continue
		}
		if err := p.session.Grow(idleCallers); err != nil {
			p.row.failure = fmt.Sprintf("%d idle connections: %v", idleCallers, err)
			continue
		}
		p.row.memoryIdle = memory(p.pids)
		p.leave() // for the files and ports
	}
}
