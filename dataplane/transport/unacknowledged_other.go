//go:build !linux

package transport

import "net"

// limitUnacknowledged does nothing where the kernel has no such limit: probes notice the silence.
func limitUnacknowledged(net.Conn) {}
