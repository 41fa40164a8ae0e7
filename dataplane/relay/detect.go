package relay

import (
	"github.com/headroom-mesh/headroom/policy"
)

// Declared returns the protocol that a declaration amounts to.
func Declared(p policy.Protocol) Protocol {
	switch p {
	case policy.ProtocolHTTP:
		return HTTP1
	case policy.ProtocolHTTP2:
		return HTTP2
	case policy.ProtocolTCP:
		return TCP
	}
	return Unknown
}
