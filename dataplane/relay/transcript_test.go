package relay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/headroom-mesh/headroom/dataplane/memnet"
	"github.com/headroom-mesh/headroom/policy"
)

// TestTranscripts plays the scripts in testdata/http1, on a network in memory and on that of the machine. Each block is a
// scene with callers c1, c2..., an engine, and connections to the replica, r1, r2..., in the order in which they are made:
//
//	scene KEY=VALUE...      agents (callers are agents), forwarded=HOW, timeout=D, waits=D (Next takes so long),
//	                        detect=D (what callers speak is to be found out, within D), speaks=PROTOCOL (it is declared),
//	                        explicit (calls say where they go), proxied (the replica wants PROXY headers),
//	                        route=(A,B...) (the hops of each call: web; refused, which can't be connected to; agent)
//
// and on the lines that follow, one step each:
//
//	c1> BYTES               the caller sends. "|" stands for CR LF, "{a*9}" for aaaaaaaaa, escapes are those of Go
//	r1> BYTES               the replica sends
//	c1 closes               or half-closes, or resets; likewise r1
//	wait D                  time passes
//	stop                    the context of Serve ends
//
// What comes of a step is below it.
//
// Rewrite the results after a change with: go test ./dataplane/relay -run TestTranscripts -rewrite
func TestTranscripts(t *testing.T) {
	datadriven.Walk(t, "testdata/http1", func(t *testing.T, path string) {
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) (out string) {
			synctest.Test(t, func(t *testing.T) { out = play(t, d, inMemory(t), "") })
			return out
		})
	})
}

// TestTranscriptsOverTCP expects the same where the kernel is asked, apart from what takes long.
func TestTranscriptsOverTCP(t *testing.T) {
	datadriven.Walk(t, "testdata/http1", func(t *testing.T, path string) {
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			if strings.Contains(d.Input, "wait ") {
				return d.Expected
			}
			return play(t, d, overTCP(t), d.Expected)
		})
	})
}

// network is where a scene takes place.
type network struct {
	listen func() net.Listener
	dial   func(ctx context.Context, to net.Addr) (net.Conn, error)
	settle func(done func() bool) // waits until nothing more happens, or done says so
}

func inMemory(t *testing.T) network {
	n := memnet.New()
	host := n.Host("10.0.0.1")
	return network{
		listen: func() net.Listener {
			l, err := host.Listen(0)
			if err != nil {
				t.Fatal(err)
			}
			return l
		},
		dial: func(ctx context.Context, to net.Addr) (net.Conn, error) {
			return host.Dial(ctx, netip.MustParseAddrPort(to.String()))
		},
		settle: func(func() bool) { synctest.Wait() },
	}
}

func overTCP(t testing.TB) network {
	return network{
		listen: func() net.Listener { return listen(t) },
		dial: func(ctx context.Context, to net.Addr) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "tcp", to.String())
		},
		settle: func(done func() bool) {
			tick := time.NewTicker(time.Millisecond)
			defer tick.Stop()
			for end := time.After(3 * time.Second); !done(); {
				select {
				case <-tick.C:
				case <-end:
					return
				}
			}
		},
	}
}

func listen(t testing.TB) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// scene is a play on a network.
type scene struct {
	t       *testing.T
	net     network
	engine  *Engine
	at      net.Addr
	replica net.Listener
	wg      sync.WaitGroup
	router  *scriptedRouter

	mu sync.Mutex
	// mu guards the fields below.

	conns []*player
	log   []string // what the router and Serve say
}

// player is one end of a connection, that the script speaks for.
type player struct {
	name string
	net.Conn
	got    []byte
	ended  string
	told   bool // that it has ended
	opened bool // told that it was
}

func play(t *testing.T, d *datadriven.TestData, n network, expected string) string {
	s := &scene{t: t, net: n, replica: n.listen()}
	s.router = newScriptedRouter(s, d)
	s.engine = New(Config{DrainTimeout: 5 * time.Second})
	s.router.connect()
	l := n.listen()
	s.at = l.Addr()
	entry := Entry{Router: s.router, Protocol: HTTP1, Agents: d.HasArg("agents")}
	switch {
	case d.HasArg("detect") || d.HasArg("speaks"):
		entry.Protocol, entry.Service = Unknown, func() Service { return s.router.service }
	case d.HasArg("explicit"):
		entry.Protocol = Unknown
	}
	running, end := context.WithCancel(t.Context())
	serving, stop := context.WithCancel(t.Context())
	s.wg.Go(func() { s.engine.Run(running) })
	served := make(chan bool)
	s.wg.Go(func() {
		defer close(served)
		err := s.engine.Serve(serving, l, entry)
		s.say("served: %v", err)
	})
	s.wg.Go(s.accept)

	var out strings.Builder
	for line := range strings.Lines(d.Input) {
		line = strings.TrimSpace(line)
		out.WriteString(line + "\n")
		if line == "stop" {
			stop()
		} else {
			s.step(line)
		}
		out.WriteString(s.observe(want(&expected)))
	}
	s.mu.Lock()
	for _, c := range s.conns {
		c.Close()
	}
	s.mu.Unlock()
	stop()
	s.replica.Close()
	<-served
	end()
	s.wg.Wait()
	if b, e := s.router.begun, s.router.ended; b != e {
		fmt.Fprintf(&out, "%d calls began, %d ended\n", b, e)
	}
	return out.String()
}

