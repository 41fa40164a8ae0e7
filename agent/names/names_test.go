package names

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/headroom-mesh/headroom/registry"
)

// lookup knows four services: web with both families, the others with one.
func lookup(service registry.ServiceName) (ipv4, ipv6 netip.Addr, found bool) {
	switch service {
	case "web":
		return netip.MustParseAddr("240.0.0.1"), netip.MustParseAddr("fd00::1"), true
	case "old":
		return netip.MustParseAddr("240.0.0.2"), netip.Addr{}, true
	case "cart.shop":
		return netip.MustParseAddr("240.0.0.9"), netip.Addr{}, true
	case "new":
		return netip.Addr{}, netip.MustParseAddr("fd00::3"), true
	}
	return netip.Addr{}, netip.Addr{}, false
}

func lookupAddr(a netip.Addr) (registry.ServiceName, bool) {
	return "web", a == netip.MustParseAddr("240.0.0.1") || a == netip.MustParseAddr("fd00::1")
}

// serve runs a server until the test ends.
func serve(t *testing.T, cfg Config) netip.AddrPort {
	t.Helper()
	s, stop := start(t, cfg)
	t.Cleanup(func() {
		if err := stop(); err != nil {
			t.Errorf("Run returned %v", err)
		}
	})
	return s.Addrs()[0]
}

// start runs a server with a file system of its own until stop is called.
func start(t *testing.T, cfg Config) (s *Server, stop func() error) {
	t.Helper()
	if cfg.Addrs == nil {
		cfg.Addrs = []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:0")}
	}
	if cfg.Root == "" {
		cfg.Root = t.TempDir()
	}
	if cfg.Lookup == nil {
		cfg.Lookup = lookup
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.NewTextHandler(t.Output(), nil))
	}
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	select {
	case <-s.Ready():
	case err := <-ended:
		cancel()
		t.Fatal(err)
	}
	return s, func() error { cancel(); return <-ended }
}

// upstream is a resolver that answers what the test wants, by UDP and TCP, and knows what it was asked.
type upstream struct {
	at netip.AddrPort

	mu      sync.Mutex
	queries [][]byte
	clients []string
}

// newUpstream answers each query in a goroutine; nil is no answer.
func newUpstream(t *testing.T, answer func(network string, query []byte) []byte) *upstream {
	t.Helper()
	l, err := listen(netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	u := &upstream{at: l.at}
	var wg sync.WaitGroup
	t.Cleanup(func() { closeAll([]socket{l}); wg.Wait() })
	wg.Go(func() {
		buf := make([]byte, dns.MaxMsgSize)
		for {
			n, from, err := l.udp.ReadFromUDPAddrPort(buf)
			if err != nil {
				return
			}
			query := slices.Clone(buf[:n])
			u.note(query, from.String())
			wg.Go(func() {
				if a := answer("udp", query); a != nil {
					l.udp.WriteToUDPAddrPort(a, from)
				}
			})
		}
	})
	wg.Go(func() {
		for {
			conn, err := l.tcp.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer conn.Close()
				query, err := readFrame(conn)
				if err != nil {
					return
				}
				u.note(query, conn.RemoteAddr().String())
				if a := answer("tcp", query); a != nil {
					writeFrame(conn, a)
				}
			})
		}
	})
	return u
}

func (u *upstream) note(query []byte, client string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.queries = append(u.queries, query)
	u.clients = append(u.clients, client)
}

func (u *upstream) asked() (queries [][]byte, clients []string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	return slices.Clone(u.queries), slices.Clone(u.clients)
}

// answerA is the answer that a name has one address.
func answerA(query []byte, addr string) []byte {
	var in dns.Msg
	if err := in.Unpack(query); err != nil {
		return refusal(query, dns.RcodeFormatError)
	}
	out := new(dns.Msg).SetReply(&in)
	out.Answer = []dns.RR{&dns.A{Hdr: head(in.Question[0].Name, dns.TypeA, 60), A: net.ParseIP(addr)}}
	return pack(out)
}

func plainUpstream(t *testing.T) *upstream {
	return newUpstream(t, func(_ string, query []byte) []byte { return answerA(query, "192.0.2.1") })
}

