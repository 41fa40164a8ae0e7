package names

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
)

const (
	// maxConns bounds the clients connected by TCP to one address.
	maxConns = 256
	// idleTimeout is how long they may stay without a query.
	idleTimeout = 10 * time.Second
	// writeTimeout is how long they may take to read an answer.
	writeTimeout = 4 * time.Second
	// pause follows an error of a socket that may last, such as too many open files.
	pause = 100 * time.Millisecond
)

// socket is where the server listens, by UDP and TCP.
type socket struct {
	at  netip.AddrPort
	udp *net.UDPConn
	tcp *net.TCPListener
}

func listenAll(addrs []netip.AddrPort) ([]socket, error) {
	var sockets []socket
	for _, at := range addrs {
		l, err := listen(at)
		if err != nil {
			closeAll(sockets)
			return nil, explain(at, err)
		}
		sockets = append(sockets, l)
	}
	return sockets, nil
}

func closeAll(sockets []socket) {
	for _, l := range sockets {
		l.udp.Close()
		l.tcp.Close()
	}
}

func explain(at netip.AddrPort, err error) error {
	what := fmt.Sprintf("answer DNS queries on %s", at)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return fmt.Errorf("%s: %w: another program is there already, such as a DNS server; choose another address or port", what, err)
	case errors.Is(err, syscall.EACCES):
		return fmt.Errorf("%s: %w: a port below 1024 wants root or CAP_NET_BIND_SERVICE", what, err)
	}
	return fmt.Errorf("%s: %w", what, err)
}

// listen takes the same port for both. If any will do, one that is free for TCP may be taken for UDP, so it tries again.
func listen(at netip.AddrPort) (socket, error) {
	for attempt := 1; ; attempt++ {
		l, err := listenOnce(at)
		if err == nil || at.Port() != 0 || attempt == 10 {
			return l, err
		}
	}
}

func listenOnce(at netip.AddrPort) (socket, error) {
	family := "4"
	if at.Addr().Unmap().Is6() {
		family = "6"
	}
	tcp, err := net.ListenTCP("tcp"+family, net.TCPAddrFromAddrPort(at))
	if err != nil {
		return socket{}, err
	}
	bound := netip.AddrPortFrom(at.Addr().Unmap(), tcp.Addr().(*net.TCPAddr).AddrPort().Port())
	udp, err := net.ListenUDP("udp"+family, net.UDPAddrFromAddrPort(bound))
	if err == nil && at.Addr().IsUnspecified() {
		err = noteDestinations(udp, family)
	}
	if err != nil {
		tcp.Close()
		if udp != nil {
			udp.Close()
		}
		return socket{}, err
	}
	return socket{bound, udp, tcp}, nil
}

// noteDestinations lets answers come from the address that was asked, where that may be any of the machine's.
func noteDestinations(udp *net.UDPConn, family string) error {
	if family == "6" {
		return ipv6.NewPacketConn(udp).SetControlMessage(ipv6.FlagDst|ipv6.FlagInterface, true)
	}
	return ipv4.NewPacketConn(udp).SetControlMessage(ipv4.FlagDst|ipv4.FlagInterface, true)
}

// serveUDP answers until conn is closed.
func (s *Server) serveUDP(ctx context.Context, wg *sync.WaitGroup, conn *net.UDPConn) {
	buf := make([]byte, dns.MaxMsgSize)
	for ctx.Err() == nil {
		n, from, err := dns.ReadFromSessionUDP(conn, buf)
		if err != nil {
			wait(ctx, pause)
			continue
		}
		s.handle(ctx, wg, "udp", buf[:n], func(answer []byte) {
			_, _ = dns.WriteToSessionUDP(conn, answer, from) // a client that is gone asks no more
		})
	}
}

func wait(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// serveTCP accepts until l is closed.
func (s *Server) serveTCP(ctx context.Context, wg *sync.WaitGroup, l *net.TCPListener) {
	places := make(chan struct{}, maxConns)
	for ctx.Err() == nil {
		conn, err := l.Accept()
		if err != nil {
			wait(ctx, pause)
			continue
		}
		select {
		case places <- struct{}{}:
			wg.Go(func() {
				s.serveConn(ctx, conn)
				<-places
			})
		default:
			conn.Close()
		}
	}
}

// serveConn answers the queries of one client, each as soon as its answer is known.
func (s *Server) serveConn(ctx context.Context, conn net.Conn) {
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	var wg sync.WaitGroup
	defer wg.Wait()
	var mu sync.Mutex // held to write an answer as a whole
	for {
		conn.SetReadDeadline(time.Now().Add(idleTimeout))
		query, err := readFrame(conn)
		if err != nil {
			return
		}
		s.handle(ctx, &wg, "tcp", query, func(answer []byte) {
			mu.Lock()
			defer mu.Unlock()
			conn.SetWriteDeadline(time.Now().Add(writeTimeout))
			if writeFrame(conn, answer) != nil {
				conn.Close()
			}
		})
	}
}
