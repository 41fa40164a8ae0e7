package relay

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	crand "crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"math/big"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/fault"
)

// oneWay is a Router of connections that all go to one place. It is a Call, too, and tells how calls end.
type oneWay struct {
	to   *Upstream
	ends chan Ending
}

func (r *oneWay) Begin(Head, time.Time) Call { return r }
func (r *oneWay) Waits() bool                { return false }
func (r *oneWay) Next(_ context.Context, failed *fault.Error) (Hop, *fault.Error) {
	return Hop{To: r.to}, failed
}
func (r *oneWay) Answered(Answer, time.Time) ([]Field, *fault.Error) { return nil, nil }
func (r *oneWay) End(e Ending, _ time.Time)                          { r.ends <- e }

// tunnels is an engine through which connections go to a replica.
type tunnels struct {
	t       *testing.T
	router  *oneWay
	front   net.Listener
	replica net.Listener
}

// overKinds runs a test for replicas that are reached in each of the ways there are.
func overKinds(t *testing.T, service Service, test func(*testing.T, *tunnels)) {
	for _, kind := range []struct {
		name   string
		listen func(*testing.T) net.Listener
		dial   func(ctx context.Context, to net.Addr) (net.Conn, error)
	}{
		{"plain", func(t *testing.T) net.Listener { return listen(t) }, dialAny},
		{"unix", listenUnix, dialAny},
		{"tls", listenTLS, func(ctx context.Context, to net.Addr) (net.Conn, error) {
			raw, err := dialAny(ctx, to)
			if err != nil {
				return nil, err
			}
			c := tls.Client(raw, &tls.Config{InsecureSkipVerify: true})
			return c, c.HandshakeContext(ctx)
		}},
	} {
		t.Run(kind.name, func(t *testing.T) {
			e := New(Config{DrainTimeout: 100 * time.Millisecond})
			tt := &tunnels{t: t, front: listen(t), replica: kind.listen(t)}
			tt.router = &oneWay{ends: make(chan Ending, 1000), to: e.NewUpstream(Target{Name: "it", Dial: func(ctx context.Context, _ Protocol) (net.Conn, error) {
				return kind.dial(ctx, tt.replica.Addr())
			}})}
			ctx, cancel := context.WithCancel(context.Background())
			var wg sync.WaitGroup
			wg.Go(func() { e.Run(ctx) })
			wg.Go(func() {
				e.Serve(ctx, tt.front, Entry{Router: tt.router, Service: func() Service { return service }})
			})
			t.Cleanup(func() { tt.replica.Close(); cancel(); wg.Wait() })
			test(t, tt)
		})
	}
}

func dialAny(ctx context.Context, to net.Addr) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, to.Network(), to.String())
}

func listenUnix(t *testing.T) net.Listener {
	dir, err := os.MkdirTemp("", "relay") // its name is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	l, err := net.Listen("unix", filepath.Join(dir, "s"))
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func listenTLS(t *testing.T) net.Listener {
	key, err := ecdsa.GenerateKey(elliptic.P256(), crand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	cert, err := x509.CreateCertificate(crand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.NewListener(listen(t), &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{cert}, PrivateKey: key}}})
}

// open makes a connection to the replica. The caller has to have said something if the replica must hear of it.
func (tt *tunnels) open(first string) (caller *net.TCPConn, replica net.Conn) {
	tt.t.Helper()
	c, err := net.Dial("tcp", tt.front.Addr().String())
	if err != nil {
		tt.t.Fatal(err)
	}
	if _, err := io.WriteString(c, first); err != nil {
		tt.t.Fatal(err)
	}
	r, err := tt.replica.Accept()
	if err != nil {
		tt.t.Fatal(err)
	}
	for _, c := range []net.Conn{c, r} {
		tt.t.Cleanup(func() { c.Close() })
		c.SetDeadline(time.Now().Add(20 * time.Second))
	}
	if got := tt.read(r, len(first)); got != first {
		tt.t.Fatalf("the replica got %q, want %q", got, first)
	}
	return c.(*net.TCPConn), r
}

