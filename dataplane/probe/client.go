package probe

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

const (
	dialTimeout = time.Second
	pingTimeout = time.Second // for the first answer on a connection

	// A peer is silent when nothing came from it for so long, though so many probes were lost.
	silence   = 500 * time.Millisecond
	minMissed = 3

	sweepEvery  = 5 * time.Millisecond // at most
	stableAfter = 2 * time.Second      // a connection that lasted so long is dialed again at once
	closedAfter = minBackoff           // and one that lasted so long, if the peer has closed it in good order
	minBackoff  = 100 * time.Millisecond
	maxBackoff  = 1600 * time.Millisecond // and a quarter of jitter

	wantedFor = time.Minute     // since the last probe: a peer that is down is dialed again
	keptFor   = 5 * time.Minute // since the last probe: a peer is remembered
)

// Sink takes in what became of probes: for each probe that was sent one call, from a goroutine of the Client. Calls
// must be quick.
type Sink interface {
	Answered(token uint64, a Answer, now time.Time)
	// Lost says that no answer came in time, or that none will.
	Lost(token uint64, now time.Time)
}

// Config holds what a Client needs.
type Config struct {
	// Dial connects to an agent for probes. Required.
	Dial func(ctx context.Context, agent netip.AddrPort) (net.Conn, error)
	// State is told whether an agent answers probes, whenever that changes. A new one is taken to be up until it is
	// known not to be; one that is forgotten counts as new. It must be quick. Default: nobody is told.
	State func(agent netip.AddrPort, up bool)
	// Log is where to log. Default: nowhere.
	Log *slog.Logger
	// Metrics is where to register metrics. Default: nowhere.
	Metrics prometheus.Registerer
}

// Validate says all that is wrong.
func (c Config) Validate() error {
	if c.Dial == nil {
		return errors.New("probe client: Dial: want a function that connects to an agent, not nil")
	}
	return nil
}

func (c Config) withDefaults() Config {
	if c.State == nil {
		c.State = func(netip.AddrPort, bool) {}
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

// Client probes the endpoints of other agents. It is safe for concurrent use.
type Client struct {
	cfg     Config
	metrics *metrics
	joined  chan struct{} // signals that fresh isn't empty

	mu sync.RWMutex
	// mu guards the fields below.

	running bool
	peers   map[netip.AddrPort]*peer
	fresh   []*peer // those that Run has yet to take care of
}

// NewClient returns a client whose probes are sent while Run runs.
func NewClient(cfg Config) (*Client, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	return &Client{
		cfg:     cfg.withDefaults(),
		metrics: newMetrics(cfg.Metrics),
		joined:  make(chan struct{}, 1),
		peers:   make(map[netip.AddrPort]*peer),
	}, nil
}

// Probe asks an agent how an endpoint of its node fares. It never blocks. If it returns true, sink is told exactly once
// what became of the probe, after timeout at the latest. It returns false if the probe is not sent: the agent is down,
// too many probes to it are unanswered, the endpoint's name is longer than MaxEndpointID, or Run doesn't run.
//
// An agent that is down is dialed again for as long as there are attempts to probe it, such as one in half a minute.
func (c *Client) Probe(agent netip.AddrPort, q Request, timeout time.Duration, sink Sink, token uint64) bool {
	p := c.peer(agent)
	if p == nil || !p.send(q, timeout, sink, token) {
		c.metrics.refused.Inc()
		return false
	}
	c.metrics.sent.Inc()
	return true
}

// peer returns the peer at an address, nil if Run doesn't run.
func (c *Client) peer(agent netip.AddrPort) *peer {
	c.mu.RLock()
	p, running := c.peers[agent], c.running
	c.mu.RUnlock()
	if p != nil || !running {
		return p
	}
	return c.join(agent)
}

func (c *Client) join(agent netip.AddrPort) *peer {
	c.mu.Lock()
	defer c.mu.Unlock()
	if p := c.peers[agent]; p != nil || !c.running {
		return p
	}
	p := newPeer(agent, &c.cfg, c.metrics)
	c.peers[agent] = p
	c.fresh = append(c.fresh, p)
	signal(c.joined)
	return p
}

// Run connects to agents as probes to them ask for it, until ctx ends; it returns when all that it started has ended
// and every sink has been told. It must not be called while it runs.
func (c *Client) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	c.mu.Lock()
	c.running = true
	c.mu.Unlock()
	forget := time.NewTicker(keptFor / 5)
	defer forget.Stop()
	for {
		select {
		case <-ctx.Done():
			c.mu.Lock()
			c.running = false
			clear(c.peers)
			c.mu.Unlock()
			c.runFresh(ctx, &wg) // they tell their sinks
			return nil
		case <-c.joined:
			c.runFresh(ctx, &wg)
		case now := <-forget.C:
			c.forget(now)
		}
	}
}

func (c *Client) runFresh(ctx context.Context, wg *sync.WaitGroup) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range c.fresh {
		ctx, cancel := context.WithCancelCause(ctx)
		p.stop = cancel
		wg.Go(func() {
			defer cancel(nil)
			p.run(ctx)
		})
	}
	c.fresh = nil
}

// forget ends the peers that nobody has probed for long.
func (c *Client) forget(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for agent, p := range c.peers {
		if p.stop != nil && p.unused(now) >= keptFor {
			delete(c.peers, agent)
			p.stop(errForgotten)
		}
	}
}

// signal wakes whoever waits for c, now or next.
func signal(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
