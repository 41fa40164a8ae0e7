package names

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"
)

// exchangeRaw sends a query as it is, and returns the answer as it is.
func exchangeRaw(t *testing.T, network string, at netip.AddrPort, query []byte) []byte {
	t.Helper()
	conn, err := net.Dial(network, at.String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(10 * time.Second))
	var answer []byte
	if network == "tcp" {
		if err = writeFrame(conn, query); err == nil {
			answer, err = readFrame(conn)
		}
	} else {
		if err = writeDatagram(conn, query); err == nil {
			answer = make([]byte, dns.MaxMsgSize)
			var n int
			n, err = conn.Read(answer)
			answer = answer[:n]
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	return answer
}

// TestNothingIsChanged forwards a query with things in it that nobody can know, and wants it to arrive as it was.
func TestNothingIsChanged(t *testing.T) {
	tail := []byte{0, 0xff, 0xfe, 0xff, 0xfd, 1, 2, 3} // no record at all
	odd := func(query []byte) []byte {
		query = slices.Clone(query)
		query[11]++
		return append(query, tail...)
	}
	u := newUpstream(t, func(network string, query []byte) []byte {
		answer := slices.Clone(query)
		answer[2] |= 0x80 | 0x02 // an answer, truncated
		answer[3] |= 0x70        // with bits that are rarely set
		return append(answer, network...)
	})
	at := serve(t, Config{Upstreams: []netip.AddrPort{u.at}})
	for _, network := range []string{"udp", "tcp"} {
		query := odd(packed(t, "wWw.eXaMpLe.CoM.", func(m *dns.Msg) {
			m.SetEdns0(3333, true)
			m.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_LOCAL{Code: 65001, Data: []byte("x")}}
			m.CheckingDisabled = true
			m.Question[0].Qtype = 65500
		}))
		answer := exchangeRaw(t, network, at, query)
		queries, _ := u.asked()
		seen := queries[len(queries)-1]
		if !bytes.Equal(seen[2:], query[2:]) {
			t.Errorf("by %s: sent    %x\narrived %x", network, query, seen)
		}
		want := append(slices.Clone(query), network...)
		want[2] |= 0x82
		want[3] |= 0x70
		if !bytes.Equal(answer, want) {
			t.Errorf("by %s: got  %x\nwant %x", network, answer, want)
		}
	}
}

// TestForwardedByTCP wants a resolver that answers something else not to be believed by TCP, either.
func TestForwardedByTCP(t *testing.T) {
	wrong := newUpstream(t, func(_ string, query []byte) []byte {
		answer := answerA(query, "192.0.2.66")
		header(answer).setID(header(query).id() ^ 1)
		return answer
	})
	right := newUpstream(t, func(network string, query []byte) []byte {
		if network != "tcp" {
			return refusal(query, dns.RcodeServerFailure)
		}
		return answerA(query, "192.0.2.1")
	})
	at := serve(t, Config{Upstreams: []netip.AddrPort{wrong.at, right.at}})
	query := packed(t, "example.com.", nil)
	if got := describe(t, query, exchangeRaw(t, "tcp", at, query)); got != "192.0.2.1" {
		t.Errorf("got %s", got)
	}
}

// TestQueriesAreHardToGuess wants a new ID and a new port for each query.
func TestQueriesAreHardToGuess(t *testing.T) {
	u := plainUpstream(t)
	at := serve(t, Config{Upstreams: []netip.AddrPort{u.at}})
	query := packed(t, "example.com.", nil)
	for range 30 {
		exchangeRaw(t, "udp", at, query)
	}
	queries, clients := u.asked()
	ids, ports := map[uint16]bool{}, map[string]bool{}
	for i := range queries {
		ids[header(queries[i]).id()] = true
		ports[clients[i]] = true
	}
	if len(ids) < 25 || len(ports) < 25 {
		t.Errorf("30 queries had %d IDs and %d ports", len(ids), len(ports))
	}
}

// resolver stands for one in the bubble: it gets each query, and how many it had before.
type resolver func(conn net.Conn, before int, query []byte)

func silent(conn net.Conn, _ int, _ []byte) { io.Copy(io.Discard, conn) }

func answers(addr string) resolver {
	return func(conn net.Conn, _ int, query []byte) { conn.Write(answerA(query, addr)) }
}

func after(d time.Duration, r resolver) resolver {
	return func(conn net.Conn, before int, query []byte) { time.Sleep(d); r(conn, before, query) }
}

func says(rcode int) resolver {
	return func(conn net.Conn, _ int, query []byte) { conn.Write(refusal(query, rcode)) }
}

// losesFirst loses the first query that comes.
func losesFirst(r resolver) resolver {
	return func(conn net.Conn, before int, query []byte) {
		if before == 0 {
			silent(conn, before, query)
			return
		}
		r(conn, before, query)
	}
}

// spoofed is what comes from somebody who has to guess.
func spoofed(r resolver) resolver {
	return func(conn net.Conn, before int, query []byte) {
		bad := answerA(query, "192.0.2.66")
		header(bad).setID(header(bad).id() + 1)
		conn.Write(bad)
		other := packed(nil, "example.org.", nil)
		header(other).setID(header(query).id())
		conn.Write(answerA(other, "192.0.2.66"))
		conn.Write(query)
		conn.Write([]byte("?"))
		r(conn, before, query)
	}
}

// newBubbleForwarder asks resolvers that aren't there: at 10.0.0.1 the first of the list, and so on. Nobody listens where
// it is nil.
func newBubbleForwarder(resolvers ...resolver) *forwarder {
	f := newForwarder(nil)
	byAddress := map[string]resolver{}
	var addrs []netip.AddrPort
	for i, r := range resolvers {
		at := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)}), 53)
		addrs = append(addrs, at)
		byAddress[at.String()] = r
	}
	f.upstreams.Store(&addrs)
	var mu sync.Mutex
	asked := map[string]int{}
	f.dial = func(_ context.Context, _, address string) (net.Conn, error) {
		r := byAddress[address]
		if r == nil {
			return nil, errors.New("connection refused")
		}
		mu.Lock()
		before := asked[address]
		asked[address]++
		mu.Unlock()
		client, server := net.Pipe()
		go func() {
			defer server.Close()
			query := make([]byte, 512)
			if n, err := server.Read(query); err == nil {
				r(server, before, query[:n])
			}
		}()
		return client, nil
	}
	return f
}

