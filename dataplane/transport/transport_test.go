package transport_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/headroom-mesh/headroom/dataplane/memnet"
	"github.com/headroom-mesh/headroom/dataplane/transport"
)

func protocols() []transport.Protocol {
	return []transport.Protocol{transport.HTTP, transport.Probe, transport.RPC}
}

func listen(t *testing.T) (net.Listener, netip.AddrPort) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l, l.Addr().(*net.TCPAddr).AddrPort()
}

// run starts f and returns what stops it and waits for its end.
func run(t *testing.T, f func(context.Context) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := f(ctx); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	stop = sync.OnceFunc(func() { cancel(); wg.Wait() })
	t.Cleanup(stop)
	return stop
}

// echo answers each connection of a protocol with its name, and then with what it reads.
func echo(l net.Listener, p transport.Protocol) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		wg.Go(func() {
			defer c.Close()
			io.WriteString(c, string(p)+":")
			io.Copy(c, c)
		})
	}
}

func ask(c net.Conn, payload string) (string, error) {
	defer c.Close()
	if _, err := io.WriteString(c, payload); err != nil {
		return "", err
	}
	if err := c.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		return "", err
	}
	b, err := io.ReadAll(c)
	return string(b), err
}

func TestAllProtocolsThroughOnePort(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	m := transport.NewMux(transport.Plain{}, nil, reg)
	l, addr := listen(t)
	var servers sync.WaitGroup
	for _, p := range protocols() {
		pl := m.Listener(p)
		servers.Go(func() { echo(pl, p) })
	}
	stop := run(t, func(ctx context.Context) error { return m.Run(ctx, l) })

	var wg sync.WaitGroup
	for i := range 60 {
		p := protocols()[i%3]
		wg.Go(func() {
			c, err := (transport.Plain{}).Dial(t.Context(), addr, p)
			if err != nil {
				t.Error(err)
				return
			}
			got, err := ask(c, "HEADROOM payload\n")
			if want := string(p) + ":HEADROOM payload\n"; err != nil || got != want {
				t.Errorf("%s: got %q, %v; want %q", p, got, err, want)
			}
		})
	}
	wg.Wait()
	stop()
	servers.Wait()
	if problems, err := testutil.GatherAndLint(reg); err != nil || len(problems) > 0 {
		t.Errorf("metrics: %v %v", problems, err)
	}
	if n := testutil.CollectAndCount(reg, "headroom_transport_accepted_connections_total"); n != 3 {
		t.Errorf("%d series of accepted connections, want 3", n)
	}
}

// TestDialDoesNotWait dials a server that never reads nor writes.
func TestDialDoesNotWait(t *testing.T) {
	_, addr := listen(t)
	c, err := (transport.Plain{}).Dial(t.Context(), addr, transport.Probe)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
}

func TestAccept(t *testing.T) {
	tests := []struct {
		name, sent string
		protocol   transport.Protocol
		wantErr    string
	}{
		{"http", "HEADROOM headroom-http/1\nGET", transport.HTTP, ""},
		{"http2", "HEADROOM headroom-h2/1\nGET", transport.HTTP2, ""},
		{"probe", "HEADROOM headroom-probe/2\nGET", transport.Probe, ""},
		{"rpc", "HEADROOM headroom-rpc/1\nGET", transport.RPC, ""},
		{"another version", "HEADROOM headroom-http/2\n", "", `"HEADROOM headroom-http/2\n": not an agent of a compatible version`},
		{"http request", "GET / HTTP/1.1\r\n\r\n", "", `"GET / HTTP/1.1\r\n\r\n": not an agent`},
		{"TLS", "\x16\x03\x01\x02", "", "begins TLS"},
		{"cut short", "HEADROOM head", "", `after "HEADROOM head": EOF`},
		{"nothing", "", "", "EOF"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				client, server := pair(t)
				io.WriteString(client, tt.sent)
				client.(interface{ CloseWrite() error }).CloseWrite()
				c, p, err := (transport.Plain{}).Accept(t.Context(), server)
				if tt.wantErr != "" {
					if err == nil || !strings.Contains(err.Error(), tt.wantErr) {
						t.Errorf("error %v, want %q in it", err, tt.wantErr)
					}
					if _, err := server.Read(make([]byte, 1)); !errors.Is(err, net.ErrClosed) {
						t.Errorf("the connection is left open: %v", err)
					}
					return
				}
				if err != nil || p != tt.protocol {
					t.Fatalf("protocol %q, %v; want %q", p, err, tt.protocol)
				}
				if rest, err := io.ReadAll(c); err != nil || string(rest) != "GET" {
					t.Errorf("payload %q, %v; want GET", rest, err)
				}
			})
		})
	}
}

