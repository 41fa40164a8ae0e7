package registry

import (
	"errors"
	"fmt"
	"net/netip"
	"path"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/headroom-mesh/headroom/policy/document"
)

// Keys of the store are, below the prefix of the mesh: services/NAME, endpoints/SERVICE/NODE/ADDRESS, policies/SERVICE,
// nodes/NODE, addresses/SERVICE, slots/N.
const (
	ServiceKeys  = "services/"
	EndpointKeys = "endpoints/"
	PolicyKeys   = "policies/"
	NodeKeys     = "nodes/"
	AddressKeys  = "addresses/"
	SlotKeys     = "slots/"
)

// Record is one key of the store with its value. The key is relative to the prefix of the mesh.
type Record struct {
	Key      string
	Value    []byte
	Revision int64 // at which the value was written
	Created  int64 // revision at which the key came into being; 0 if that is not known
}

// Key returns where the record of the endpoint is stored.
func (e Endpoint) Key() string { return EndpointKeys + string(e.ID()) }

// Key returns where the record of the service is stored.
func (n ServiceName) Key() string { return ServiceKeys + string(n) }

// PolicyKey returns where the policy of the service is stored.
func (n ServiceName) PolicyKey() string { return PolicyKeys + string(n) }

// AddressKey returns where the virtual addresses of the service are stored.
func (n ServiceName) AddressKey() string { return AddressKeys + string(n) }

// Key returns where the claim of the name is stored.
func (n NodeName) Key() string { return NodeKeys + string(n) }

// VirtualRanges returns the ranges of virtual addresses: those given, or else the defaults, which are of no use on the Internet.
// The one of IPv4 is reserved (RFC 1112, 4), the one of IPv6 local (RFC 4193).
func VirtualRanges(ipv4, ipv6 netip.Prefix) (netip.Prefix, netip.Prefix) {
	if !ipv4.IsValid() {
		ipv4 = netip.MustParsePrefix("240.64.0.0/12")
	}
	if !ipv6.IsValid() {
		ipv6 = netip.MustParsePrefix("fd68:6561:6472::/64")
	}
	return ipv4, ipv6
}

// Validate reports whether the name may be part of a key.
func (n ServiceName) Validate() error {
	if !document.IsServiceName(string(n)) {
		return fmt.Errorf("service %q: want %s", string(n), document.ServiceNames)
	}
	return nil
}

// Validate reports whether the name may be part of a key.
func (n NodeName) Validate() error {
	if n == "" || len(n) > 253 || strings.Contains(string(n), "/") || !isPrintable(string(n)) {
		return fmt.Errorf("node %q: want 1 to 253 printable characters without '/' and spaces", string(n))
	}
	return nil
}

// validateAddress wants one address, that can be part of a key.
func (e Endpoint) validateAddress() error {
	switch {
	case e.Socket != "" && (e.Address.IsValid() || !path.IsAbs(e.Socket) || path.Clean(e.Socket) != e.Socket || !isPrintable(e.Socket)):
		return fmt.Errorf("address %q: want unix: and the absolute path of a socket, without spaces, and no other address", e.At())
	case e.Socket == "" && (!e.Address.IsValid() || e.Address.Port() == 0):
		return fmt.Errorf("address %q: want IP:PORT or unix:/PATH", e.Address)
	}
	return nil
}

func isPrintable(s string) bool {
	bad := func(r rune) bool { return unicode.IsSpace(r) || !unicode.IsPrint(r) }
	return utf8.ValidString(s) && !strings.ContainsFunc(s, bad)
}

// Validate reports all that keeps the endpoint from being stored.
func (e Endpoint) Validate() error {
	problems := []error{e.Service.Validate(), e.Node.Validate()}
	problems = append(problems, e.validateAddress())
	if e.Weight < 0 || e.Weight > maxWeight {
		problems = append(problems, fmt.Errorf("weight %d: want 1 to %d, or 0, which counts as 1", e.Weight, maxWeight))
	}
	return errors.Join(problems...)
}
