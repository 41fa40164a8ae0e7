package probe

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"time"
)

var (
	errSilent = errors.New("probes go unanswered")
	errOrder  = errors.New("an answer to no probe, or out of order")

	errForgotten = errors.New("nobody probes the agent any more")
)

type state int

const (
	connecting state = iota // never heard of
	up
	down
)

// peer is an agent that is probed. Its goroutine, run, owns the connection and looks after deadlines; each connection
// has a goroutine that reads and one that writes.
type peer struct {
	addr    netip.AddrPort
	cfg     *Config
	metrics *metrics
	born    time.Time
	stop    context.CancelCauseFunc // guarded by the client's mu; nil before run
	wake    chan struct{}           // signals that frames isn't empty, or that somebody wants to probe
	timer   *time.Timer             // for the next sweep

	// Owned by run.

	state state
	lost  []outstanding // scratch

	mu sync.Mutex
	// mu guards the fields below. Times count from born.

	open   bool          // whether probes are taken
	used   time.Duration // when somebody last wanted to probe
	heard  time.Duration // when the last answer came, or the connection was made
	sweep  time.Duration // when timer fires; never if it's stopped
	ring   ring
	missed int           // how many in ring are late
	frames []byte        // what the connection's writer has yet to write
	wrote  time.Duration // when it last did
}

func newPeer(addr netip.AddrPort, cfg *Config, m *metrics) *peer {
	p := &peer{
		addr:    addr,
		cfg:     cfg,
		metrics: m,
		born:    time.Now(),
		wake:    make(chan struct{}, 1),
		timer:   time.NewTimer(never),
		open:    true,
		sweep:   never,
	}
	p.timer.Stop()
	return p
}

// send queues a probe, unless the peer is down or has too many.
func (p *peer) send(q Request, timeout time.Duration, sink Sink, token uint64) bool {
	now := time.Since(p.born)
	p.mu.Lock()
	p.used = now
	ok := p.open && len(q.Endpoint) <= MaxEndpointID &&
		p.queueLocked(q, outstanding{sink: sink, token: token, sent: now, deadline: now + timeout})
	due := q.Urgent || !ok || now-p.wrote >= gathering
	if !due {
		p.armLocked(p.wrote+longestQueued, now)
	}
	p.mu.Unlock()
	if due {
		signal(p.wake)
	}
	return ok
}

func (p *peer) queueLocked(q Request, o outstanding) bool {
	id, ok := p.ring.push(o)
	if !ok {
		return false
	}
	p.frames, _ = AppendRequest(p.frames, id, q) // the length has been checked
	p.armLocked(o.deadline, o.sent)
	return true
}

// armLocked makes a sweep happen at a time, unless one happens before.
func (p *peer) armLocked(at, now time.Duration) {
	if at < p.sweep {
		p.sweep = at
		p.timer.Reset(at - now)
	}
}

// unused returns for how long nobody has wanted to probe.
func (p *peer) unused(now time.Time) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return now.Sub(p.born) - p.used
}

// run keeps a connection until ctx ends.
func (p *peer) run(ctx context.Context) {
	p.metrics.peers[connecting].Inc()
	defer p.leave(ctx)
	backoff := minBackoff
	for {
		lasted, err := p.connect(ctx)
		if ctx.Err() != nil {
			return
		}
		stable := lasted >= stableAfter
		if stable {
			backoff = minBackoff
		}
		if stable && !errors.Is(err, errSilent) && !errors.Is(err, errFormat) || errors.Is(err, io.EOF) && lasted >= closedAfter {
			continue // at once: the peer may have closed it with good reason
		}
		p.become(down, err)
		if !p.rest(ctx, backoff+rand.N(backoff/4)) {
			return
		}
		backoff = min(2*backoff, maxBackoff)
	}
}

// leave ends what run began.
func (p *peer) leave(ctx context.Context) {
	p.abandon(false)
	if p.state == down && context.Cause(ctx) == errForgotten {
		p.cfg.State(p.addr, true) // nothing is known against it any more
	}
	p.metrics.peers[p.state].Dec()
}

// rest waits for d, and then until somebody wants to probe. It returns false when ctx ends first.
func (p *peer) rest(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
	}
	for p.unused(time.Now()) > wantedFor {
		select {
		case <-ctx.Done():
			return false
		case <-p.wake:
		}
	}
	return true
}

// connect dials and uses the connection while it lasts. Meanwhile probes are queued unless the peer is down. When it
// returns nothing is outstanding of what had been sent.
func (p *peer) connect(ctx context.Context) (lasted time.Duration, err error) {
	c, err := p.dial(ctx)
	if err != nil {
		return 0, err
	}
	start := time.Now()
	err = p.use(ctx, c)
	if errors.Is(err, errFormat) {
		p.metrics.bad.Inc()
	}
	p.abandon(p.state != down)
	return time.Since(start), err
}

func (p *peer) dial(ctx context.Context) (c net.Conn, err error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	dialed := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		defer close(dialed)
		c, err = p.cfg.Dial(ctx, p.addr)
	})
	for {
		select {
		case <-dialed:
			return c, err
		case <-p.timer.C:
			p.sweepNow()
		}
	}
}

