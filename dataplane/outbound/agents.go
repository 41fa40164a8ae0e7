package outbound

import (
	"net/netip"
	"sync"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/relay"
)

const (
	// idleTimeout is how long a connection to another agent is kept for the next request.
	idleTimeout = 90 * time.Second
	// patience is how long requests in flight to an agent that has fallen silent may go on waiting: it may be back in a
	// moment. After that they fail, long before TCP would give up.
	patience = 5 * time.Second
)

// agents are the ways to other agents.
type agents struct {
	connect func(agent netip.AddrPort) *relay.Upstream

	mu sync.Mutex
	// mu guards the fields below.

	all    map[netip.AddrPort]*relay.Upstream
	silent map[netip.AddrPort]time.Time // since when; those whose connections are yet to be cut
}

func newAgents(connect func(agent netip.AddrPort) *relay.Upstream) *agents {
	return &agents{connect: connect, all: map[netip.AddrPort]*relay.Upstream{}, silent: map[netip.AddrPort]time.Time{}}
}

// to returns the way to an agent.
func (as *agents) to(agent netip.AddrPort) *relay.Upstream {
	as.mu.Lock()
	defer as.mu.Unlock()
	u := as.all[agent]
	if u == nil {
		u = as.connect(agent)
		as.all[agent] = u
	}
	return u
}

// fellSilent gives up the idle connections to an agent: a request on one of them would wait for an answer, where a new
// connection fails soon.
func (as *agents) fellSilent(now time.Time, agent netip.AddrPort) {
	as.mu.Lock()
	defer as.mu.Unlock()
	if u := as.all[agent]; u != nil {
		u.CloseIdle()
		as.silent[agent] = now
	}
}

func (as *agents) isBack(agent netip.AddrPort) {
	as.mu.Lock()
	defer as.mu.Unlock()
	delete(as.silent, agent)
}

// cutSilent closes the connections to agents that have been silent for too long.
func (as *agents) cutSilent(now time.Time) {
	as.mu.Lock()
	defer as.mu.Unlock()
	for agent, since := range as.silent {
		if now.Sub(since) >= patience {
			as.all[agent].Cut()
			delete(as.all, agent)
			delete(as.silent, agent)
		}
	}
}

// closeIdle closes the connections that no request uses.
func (as *agents) closeIdle() {
	as.mu.Lock()
	defer as.mu.Unlock()
	for _, u := range as.all {
		u.CloseIdle()
	}
}