func (tt *tunnels) read(c net.Conn, n int) string {
	tt.t.Helper()
	b := make([]byte, n)
	if n, err := io.ReadFull(c, b); err != nil {
		tt.t.Fatalf("%v after %q", err, b[:n])
	}
	return string(b)
}

func (tt *tunnels) wantEnd(want fault.Reason) {
	tt.t.Helper()
	select {
	case e := <-tt.router.ends:
		if e.Reason != want {
			tt.t.Errorf("the call ended as %q, want %q", e.Reason, want)
		}
	case <-time.After(10 * time.Second):
		tt.t.Fatal("the call does not end")
	}
}

func closeWrite(c net.Conn) { c.(interface{ CloseWrite() error }).CloseWrite() }

// reset breaks a connection off.
func reset(c net.Conn) {
	if over, ok := c.(*tls.Conn); ok {
		c = over.NetConn()
	}
	if l, ok := c.(*net.TCPConn); ok {
		l.SetLinger(0)
	}
	c.Close()
}

func TestTunnelCarriesAllThatComes(t *testing.T) {
	overKinds(t, Service{Protocol: TCP}, func(t *testing.T, tt *tunnels) {
		const size = 8 << 20
		data := make([]byte, size)
		rand.NewChaCha8([32]byte{1}).Read(data)
		var wg sync.WaitGroup
		send := func(c net.Conn, data []byte) {
			wg.Go(func() {
				for sizes := rand.New(rand.NewPCG(1, 2)); len(data) > 0; {
					n := min(len(data), 1+sizes.IntN(1<<sizes.IntN(20)))
					if _, err := c.Write(data[:n]); err != nil {
						t.Error(err)
						return
					}
					data = data[n:]
				}
				closeWrite(c)
			})
		}
		receive := func(c net.Conn, want []byte) {
			wg.Go(func() {
				if got, err := io.ReadAll(c); err != nil || !bytes.Equal(got, want) {
					t.Errorf("got %d bytes, %v", len(got), err)
				}
			})
		}
		caller, replica := tt.open("first")
		send(caller, data)
		receive(replica, data)
		send(replica, data[size/2:])
		receive(caller, data[size/2:])
		wg.Wait()
		tt.wantEnd(fault.None)
	})
}

func TestTunnelHalfClosed(t *testing.T) {
	overKinds(t, Service{Protocol: TCP}, func(t *testing.T, tt *tunnels) {
		for _, callerFirst := range []bool{true, false} {
			a, b := tt.open("x")
			first, second := net.Conn(a), b
			if !callerFirst {
				first, second = b, a
			}
			closeWrite(first)
			if n, err := second.Read(make([]byte, 1)); n != 0 || err != io.EOF {
				t.Errorf("after half of it was closed: %d, %v", n, err)
			}
			io.WriteString(second, "still here")
			if got := tt.read(first, 10); got != "still here" {
				t.Errorf("got %q", got)
			}
			closeWrite(second)
			if n, err := first.Read(make([]byte, 1)); n != 0 || err != io.EOF {
				t.Errorf("after all of it was closed: %d, %v", n, err)
			}
			tt.wantEnd(fault.None)
		}
	})
}

// TestTunnelBroken wants the other end to see that it was, and the call to say by whom.
func TestTunnelBroken(t *testing.T) {
	overKinds(t, Service{Protocol: TCP}, func(t *testing.T, tt *tunnels) {
		caller, replica := tt.open("x")
		reset(caller)
		if n, err := replica.Read(make([]byte, 1)); n > 0 || err == nil || err == io.EOF && replica.LocalAddr().Network() != "unix" {
			t.Errorf("after the caller broke off, the replica reads %d, %v", n, err)
		}
		tt.wantEnd(fault.Canceled)

		if replica.LocalAddr().Network() == "unix" {
			return // there is no such thing
		}
		caller, replica = tt.open("x")
		reset(replica)
		if n, err := caller.Read(make([]byte, 1)); n > 0 || !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("after the replica broke off, the caller reads %d, %v", n, err)
		}
		tt.wantEnd(fault.Reset)
	})
}

