package outbound

import (
	"net/netip"
	"sync"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/identity"
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
	connect func(agent netip.AddrPort, as identity.Workload) *relay.Upstream

	mu sync.Mutex
	// mu guards the fields below.

	all    map[netip.AddrPort]*ways
	silent map[netip.AddrPort]time.Time // since when; those whose connections are yet to be cut
}

// ways are those to one agent: a connection is one caller's, as its certificate is.
type ways struct {
	node      *relay.Upstream
	workloads map[identity.Workload]*relay.Upstream
}

func (w *ways) each(do func(*relay.Upstream)) {
	do(w.node)
	for _, u := range w.workloads {
		do(u)
	}
}

func newAgents(connect func(agent netip.AddrPort, as identity.Workload) *relay.Upstream) *agents {
	return &agents{connect: connect, all: map[netip.AddrPort]*ways{}, silent: map[netip.AddrPort]time.Time{}}
}

// to returns the way to an agent, for a workload or this node.
func (as *agents) to(agent netip.AddrPort, w identity.Workload) *relay.Upstream {
	as.mu.Lock()
	defer as.mu.Unlock()
	to := as.all[agent]
	if to == nil {
		to = &ways{node: as.connect(agent, identity.Workload{}), workloads: map[identity.Workload]*relay.Upstream{}}
		as.all[agent] = to
	}
	if w == (identity.Workload{}) {
		return to.node
	}
	u := to.workloads[w]
	if u == nil {
		u = as.connect(agent, w)
		to.workloads[w] = u
	}
	return u
}

// fellSilent gives up the idle connections to an agent: a request on one of them would wait for an answer, where a new
// connection fails soon.
func (as *agents) fellSilent(now time.Time, agent netip.AddrPort) {
	as.mu.Lock()
	defer as.mu.Unlock()
	if to := as.all[agent]; to != nil {
		to.each((*relay.Upstream).CloseIdle)
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
			as.all[agent].each((*relay.Upstream).Cut)
			delete(as.all, agent)
			delete(as.silent, agent)
		}
	}
}

// closeIdle closes the connections that no request uses.
func (as *agents) closeIdle() {
	as.mu.Lock()
	defer as.mu.Unlock()
	for _, to := range as.all {
		to.each((*relay.Upstream).CloseIdle)
	}
}
