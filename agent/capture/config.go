// Package capture directs the connections of this node's applications to the agent, by nftables.
package capture

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math"
	"net/netip"
	"slices"
	"strings"
)

// DefaultMark is what the agent's own sockets carry (SO_MARK), so that their connections are left alone.
const DefaultMark = 0x6865

// ErrTaken means that a virtual range overlaps what others use.
var ErrTaken = errors.New("choose another range")

// Config says what is captured, and what is not.
type Config struct {
	// Port is where the agent accepts captured connections. It must be set. Those of this network namespace come to the
	// loopback addresses, those of others, such as pods, to the first address of a range.
	Port uint16

	// IPv4 and IPv6 are the ranges of virtual addresses. All TCP connections to them are captured, and whatever else goes
	// there is refused. One of them must be set.
	IPv4, IPv6 netip.Prefix

	// Mark is what the agent's own sockets carry (SO_MARK). Zero: DefaultMark.
	Mark uint32

	// ExemptUIDs are users whose connections are left alone.
	ExemptUIDs []uint32

	// ExemptPorts are ports: connections to them are left alone.
	ExemptPorts []uint16

	// ExemptCgroups are control groups (version 2) whose connections are left alone, with those of all groups in them:
	// paths below the root of the hierarchy, as in "system.slice/sshd.service". They must be there when capture starts.
	ExemptCgroups []string

	// RedirectDNS directs all DNS queries of this network namespace, over UDP and TCP, to DNSPort.
	RedirectDNS bool

	// RedirectPodDNS does so with queries that come from other network namespaces, too.
	RedirectPodDNS bool

	// DNSPort is where the agent answers DNS queries. It must be set if these are redirected.
	DNSPort uint16

	// Netns is the network namespace, as a path such as /run/netns/NAME or /proc/PID/ns/net. Empty: that of this process.
	Netns string

	// Pod: the network namespace is that of a pod. Then only what the pod itself sends is captured, nothing that comes to it, no
	// routes are added, as pods have one that leads out, and what an agent that died leaves refuses connections to virtual
	// addresses and else does nothing.
	Pod bool

	// TakeOver: capture also where another agent does. What is new comes here from then on; what that agent has captured stays
	// with it until it ends. Only in pods. If Port is that agent's, captured connections come to the next one.
	TakeOver bool

	// Log is told when capture starts and ends, and what had to be mended. Nil: nobody is.
	Log *slog.Logger
}

func (c Config) withDefaults() Config {
	if c.Mark == 0 {
		c.Mark = DefaultMark
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

// Validate returns all that is wrong.
func (c Config) Validate() error {
	var problems []error
	wrong := func(format string, a ...any) { problems = append(problems, fmt.Errorf(format, a...)) }
	if c.Port == 0 {
		wrong("Port: want the port, 1 to 65535, at which captured connections are accepted")
	}
	if c.DNSPort == 0 && (c.RedirectDNS || c.RedirectPodDNS) {
		wrong("DNSPort: want the port, 1 to 65535, to which DNS queries are redirected")
	}
	if c.TakeOver && !c.Pod {
		wrong("TakeOver: another agent can be taken over from in pods only: set Pod, or stop that agent first")
	}
	if c.TakeOver && c.Port == math.MaxUint16 {
		wrong("Port: want the next one, too, to take over from an agent: 1 to 65534")
	}
	if len(c.ranges()) == 0 && !c.Pod {
		wrong("IPv4, IPv6: want a range of virtual addresses, at least of one kind")
	}
	problems = append(problems,
		validateRange("IPv4", c.IPv4, c.IPv4.Addr().Is4()),
		validateRange("IPv6", c.IPv6, c.IPv6.Addr().Is6() && !c.IPv6.Addr().Is4In6()))
	if slices.Contains(c.ExemptPorts, 0) {
		wrong("ExemptPorts: 0 is no port, want 1 to 65535")
	}
	for _, group := range c.ExemptCgroups {
		if path := strings.Trim(group, "/"); path == "." || !fs.ValidPath(path) {
			wrong("ExemptCgroups: %q: want a path below the root of the hierarchy, as in system.slice/sshd.service", group)
		}
	}
	return errors.Join(problems...)
}

// validateRange takes the name of the field, which is the kind of address, and whether the range is of that kind.
func validateRange(field string, r netip.Prefix, fits bool) error {
	switch {
	case !r.IsValid():
		return nil
	case !fits:
		return fmt.Errorf("%s: %v is no range of %[1]s addresses", field, r)
	case r != r.Masked():
		return fmt.Errorf("%s: want the first address of the range, as in %v, got %v", field, r.Masked(), r)
	case r.Bits() < 4:
		return fmt.Errorf("%s: %v is most of all addresses, want a prefix of at least 4 bits", field, r)
	}
	for _, taken := range []string{"127.0.0.0/8", "0.0.0.0/8", "224.0.0.0/4", "::1/128", "ff00::/8", "fe80::/10"} {
		if p := netip.MustParsePrefix(taken); p.Overlaps(r) {
			return fmt.Errorf("%s: %v overlaps %v, which has a meaning of its own: choose another range", field, r, p)
		}
	}
	return nil
}

// ranges returns those that are set.
func (c Config) ranges() []netip.Prefix {
	return slices.DeleteFunc([]netip.Prefix{c.IPv4, c.IPv6}, func(p netip.Prefix) bool { return !p.IsValid() })
}

// at is where captured connections of other network namespaces come to.
func (c Config) at(r netip.Prefix) netip.AddrPort { return netip.AddrPortFrom(r.Addr(), c.Port) }

// listenable returns the ports at which captured connections may come: an agent and its successor have one each.
func (c Config) listenable() []uint16 {
	if !c.Pod || c.Port == math.MaxUint16 {
		return []uint16{c.Port}
	}
	return []uint16{c.Port, c.Port + 1}
}

// addresses is where all captured connections come to, at a port.
func (c Config) addresses(port uint16) []netip.AddrPort {
	all := []netip.AddrPort{
		netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), port),
		netip.AddrPortFrom(netip.IPv6Loopback(), port),
	}
	if c.Pod {
		return all
	}
	for _, r := range c.ranges() {
		all = append(all, c.at(r))
	}
	return all
}
