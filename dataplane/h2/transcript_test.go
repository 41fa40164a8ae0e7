package h2

import (
	"bytes"
	"context"
	"encoding/hex"
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
	"github.com/headroom-mesh/headroom/dataplane/memnet"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// TestTranscripts plays the scripts in testdata/conn. Each block is a connection, of which the script speaks for the other
// end and for the Handler. "server" is a block where the end under test is the server, "client" one where it is the client;
// "raw" leaves the greetings to the script. On the lines that follow is one step each:
//
//	> FRAME [STREAM] [FLAG...] [ARG...]   the other end sends a frame: see peer.send
//	> xHEX                                or bytes
//	N times > FRAME... ; FRAME...         more often; STREAM+ is two more each time
//	closes                                the other end closes
//	reads off/on                          the other end stops to read, and goes on
//	open NAME:VALUE...                    the client opens a stream; with "end" the request has no body
//	ID head NAME:VALUE... [end]           the Handler sends fields
//	ID data TEXT [end]                    or a part of a body, of which it shows how much was taken; "{a*9}" is aaaaaaaaa,
//	                                      and "{n:v*9}" nine fields
//	ID consumed N, ID reset CODE          or does that
//	drain, check, wait D                  and that
//
// What comes of a step is below it: "<" are frames, the rest is what the Handler was told. Data is consumed at once only
// where the block says "consumes".
//
// Rewrite the results after a change with: go test ./dataplane/h2 -run TestTranscripts -rewrite
func TestTranscripts(t *testing.T) {
	datadriven.Walk(t, "testdata/conn", func(t *testing.T, path string) {
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) (out string) {
			synctest.Test(t, func(t *testing.T) { out = play(t, d) })
			return out
		})
	})
}

// scene is a connection, its other end and its Handler.
type scene struct {
	t        *testing.T
	conn     *Conn
	peer     net.Conn
	framer   *http2.Framer
	block    bytes.Buffer
	encoder  *hpack.Encoder
	consumes bool

	mu      sync.Mutex
	log     []string
	streams map[uint32]*Stream
	paused  chan struct{} // not nil: closed when the other end is to read on
}

func pair(t testing.TB) (a, b net.Conn) {
	host := memnet.New().Host("10.0.0.1")
	l, err := host.Listen(0)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	a, err = host.Dial(context.Background(), netip.MustParseAddrPort(l.Addr().String()))
	if err != nil {
		t.Fatal(err)
	}
	if b, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	return a, b
}

func play(t *testing.T, d *datadriven.TestData) string {
	s := &scene{t: t, streams: map[uint32]*Stream{}, consumes: d.HasArg("consumes")}
	local, peer := pair(t)
	s.peer = peer
	cfg := Config{Handler: s, Buffers: new(Buffers), Trusted: d.HasArg("trusted")}
	if d.Cmd == "server" {
		s.conn = NewServer(local, cfg)
	} else {
		s.conn = NewClient(local, cfg)
	}
	s.framer = http2.NewFramer(peer, nil)
	s.framer.AllowIllegalWrites = true
	s.encoder = hpack.NewEncoder(&s.block)
	ctx, end := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { s.say("the connection ended: %v", s.conn.Run(ctx)) })
	wg.Go(func() { s.read(d.Cmd == "client") })
	if !d.HasArg("raw") {
		s.greet(d.Cmd == "server")
	}
	var out strings.Builder
	for line := range strings.Lines(d.Input) {
		line = strings.TrimSpace(line)
		s.step(line)
		out.WriteString(line + "\n" + s.observe(strings.Contains(line, " times > ")))
	}
	s.resume()
	end()
	peer.Close()
	wg.Wait()
	return out.String()
}

func (s *scene) greet(client bool) {
	if client {
		io.WriteString(s.peer, http2.ClientPreface)
	}
	s.framer.WriteSettings()
	s.framer.WriteSettingsAck()
	s.observe(false)
}

func (s *scene) say(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.log = append(s.log, shorten(fmt.Sprintf(format, args...)))
}

