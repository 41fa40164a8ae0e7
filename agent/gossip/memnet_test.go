package gossip

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
)

// network joins transports in memory. Packets and streams between hosts that cut says are apart get lost.
type network struct {
	mu    sync.Mutex
	hosts map[string]*host
	cut   func(from, to string) bool
}

type host struct {
	net     *network
	addr    string
	packets chan *memberlist.Packet
	streams chan net.Conn
}

func newNetwork() *network {
	return &network{hosts: map[string]*host{}, cut: func(string, string) bool { return false }}
}

func (n *network) partition(cut func(from, to string) bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.cut = cut
}

// attach makes g use the network instead of sockets.
func (n *network) attach(g *Gossip) {
	g.newTransport = func(context.Context) (memberlist.NodeAwareTransport, netip.AddrPort, error) {
		n.mu.Lock()
		defer n.mu.Unlock()
		h := &host{net: n, addr: g.cfg.Advertise.String(), packets: make(chan *memberlist.Packet, 256), streams: make(chan net.Conn, 16)}
		n.hosts[h.addr] = h
		return h, g.cfg.Advertise, nil
	}
}

func (n *network) reach(from, to string) (*host, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	h, ok := n.hosts[to]
	return h, ok && !n.cut(from, to)
}

func (h *host) FinalAdvertiseAddr(ip string, port int) (net.IP, int, error) {
	return net.ParseIP(ip).To4(), port, nil
}

func (h *host) WriteToAddress(b []byte, a memberlist.Address) (time.Time, error) {
	now := time.Now()
	if to, ok := h.net.reach(h.addr, a.Addr); ok {
		p := &memberlist.Packet{Buf: append([]byte(nil), b...), From: net.UDPAddrFromAddrPort(netip.MustParseAddrPort(h.addr)), Timestamp: now}
		select {
		case to.packets <- p:
		default: // lost, as packets may be
		}
	}
	return now, nil
}

func (h *host) DialAddressTimeout(a memberlist.Address, timeout time.Duration) (net.Conn, error) {
	to, ok := h.net.reach(h.addr, a.Addr)
	if !ok {
		time.Sleep(timeout)
		return nil, errors.New("dial " + a.Addr + ": timeout")
	}
	ours, theirs := net.Pipe()
	select {
	case to.streams <- theirs:
		return ours, nil
	default:
		return nil, errors.New("dial " + a.Addr + ": refused")
	}
}

func (h *host) WriteTo(b []byte, addr string) (time.Time, error) {
	return h.WriteToAddress(b, memberlist.Address{Addr: addr})
}

func (h *host) DialTimeout(addr string, timeout time.Duration) (net.Conn, error) {
	return h.DialAddressTimeout(memberlist.Address{Addr: addr}, timeout)
}

func (h *host) PacketCh() <-chan *memberlist.Packet { return h.packets }
func (h *host) StreamCh() <-chan net.Conn           { return h.streams }

func (h *host) Shutdown() error {
	h.net.mu.Lock()
	defer h.net.mu.Unlock()
	delete(h.net.hosts, h.addr)
	return nil
}
