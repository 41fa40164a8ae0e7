//go:build linux

package load

import (
	"fmt"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// Paths that tell the origin what to do.
const (
	unaryPath  = "/bench.Echo/Unary"  // answers the one message when it has come
	streamPath = "/bench.Echo/Stream" // sends back each message as it comes
)

// grpcCaller makes calls in the form of gRPC, several at a time.
type grpcCaller struct {
	*h2
	all     []*call
	under   map[uint32]*grpcCall
	next    uint32
	request []hpack.HeaderField
	want    int // messages
}

// grpcCall is a call that is under way.
type grpcCall struct {
	call     *call
	answered bool
	received int // bytes
	sent     int // messages
}

func newGRPCCaller(c *conn, k Kind, authority string) caller {
	path := unaryPath
	if k.messages > 1 {
		path = streamPath
	}
	g := &grpcCaller{under: map[uint32]*grpcCall{}, next: 1, want: k.messages}
	g.h2 = newH2(c, g)
	g.request = []hpack.HeaderField{
		{Name: ":method", Value: "POST"}, {Name: ":scheme", Value: "http"}, {Name: ":path", Value: path},
		{Name: ":authority", Value: authority}, {Name: "content-type", Value: "application/grpc"},
		{Name: "user-agent", Value: "bench/1.0"}, {Name: "te", Value: "trailers"},
	}
	for range k.Calls {
		call := newCall(c, nil)
		call.begin = func() { g.begin(call) }
		g.all = append(g.all, call)
	}
	c.out = append(c.out, http2.ClientPreface...)
	g.open()
	return g
}

func (g *grpcCaller) calls() []*call { return g.all }

func (g *grpcCaller) begin(c *call) {
	stream := g.next
	g.next += 2
	g.under[stream] = &grpcCall{call: c, sent: 1}
	g.sendFields(stream, g.request, false)
	g.sendMessage(stream, g.want == 1)
}

func (g *grpcCaller) fields(stream uint32, end bool) error {
	c := g.under[stream]
	if c == nil {
		return fmt.Errorf("fields on stream %d, which is not open", stream)
	}
	if !c.answered {
		if c.answered = true; g.field(":status") != "200" {
			return fmt.Errorf("the answer: %v", g.decoded)
		}
	}
	if !end {
		return nil
	}
	if g.field("grpc-status") != "0" || c.received != g.want*messageSize {
		return fmt.Errorf("the end, after %d bytes of %d: %v", c.received, g.want*messageSize, g.decoded)
	}
	delete(g.under, stream)
	c.call.done(nil)
	return nil
}

func (g *grpcCaller) data(stream uint32, n int, end bool) error {
	c := g.under[stream]
	if c == nil || end {
		return fmt.Errorf("data on stream %d, which is not open or ends without trailers", stream)
	}
	c.received += n
	for c.sent < g.want && c.received >= c.sent*messageSize {
		c.sent++
		g.sendMessage(stream, c.sent == g.want)
	}
	return nil
}

func (g *grpcCaller) reset(stream uint32, code http2.ErrCode) error {
	return fmt.Errorf("stream %d was reset: %s", stream, code)
}

func (g *grpcCaller) closed(err error) {
	for _, c := range g.all {
		c.fail(err)
	}
}

// grpcOrigin sends back each message.
type grpcOrigin struct {
	*h2
	under map[uint32]*grpcServed
}

type grpcServed struct {
	unary    bool
	received int // bytes
	answered int // messages
}

func newGRPCOrigin(c *conn) handler {
	g := &grpcOrigin{under: map[uint32]*grpcServed{}}
	g.h2 = newH2(c, g)
	g.preface = http2.ClientPreface
	g.open()
	return g
}

func (g *grpcOrigin) fields(stream uint32, end bool) error {
	if s := g.under[stream]; s != nil { // trailers
		return g.finish(stream, s)
	}
	path := g.field(":path")
	if end || path != unaryPath && path != streamPath {
		return fmt.Errorf("not a request of the bench: %v", g.decoded)
	}
	g.under[stream] = &grpcServed{unary: path == unaryPath}
	return nil
}

func (g *grpcOrigin) data(stream uint32, n int, end bool) error {
	s := g.under[stream]
	if s == nil {
		return nil // it was reset
	}
	s.received += n
	if !s.unary || end {
		g.echo(stream, s)
	}
	if end {
		return g.finish(stream, s)
	}
	return nil
}

func (g *grpcOrigin) echo(stream uint32, s *grpcServed) {
	if s.answered == 0 && s.received >= messageSize {
		g.sendFields(stream, []hpack.HeaderField{{Name: ":status", Value: "200"}, {Name: "content-type", Value: "application/grpc"}}, false)
	}
	for ; s.received >= (s.answered+1)*messageSize; s.answered++ {
		g.sendMessage(stream, false)
	}
}

func (g *grpcOrigin) finish(stream uint32, _ *grpcServed) error {
	delete(g.under, stream)
	if len(g.held) > 0 {
		return fmt.Errorf("the window is shut at the end of stream %d", stream)
	}
	g.sendFields(stream, []hpack.HeaderField{{Name: "grpc-status", Value: "0"}, {Name: "grpc-message", Value: ""}}, true)
	return nil
}

func (g *grpcOrigin) reset(stream uint32, _ http2.ErrCode) error {
	delete(g.under, stream)
	return nil
}

func (g *grpcOrigin) closed(error) {}
