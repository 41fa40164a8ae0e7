package sockets_test

import (
	"net"
	"strings"
	"testing"

	"github.com/headroom-mesh/headroom/dataplane/sockets"
)

// TestNoOriginalDestination expects connections that can't have been redirected to be named. That redirected ones are told
// is among the tests of package agent/capture.
func TestNoOriginalDestination(t *testing.T) {
	c, _ := net.Pipe()
	defer c.Close()
	if _, err := sockets.OriginalDestination(c); err == nil || !strings.Contains(err.Error(), "is no TCP connection") {
		t.Errorf("a pipe: %v", err)
	}
	w, far := pair(t)
	far.Close()
	w.Close()
	if _, err := sockets.OriginalDestination(w); err == nil {
		t.Error("no error for a connection that is closed")
	}
}