func TestResolversInOrder(t *testing.T) {
	one, two := answers("192.0.2.1"), answers("192.0.2.2")
	tests := []struct {
		name      string
		resolvers []resolver
		want      string
	}{
		{"the first answers", []resolver{one, two}, "192.0.2.1 after 0s"},
		{"the first is dead", []resolver{silent, two}, "192.0.2.2 after 1s"},
		{"two are dead", []resolver{silent, silent, two}, "192.0.2.2 after 2s"},
		{"the first is slow, and the second dead", []resolver{after(1500*time.Millisecond, one), silent}, "192.0.2.1 after 1.5s"},
		{"the first is slow, and the second is not", []resolver{after(1500*time.Millisecond, one), two}, "192.0.2.2 after 1s"},
		{"nobody is at the first", []resolver{nil, two}, "192.0.2.2 after 0s"},
		{"the only one is slow", []resolver{after(3900*time.Millisecond, one)}, "192.0.2.1 after 3.9s"},
		{"a query is lost", []resolver{losesFirst(one)}, "192.0.2.1 after 1s"},
		{"the first is broken", []resolver{says(dns.RcodeServerFailure), two}, "192.0.2.2 after 0s"},
		{"the first refuses us", []resolver{says(dns.RcodeRefused), after(time.Second, two)}, "192.0.2.2 after 1s"},
		{"all are broken, each in its way", []resolver{says(dns.RcodeRefused), says(dns.RcodeServerFailure)}, "REFUSED after 0s"},
		{"the first is broken, and the second dead", []resolver{says(dns.RcodeRefused), silent}, "REFUSED after 4s"},
		{"there is no such name", []resolver{says(dns.RcodeNameError), two}, "NXDOMAIN after 0s"},
		{"all are dead", []resolver{silent, silent}, "nothing after 4s"},
		{"nobody is there", []resolver{nil, nil}, "nothing after 0s"},
		{"there are none", nil, "nothing after 0s"},
		{"somebody guesses", []resolver{spoofed(one)}, "192.0.2.1 after 0s"},
		{"somebody guesses, and the resolver is dead", []resolver{spoofed(silent), two}, "192.0.2.2 after 1s"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				query := packed(t, "example.com.", nil)
				answer, took := newBubbleForwarder(test.resolvers...).forward(t.Context(), "udp", query)
				if got := describe(t, query, answer) + " after " + took.String(); got != test.want {
					t.Errorf("got %s, want %s", got, test.want)
				}
				time.Sleep(2 * forwardTimeout) // until the resolvers have ended, too
			})
		})
	}
}