func ask(t *testing.T, network string, at netip.AddrPort, m *dns.Msg) *dns.Msg {
	t.Helper()
	client := dns.Client{Net: network, Timeout: 10 * time.Second}
	answer, _, err := client.Exchange(m, at.String())
	if err != nil {
		t.Fatalf("%s by %s: %v", m.Question[0].String(), network, err)
	}
	return answer
}

func question(name string, qtype uint16) *dns.Msg { return new(dns.Msg).SetQuestion(name, qtype) }

// show writes an answer in one line.
func show(m *dns.Msg) string {
	first := dns.RcodeToString[m.Rcode]
	if m.Authoritative {
		first += " aa"
	}
	if m.Truncated {
		first += " tc"
	}
	parts := []string{first}
	for _, rr := range m.Answer {
		parts = append(parts, strings.Join(strings.Fields(rr.String()), " "))
	}
	for _, rr := range m.Ns {
		if s, ok := rr.(*dns.SOA); ok {
			parts = append(parts, fmt.Sprintf("soa %s %d", s.Hdr.Name, s.Minttl))
		}
	}
	for _, rr := range m.Extra {
		if rr.Header().Rrtype != dns.TypeOPT {
			parts = append(parts, "+ "+strings.Join(strings.Fields(rr.String()), " "))
		}
	}
	return strings.Join(parts, " | ")
}