// observe returns what has happened: first what the Handler was told, then what the other end has seen. After a step that
// was repeated, alike lines are counted, whatever stream they concern.
func (s *scene) observe(repeated bool) string {
	synctest.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	slices.SortStableFunc(s.log, func(a, b string) int { return rank(a) - rank(b) })
	var order []string
	times := map[string]int{}
	for _, line := range s.log {
		if repeated {
			line = regexp.MustCompile(`\b[0-9]*[13579]\b`).ReplaceAllString(line, "#")
		}
		if times[line] == 0 {
			order = append(order, line)
		}
		times[line]++
	}
	s.log = nil
	var out strings.Builder
	for _, line := range order {
		fmt.Fprintf(&out, "  %s", line)
		if times[line] > 1 {
			fmt.Fprintf(&out, " (%d times)", times[line])
		}
		out.WriteByte('\n')
	}
	return out.String()
}

func rank(line string) int {
	switch {
	case strings.HasPrefix(line, "the connection"):
		return 3
	case strings.HasPrefix(line, "the other end"):
		return 2
	case line[0] == '<':
		return 1
	}
	return 0
}

// read shows the frames that come.
func (s *scene) read(preface bool) {
	in := http2.NewFramer(nil, pausing{s})
	in.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	if preface {
		io.CopyN(io.Discard, pausing{s}, int64(len(http2.ClientPreface)))
	}
	for {
		f, err := in.ReadFrame()
		if err != nil {
			s.say("the other end reads: %v", err)
			return
		}
		s.say("< %s", render(f))
	}
}

// pausing is the other end's connection, which it does not read while that is paused.
type pausing struct{ *scene }

func (p pausing) Read(b []byte) (int, error) {
	p.mu.Lock()
	paused := p.paused
	p.mu.Unlock()
	if paused != nil {
		<-paused
	}
	return p.peer.Read(b)
}

func (s *scene) resume() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.paused != nil {
		close(s.paused)
		s.paused = nil
	}
}

func render(f http2.Frame) string {
	h := f.Header()
	switch f := f.(type) {
	case *http2.SettingsFrame:
		if f.IsAck() {
			return "SETTINGS ack"
		}
		return "SETTINGS"
	case *http2.MetaHeadersFrame:
		return fmt.Sprintf("HEADERS %d %s", h.StreamID, list(f.Fields, f.StreamEnded()))
	case *http2.DataFrame:
		return fmt.Sprintf("DATA %d %s", h.StreamID, body(f.Data(), f.StreamEnded()))
	case *http2.RSTStreamFrame:
		return fmt.Sprintf("RST_STREAM %d %v", h.StreamID, f.ErrCode)
	case *http2.GoAwayFrame:
		return fmt.Sprintf("GOAWAY %d %v", f.LastStreamID, f.ErrCode)
	case *http2.WindowUpdateFrame:
		return fmt.Sprintf("WINDOW_UPDATE %d %d", h.StreamID, f.Increment)
	case *http2.PingFrame:
		if f.IsAck() {
			return fmt.Sprintf("PING ack %q", f.Data)
		}
		return fmt.Sprintf("PING %q", f.Data)
	}
	return fmt.Sprint(f)
}

func list(fields []hpack.HeaderField, end bool) string {
	var out []string
	for _, f := range fields {
		out = append(out, f.Name+":"+f.Value)
	}
	return strings.Join(append(out, slices.Repeat([]string{"end"}, one(end))...), " ")
}

func body(p []byte, end bool) string {
	return fmt.Sprintf("%q", p) + strings.Repeat(" end", one(end))
}

func one(b bool) int {
	if b {
		return 1
	}
	return 0
}

// The Handler.

func (s *scene) Headers(x *Stream, fields []hpack.HeaderField, end bool) {
	s.mu.Lock()
	s.streams[x.id] = x
	s.mu.Unlock()
	s.say("%d head %s", x.id, list(fields, end))
}

func (s *scene) Data(x *Stream, p []byte, end bool) {
	s.say("%d data %s", x.id, body(p, end))
	if s.consumes {
		x.Consumed(len(p))
	}
}

func (s *scene) Trailers(x *Stream, fields []hpack.HeaderField) {
	s.say("%d trailers %s", x.id, list(fields, false))
}

func (s *scene) Writable(x *Stream) { s.say("%d may write", x.id) }

