//go:build linux

package main

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/headroom-mesh/headroom/bench/load"
)

const (
	headroomName = "headroom"
	benchService = "bench"
)

// The ports of an agent that are used here.
const (
	gossipPort    = 7946
	etcdPort      = 2379
	proxyPort     = 15001
	adminPort     = 15010
	adminHTTPPort = 15000
)

// headroom runs as it is shipped: agents with all their defaults. An agent more holds the registry; it has no part in the
// traffic, and is not counted.
func headroom() contestant {
	return contestant{name: headroomName, start: func(_ context.Context, at place) (*running, error) { return startHeadroom(at) }}
}

// mesh is a set of agents that are being started.
type mesh struct {
	place
	running
	registry node
}

// node is an agent's.
type node struct {
	name string
	at   netip.Addr
}

func (n node) port(p uint16) netip.AddrPort { return netip.AddrPortFrom(n.at, p) }

func startHeadroom(at place) (*running, error) {
	m := &mesh{place: at, registry: node{"registry", at.address(100)}}
	err := m.start()
	return &m.running, err
}

func (m *mesh) start() error {
	m.authority, m.profiles = benchService+".mesh", map[string]string{}
	if err := m.agent(m.registry, false, "--etcd-embedded", m.folder(m.registry, "etcd")); err != nil {
		return err
	}
	join := []string{"--etcd", m.registry.port(etcdPort).String(), "--join", m.registry.port(gossipPort).String()}
	caller, replicas := node{"a", m.address(0)}, node{"a", m.address(0)}
	if m.topology.hops > 1 {
		replicas = node{"b", m.address(1)}
	}
	if err := m.declare(replicas); err != nil {
		return err
	}
	if replicas != caller {
		if err := m.agent(replicas, true, append(join, "--services", m.folder(replicas, "services"))...); err != nil {
			return err
		}
	} else {
		join = append(join, "--services", m.folder(replicas, "services"))
	}
	m.entry = caller.port(proxyPort)
	if m.kind.Protocol == load.TCP { // its connections don't say where they want to go
		m.entry = caller.port(load.TCP.Port())
		join = append(join, "--listen", benchService+"="+m.entry.String())
	}
	return m.agent(caller, true, join...)
}

func (m *mesh) folder(n node, name string) string { return filepath.Join(m.dir, n.name, name) }

// agent starts an agent: on the cores of proxies, if it has a part in the traffic.
func (m *mesh) agent(n node, counted bool, args ...string) error {
	dir := m.folder(n, "data")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	args = append([]string{"--node", n.name, "--bind", n.at.String(), "--data-dir", dir, "--log-level", "warn"}, args...)
	if m.topology.mtls {
		args = append(args, "--ca", filepath.Join(m.dir, "ca"))
	} else {
		args = append(args, "--mtls", "off")
	}
	on, env := m.cores.load, []string(nil)
	if counted {
		on, env = m.cores.proxies, []string{"GOMAXPROCS=1"}
	}
	p, err := start(on, env, dir, n.name, filepath.Join(m.bin, "agent"), args...)
	if err != nil {
		return err
	}
	if counted {
		m.counted = append(m.counted, p)
		m.profiles[n.name] = n.port(adminHTTPPort).String()
	} else {
		m.others = append(m.others, p)
	}
	return nil
}

// declare writes the replicas down for the agent of their node.
func (m *mesh) declare(n node) error {
	dir := m.folder(n, "services")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	var doc strings.Builder
	fmt.Fprintf(&doc, "apiVersion: headroom.dev/v1\nkind: LocalService\nmetadata: {name: %s}\nspec:\n", benchService)
	switch m.kind.Protocol {
	case load.HTTP2:
		doc.WriteString("  protocol: http2\n")
	case load.TCP:
		doc.WriteString("  protocol: tcp\n")
	}
	doc.WriteString("  endpoints:\n")
	for _, ip := range m.origin {
		fmt.Fprintf(&doc, "  - address: %s\n", netip.AddrPortFrom(ip, m.kind.Protocol.Port()))
	}
	return os.WriteFile(filepath.Join(dir, "bench.yaml"), []byte(doc.String()), 0o644)
}