func TestAnswers(t *testing.T) {
	reverse, _ := dns.ReverseAddr("fd00::1")
	const nothing, nowhere = "NOERROR aa | soa mesh. 1", "NXDOMAIN aa | soa mesh. 1"
	tests := []struct {
		name  string
		qtype uint16
		want  string
	}{
		{"web.mesh.", dns.TypeA, "NOERROR aa | web.mesh. 5 IN A 240.0.0.1"},
		{"web.mesh.", dns.TypeAAAA, "NOERROR aa | web.mesh. 5 IN AAAA fd00::1"},
		{"wEb.MesH.", dns.TypeA, "NOERROR aa | wEb.MesH. 5 IN A 240.0.0.1"},
		{"old.mesh.", dns.TypeAAAA, nothing},
		{"new.mesh.", dns.TypeA, nothing},
		{"web.mesh.", dns.TypeHTTPS, nothing},
		{"web.mesh.", dns.TypeTXT, nothing},
		{"web.mesh.", dns.TypeSRV, nothing},
		{"web.mesh.", dns.TypeANY, `NOERROR aa | web.mesh. 5 IN HINFO "RFC8482" ""`},
		{"nosuch.mesh.", dns.TypeA, nowhere},
		{"nosuch.mesh.", dns.TypeANY, nowhere},
		{"a.web.mesh.", dns.TypeA, nowhere},
		{`we\.b.mesh.`, dns.TypeA, nowhere},
		{"mesh.", dns.TypeA, nothing},
		{"mesh.", dns.TypeSOA, "NOERROR aa | mesh. 1 IN SOA mesh. hostmaster.mesh. 1 60 10 600 1"},
		{"mesh.", dns.TypeAXFR, "REFUSED"},

		{"cart.shop.mesh.", dns.TypeA, "NOERROR aa | cart.shop.mesh. 5 IN A 240.0.0.9"},
		{"_http._tcp.cart.shop.mesh.", dns.TypeSRV, "NOERROR aa | _http._tcp.cart.shop.mesh. 5 IN SRV 0 0 80 cart.shop.mesh." +
			" | + cart.shop.mesh. 5 IN A 240.0.0.9"},
		{"shop.mesh.", dns.TypeA, nowhere},
		{"_http._tcp.web.mesh.", dns.TypeSRV, "NOERROR aa | _http._tcp.web.mesh. 5 IN SRV 0 0 80 web.mesh." +
			" | + web.mesh. 5 IN A 240.0.0.1 | + web.mesh. 5 IN AAAA fd00::1"},
		{"_HTTPS._tcp.Old.mesh.", dns.TypeSRV, "NOERROR aa | _HTTPS._tcp.Old.mesh. 5 IN SRV 0 0 443 Old.mesh. | + Old.mesh. 5 IN A 240.0.0.2"},
		{"_grpc._tcp.web.mesh.", dns.TypeSRV, nothing},
		{"_http._udp.web.mesh.", dns.TypeSRV, nothing},
		{"_http._tcp.web.mesh.", dns.TypeA, nothing},
		{"_tcp.web.mesh.", dns.TypeA, nothing},
		{"_http._tcp.nosuch.mesh.", dns.TypeSRV, nowhere},
		{"http._tcp.web.mesh.", dns.TypeSRV, nowhere},
		{"_a._http._tcp.web.mesh.", dns.TypeSRV, nowhere},

		{"web.prod.example.com.", dns.TypeA, "NOERROR aa | web.prod.example.com. 5 IN A 240.0.0.1"},
		{"nosuch.prod.example.com.", dns.TypeA, "NXDOMAIN aa | soa prod.example.com. 1"},

		{"1.0.0.240.in-addr.arpa.", dns.TypePTR, "NOERROR aa | 1.0.0.240.in-addr.arpa. 5 IN PTR web.mesh."},
		{reverse, dns.TypePTR, "NOERROR aa | " + reverse + " 5 IN PTR web.mesh."},
		{"1.0.0.240.in-addr.arpa.", dns.TypeA, "NOERROR aa | soa 1.0.0.240.in-addr.arpa. 1"},

		{"9.0.0.240.in-addr.arpa.", dns.TypePTR, "NOERROR | 9.0.0.240.in-addr.arpa. 60 IN A 192.0.2.1"},
		{"240.in-addr.arpa.", dns.TypePTR, "NOERROR | 240.in-addr.arpa. 60 IN A 192.0.2.1"},
		{"web.example.", dns.TypeA, "NOERROR | web.example. 60 IN A 192.0.2.1"},
		{"web.mesh.example.", dns.TypeA, "NOERROR | web.mesh.example. 60 IN A 192.0.2.1"},
		{"notmesh.", dns.TypeA, "NOERROR | notmesh. 60 IN A 192.0.2.1"},
		{"example.com.", dns.TypeMX, "NOERROR | example.com. 60 IN A 192.0.2.1"},
		{".", dns.TypeNS, "NOERROR | . 60 IN A 192.0.2.1"},
	}
	u := plainUpstream(t)
	at := serve(t, Config{Suffixes: []string{"mesh", "Prod.example.com"}, LookupAddr: lookupAddr, Upstreams: []netip.AddrPort{u.at}})
	for _, network := range []string{"udp", "tcp"} {
		for _, test := range tests {
			got := show(ask(t, network, at, question(test.name, test.qtype)))
			if got != test.want {
				t.Errorf("%s %s by %s:\n got %s\nwant %s", test.name, dns.TypeToString[test.qtype], network, got, test.want)
			}
		}
	}
	queries, _ := u.asked()
	for _, query := range queries {
		if q, _ := readQuestion(query); dns.IsSubDomain("mesh.", q.Name) {
			t.Errorf("a query for %s left the mesh", q.Name)
		}
	}
}

func TestAnswersWithEDNS(t *testing.T) {
	at := serve(t, Config{})
	if opt := ask(t, "udp", at, question("web.mesh.", dns.TypeA)).IsEdns0(); opt != nil {
		t.Errorf("got EDNS in the answer to a query without: %v", opt)
	}
	opt := ask(t, "udp", at, question("web.mesh.", dns.TypeA).SetEdns0(4096, true)).IsEdns0()
	if opt == nil || !opt.Do() || opt.UDPSize() != udpSize {
		t.Errorf("got %v, want EDNS with the flag DO and our own size", opt)
	}
	opt = ask(t, "udp", at, question("nosuch.mesh.", dns.TypeA).SetEdns0(4096, false)).IsEdns0()
	if opt == nil || opt.Do() {
		t.Errorf("got %v, want EDNS without the flag DO", opt)
	}
	unknown := question("web.mesh.", dns.TypeA).SetEdns0(4096, false)
	unknown.IsEdns0().SetVersion(1)
	if got := show(ask(t, "udp", at, unknown)); got != "BADVERS" && got != "BADSIG" { // two names of one number
		t.Errorf("got %s for a version of EDNS yet to come", got)
	}
}

