package h2

import (
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"pgregory.net/rapid"
)

// answerer answers each request with a head, and what the request says it echoes.
type answerer struct {
	head []hpack.HeaderField

	begun, ended int
}

func (a *answerer) Headers(s *Stream, fields []hpack.HeaderField, end bool) {
	a.begun++
	s.WriteHeaders(a.head, []Field{{"x-more", []byte("more")}}, end)
	a.end(end)
}

func (a *answerer) Data(s *Stream, p []byte, end bool) {
	n := s.Write(p, end)
	s.Consumed(len(p))
	if n < len(p) { // it is not what is tested
		s.Reset(http2.ErrCodeCancel)
		end = true
	}
	a.end(end)
}

func (a *answerer) Trailers(s *Stream, _ []hpack.HeaderField) { a.end(true); s.Write(nil, true) }
func (a *answerer) Writable(*Stream)                          {}
func (a *answerer) Reset(*Stream, http2.ErrCode, Cause)       { a.end(true) }
func (a *answerer) end(yes bool) {
	if yes {
		a.ended++
	}
}

// TestBacklog wants to be rid of who asks ever more and reads nothing.
func TestBacklog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		local, peer := pair(t)
		c := NewServer(local, Config{Buffers: new(Buffers), Handler: &answerer{
			head: []hpack.HeaderField{{Name: ":status", Value: "200"}, {Name: "x", Value: strings.Repeat("x", 60<<10)}},
		}})
		var wg sync.WaitGroup
		wg.Go(func() {
			err := c.Run(t.Context())
			if e, ok := errors.AsType[http2.ConnectionError](err); !ok || http2.ErrCode(e) != http2.ErrCodeEnhanceYourCalm {
				t.Errorf("the connection ended with %v", err)
			}
		})
		io.WriteString(peer, http2.ClientPreface)
		f := http2.NewFramer(peer, nil)
		f.WriteSettings()
		for id := uint32(1); id < 1000; id += 2 {
			f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: head(t, "GET"), EndStream: true, EndHeaders: true})
		}
		wg.Wait()
		peer.Close()
	})
}

func head(t testing.TB, method string, more ...hpack.HeaderField) []byte {
	var b bytes.Buffer
	e := hpack.NewEncoder(&b)
	for _, f := range append([]hpack.HeaderField{
		{Name: ":method", Value: method}, {Name: ":scheme", Value: "http"}, {Name: ":authority", Value: "web.mesh"}, {Name: ":path", Value: "/"},
	}, more...) {
		if err := e.WriteField(f); err != nil {
			t.Fatal(err)
		}
	}
	return b.Bytes()
}

// TestLiterals wants what is written without a table to be read as it was.
func TestLiterals(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := hpack.HeaderField{Name: rapid.StringMatching(`[a-z]{1,300}`).Draw(t, "name"), Value: rapid.StringN(0, 40000, 40000).Draw(t, "value")}
		got, err := hpack.NewDecoder(tableSize, nil).DecodeFull(appendLiteral(appendLiteral(nil, f.Name, f.Value), f.Name, []byte(f.Value)))
		if err != nil || len(got) != 2 || got[0] != f || got[1] != f {
			t.Fatalf("got %v, %v", got, err)
		}
	})
}

// collector is a client's Handler that keeps one response.
type collector struct {
	fields   []hpack.HeaderField
	body     []byte
	done     bool
	broken   bool
	writable func()
}

func (c *collector) Headers(s *Stream, fields []hpack.HeaderField, end bool) {
	c.fields, c.done = append([]hpack.HeaderField(nil), fields...), end
}
func (c *collector) Data(s *Stream, p []byte, end bool) {
	c.body, c.done = append(c.body, p...), end
	s.Consumed(len(p))
}
func (c *collector) Trailers(s *Stream, fields []hpack.HeaderField) { c.done = true }
func (c *collector) Writable(*Stream)                               { c.writable() }
func (c *collector) Reset(*Stream, http2.ErrCode, Cause)            { c.broken = true }

