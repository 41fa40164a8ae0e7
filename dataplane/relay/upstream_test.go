package relay

import (
	"net"
	"testing"
)

// TestClosedConnectionsAreLetGo wants those that were idle for too long to be held no more: one of TLS takes much memory.
func TestClosedConnectionsAreLetGo(t *testing.T) {
	u := New(Config{}).NewUpstream(Target{})
	for used := range int64(4) {
		near, far := net.Pipe()
		defer far.Close()
		u.idle = append(u.idle, &upstreamConn{socket: newSocket(near), upstream: u, used: used})
	}
	u.closeIdleSince(3)
	if len(u.idle) != 1 || u.idle[0].used != 3 {
		t.Fatalf("%d connections are left, want the one used last", len(u.idle))
	}
	for _, c := range u.idle[1:cap(u.idle)] {
		if c != nil {
			t.Errorf("a connection that was closed is still held")
		}
	}
}