// TestTruncation uses a suffix that no configuration may have: others leave no answer too long for any client.
func TestTruncation(t *testing.T) {
	label := strings.Repeat("x", 54)
	suffix := strings.Join([]string{label, label, label, label}, ".")
	z := newZone(Config{Lookup: lookup, Suffixes: []string{suffix}})
	answer := func(network string, size uint16) (*dns.Msg, int) {
		query := packed(t, "_http._tcp.web."+suffix+".", func(m *dns.Msg) {
			m.Question[0].Qtype = dns.TypeSRV
			if size > 0 {
				m.SetEdns0(size, false)
			}
		})
		raw, _ := z.answer(query, network)
		var m dns.Msg
		if err := m.Unpack(raw); err != nil {
			t.Fatal(err)
		}
		return &m, len(raw)
	}
	for _, size := range []uint16{0, 1, 512} {
		if got, n := answer("udp", size); !got.Truncated || n > 512 {
			t.Errorf("a client that says it takes %d bytes: got %d, truncated %t", size, n, got.Truncated)
		}
	}
	for network, size := range map[string]uint16{"udp": 1400, "tcp": 0} {
		got, _ := answer(network, size)
		if got.Truncated || len(got.Answer) != 1 || len(got.Extra) < 2 {
			t.Errorf("by %s: got %s, want all of it", network, show(got))
		}
	}
}

