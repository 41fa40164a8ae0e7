package transport

import (
	"maps"
	"net/netip"
	"sync"
	"time"
)

const (
	// staysPlain is for how long an agent without TLS is not asked for it again.
	staysPlain = time.Minute
	// doubt is for how long an agent that has spoken TLS may fail to, as one does that is just being restarted, before it is
	// taken to have lost it.
	doubt    = 5 * time.Second
	maxPeers = 10000
)

// peers remembers which agents spoke TLS, while some don't.
type peers struct {
	mu sync.Mutex
	// mu guards the field below.
	at map[netip.AddrPort]peer
}

type peer struct {
	spokeTLS   bool
	failing    time.Time // since when it does not, zero if it does
	plainUntil time.Time
}

func (ps *peers) isPlain(agent netip.AddrPort, now time.Time) bool {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	return now.Before(ps.at[agent].plainUntil)
}

func (ps *peers) succeeded(agent netip.AddrPort) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	ps.putLocked(agent, peer{spokeTLS: true})
}

// heard notes that an agent on a machine has dialled in TLS: if it was taken to have none, it has some now.
func (ps *peers) heard(machine netip.Addr) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	maps.DeleteFunc(ps.at, func(agent netip.AddrPort, p peer) bool { return agent.Addr() == machine && !p.spokeTLS })
}

// failed notes that an agent did not answer in TLS, and reports whether to speak to it in the clear.
func (ps *peers) failed(agent netip.AddrPort, now time.Time) bool {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	p := ps.at[agent]
	if p.failing.IsZero() {
		p.failing = now
	}
	plain := !p.spokeTLS || now.Sub(p.failing) >= doubt
	if plain {
		p = peer{plainUntil: now.Add(staysPlain)}
	}
	ps.putLocked(agent, p)
	return plain
}

// putLocked forgets others rather than grow without end.
func (ps *peers) putLocked(agent netip.AddrPort, p peer) {
	if ps.at == nil || len(ps.at) >= maxPeers {
		ps.at = map[netip.AddrPort]peer{}
	}
	ps.at[agent] = p
}