// TestLargeHeads wants lists of fields of any size, and bodies, to come as they were sent from one end to the other.
func TestLargeHeads(t *testing.T) {
	for _, size := range []int{0, 1, 100, 16000, frameSize - 20, frameSize, frameSize + 1, 40000, 60000} {
		synctest.Test(t, func(t *testing.T) {
			local, remote := pair(t)
			value := strings.Repeat("ab~", size/3+1)[:size]
			a := &answerer{head: []hpack.HeaderField{{Name: ":status", Value: "200"}, {Name: "x", Value: value}}}
			server := NewServer(remote, Config{Buffers: new(Buffers), Handler: a})
			got := &collector{}
			client := NewClient(local, Config{Buffers: new(Buffers), Handler: got})
			ctx, end := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			wg.Go(func() { server.Run(ctx) })
			wg.Go(func() { client.Run(ctx) })
			<-client.Ready()
			s := client.Open(nil, []hpack.HeaderField{
				{Name: ":method", Value: "POST"}, {Name: ":scheme", Value: "http"}, {Name: ":authority", Value: "web.mesh"}, {Name: ":path", Value: "/"},
				{Name: "y", Value: value},
			}, []Field{{"z", []byte("more")}}, false)
			s.Write([]byte(value), true)
			client.Flush()
			synctest.Wait()
			if !got.done || string(got.body) != value || len(got.fields) != 3 || got.fields[1].Value != value || got.fields[2].Value != "more" {
				t.Errorf("%d bytes: done %v, %d fields, body of %d bytes", size, got.done, len(got.fields), len(got.body))
			}
			end()
			wg.Wait()
		})
	}
}

// FuzzFrames holds a server's end against any bytes: it must come to an end, and end every stream that it began.
func FuzzFrames(f *testing.F) {
	add := func(write func(*http2.Framer)) {
		var b bytes.Buffer
		b.WriteString(http2.ClientPreface)
		framer := http2.NewFramer(&b, nil)
		framer.AllowIllegalWrites = true
		framer.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 100})
		write(framer)
		f.Add(b.Bytes())
	}
	add(func(f *http2.Framer) {})
	add(func(w *http2.Framer) {
		w.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: head(f, "GET"), EndStream: true, EndHeaders: true})
		w.WriteHeaders(http2.HeadersFrameParam{StreamID: 3, BlockFragment: head(f, "POST", hpack.HeaderField{Name: "content-length", Value: "5"}), EndHeaders: true})
		w.WriteDataPadded(3, true, []byte("hello"), make([]byte, 3))
		w.WriteWindowUpdate(0, 100)
	})
	add(func(w *http2.Framer) {
		block := head(f, "POST")
		w.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block[:5], Priority: http2.PriorityParam{StreamDep: 3, Weight: 7}, PadLength: 5})
		w.WriteContinuation(1, true, block[5:])
		w.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, EndStream: true, EndHeaders: true})
		w.WriteRSTStream(1, http2.ErrCodeCancel)
		w.WritePing(false, [8]byte{1})
		w.WritePriority(5, http2.PriorityParam{StreamDep: 5})
		w.WriteGoAway(0, http2.ErrCodeNo, nil)
	})
	add(func(w *http2.Framer) {
		w.WriteSettings(http2.Setting{ID: http2.SettingHeaderTableSize, Val: 0}, http2.Setting{ID: http2.SettingMaxFrameSize, Val: 16384})
		w.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: head(f, "GET"), EndHeaders: true})
		w.WriteWindowUpdate(1, 1<<31-1)
		w.WriteRawFrame(0x55, 0, 1, []byte("unknown"))
		w.WritePushPromise(http2.PushPromiseParam{StreamID: 1, PromiseID: 2, BlockFragment: head(f, "GET"), EndHeaders: true})
	})
	f.Fuzz(func(t *testing.T, in []byte) {
		synctest.Test(t, func(t *testing.T) {
			local, peer := pair(t)
			a := &answerer{head: []hpack.HeaderField{{Name: ":status", Value: "200"}}}
			c := NewServer(local, Config{Buffers: new(Buffers), Handler: a})
			var wg sync.WaitGroup
			began := time.Now()
			wg.Go(func() { c.Run(t.Context()) })
			wg.Go(func() { io.Copy(io.Discard, peer) })
			peer.Write(in)
			peer.(interface{ CloseWrite() error }).CloseWrite()
			wg.Wait()
			peer.Close()
			if took := time.Since(began); took > 20*time.Second {
				t.Errorf("it took %v", took)
			}
			if len(c.streams) > 0 || a.begun > a.ended {
				t.Errorf("%d streams began, %d ended, %d are left", a.begun, a.ended, len(c.streams))
			}
			if c.queued != 0 {
				t.Errorf("%d bytes are taken for read and not consumed", c.queued)
			}
		})
	})
}