// packed returns a query as it is sent, changed by edit.
func packed(t testing.TB, name string, edit func(*dns.Msg)) []byte {
	m := question(name, dns.TypeA)
	if edit != nil {
		edit(m)
	}
	b, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// malformed returns queries that are not as they should be, by what is to be said to them.
func malformed(t testing.TB) map[string][][]byte {
	opcode := func(op int) []byte { return packed(t, "web.mesh.", func(m *dns.Msg) { m.Opcode = op }) }
	class := func(c uint16) []byte { return packed(t, "web.mesh.", func(m *dns.Msg) { m.Question[0].Qclass = c }) }
	good := packed(t, "web.mesh.", nil)
	extra := slices.Clone(good) // claims a record that isn't one
	extra[11] = 1
	extra = append(extra, 0xff, 1, 2)
	short := good[:len(good)-3]
	loop := append(slices.Clone(good[:headerSize]), 0xc0, headerSize, 0, 1, 0, 1)
	two := packed(t, "web.mesh.", func(m *dns.Msg) { m.Question = append(m.Question, m.Question[0]) })
	none := packed(t, "web.mesh.", func(m *dns.Msg) { m.Question = nil })
	return map[string][][]byte{
		"FORMERR": {extra, short, loop, two, none},
		"NOTIMP":  {opcode(dns.OpcodeStatus), opcode(dns.OpcodeNotify), opcode(dns.OpcodeUpdate), opcode(15)},
		"REFUSED": {class(dns.ClassCHAOS), class(dns.ClassANY), class(0)},
		"":        {packed(t, "web.mesh.", func(m *dns.Msg) { m.Response = true }), good[:headerSize-1], {}},
	}
}

func TestRefusals(t *testing.T) {
	u := plainUpstream(t)
	at := serve(t, Config{Upstreams: []netip.AddrPort{u.at}})
	conn, err := net.Dial("udp", at.String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(10 * time.Second))
	for want, queries := range malformed(t) {
		for _, query := range queries {
			conn.Write(query)
			if want == "" {
				query = packed(t, "web.mesh.", nil) // the next one is answered
				conn.Write(query)
			}
			buf := make([]byte, 512)
			n, err := conn.Read(buf)
			if err != nil {
				t.Fatalf("%x: %v", query, err)
			}
			rcode := dns.RcodeToString[header(buf[:n]).rcode()]
			if want == "" {
				rcode = strings.TrimPrefix(rcode, "NOERROR")
			}
			if rcode != want || header(buf).id() != header(query).id() {
				t.Errorf("%x: got %s, %x, want %s", query, rcode, buf[:n], want)
			}
		}
	}
	if queries, _ := u.asked(); len(queries) > 0 {
		t.Errorf("forwarded %x", queries)
	}
}

func FuzzAnswer(f *testing.F) {
	for _, queries := range malformed(f) {
		for _, query := range queries {
			f.Add(query, false)
		}
	}
	f.Add(packed(f, "_http._tcp.web.mesh.", func(m *dns.Msg) { m.Question[0].Qtype = dns.TypeSRV; m.SetEdns0(512, true) }), false)
	f.Add(packed(f, "1.0.0.240.in-addr.arpa.", nil), true)
	f.Add(packed(f, "example.com.", nil), true)
	z := newZone(Config{Lookup: lookup, LookupAddr: lookupAddr, Suffixes: []string{"mesh"}})
	f.Fuzz(func(t *testing.T, query []byte, tcp bool) {
		network := "udp"
		if tcp {
			network = "tcp"
		}
		before := slices.Clone(query)
		answer, verdict := z.answer(query, network)
		if !bytes.Equal(before, query) {
			t.Fatal("the query was changed")
		}
		if isAnswerTo(query, query) && verdict != refused {
			t.Fatal("an answer was taken for a query")
		}
		switch verdict {
		case elsewhere:
			if q, err := readQuestion(query); err != nil || dns.IsSubDomain("mesh.", q.Name) {
				t.Fatalf("forwards %v, %v", q, err)
			}
			answer = refusal(query, dns.RcodeServerFailure) // if no resolver answers
		case answered:
			if !isAnswerTo(answer, query) {
				t.Fatalf("%x is no answer to %x", answer, query)
			}
		}
		if answer == nil {
			return
		}
		var out dns.Msg
		if err := out.Unpack(answer); err != nil || !out.Response || out.Id != header(query).id() {
			t.Fatalf("answers %x with %x: %v", query, answer, err)
		}
		if !tcp && len(answer) > 512 && verdict == answered && out.IsEdns0() == nil {
			t.Fatalf("answers %d bytes to a client that takes 512", len(answer))
		}
	})
}

func TestConcurrentClients(t *testing.T) {
	u := plainUpstream(t)
	r := prometheus.NewRegistry()
	at := serve(t, Config{Upstreams: []netip.AddrPort{u.at}, Metrics: r})
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			network := []string{"udp", "tcp"}[i%2]
			client := dns.Client{Net: network, Timeout: 10 * time.Second}
			for j := range 25 {
				name, want := "web.mesh.", "240.0.0.1"
				if j%2 == 1 {
					name, want = fmt.Sprintf("host-%d-%d.example.", i, j), "192.0.2.1"
				}
				answer, _, err := client.Exchange(question(name, dns.TypeA), at.String())
				if err != nil || len(answer.Answer) != 1 || answer.Answer[0].(*dns.A).A.String() != want || answer.Question[0].Name != name {
					t.Errorf("%s by %s: got %v, %v", name, network, answer, err)
					return
				}
			}
		})
	}
	wg.Wait()
	wantQueries(t, r, 260, 240, 0, 0)
}

func wantQueries(t *testing.T, r *prometheus.Registry, mesh, forwarded, failed, refused int) {
	t.Helper()
	want := fmt.Sprintf(`
# HELP headroom_dns_queries_total DNS queries by who answered: mesh (the names of services), forwarded (a resolver of the node), failed (no resolver did, or too many were waiting), refused (malformed, or of a kind that is not answered).
# TYPE headroom_dns_queries_total counter
headroom_dns_queries_total{answer="failed"} %d
headroom_dns_queries_total{answer="forwarded"} %d
headroom_dns_queries_total{answer="mesh"} %d
headroom_dns_queries_total{answer="refused"} %d
`, failed, forwarded, mesh, refused)
	if err := testutil.GatherAndCompare(r, strings.NewReader(want), "headroom_dns_queries_total"); err != nil {
		t.Error(err)
	}
}

func TestMetrics(t *testing.T) {
	r := prometheus.NewRegistry()
	at := serve(t, Config{Metrics: r})
	ask(t, "udp", at, question("web.mesh.", dns.TypeA))
	ask(t, "tcp", at, question("nosuch.mesh.", dns.TypeA))
	ask(t, "udp", at, question("mesh.", dns.TypeAXFR))
	if got := show(ask(t, "udp", at, question("example.com.", dns.TypeA))); got != "SERVFAIL" {
		t.Errorf("without a resolver: got %s", got)
	}
	wantQueries(t, r, 2, 0, 1, 1)
	if problems, err := testutil.GatherAndLint(r); err != nil || len(problems) > 0 {
		t.Errorf("%v, %v", problems, err)
	}
}