func (s *scene) Reset(x *Stream, code http2.ErrCode, why Cause) {
	s.say("%d is reset: %v, %s", x.id, code, [...]string{"by the other end", "unseen", "malformed", "broken"}[why])
}

func (s *scene) step(line string) {
	words := strings.Fields(line)
	times, rest, repeated := strings.Cut(line, " times > ")
	switch {
	case repeated:
		n, _ := strconv.Atoi(times)
		for i := range n {
			for frame := range strings.SplitSeq(rest, ";") {
				if s.send(strings.Fields(frame), 2*uint32(i)) != nil {
					return
				}
			}
			if i%50 == 49 {
				synctest.Wait() // more than that is not under way at a time
			}
		}
	case words[0] == ">":
		s.send(words[1:], 0) // the connection may be closed: observed elsewhere
	case words[0] == "closes":
		s.peer.Close()
	case words[0] == "reads":
		s.resume()
		if words[1] == "off" {
			s.mu.Lock()
			s.paused = make(chan struct{})
			s.mu.Unlock()
		}
	case words[0] == "open":
		fields, end := fieldsOf(words[1:])
		if x := s.conn.Open(nil, fields, nil, end); x != nil {
			s.mu.Lock()
			s.streams[x.id] = x
			s.mu.Unlock()
			s.say("opened %d", x.id)
		} else {
			s.say("no more streams")
		}
	case words[0] == "drain":
		s.conn.Drain()
	case words[0] == "check":
		if err := s.conn.Check(time.Now()); err != nil {
			s.say("%v", regexp.MustCompile(`10\.[0-9.:]+`).ReplaceAllString(err.Error(), "HOST"))
			s.conn.Close()
		}
	case words[0] == "wait":
		d, err := time.ParseDuration(words[1])
		if err != nil {
			s.t.Fatal(err)
		}
		time.Sleep(d)
	default:
		s.act(words)
	}
	s.conn.Flush()
}

// act does what a Handler might do.
func (s *scene) act(words []string) {
	id, err := strconv.Atoi(words[0])
	s.mu.Lock()
	x := s.streams[uint32(id)]
	s.mu.Unlock()
	if err != nil || x == nil {
		s.t.Fatalf("what does %q mean?", words)
	}
	switch words[1] {
	case "head":
		fields, end := fieldsOf(words[2:])
		x.WriteHeaders(fields, nil, end)
	case "data":
		text := ""
		end := words[len(words)-1] == "end"
		if len(words) > 2+one(end) {
			text = expand(words[2])
		}
		s.say("%d of %d taken", x.Write([]byte(text), end), len(text))
	case "consumed":
		n, _ := strconv.Atoi(words[2])
		x.Consumed(n)
	case "reset":
		x.Reset(codeOf(words[2]))
	default:
		s.t.Fatalf("what does %q mean?", words)
	}
}

func fieldsOf(words []string) (fields []hpack.HeaderField, end bool) {
	for _, w := range words {
		if w == "end" {
			end = true
			continue
		}
		if m := regexp.MustCompile(`^\{(\w+):(\w+)\*(\d+)\}$`).FindStringSubmatch(w); m != nil {
			n, _ := strconv.Atoi(m[3])
			fields = append(fields, slices.Repeat([]hpack.HeaderField{{Name: m[1], Value: m[2]}}, n)...)
			continue
		}
		at := 1 + strings.IndexByte(w[1:], ':')
		fields = append(fields, hpack.HeaderField{Name: expand(w[:at]), Value: strings.ReplaceAll(expand(w[at+1:]), "_", " ")})
	}
	return fields, end
}

func codeOf(name string) http2.ErrCode {
	for c := range http2.ErrCode(0xe) {
		if c.String() == name {
			return c
		}
	}
	return 0xff
}