// want cuts the observations after the next step off what is expected.
func want(expected *string) string {
	_, rest, _ := strings.Cut(*expected, "\n")
	at := 0
	for strings.HasPrefix(rest[at:], "  ") {
		at += strings.Index(rest[at:], "\n") + 1
	}
	*expected = rest[at:]
	return rest[:at]
}

func (s *scene) say(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.log = append(s.log, fmt.Sprintf(format, args...))
}

// accept takes the connections to the replica.
func (s *scene) accept() {
	for n := 1; ; n++ {
		c, err := s.replica.Accept()
		if err != nil {
			return
		}
		s.enter(fmt.Sprint("r", n), c)
	}
}

func (s *scene) enter(name string, c net.Conn) *player {
	p := &player{name: name, Conn: c, opened: name[0] == 'c'}
	s.mu.Lock()
	s.conns = append(s.conns, p)
	s.mu.Unlock()
	s.wg.Go(func() { s.read(p) })
	return p
}

func (s *scene) read(p *player) {
	buf := make([]byte, 64<<10)
	for {
		n, err := p.Read(buf)
		s.mu.Lock()
		p.got = append(p.got, buf[:n]...)
		if err != nil && !errors.Is(err, net.ErrClosed) {
			p.ended = "reset"
			if err == io.EOF || p.name[0] == 'r' { // how replicas are left depends on timing
				p.ended = "closed"
			}
		}
		s.mu.Unlock()
		if err != nil {
			return
		}
	}
}

func (s *scene) step(line string) {
	name, rest, _ := strings.Cut(line, " ")
	if name == "wait" {
		d, err := time.ParseDuration(rest)
		if err != nil {
			s.t.Fatal(err)
		}
		time.Sleep(d)
		return
	}
	p := s.player(strings.TrimSuffix(name, ">"))
	switch {
	case p == nil:
		s.say("there is no such connection")
	case strings.HasSuffix(name, ">"):
		p.Write(expand(s.t, rest)) // the other end may have closed: observed elsewhere
	case rest == "closes":
		p.Close()
	case rest == "half-closes":
		p.Conn.(interface{ CloseWrite() error }).CloseWrite()
	case rest == "resets":
		p.Conn.(interface{ SetLinger(int) error }).SetLinger(0)
		p.Close()
	default:
		s.t.Fatalf("what does %q mean?", line)
	}
}

func (s *scene) player(name string) *player {
	s.mu.Lock()
	for _, p := range s.conns {
		if p.name == name {
			s.mu.Unlock()
			return p
		}
	}
	s.mu.Unlock()
	if name[0] != 'c' {
		return nil
	}
	c, err := s.net.dial(s.t.Context(), s.at)
	if err != nil {
		s.t.Fatal(err)
	}
	return s.enter(name, c)
}

// observe returns what has happened since it was last called.
func (s *scene) observe(want string) string {
	s.net.settle(func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.renderLocked(false) == want
	})
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.renderLocked(true)
}

func (s *scene) renderLocked(forget bool) string {
	var out strings.Builder
	conns := slices.Clone(s.conns)
	slices.SortFunc(conns, func(a, b *player) int { return strings.Compare(a.name, b.name) })
	for _, p := range conns {
		opened, told := p.opened, p.told
		if !opened {
			fmt.Fprintf(&out, "  %s connected\n", p.name)
		}
		if len(p.got) > 0 {
			fmt.Fprintf(&out, "  %s< %s\n", p.name, shrink(p.got))
		}
		if p.ended != "" && !told {
			fmt.Fprintf(&out, "  %s %s\n", p.name, p.ended)
		}
		if forget {
			p.opened, p.got, p.told = true, nil, p.ended != ""
		}
	}
	for _, line := range s.log {
		fmt.Fprintf(&out, "  %s\n", line)
	}
	if forget {
		s.log = nil
	}
	return regexp.MustCompile(`\b(10|127)\.0\.0\.1(:\d+)?\b`).ReplaceAllString(out.String(), "HOST")
}