// pair returns both ends of a connection in memory.
func pair(t *testing.T) (client, server net.Conn) {
	t.Helper()
	n := memnet.New()
	l, err := n.Host("10.0.0.2").Listen(7000)
	if err != nil {
		t.Fatal(err)
	}
	client, err = n.Host("10.0.0.1").Dial(t.Context(), netip.MustParseAddrPort("10.0.0.2:7000"))
	if err != nil {
		t.Fatal(err)
	}
	server, err = l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	return client, server
}

func TestAcceptByteByByteAndDeadlineCleared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client, server := pair(t)
		var wg sync.WaitGroup
		wg.Go(func() {
			for _, b := range []byte("HEADROOM headroom-rpc/1\n") {
				client.Write([]byte{b})
				time.Sleep(time.Millisecond)
			}
			time.Sleep(time.Hour)
			client.Write([]byte("later"))
			client.Close()
		})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		c, p, err := (transport.Plain{}).Accept(ctx, server)
		if err != nil || p != transport.RPC {
			t.Fatal(p, err)
		}
		if b, err := io.ReadAll(c); err != nil || string(b) != "later" {
			t.Errorf("read %q, %v an hour after the handshake", b, err)
		}
		wg.Wait()
	})
}

// inMemory runs a Mux inside a bubble.
func inMemory(t *testing.T, m *transport.Mux) (dial func() net.Conn, stop func()) {
	t.Helper()
	n := memnet.New()
	l, err := n.Host("10.0.0.2").Listen(7000)
	if err != nil {
		t.Fatal(err)
	}
	stop = run(t, func(ctx context.Context) error { return m.Run(ctx, l) })
	return func() net.Conn {
		t.Helper()
		c, err := n.Host("10.0.0.1").Dial(t.Context(), netip.MustParseAddrPort("10.0.0.2:7000"))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}, stop
}

// TestSlowLoris lets as many handshakes as are possible at once idle, and expects service afterwards.
func TestSlowLoris(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := transport.NewMux(transport.Plain{}, nil, nil)
		m.LimitHandshakes(32)
		l := m.Listener(transport.HTTP)
		dial, stop := inMemory(t, m)
		var idle []net.Conn
		for range 2*32 - 1 {
			c := dial()
			io.WriteString(c, "HEAD")
			idle = append(idle, c)
		}
		start := time.Now()
		good := dial()
		io.WriteString(good, "HEADROOM headroom-http/1\n")
		c, err := l.Accept()
		if err != nil || time.Since(start) > 11*time.Second {
			t.Fatalf("accepted after %v: %v", time.Since(start), err)
		}
		c.Close()
		good.Close()
		for _, c := range idle {
			if _, err := c.Read(make([]byte, 1)); err != io.EOF {
				t.Fatalf("an idle handshake is not closed: %v", err)
			}
			c.Close()
		}
		stop()
	})
}

func TestNobodyAccepts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := transport.NewMux(transport.Plain{}, nil, nil)
		m.Listener(transport.Probe) // accepted by nobody
		l := m.Listener(transport.HTTP)
		dial, stop := inMemory(t, m)
		var conns []net.Conn
		for range 300 {
			c := dial()
			io.WriteString(c, "HEADROOM headroom-probe/2\n")
			conns = append(conns, c)
		}
		synctest.Wait()
		refused := 0
		for _, c := range conns {
			c.SetReadDeadline(time.Now().Add(time.Millisecond))
			if _, err := c.Read(make([]byte, 1)); err == io.EOF {
				refused++
			}
		}
		if refused != 300-128 {
			t.Errorf("%d refused of 300, want all but 128", refused)
		}
		c := dial()
		io.WriteString(c, "HEADROOM headroom-http/1\n")
		if _, err := l.Accept(); err != nil {
			t.Error(err)
		}
		stop()
		for _, c := range conns {
			c.SetReadDeadline(time.Time{})
			if _, err := c.Read(make([]byte, 1)); err != io.EOF {
				t.Fatalf("a connection that nobody accepted is left open: %v", err)
			}
		}
	})
}