// send sends a frame. HEADERS has fields as NAME:VALUE ("_" is a space), end, and more (CONTINUATION follows); "GET" stands
// for the fields of a request. DATA has a text, end, and pad.
func (s *scene) send(words []string, add uint32) error {
	if hexed, ok := strings.CutPrefix(words[0], "x"); ok {
		b, err := hex.DecodeString(hexed)
		if err != nil {
			s.t.Fatal(err)
		}
		_, err = s.peer.Write(b)
		return err
	}
	number := func(i int) uint32 {
		if i >= len(words) {
			return 0
		}
		digits, counts := strings.CutSuffix(words[i], "+")
		n, _ := strconv.ParseUint(digits, 10, 32)
		if counts {
			n += uint64(add)
		}
		return uint32(n)
	}
	id, f := number(1), s.framer
	switch words[0] {
	case "PREFACE":
		_, err := io.WriteString(s.peer, http2.ClientPreface)
		return err
	case "SETTINGS":
		var settings []http2.Setting
		for _, w := range words[1:] {
			name, value, _ := strings.Cut(w, "=")
			n, _ := strconv.ParseUint(value, 10, 32)
			for i := range http2.SettingID(7) {
				if i.String() == name {
					settings = append(settings, http2.Setting{ID: i, Val: uint32(n)})
				}
			}
		}
		return f.WriteSettings(settings...)
	case "SETTINGS_ACK":
		return f.WriteSettingsAck()
	case "HEADERS":
		return s.sendHeaders(id, words[2:])
	case "CONTINUATION":
		return f.WriteContinuation(id, slices.Contains(words, "last"), []byte(expand(words[2])))
	case "DATA":
		end, padded := slices.Contains(words, "end"), slices.Contains(words, "pad")
		text := ""
		if len(words) > 2 && words[2] != "end" && words[2] != "pad" {
			text = expand(words[2])
		}
		if padded {
			return f.WriteDataPadded(id, end, []byte(text), make([]byte, 9))
		}
		for len(text) > 16384 {
			f.WriteData(id, false, []byte(text[:16384]))
			text = text[16384:]
		}
		return f.WriteData(id, end, []byte(text))
	case "RST_STREAM":
		return f.WriteRSTStream(id, codeOf(words[2]))
	case "WINDOW_UPDATE":
		return f.WriteWindowUpdate(id, number(2))
	case "PING":
		return f.WritePing(false, [8]byte{'p'})
	case "PING_ACK":
		var data [8]byte
		copy(data[:], words[1])
		return f.WritePing(true, data)
	case "GOAWAY":
		return f.WriteGoAway(id, codeOf(words[2]), nil)
	case "PRIORITY":
		return f.WritePriority(id, http2.PriorityParam{StreamDep: number(2)})
	}
	s.t.Fatalf("what does %q mean?", words)
	return nil
}

func (s *scene) sendHeaders(id uint32, words []string) error {
	more := slices.Contains(words, "more")
	words = slices.DeleteFunc(slices.Clone(words), func(w string) bool { return w == "more" })
	if i := slices.Index(words, "GET"); i >= 0 {
		words = slices.Replace(words, i, i+1, ":method:GET", ":scheme:http", ":authority:web.mesh", ":path:/")
	}
	fields, end := fieldsOf(words)
	s.block.Reset()
	for _, f := range fields {
		s.encoder.WriteField(f)
	}
	rest := bytes.Clone(s.block.Bytes())
	first := rest[:min(len(rest), frameSize)]
	rest = rest[len(first):]
	err := s.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: first, EndStream: end, EndHeaders: !more && len(rest) == 0})
	for len(rest) > 0 {
		part := rest[:min(len(rest), frameSize)]
		rest = rest[len(part):]
		err = s.framer.WriteContinuation(id, !more && len(rest) == 0, part)
	}
	return err
}

// expand makes "{a*9}" aaaaaaaaa.
func expand(text string) string {
	return regexp.MustCompile(`\{(.+?)\*(\d+)\}`).ReplaceAllStringFunc(text, func(m string) string {
		what, count, _ := strings.Cut(m[1:len(m)-1], "*")
		n, _ := strconv.Atoi(count)
		return strings.Repeat(what, n)
	})
}

// shorten is the opposite.
func shorten(text string) string {
	var out strings.Builder
	for len(text) > 0 {
		n := 1
		for n < len(text) && text[n] == text[0] {
			n++
		}
		if n > 20 {
			fmt.Fprintf(&out, "{%c*%d}", text[0], n)
			text = text[n:]
			continue
		}
		out.WriteByte(text[0])
		text = text[1:]
	}
	return out.String()
}
