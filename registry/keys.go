package registry

import (
	"errors"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/headroom-mesh/headroom/policy/document"
)

// Keys of the store are, below the prefix of the mesh: services/NAME, endpoints/SERVICE/NODE/ADDRESS, policies/SERVICE,
// nodes/NODE.
const (
	ServiceKeys  = "services/"
	EndpointKeys = "endpoints/"
	PolicyKeys   = "policies/"
	NodeKeys     = "nodes/"
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

// Key returns where the claim of the name is stored.
func (n NodeName) Key() string { return NodeKeys + string(n) }

// Validate reports whether the name may be part of a key.
func (n ServiceName) Validate() error {
	if !document.IsLabel(string(n)) {
		return fmt.Errorf("service %q: want a DNS label (a-z, 0-9 and '-' inside, 63 characters at most)", string(n))
	}
	return nil
}

// Validate reports whether the name may be part of a key.
func (n NodeName) Validate() error {
	bad := func(r rune) bool { return r == '/' || unicode.IsSpace(r) || !unicode.IsPrint(r) }
	if n == "" || len(n) > 253 || !utf8.ValidString(string(n)) || strings.ContainsFunc(string(n), bad) {
		return fmt.Errorf("node %q: want 1 to 253 printable characters without '/' and spaces", string(n))
	}
	return nil
}

// Validate reports all that keeps the endpoint from being stored.
func (e Endpoint) Validate() error {
	problems := []error{e.Service.Validate(), e.Node.Validate()}
	if !e.Address.IsValid() || e.Address.Port() == 0 {
		problems = append(problems, fmt.Errorf("address %q: want IP:PORT", e.Address))
	}
	if e.Weight < 0 || e.Weight > MaxWeight {
		problems = append(problems, fmt.Errorf("weight %d: want 1 to %d, or 0, which counts as 1", e.Weight, MaxWeight))
	}
	return errors.Join(problems...)
}
