package capture

import "net/netip"

// Status is what is in the kernel, and what that leaves alone.
type Status struct {
	// Owner is the netlink port of the process that captures, which is mostly its ID: of this agent, if it does. Zero: nobody
	// captures.
	Owner uint32

	// Version is that of the rules. Zero: there are none.
	Version int

	Chains []Chain        // of the guard and of the owner's table
	Rules  []Rule         // in these
	Sets   []Set          // in these tables
	Routes []netip.Prefix // the virtual ranges that are routed to this node

	Exempt Exempt

	// Before has chains of others that may see connections before this package's do, and direct them elsewhere. Of two with
	// the same priority the kernel asks the newer one first, and doesn't tell which that is, but for those of a successor.
	Before []Chain
}

// Chain is a list of rules that the kernel walks through at a hook, those of lower priority first.
type Chain struct {
	Table    string // as in "inet headroom"
	Name     string
	Hook     string // as in "output"
	Priority int
	Rules    int
}

// Rule is a rule, and how much it was for. Redirecting is decided once a connection: there Packets are connections.
type Rule struct {
	Table, Chain   string
	What           string // as in "redirect virtual IPv4"
	Packets, Bytes uint64
}

// Set is a set of addresses or users that rules look things up in.
type Set struct {
	Table, Name string
	Elements    int
}

// Exempt is what is left alone.
type Exempt struct {
	Mark    uint32
	UIDs    []uint32
	Ports   []uint16
	Cgroups []string
}

func (c Config) exempt() Exempt {
	return Exempt{c.Mark, c.ExemptUIDs, c.ExemptPorts, c.ExemptCgroups}
}
