package relay

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/headroom-mesh/headroom/policy"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// TestHTTP2Requests wants requests to be passed on, or refused, by the rules for fields.
func TestHTTP2Requests(t *testing.T) {
	got := make(chan http.Header, 1)
	s := replica(t, func(w http.ResponseWriter, r *http.Request) { got <- r.Header })
	for _, test := range []struct {
		name      string
		method    string
		head      http.Header
		agents    bool
		forwarded policy.Forwarded
		status    int
		reason    fault.Reason
		want      http.Header
	}{
		{name: "forwarded", forwarded: policy.ForwardedXFF, status: 200,
			want: http.Header{"X-Forwarded-For": {"127.0.0.1"}, "X-Forwarded-Proto": {"http"}, "X-Forwarded-Host": {"web.mesh"}, "Via": {"2 headroom"}}},
		{name: "forwarded before", forwarded: policy.ForwardedXFF, status: 200,
			head: http.Header{"X-Forwarded-For": {"10.0.0.1", "10.0.0.2, 10.0.0.3"}, "X-Forwarded-Proto": {"https"}, "Via": {"1.1 other"}},
			want: http.Header{"X-Forwarded-For": {"10.0.0.1, 10.0.0.2, 10.0.0.3, 127.0.0.1"}, "X-Forwarded-Proto": {"https"}, "Via": {"1.1 other", "2 headroom"}}},
		{name: "forwarded as RFC 7239 has it", forwarded: policy.ForwardedRFC, status: 200,
			head: http.Header{"Forwarded": {"for=10.0.0.1"}}, want: http.Header{"Forwarded": {"for=10.0.0.1, for=127.0.0.1;proto=http"}}},
		{name: "no loop", head: http.Header{"Via": {strings.Repeat("2 headroom, ", 8) + "1.1 headroom"}}, status: 200},
		{name: "a loop", head: http.Header{"Via": {"2 headroom", strings.Repeat("1.1 headroom, ", 8) + "2 headroom"}}, status: 508, reason: fault.Loop},
		{name: "a loop, asked for the head", method: "HEAD", head: http.Header{"Via": {strings.Repeat("2 headroom, ", 10)}}, status: 508, reason: fault.Loop},
		{name: "from an agent", agents: true, head: http.Header{"Via": {strings.Repeat("2 headroom, ", 10)}}, status: 200,
			want: http.Header{"Via": {strings.Repeat("2 headroom, ", 9) + "2 headroom,"}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			l := newLab(t, Entry{Agents: test.agents}, labTarget(s.Listener.Addr().String()))
			l.router.forwarded = test.forwarded
			r, _ := http.NewRequest(max(test.method, "GET"), "http://web.mesh/", nil)
			for name, values := range test.head {
				for _, v := range values {
					r.Header.Add(name, strings.TrimSpace(v))
				}
			}
			resp, err := l.client().Do(r)
			if err != nil {
				t.Fatal(err)
			}
			body, err := io.ReadAll(resp.Body)
			if resp.StatusCode != test.status || resp.Header.Get(fault.Header) != string(test.reason) || err != nil {
				t.Errorf("got %s, %v, %q, %v", resp.Status, resp.Header, body, err)
			}
			if test.status != 200 {
				return
			}
			seen := <-got
			for name, values := range test.want {
				if !slices.Equal(seen[name], values) {
					t.Errorf("the replica got %s: %q, want %q", name, seen[name], values)
				}
			}
		})
	}
}

// rawCaller speaks frames.
type rawCaller struct {
	t testing.TB
	net.Conn
	*http2.Framer
	block   strings.Builder
	encoder *hpack.Encoder
}

func (l *lab) dialRaw() *rawCaller {
	conn, err := net.Dial("tcp", l.at)
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() { conn.Close() })
	conn.SetDeadline(time.Now().Add(10 * time.Second))
	c := &rawCaller{t: l.t, Conn: conn, Framer: http2.NewFramer(conn, conn)}
	c.encoder = hpack.NewEncoder(&c.block)
	c.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	io.WriteString(conn, http2.ClientPreface)
	c.WriteSettings()
	return c
}

