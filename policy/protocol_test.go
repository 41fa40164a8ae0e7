package policy_test

import (
	"strings"
	"testing"

	"github.com/headroom-mesh/headroom/policy"
)

func TestParseProtocol(t *testing.T) {
	for name, want := range map[string]policy.Protocol{
		"": policy.ProtocolUndeclared, "http": policy.ProtocolHTTP, "http1": policy.ProtocolHTTP, "kubernetes.io/ws": policy.ProtocolHTTP,
		"http2": policy.ProtocolHTTP2, "grpc": policy.ProtocolHTTP2, "kubernetes.io/h2c": policy.ProtocolHTTP2,
		"tcp": policy.ProtocolTCP, "tls": policy.ProtocolTCP, "https": policy.ProtocolTCP, "kubernetes.io/wss": policy.ProtocolTCP,
		"mysql": policy.ProtocolTCP, "redis": policy.ProtocolTCP,
	} {
		if got, err := policy.ParseProtocol(name); got != want || err != nil {
			t.Errorf("%q: got %q, %v, want %q", name, got, err, want)
		}
	}
	for _, name := range []string{"HTTP", "udp", "kubernetes.io/h3", " http"} {
		got, err := policy.ParseProtocol(name)
		if err == nil || got != "" {
			t.Errorf("%q: got %q", name, got)
			continue
		}
		for _, want := range []string{"want http, http2, grpc, tls or tcp", "kubernetes.io/h2c", "mysql", `got "` + name + `"`} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%q: error %q lacks %q", name, err, want)
			}
		}
	}
}