func TestProtocolWithoutListener(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dial, stop := inMemory(t, transport.NewMux(transport.Plain{}, nil, nil))
		c := dial()
		io.WriteString(c, "HEADROOM headroom-rpc/1\n")
		if _, err := c.Read(make([]byte, 1)); err != io.EOF {
			t.Errorf("read: %v, want EOF", err)
		}
		stop()
	})
}

func TestClosing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := transport.NewMux(transport.Plain{}, nil, nil)
		http, rpc := m.Listener(transport.HTTP), m.Listener(transport.RPC)
		if a := http.Addr(); a.String() != "headroom-http/1" {
			t.Errorf("address before Run: %v", a)
		}
		dial, stop := inMemory(t, m)
		kept := dial()
		io.WriteString(kept, "HEADROOM headroom-http/1\n")
		c, err := http.Accept()
		if err != nil {
			t.Fatal(err)
		}
		if a := http.Addr(); a.String() != "10.0.0.2:7000" {
			t.Errorf("address: %v", a)
		}
		rpc.Close()
		rpc.Close()
		refused := dial()
		io.WriteString(refused, "HEADROOM headroom-rpc/1\n")
		if _, err := refused.Read(make([]byte, 1)); err != io.EOF {
			t.Errorf("read: %v, want EOF", err)
		}
		halfway := dial()
		io.WriteString(halfway, "HEADR")
		synctest.Wait()

		start := time.Now()
		stop()
		if took := time.Since(start); took > 0 {
			t.Errorf("Run took %v to end", took)
		}
		for _, l := range []net.Listener{http, rpc} {
			if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
				t.Errorf("accept after the end: %v, want ErrClosed", err)
			}
		}
		io.WriteString(kept, "still here")
		kept.Close()
		if b, err := io.ReadAll(c); err != nil || string(b) != "still here" {
			t.Errorf("connection of its owner: %q, %v", b, err)
		}
	})
}

func TestRunFailsWhenTheListenerIsClosed(t *testing.T) {
	l, _ := listen(t)
	m := transport.NewMux(transport.Plain{}, nil, nil)
	pl := m.Listener(transport.HTTP)
	l.Close()
	if err := m.Run(t.Context(), l); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Run: %v, want ErrClosed", err)
	}
	if _, err := pl.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("accept: %v, want ErrClosed", err)
	}
}

// exhausted is a listener without file descriptors for a while.
type exhausted struct {
	net.Listener
	failures atomic.Int32
}

func (l *exhausted) Accept() (net.Conn, error) {
	if l.failures.Add(-1) >= 0 {
		return nil, fmt.Errorf("accept: %w", syscall.EMFILE)
	}
	return l.Listener.Accept()
}

func TestAcceptErrorsPass(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := memnet.New()
		raw, err := n.Host("10.0.0.2").Listen(7000)
		if err != nil {
			t.Fatal(err)
		}
		l := &exhausted{Listener: raw}
		l.failures.Store(8)
		m := transport.NewMux(transport.Plain{}, nil, nil)
		pl := m.Listener(transport.HTTP)
		stop := run(t, func(ctx context.Context) error { return m.Run(ctx, l) })
		start := time.Now()
		c, err := n.Host("10.0.0.1").Dial(t.Context(), netip.MustParseAddrPort("10.0.0.2:7000"))
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(c, "HEADROOM headroom-http/1\n")
		if _, err := pl.Accept(); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); took < time.Second || took > 5*time.Second {
			t.Errorf("recovered from 8 errors after %v, want pauses that grow", took)
		}
		stop()
	})
}

func TestDialFails(t *testing.T) {
	l, addr := listen(t)
	l.Close()
	if _, err := (transport.Plain{}).Dial(t.Context(), addr, transport.HTTP); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dial: %v, want refused", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := (transport.Plain{}).Dial(ctx, addr, transport.HTTP); !errors.Is(err, context.Canceled) {
		t.Errorf("dial: %v, want canceled", err)
	}
}
