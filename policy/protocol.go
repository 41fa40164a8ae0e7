package policy

import (
	"fmt"
	"slices"
	"strings"
)

// Protocol is what a replica is declared to speak.
type Protocol string

const (
	ProtocolUndeclared Protocol = ""
	ProtocolHTTP       Protocol = "http"  // HTTP/1
	ProtocolHTTP2      Protocol = "http2" // with prior knowledge; gRPC, too
	ProtocolTCP        Protocol = "tcp"   // bytes, among them those of TLS
)

// ParseProtocol reads what an operator, or a Service of Kubernetes in its field appProtocol, calls a protocol.
func ParseProtocol(name string) (Protocol, error) {
	if name == "" {
		return ProtocolUndeclared, nil
	}
	for _, p := range []Protocol{ProtocolHTTP, ProtocolHTTP2, ProtocolTCP} {
		if slices.Contains(p.names(), name) {
			return p, nil
		}
	}
	return "", fmt.Errorf("want http, http2, grpc, tls or tcp, or what Kubernetes calls these (%s), got %q", strings.Join(aliases(), ", "), name)
}

// names returns those by which a protocol is known: ours first, then those of Kubernetes and of what runs on it.
func (p Protocol) names() []string {
	switch p {
	case ProtocolHTTP:
		return []string{"http", "http1", "kubernetes.io/ws", "ws", "grpc-web"}
	case ProtocolHTTP2:
		return []string{"http2", "grpc", "kubernetes.io/h2c", "h2c"}
	case ProtocolTCP:
		return []string{"tcp", "tls", "https", "kubernetes.io/wss", "wss", "mysql", "postgres", "postgresql", "redis", "mongo", "mongodb",
			"memcached", "kafka", "amqp", "amqps", "mqtt", "nats", "smtp", "smtps", "ldap", "ldaps", "ssh"}
	}
	return nil
}

func aliases() []string {
	var all []string
	for _, p := range []Protocol{ProtocolHTTP, ProtocolHTTP2, ProtocolTCP} {
		all = append(all, p.names()...)
	}
	ours := []string{"http", "http2", "grpc", "tls", "tcp"}
	return slices.DeleteFunc(all, func(name string) bool { return slices.Contains(ours, name) })
}