// TestPipelining wants no query on a connection to wait for another one.
func TestPipelining(t *testing.T) {
	release := make(chan struct{})
	u := newUpstream(t, func(_ string, query []byte) []byte { <-release; return answerA(query, "192.0.2.1") })
	at := serve(t, Config{Upstreams: []netip.AddrPort{u.at}})
	conn, err := net.Dial("tcp", at.String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(10 * time.Second))
	for _, name := range []string{"example.com.", "web.mesh."} {
		if err := writeFrame(conn, packed(t, name, nil)); err != nil {
			t.Fatal(err)
		}
	}
	for _, want := range []string{"web.mesh.", "example.com."} {
		answer, err := readFrame(conn)
		if err != nil {
			t.Fatal(err)
		}
		if q, _ := readQuestion(answer); q.Name != want {
			t.Errorf("got the answer for %s, want that for %s", q.Name, want)
		}
		if want == "web.mesh." {
			close(release)
		}
	}
}

func TestWildcardAnswersFromTheAddressThatWasAsked(t *testing.T) {
	at := serve(t, Config{Addrs: []netip.AddrPort{netip.MustParseAddrPort("0.0.0.0:0")}})
	for _, host := range []string{"127.0.0.1", "127.0.0.9"} { // the client's socket takes no answers from elsewhere
		to := netip.AddrPortFrom(netip.MustParseAddr(host), at.Port())
		if got := show(ask(t, "udp", to, question("old.mesh.", dns.TypeA))); !strings.Contains(got, "240.0.0.2") {
			t.Errorf("%s: got %s", host, got)
		}
	}
}

// TestEnd wants Run to end at once, though a query still waits for a resolver, and to leave the address free.
func TestEnd(t *testing.T) {
	asked, release := make(chan struct{}, 10), make(chan struct{})
	u := newUpstream(t, func(string, []byte) []byte { asked <- struct{}{}; <-release; return nil })
	defer close(release)
	s, stop := start(t, Config{Upstreams: []netip.AddrPort{u.at}})
	at := s.Addrs()[0]
	for _, network := range []string{"udp", "tcp"} {
		conn, err := net.Dial(network, at.String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		query := packed(t, "example.com.", nil)
		if network == "tcp" {
			err = writeFrame(conn, query)
		} else {
			err = writeDatagram(conn, query)
		}
		if err != nil {
			t.Fatal(err)
		}
		<-asked
	}
	began := time.Now()
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > forwardTimeout/2 {
		t.Errorf("it took %s to end", took)
	}
	l, err := listen(at)
	if err != nil {
		t.Fatalf("the address is still taken: %v", err)
	}
	closeAll([]socket{l})
}

func TestTakenAddress(t *testing.T) {
	at := serve(t, Config{})
	s, err := New(Config{Addrs: []netip.AddrPort{at}, Lookup: lookup, Root: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	err = s.Run(t.Context())
	if err == nil || !strings.Contains(err.Error(), at.String()) || !strings.Contains(err.Error(), "choose another address") {
		t.Errorf("got %v, want what is wrong with %s, and what to do", err, at)
	}
}

func TestControlSeesEverySocket(t *testing.T) {
	u := plainUpstream(t)
	var mu sync.Mutex
	var sockets []string
	at := serve(t, Config{Upstreams: []netip.AddrPort{u.at}, Control: func(network, address string, c syscall.RawConn) error {
		mu.Lock()
		defer mu.Unlock()
		sockets = append(sockets, network+" "+address)
		return nil
	}})
	ask(t, "udp", at, question("example.com.", dns.TypeA))
	ask(t, "tcp", at, question("example.com.", dns.TypeA))
	mu.Lock()
	defer mu.Unlock()
	if diff := cmp.Diff([]string{"udp4 " + u.at.String(), "tcp4 " + u.at.String()}, sockets); diff != "" {
		t.Error(diff)
	}
}

// TestGoResolver asks as programs in Go do.
func TestGoResolver(t *testing.T) {
	u := plainUpstream(t)
	at := serve(t, Config{LookupAddr: lookupAddr, Upstreams: []netip.AddrPort{u.at}})
	r := net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, at.String())
	}}
	addrs, err := r.LookupNetIP(t.Context(), "ip", "web.mesh.")
	slices.SortFunc(addrs, netip.Addr.Compare)
	if got := fmt.Sprint(addrs); err != nil || got != "[240.0.0.1 fd00::1]" {
		t.Errorf("got %s, %v", got, err)
	}
	if _, srv, err := r.LookupSRV(t.Context(), "http", "tcp", "web.mesh."); err != nil || len(srv) != 1 || srv[0].Target != "web.mesh." || srv[0].Port != 80 {
		t.Errorf("got %v, %v", srv, err)
	}
	if names, err := r.LookupAddr(t.Context(), "240.0.0.1"); err != nil || len(names) != 1 || names[0] != "web.mesh." {
		t.Errorf("got %v, %v", names, err)
	}
	_, err = r.LookupNetIP(t.Context(), "ip", "nosuch.mesh.")
	if missing, ok := errors.AsType[*net.DNSError](err); !ok || !missing.IsNotFound {
		t.Errorf("got %v, want that there is no such host", err)
	}
	if addrs, err := r.LookupNetIP(t.Context(), "ip4", "example.com."); err != nil || fmt.Sprint(addrs) != "[192.0.2.1]" {
		t.Errorf("got %v, %v", addrs, err)
	}
}

