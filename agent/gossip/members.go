package gossip

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
	"google.golang.org/protobuf/proto"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/registry"
)

// State says what is known of a member.
type State int

const (
	Alive State = iota
	Dead        // stopped answering without a word
	Left        // said that it goes
)

// String returns the word that users see.
func (s State) String() string {
	return [...]string{"alive", "dead", "left"}[s]
}

// Member is an agent of the mesh.
type Member struct {
	Node    registry.NodeName
	Zone    string
	Version string
	Gossip  netip.AddrPort // where it gossips
	Mesh    netip.AddrPort // where it takes traffic from other agents
	State   State
	Since   time.Time // of the state
}

// keepGone is for how long a member that died or left is remembered, and a dead one dialled.
const keepGone = 24 * time.Hour

// members is the table of all members that memberlist has told about. memberlist calls its methods one at a time.
type members struct {
	self    registry.NodeName
	log     *slog.Logger
	metrics *metrics

	// mu guards the fields below.
	mu     sync.Mutex
	byName map[registry.NodeName]Member
	change chan struct{} // closed at the next change
}

func newMembers(self registry.NodeName, log *slog.Logger, m *metrics) *members {
	return &members{self: self, log: log, metrics: m, byName: map[registry.NodeName]Member{}, change: make(chan struct{})}
}

// NotifyJoin is called when a member is new or has come back.
func (ms *members) NotifyJoin(n *memberlist.Node) {
	m := ms.put(n, Alive)
	if m.Node != ms.self {
		ms.log.Info("member joined", "node", m.Node, "peer", m.Gossip)
	}
}

// NotifyUpdate is called when the metadata of a member has changed.
func (ms *members) NotifyUpdate(n *memberlist.Node) { ms.put(n, Alive) }

// NotifyLeave is called when a member left or counts as dead.
func (ms *members) NotifyLeave(n *memberlist.Node) {
	m := ms.put(n, Dead)
	switch {
	case m.Node == ms.self:
	case m.State == Left:
		ms.log.Info("member left", "node", m.Node, "peer", m.Gossip)
	default:
		ms.log.Warn("member does not answer and counts as dead", "node", m.Node, "peer", m.Gossip)
	}
}

func (ms *members) put(n *memberlist.Node, s State) Member {
	m, leaving, err := decodeMetadata(n.Meta)
	if err != nil {
		ms.log.Warn("metadata of a member can't be read: its zone and mesh address are unknown", "node", n.Name, "err", err)
	}
	if leaving {
		s = Left
	}
	m.Node, m.Gossip = registry.NodeName(n.Name), nodeAddr(n)
	m.State, m.Since = s, time.Now()

	ms.mu.Lock()
	defer ms.mu.Unlock()
	if old, ok := ms.byName[m.Node]; ok && old.State == m.State {
		m.Since = old.Since
	}
	ms.byName[m.Node] = m
	ms.forgetLocked(time.Now())
	ms.metrics.count(ms.byName)
	close(ms.change)
	ms.change = make(chan struct{})
	return m
}

func (ms *members) forgetLocked(now time.Time) {
	maps.DeleteFunc(ms.byName, func(_ registry.NodeName, m Member) bool {
		return m.State != Alive && now.Sub(m.Since) > keepGone
	})
}

func (ms *members) all() []Member {
	ms.mu.Lock()
	defer ms.mu.Unlock()
	return slices.SortedFunc(maps.Values(ms.byName), func(a, b Member) int { return cmp.Compare(a.Node, b.Node) })
}

func (ms *members) changed() <-chan struct{} {
	ms.mu.Lock()
	defer ms.mu.Unlock()
	return ms.change
}

// encodeMetadata renders what agents tell about themselves: a Member without what memberlist tells anyway. Agents of
// other versions skip what they don't know.
func encodeMetadata(c Config, leaving bool) []byte {
	m := &meshv1.Member{Zone: c.Zone, Version: c.Version}
	if c.Mesh.IsValid() {
		m.MeshAddress = c.Mesh.String()
	}
	if leaving {
		m.State = Left.String()
	}
	b, err := proto.Marshal(m)
	if err != nil {
		return nil // not UTF-8: refused by checkMetadata
	}
	return b
}

func decodeMetadata(b []byte) (m Member, leaving bool, err error) {
	var pb meshv1.Member
	if err := proto.Unmarshal(b, &pb); err != nil {
		return Member{}, false, fmt.Errorf("metadata of %d bytes: %w", len(b), err)
	}
	if pb.MeshAddress != "" {
		if m.Mesh, err = netip.ParseAddrPort(pb.MeshAddress); err != nil {
			return Member{}, false, fmt.Errorf("mesh address: %w", err)
		}
	}
	m.Zone, m.Version = pb.Zone, pb.Version
	return m, pb.State == Left.String(), nil
}

func checkMetadata(c Config) error {
	_, err := proto.Marshal(&meshv1.Member{Zone: c.Zone, Version: c.Version})
	if err != nil {
		return errors.New("zone, version: want UTF-8")
	}
	n := len(encodeMetadata(c, true))
	if n <= memberlist.MetaMaxSize {
		return nil
	}
	field, size := "zone", len(c.Zone)
	if len(c.Version) > len(c.Zone) {
		field, size = "version", len(c.Version)
	}
	return fmt.Errorf("%s: what is told about this agent takes %d bytes, and at most %d fit: shorten %s, which has %d", field, n, memberlist.MetaMaxSize, field, size)
}