// TestReplicaThatHearsNobodyOut has a replica that says all that it has to say and closes its connection, while the caller
// still speaks: that is no failure.
func TestReplicaThatHearsNobodyOut(t *testing.T) {
	overKinds(t, Service{Protocol: TCP}, func(t *testing.T, tt *tunnels) {
		caller, replica := tt.open("x")
		io.WriteString(replica, "bye")
		replica.Close()
		if got, err := io.ReadAll(caller); string(got) != "bye" || err != nil {
			t.Errorf("got %q, %v", got, err)
		}
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for err := error(nil); err == nil; <-tick.C {
			_, err = io.WriteString(caller, "and another thing")
		}
		tt.wantEnd(fault.None)
	})
}

// TestNobodyThere wants the caller of a replica that can't be reached to see a failure, not an empty answer.
func TestNobodyThere(t *testing.T) {
	overKinds(t, Service{Protocol: TCP}, func(t *testing.T, tt *tunnels) {
		tt.replica.Close()
		c, err := net.Dial("tcp", tt.front.Addr().String())
		if err == nil { // else it was even quicker
			defer c.Close()
			c.SetDeadline(time.Now().Add(10 * time.Second))
			_, err = c.Read(make([]byte, 1))
		}
		if !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("got %v", err)
		}
		tt.wantEnd(fault.ConnectFailed)
	})
}

// TestIdleTunnelsNeedLittle counts the memory, and the files, of connections on which nothing happens: before either end
// has spoken, and after.
func TestIdleTunnelsNeedLittle(t *testing.T) {
	const many = 200
	overKinds(t, Service{DetectTimeout: time.Millisecond}, func(t *testing.T, tt *tunnels) {
		type pair struct {
			caller  *net.TCPConn
			replica net.Conn
		}
		var pairs []pair
		limit := int64(24 << 10) // with both stacks, and the test's own ends
		if t.Name() == "TestIdleTunnelsNeedLittle/tls" {
			limit = 48 << 10 // TLS has buffers of its own, at both its ends
		}
		memory, files := memoryInUse(), filesOpen(t)
		check := func(when string) {
			if used := (memoryInUse() - memory) / many; used > limit && !raceEnabled() {
				t.Errorf("%s: %d bytes a tunnel, want %d at most", when, used, limit)
			}
			if n := filesOpen(t) - files; n > 4*many+10 { // both ends of two connections
				t.Errorf("%s: %d files are open for %d tunnels", when, n, many)
			}
		}
		for range many {
			c, err := net.Dial("tcp", tt.front.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { c.Close() })
			r, err := tt.replica.Accept()
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { r.Close() })
			if over, ok := r.(*tls.Conn); ok {
				if err := over.Handshake(); err != nil {
					t.Fatal(err)
				}
			}
			pairs = append(pairs, pair{c.(*net.TCPConn), r})
		}
		check("before either end has spoken")
		for _, p := range pairs {
			io.WriteString(p.replica, "220 ready")
			tt.read(p.caller, 9)
			io.WriteString(p.caller, "QUIT")
			tt.read(p.replica, 4)
		}
		check("after both have")
	})
}

// TestShortTunnels counts the memory that connections take of which each carries little: what one was lent serves the next.
func TestShortTunnels(t *testing.T) {
	if raceEnabled() {
		t.Skip("memory is not lent again as reliably")
	}
	overKinds(t, Service{Protocol: TCP}, func(t *testing.T, tt *tunnels) {
		most := uint64(pieceSize)
		converse := func() {
			caller, replica := tt.open("hello")
			if _, ok := replica.(*tls.Conn); ok {
				most = 3 * pieceSize // a handshake takes much
			}
			defer caller.Close()
			defer replica.Close()
			io.WriteString(replica, "hello yourself")
			closeWrite(replica)
			closeWrite(caller)
			io.Copy(io.Discard, caller)
			tt.wantEnd(fault.None)
		}
		converse()
		const n = 100
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		for range n {
			converse()
		}
		runtime.ReadMemStats(&after)
		if each := (after.TotalAlloc - before.TotalAlloc) / n; each > most {
			t.Errorf("a connection takes %d bytes of memory, with both its ends, want less than %d", each, most)
		}
	})
}

func memoryInUse() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC() // pools are emptied by the second
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc + m.StackInuse)
}

func filesOpen(t *testing.T) int {
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skip("there is no /proc")
	}
	return len(all)
}