// use sends and receives on c until one of them fails, the peer falls silent, or ctx ends. It closes c.
func (p *peer) use(ctx context.Context, c net.Conn) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer c.Close()
	defer cancel()
	p.ping()
	ended := make(chan error, 2)
	alive := make(chan struct{}, 1)
	wg.Go(func() { ended <- p.read(c, alive) })
	wg.Go(func() { ended <- p.write(ctx, c) })
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-ended:
			return err
		case <-alive:
			p.become(up, nil)
		case <-p.timer.C:
			if p.sweepNow() {
				return errSilent
			}
		}
	}
}

// ping asks for a first answer on a new connection. If too much is queued for it, that will be answered as well.
func (p *peer) ping() {
	now := time.Since(p.born)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.heard = now
	p.queueLocked(Request{}, outstanding{sent: now, deadline: now + pingTimeout})
	signal(p.wake)
}

const (
	// gathering is the least time between two writes of probes for whose answers nobody waits: those that are due meanwhile, at
	// thousands a second, share one. It is nothing to the time for which answers are reused, and most of what probes cost is the
	// writes, and the reads at both ends. Who sends the first one after that time has them all written: no timer has to wake
	// anybody for it.
	gathering = time.Millisecond
	// longestQueued is when they are written though no more follow.
	longestQueued = 5 * time.Millisecond
)

// write writes what is queued, all at once.
func (p *peer) write(ctx context.Context, c net.Conn) error {
	var frames []byte
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-p.wake:
		}
		p.mu.Lock()
		frames, p.frames = p.frames, frames[:0]
		p.wrote = time.Since(p.born)
		p.mu.Unlock()
		if len(frames) == 0 {
			continue
		}
		if _, err := c.Write(frames); err != nil {
			return fmt.Errorf("write probes: %w", err)
		}
	}
}

// read takes in answers. The first one shows that the peer is alive.
func (p *peer) read(c net.Conn, alive chan<- struct{}) error {
	in := bufio.NewReaderSize(c, 2<<10)
	for first := true; ; first = false {
		id, a, err := ReadAnswer(in)
		if err != nil {
			return err
		}
		if err := p.answered(id, a, time.Now()); err != nil {
			return err
		}
		if first {
			alive <- struct{}{}
		}
	}
}

func (p *peer) answered(id uint32, a Answer, now time.Time) error {
	t := now.Sub(p.born)
	p.mu.Lock()
	if p.ring.len() == 0 || p.ring.first != id {
		p.mu.Unlock()
		return fmt.Errorf("%w: %w", errOrder, errFormat)
	}
	o := p.ring.pop()
	p.heard = t
	if o.late {
		p.missed--
	}
	p.mu.Unlock()
	switch {
	case o.late:
		p.metrics.late.Inc()
	case o.sink != nil:
		p.metrics.ok.Inc()
		p.metrics.duration.Observe((t - o.sent).Seconds())
		o.sink.Answered(o.token, a, now)
	}
	return nil
}

// sweepNow tells the sinks of probes whose time is up, and returns whether the peer is silent.
func (p *peer) sweepNow() (silent bool) {
	now := time.Now()
	t := now.Sub(p.born)
	p.mu.Lock()
	var next time.Duration
	p.lost, next = p.ring.expire(t, p.lost)
	p.missed += len(p.lost)
	if p.missed >= minMissed {
		until := max(p.heard, p.ring.at(p.ring.first).sent) + silence
		if silent = t >= until; !silent {
			next = min(next, until)
		}
	}
	if len(p.frames) > 0 {
		signal(p.wake)
	}
	p.sweep = never
	if next != never {
		p.armLocked(max(next, t+sweepEvery), t)
	}
	p.mu.Unlock()
	return p.tellLost(now) || silent
}

// abandon gives up all that is outstanding. Unless it stays open, probes are refused from now on.
func (p *peer) abandon(open bool) {
	now := time.Now()
	p.mu.Lock()
	p.open = open
	p.frames = p.frames[:0]
	p.missed = 0
	for p.ring.len() > 0 {
		if o := p.ring.pop(); !o.late {
			p.lost = append(p.lost, o)
		}
	}
	p.sweep = never
	p.timer.Stop()
	p.mu.Unlock()
	p.tellLost(now)
}

// tellLost empties p.lost. It returns whether a ping was in it.
func (p *peer) tellLost(now time.Time) (ping bool) {
	for _, o := range p.lost {
		if o.sink == nil {
			ping = true
			continue
		}
		p.metrics.lost.Inc()
		o.sink.Lost(o.token, now)
	}
	clear(p.lost)
	p.lost = p.lost[:0]
	return ping
}

// become changes the state, if it differs. Probes are taken unless the peer is down.
func (p *peer) become(s state, err error) {
	if s == down {
		p.abandon(false)
	} else {
		p.mu.Lock()
		p.open = true
		p.mu.Unlock()
	}
	if s == p.state {
		return
	}
	p.metrics.peers[p.state].Dec()
	p.metrics.peers[s].Inc()
	p.state = s
	if s == up {
		p.cfg.Log.Info("agent answers probes", "peer", p.addr)
	} else {
		p.cfg.Log.Warn("agent does not answer probes", "peer", p.addr, "err", err)
	}
	p.cfg.State(p.addr, s == up)
}