func describe(t *testing.T, query, answer []byte) string {
	if answer == nil {
		return "nothing"
	}
	if !isAnswerTo(answer, query) {
		t.Errorf("%x is no answer to %x", answer, query)
	}
	var m dns.Msg
	if err := m.Unpack(answer); err != nil {
		t.Error(err)
	}
	if len(m.Answer) > 0 {
		return m.Answer[0].(*dns.A).A.String()
	}
	return dns.RcodeToString[m.Rcode]
}

// TestTooManyWait wants what goes beyond the limit to fail at once, and the rest to fail in time, and not to take much memory
// meanwhile.
func TestTooManyWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, err := New(Config{Lookup: lookup})
		if err != nil {
			t.Fatal(err)
		}
		s.forwarder = newBubbleForwarder(silent)
		began := time.Now()
		var mu sync.Mutex
		failures := map[string]int{}
		var wg sync.WaitGroup
		query := packed(t, "example.com.", func(m *dns.Msg) { m.SetEdns0(1232, false) })
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		for range maxForwarded + 5 {
			s.handle(t.Context(), &wg, "udp", query, func(answer []byte) {
				mu.Lock()
				defer mu.Unlock()
				failures[fmt.Sprintf("%s after %s", describe(t, query, answer), time.Since(began))]++
			})
		}
		wg.Wait()
		if failures["SERVFAIL after 0s"] != 5 || failures["SERVFAIL after 4s"] != maxForwarded {
			t.Errorf("got %v", failures)
		}
		runtime.ReadMemStats(&after)
		if took := (after.TotalAlloc - before.TotalAlloc) / maxForwarded; took > 48<<10 {
			t.Errorf("each query that waited took %d bytes", took)
		}
		s.forwarder.dial = newBubbleForwarder(answers("192.0.2.1")).dial
		s.handle(t.Context(), &wg, "udp", query, func(answer []byte) {
			if got := describe(t, query, answer); got != "192.0.2.1" {
				t.Errorf("once there is room again: got %s", got)
			}
		})
		wg.Wait()
	})
}

// TestOwnAddressIsNoResolver wants no query to go round in circles.
func TestOwnAddressIsNoResolver(t *testing.T) {
	tests := []struct{ own, upstream, want string }{
		{"127.0.0.1:53", "127.0.0.1:53", ""},
		{"127.0.0.1:53", "[::ffff:127.0.0.1]:53", ""},
		{"127.0.0.1:53", "127.0.0.1:5353", "127.0.0.1:5353"},
		{"127.0.0.1:53", "127.0.0.53:53", "127.0.0.53:53"},
		{"127.0.0.1:53", "0.0.0.0:53", ""},
		{"0.0.0.0:53", "127.0.0.53:53", ""},
		{"0.0.0.0:53", "192.0.2.1:53", "192.0.2.1:53"},
		{"[::]:53", "[::1]:53", ""},
		{"[::1]:53", "[::1]:53", ""},
	}
	for _, test := range tests {
		s, err := New(Config{Lookup: lookup, Upstreams: []netip.AddrPort{netip.MustParseAddrPort(test.upstream)}})
		if err != nil {
			t.Fatal(err)
		}
		s.addrs = []netip.AddrPort{netip.MustParseAddrPort(test.own)}
		s.readResolvers()
		var got []string
		for _, at := range *s.forwarder.upstreams.Load() {
			got = append(got, at.String())
		}
		if strings.Join(got, " ") != test.want {
			t.Errorf("on %s with resolver %s: asks %v, want %q", test.own, test.upstream, got, test.want)
		}
	}
}