func TestValidate(t *testing.T) {
	if err := (Config{Lookup: lookup}).Validate(); err != nil {
		t.Errorf("the defaults: %v", err)
	}
	err := Config{
		Mode:      "magic",
		Addrs:     []netip.AddrPort{{}},
		Suffixes:  []string{"mesh", "", ".", "a..b", "in space", "arpa", strings.Repeat("long.", 40)},
		Upstreams: []netip.AddrPort{netip.MustParseAddrPort("10.0.0.2:0")},
	}.Validate()
	for _, want := range []string{
		`mode: want listen, redirect, resolv.conf or resolved, got "magic"`, "addrs[0]: want IP:PORT", "suffixes[1]", "suffixes[2]",
		"suffixes[3]", "suffixes[4]", "suffixes[5]", "suffixes[6]", "lookup: missing", "upstreams[0]: want IP:PORT",
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("no word of %q in: %v", want, err)
		}
	}
	if err != nil && strings.Contains(err.Error(), "suffixes[0]") {
		t.Errorf("a good suffix is refused: %v", err)
	}
	err = Config{Mode: ResolvConf, Addrs: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:5353")}, Lookup: lookup}.Validate()
	if err == nil || !strings.Contains(err.Error(), "want port 53") {
		t.Errorf("got %v for a port that resolv.conf can't name", err)
	}
}

func TestAddressOf(t *testing.T) {
	nibbles := strings.Repeat("0.", 30)
	for name, want := range map[string]string{
		"4.3.2.1.in-addr.arpa.":               "1.2.3.4",
		"4.3.2.1.IN-ADDR.ARPA.":               "1.2.3.4",
		"3.2.1.in-addr.arpa.":                 "",
		"x.3.2.1.in-addr.arpa.":               "",
		"256.3.2.1.in-addr.arpa.":             "",
		"04.3.2.1.in-addr.arpa.":              "",
		"1.0." + nibbles + "ip6.arpa.":        "::1",
		"A.b." + nibbles + "ip6.arpa.":        "::ba",
		"10." + nibbles + "ip6.arpa.":         "",
		"g.0." + nibbles + "ip6.arpa.":        "",
		"10." + nibbles + "0.ip6.arpa.":       "",
		"4.3.2.1.in-addr.arpa.example.":       "",
		".":                                   "",
		"1.0." + nibbles + "ip6.arpa.mesh.x.": "",
	} {
		addr, ok := addressOf(name)
		if got := addr.String(); ok != (want != "") || ok && got != want {
			t.Errorf("%s: got %s, %t, want %s", name, got, ok, want)
		}
	}
}
