package gossip

import (
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/headroom-mesh/headroom/registry"
)

// rivals deals with two agents of one name. If the name is ours, the other one usually is this agent's own past, on the
// address that it had before a restart, and goes by itself; if it answers, somebody has to rename one of the two.
type rivals struct {
	self    registry.NodeName
	log     *slog.Logger
	noticed chan struct{} // gets a signal when a rival appears

	// mu guards the fields below.
	mu    sync.Mutex
	rival netip.AddrPort // invalid if there is none
	fresh bool           // whether it was seen since the last take
	calm  int            // rounds since it was seen
	quiet *limiter
}

// calmRounds is for how many more rounds a name is announced that others seem to have accepted here. They don't take a
// name over at the same moment: each waits until it holds the old owner for dead.
const calmRounds = 10

func newRivals(self registry.NodeName, log *slog.Logger) *rivals {
	return &rivals{self: self, log: log, noticed: make(chan struct{}, 1), quiet: newLimiter(time.Minute)}
}

// NotifyConflict is called when a member is heard of at another address than the one where it is known to live.
func (r *rivals) NotifyConflict(existing, other *memberlist.Node) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if existing.Name != string(r.self) {
		if r.quiet.allow(existing.Name, time.Now()) {
			r.log.Warn("two agents claim the same name; the one known first keeps it while it lives",
				"node", existing.Name, "peer", nodeAddr(other), "reason", "known at "+nodeAddr(existing).String())
		}
		return
	}
	r.noteLocked(nodeAddr(other))
}

func (r *rivals) noteLocked(rival netip.AddrPort) {
	if !r.rival.IsValid() {
		select {
		case r.noticed <- struct{}{}:
		default:
		}
	}
	r.rival, r.fresh = rival, true
}

// past looks, when this agent meets another one, for the address at which that one knows it. Of an address that is
// suspected already no conflict is ever heard, and yet others hold on to it until it counts as dead.
type past struct {
	*rivals
	at netip.AddrPort // of this agent
}

// NotifyMerge is called with all that the other agent knows.
func (p past) NotifyMerge(members []*memberlist.Node) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, m := range members {
		if m.Name == string(p.self) && m.State != memberlist.StateLeft && nodeAddr(m) != p.at {
			p.noteLocked(nodeAddr(m))
		}
	}
	return nil
}

// take returns the rival if it was seen since the last take, and whether the name is in dispute at all.
func (r *rivals) take() (rival netip.AddrPort, contested bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fresh {
		rival = r.rival
	}
	r.fresh = false
	return rival, r.rival.IsValid()
}

// goOn is called after a round of dials, with whether the rival answered. It reports whether to announce our name
// again soon: not if the rival lives, nor if nobody has spoken of it for a while.
func (r *rivals) goOn(answered bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.fresh {
		r.calm++
		if r.calm > calmRounds {
			r.rival = netip.AddrPort{}
		}
		return r.rival.IsValid()
	}
	r.calm = 0
	if answered && r.quiet.allow(string(r.self), time.Now()) {
		r.log.Error("another live agent has the name of this one: rename one of the two; until then only the one known first takes part",
			"node", r.self, "peer", r.rival)
	}
	return !answered
}

func nodeAddr(n *memberlist.Node) netip.AddrPort {
	ip, _ := netip.AddrFromSlice(n.Addr)
	return netip.AddrPortFrom(ip.Unmap(), n.Port)
}
