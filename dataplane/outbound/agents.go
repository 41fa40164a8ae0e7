package outbound

import (
	"maps"
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
	// forgetEvery is the time between two rounds in which ways are forgotten that nobody has asked for in keptRounds.
	forgetEvery = time.Minute
	keptRounds  = 5
)

// agents are the ways to other agents.
type agents struct {
	connect func(agent netip.AddrPort, as identity.Workload) *relay.Upstream

	mu sync.Mutex
	// mu guards the fields below.

	all    map[netip.AddrPort]*ways
	silent map[netip.AddrPort]time.Time // since when; those whose connections are yet to be cut
	round  int
}

// ways are those to one agent: a connection is one caller's, as its certificate is.
type ways struct {
	node      *way
	workloads map[identity.Workload]*way
}

type way struct {
	*relay.Upstream
	asked int // the round in which it was last asked for
}

func (w *ways) each(do func(*relay.Upstream)) {
	do(w.node.Upstream)
	for _, u := range w.workloads {
		do(u.Upstream)
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
		to = &ways{node: &way{Upstream: as.connect(agent, identity.Workload{})}, workloads: map[identity.Workload]*way{}}
		as.all[agent] = to
	}
	u := to.node
	if w != (identity.Workload{}) {
		if u = to.workloads[w]; u == nil {
			u = &way{Upstream: as.connect(agent, w)}
			to.workloads[w] = u
		}
	}
	u.asked = as.round
	return u.Upstream
}

// forget drops the ways that nobody has asked for in a while, and on which nothing is open: agents and workloads come and go.
func (as *agents) forget() {
	as.mu.Lock()
	defer as.mu.Unlock()
	as.round++
	unused := func(w *way) bool { return as.round-w.asked > keptRounds && w.Connections() == 0 }
	for agent, to := range as.all {
		maps.DeleteFunc(to.workloads, func(_ identity.Workload, w *way) bool { return unused(w) })
		if _, silent := as.silent[agent]; !silent && len(to.workloads) == 0 && unused(to.node) {
			delete(as.all, agent)
		}
	}
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