// expand turns what a script says into bytes.
func expand(t testing.TB, s string) []byte {
	s = strings.ReplaceAll(s, "|", "\r\n")
	s = regexp.MustCompile(`\{(.)\*(\d+)\}`).ReplaceAllStringFunc(s, func(m string) string {
		n, _ := strconv.Atoi(m[3 : len(m)-1])
		return strings.Repeat(m[1:2], n)
	})
	if strings.Contains(s, `\`) {
		u, err := strconv.Unquote(`"` + strings.NewReplacer("\r\n", `\r\n`, `"`, `\"`).Replace(s) + `"`)
		if err != nil {
			t.Fatalf("%q: %v", s, err)
		}
		s = u
	}
	return []byte(s)
}

// shrink is the opposite.
func shrink(b []byte) string {
	var out strings.Builder
	for len(b) > 0 {
		n := 1
		for n < len(b) && b[n] == b[0] {
			n++
		}
		switch {
		case n > 20:
			fmt.Fprintf(&out, "{%c*%d}", b[0], n)
			b = b[n:]
			continue
		case len(b) > 1 && b[0] == '\r' && b[1] == '\n':
			out.WriteByte('|')
			b = b[2:]
			continue
		case b[0] < ' ' || b[0] > '~' || b[0] == '|':
			fmt.Fprintf(&out, `\x%02x`, b[0])
		default:
			out.WriteByte(b[0])
		}
		b = b[1:]
	}
	return out.String()
}

// scriptedRouter sends calls where the scene says.
type scriptedRouter struct {
	scene     *scene
	hops      []string
	upstreams map[string]*Upstream
	forwarded policy.Forwarded
	timeout   time.Duration
	waits     time.Duration
	service   Service // that callers want, unless they say so
	proxied   bool

	begun, ended int // guarded by the scene's mu
}

func newScriptedRouter(s *scene, d *datadriven.TestData) *scriptedRouter {
	r := &scriptedRouter{scene: s, hops: []string{"web"}, upstreams: map[string]*Upstream{}}
	for _, arg := range d.CmdArgs {
		var err error
		switch arg.Key {
		case "agents":
		case "route":
			r.hops = arg.Vals
		case "forwarded":
			r.forwarded = policy.Forwarded(arg.Vals[0])
		case "timeout":
			r.timeout, err = time.ParseDuration(arg.Vals[0])
		case "detect":
			r.service.DetectTimeout, err = time.ParseDuration(arg.Vals[0])
		case "speaks":
			r.service.Protocol = Declared(policy.Protocol(arg.Vals[0]))
		case "explicit":
		case "proxied":
			r.proxied = true
		case "waits":
			r.waits, err = time.ParseDuration(arg.Vals[0])
		default:
			d.Fatalf(s.t, "what does %q mean?", arg.Key)
		}
		if err != nil {
			d.Fatalf(s.t, "%v", err)
		}
	}
	return r
}

func (r *scriptedRouter) connect() {
	for _, name := range []string{"web", "agent", "refused"} {
		r.upstreams[name] = r.scene.engine.NewUpstream(Target{
			Name: name, Agent: name == "agent", IdleTimeout: time.Minute, ProxyHeader: r.proxied && name == "web",
			Dial: func(ctx context.Context, p Protocol) (net.Conn, error) {
				if name == "refused" {
					return nil, errors.New("connection refused")
				}
				return r.scene.net.dial(ctx, r.scene.replica.Addr())
			},
		})
	}
}

func (r *scriptedRouter) Begin(h Head, now time.Time) Call {
	r.scene.mu.Lock()
	r.begun++
	r.scene.mu.Unlock()
	r.scene.say("begin %s %s %s", h.Method(nil), h.Authority(nil), h.Path(nil))
	return &scriptedCall{router: r, now: now}
}

type scriptedCall struct {
	router *scriptedRouter
	now    time.Time
	tries  int
}

func (c *scriptedCall) Waits() bool { return c.router.waits > 0 }

func (c *scriptedCall) Next(ctx context.Context, failed *fault.Error) (Hop, *fault.Error) {
	r := c.router
	if failed != nil {
		r.scene.say("failed %s", failed.Reason)
		if !failed.Reason.Unsent() || c.tries == len(r.hops) {
			return Hop{}, failed
		}
	}
	if r.waits > 0 {
		select {
		case <-time.After(r.waits):
		case <-ctx.Done():
			return Hop{}, fault.New(fault.Canceled, "the caller went away")
		}
	}
	name := r.hops[c.tries]
	c.tries++
	hop := Hop{To: r.upstreams[name], Forwarded: r.forwarded}
	if name == "agent" {
		hop.Fields = []Field{{FieldEndpoint, []byte("e1")}}
	}
	if r.timeout > 0 {
		hop.Deadline = c.now.Add(r.timeout)
	}
	return hop, nil
}

func (c *scriptedCall) Answered(a Answer, now time.Time) ([]Field, *fault.Error) {
	c.router.scene.say("answered %d", a.Status())
	if reason, ok := a.Field(nil, FieldReason); ok {
		detail, _ := a.Field(nil, FieldDetail)
		return nil, fault.New(fault.Reason(reason), "%s", detail)
	}
	return nil, nil
}

func (c *scriptedCall) End(e Ending, now time.Time) {
	r := c.router
	text := "end " + string(e.Reason)
	if e.Trailers != nil {
		sum, _ := e.Trailers.Field(nil, "x-sum")
		text += fmt.Sprintf(" with x-sum %q", sum)
	}
	r.scene.say("%s", strings.TrimSpace(text))
	r.scene.mu.Lock()
	r.ended++
	r.scene.mu.Unlock()
}