func (c *rawCaller) ask(id uint32, end bool, fields ...string) {
	c.block.Reset()
	for i := 0; i < len(fields); i += 2 {
		c.encoder.WriteField(hpack.HeaderField{Name: fields[i], Value: fields[i+1]})
	}
	if err := c.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: []byte(c.block.String()), EndStream: end, EndHeaders: true}); err != nil {
		c.t.Fatal(err)
	}
}

// next returns what comes on streams, or the GOAWAY.
func (c *rawCaller) next() string {
	for {
		f, err := c.ReadFrame()
		if err != nil {
			return err.Error()
		}
		switch f := f.(type) {
		case *http2.MetaHeadersFrame:
			return fmt.Sprintf("HEADERS %d %v end=%v", f.StreamID, f.Fields, f.StreamEnded())
		case *http2.DataFrame:
			return fmt.Sprintf("DATA %d %q end=%v", f.StreamID, f.Data(), f.StreamEnded())
		case *http2.RSTStreamFrame:
			return fmt.Sprintf("RST_STREAM %d %v", f.StreamID, f.ErrCode)
		case *http2.GoAwayFrame:
			return fmt.Sprintf("GOAWAY %d %v", f.LastStreamID, f.ErrCode)
		}
	}
}

func (c *rawCaller) want(frames ...string) {
	c.t.Helper()
	for _, want := range frames {
		if got := c.next(); !strings.HasPrefix(got, want) {
			c.t.Errorf("got %s, want %s", got, want)
		}
	}
}

// TestHTTP2Raw holds what clients of libraries don't do against the engine.
func TestHTTP2Raw(t *testing.T) {
	hold := make(chan struct{})
	defer close(hold)
	l := newWebLab(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/hold" {
			select {
			case <-hold:
			case <-r.Context().Done():
			}
		}
		if _, err := io.ReadAll(r.Body); err != nil {
			return
		}
		io.WriteString(w, "ok")
	})
	c := l.dialRaw()
	get := []string{":method", "GET", ":scheme", "http", ":authority", "web.mesh", ":path", "/"}
	post := append([]string{":method", "POST"}, get[2:]...)
	c.ask(1, true, get...)
	c.want("HEADERS 1", `DATA 1 "ok" end=true`)
	c.ask(3, true, ":method", "CONNECT", ":authority", "web.mesh:80")
	c.want("HEADERS 3", `DATA 3 "headroom: CONNECT`)

	// A body that is not what was declared ends the call, here and there.
	c.ask(5, false, append(post, "content-length", "5")...)
	c.WriteData(5, true, []byte("abc"))
	c.want("RST_STREAM 5 PROTOCOL_ERROR")
	if got := l.router.endings(t, 3); got[2] != fault.BadRequest {
		t.Errorf("the call ended with %q", got)
	}

	// A call of gRPC that nobody can take.
	l.router.hops, l.router.spare = nil, l.router.hops
	c.ask(7, false, append(post, "content-type", "application/grpc+proto")...)
	c.want("HEADERS 7 [header field \":status\" = \"200\" header field \"content-type\" = \"application/grpc\"", "RST_STREAM 7 NO_ERROR")
	l.router.hops = l.router.spare

	// A caller's own limit.
	c.ask(9, true, append(append([]string{":path", "/hold"}, get[:6]...), "grpc-timeout", "30m")...)
	c.want("HEADERS 9 [header field \":status\" = \"504\"", "DATA 9")

	// One that goes away.
	c.ask(11, true, append([]string{":path", "/hold"}, get[:6]...)...)
	c.Close()
	got := l.router.endings(t, 6)
	if want := []fault.Reason{fault.NoEndpoints, fault.Timeout, fault.Canceled}; !slices.Equal(got[3:], want) {
		t.Errorf("the calls ended with %q, want %q at last", got, want)
	}
}

// TestHTTP2Refused wants calls that a replica refuses to be made again, and to say so if that does not help.
func TestHTTP2Refused(t *testing.T) {
	var refusals, asked atomic.Int64
	at := serveRaw(t, func(c net.Conn) {
		io.CopyN(io.Discard, c, int64(len(http2.ClientPreface)))
		f := http2.NewFramer(c, c)
		f.WriteSettings()
		for {
			frame, err := f.ReadFrame()
			if err != nil {
				return
			}
			h, ok := frame.(*http2.HeadersFrame)
			switch {
			case !ok:
			case asked.Add(1) <= refusals.Load():
				f.WriteRSTStream(h.StreamID, http2.ErrCodeRefusedStream)
			default:
				f.WriteHeaders(http2.HeadersFrameParam{StreamID: h.StreamID, BlockFragment: []byte{0x88}, EndHeaders: true, EndStream: true})
			}
		}
	})
	l := newLab(t, Entry{}, labTarget(at))
	for _, test := range []struct {
		refusals int64
		status   int
	}{{0, 200}, {1, 200}, {3, 200}, {1000, 503}} {
		refusals.Store(test.refusals)
		asked.Store(0)
		resp, err := l.client().Post("http://web.mesh/", "", strings.NewReader("hello"))
		if err != nil {
			t.Fatal(err)
		}
		if body, _ := io.ReadAll(resp.Body); resp.StatusCode != test.status {
			t.Errorf("after %d refusals: got %s %q", test.refusals, resp.Status, body)
		}
		if n := asked.Load(); n > mostResent+1 {
			t.Errorf("the replica was asked %d times", n)
		}
	}
}

// TestHTTP2Idle wants connections that nobody uses to be closed, in a way that tells the caller.
func TestHTTP2Idle(t *testing.T) {
	s := replica(t, func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "ok") })
	target := labTarget(s.Listener.Addr().String())
	target.IdleTimeout = 100 * time.Millisecond
	l := newLab(t, Entry{IdleTimeout: 100 * time.Millisecond}, target)
	c := l.dialRaw()
	c.ask(1, true, ":method", "GET", ":scheme", "http", ":authority", "web.mesh", ":path", "/")
	c.want("HEADERS 1", `DATA 1 "ok" end=true`, "GOAWAY 2147483647 NO_ERROR", "GOAWAY 1 NO_ERROR", "EOF")
	eventually(t, "the connection to the replica is closed", func() bool { return l.engine.connections() == 0 })
}

// TestHTTP2Allocations bounds the garbage that a call makes.
func TestHTTP2Allocations(t *testing.T) {
	if raceEnabled() {
		t.Skip("the race detector allocates")
	}
	at := serveRaw(t, func(c net.Conn) {
		io.CopyN(io.Discard, c, int64(len(http2.ClientPreface)))
		f := http2.NewFramer(c, c)
		f.SetReuseFrames()
		f.WriteSettings()
		for {
			frame, err := f.ReadFrame()
			if err != nil {
				return
			}
			if d, ok := frame.(*http2.DataFrame); ok && d.StreamEnded() {
				f.WriteHeaders(http2.HeadersFrameParam{StreamID: d.StreamID, BlockFragment: []byte{0x88}, EndHeaders: true})
				f.WriteData(d.StreamID, true, []byte("hello"))
			}
		}
	})
	l := newLab(t, Entry{}, labTarget(at))
	c := l.dialRaw()
	c.SetReuseFrames()
	c.ReadMetaHeaders = nil
	call := func(id uint32) {
		c.ask(id, false, ":method", "POST", ":scheme", "http", ":authority", "web.mesh", ":path", "/x", "content-type", "application/grpc", "te", "trailers")
		c.WriteData(id, true, []byte("hello"))
		for {
			f, err := c.ReadFrame()
			if err != nil {
				t.Fatal(err)
			}
			if d, ok := f.(*http2.DataFrame); ok && d.StreamEnded() {
				return
			}
		}
	}
	const calls = 2000
	id := uint32(1)
	run := func() uint64 {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		for range calls {
			call(id)
			id += 2
		}
		runtime.ReadMemStats(&after)
		return after.Mallocs - before.Mallocs
	}
	run()
	if got := float64(run()) / calls; got > 14 { // half of them are the test's
		t.Errorf("a call makes %.1f allocations", got)
	} else {
		t.Logf("a call makes %.1f allocations, those of the test included", got)
	}
}
