//go:build linux

package conformance

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync"
	"testing"

	"github.com/coder/websocket"
)

// serveSocket sends messages back. With ?ping=N it sends as many pings first, and then says so; with ?close=CODE it closes
// at once, and with ?drop=1 it is gone after the first message.
func serveSocket(w http.ResponseWriter, r *http.Request) {
	c, err := websocket.Accept(w, r, &websocket.AcceptOptions{Subprotocols: []string{"second"}, CompressionMode: websocket.CompressionContextTakeover})
	if err != nil {
		return // Accept has answered
	}
	defer c.CloseNow()
	c.SetReadLimit(-1)
	query := r.URL.Query()
	if code, err := strconv.Atoi(query.Get("close")); err == nil {
		c.Close(websocket.StatusCode(code), "the server closes")
		return
	}
	if n, err := strconv.Atoi(query.Get("ping")); err == nil {
		pings(r.Context(), c, n)
		return
	}
	for echoMessage(r.Context(), c) == nil && query.Get("drop") == "" {
	}
}

// pings pings the other end so often, which says that it is done by a message.
func pings(ctx context.Context, c *websocket.Conn, n int) {
	ctx = c.CloseRead(ctx)
	for range n {
		if err := c.Ping(ctx); err != nil {
			return
		}
	}
	c.Write(ctx, websocket.MessageText, []byte("pinged"))
	<-ctx.Done()
}

// echoMessage sends the next message back, in fragments as they come.
func echoMessage(ctx context.Context, c *websocket.Conn) error {
	kind, in, err := c.Reader(ctx)
	if err != nil {
		return err
	}
	out, err := c.Writer(ctx, kind)
	if err != nil {
		return err
	}
	if _, err := io.Copy(out, in); err != nil {
		return err
	}
	return out.Close()
}

func testWebSocket(t *testing.T, at target) {
	client := &http.Client{Transport: at.transport(t)}
	for name, test := range map[string]func(socket){
		"echo": socket.echo, "compressed": socket.compressed, "fragments": socket.fragments, "pings": socket.pings,
		"client closes": socket.clientCloses, "server closes": socket.serverCloses, "client is gone": socket.clientGone,
		"server is gone": socket.serverGone, "refused": socket.refused, "many": socket.many,
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			test(socket{t, ctx, client, at.url(serviceWeb, "/socket")})
		})
	}
}

// socket is a client of WebSockets.
type socket struct {
	t      *testing.T
	ctx    context.Context
	client *http.Client
	url    string
}

func (s socket) dial(query string, options websocket.DialOptions) *websocket.Conn {
	s.t.Helper()
	options.HTTPClient = s.client
	c, _, err := websocket.Dial(s.ctx, s.url+query, &options)
	if err != nil {
		s.t.Fatal(err)
	}
	c.SetReadLimit(-1)
	s.t.Cleanup(func() { c.CloseNow() })
	return c
}

func (s socket) wantEcho(c *websocket.Conn, message []byte) {
	s.t.Helper()
	var writing sync.WaitGroup
	defer writing.Wait()
	writing.Go(func() {
		if err := c.Write(s.ctx, websocket.MessageBinary, message); err != nil {
			s.t.Error(err)
		}
	})
	kind, got, err := c.Read(s.ctx)
	if err != nil || kind != websocket.MessageBinary || !bytes.Equal(got, message) {
		s.t.Errorf("%d bytes: %d came back, %v", len(message), len(got), err)
	}
}

func (s socket) echo() {
	c := s.dial("", websocket.DialOptions{Subprotocols: []string{"first", "second"}})
	if c.Subprotocol() != "second" {
		s.t.Errorf("subprotocol %q", c.Subprotocol())
	}
	for _, n := range []int64{0, 1, 125, 126, 65535, 65536, 1 << 20, 16 << 20} {
		s.wantEcho(c, bodyOf(0, n))
	}
	s.wantClosed(c.Close(websocket.StatusNormalClosure, ""))
}

func (s socket) wantClosed(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Errorf("close: %v", err)
	}
}

func (s socket) compressed() {
	c := s.dial("", websocket.DialOptions{CompressionMode: websocket.CompressionContextTakeover})
	for range 3 {
		s.wantEcho(c, bytes.Repeat([]byte("again "), 50_000))
	}
	s.wantClosed(c.Close(websocket.StatusNormalClosure, ""))
}

// fragments sends a message in many frames.
func (s socket) fragments() {
	c := s.dial("", websocket.DialOptions{})
	w, err := c.Writer(s.ctx, websocket.MessageText)
	if err != nil {
		s.t.Fatal(err)
	}
	var want bytes.Buffer
	for i := range 300 {
		fmt.Fprintf(io.MultiWriter(w, &want), "fragment %d, ", i)
	}
	if err := w.Close(); err != nil {
		s.t.Fatal(err)
	}
	if kind, got, err := c.Read(s.ctx); kind != websocket.MessageText || !bytes.Equal(got, want.Bytes()) {
		s.t.Errorf("got %v of %d bytes, %v", kind, len(got), err)
	}
}

func (s socket) pings() {
	c := s.dial("?ping=20", websocket.DialOptions{})
	if _, got, err := c.Read(s.ctx); string(got) != "pinged" {
		s.t.Errorf("got %q, %v", got, err)
	}
	ctx := c.CloseRead(s.ctx)
	for range 20 {
		if err := c.Ping(ctx); err != nil {
			s.t.Fatal(err)
		}
	}
}

// clientCloses wants the server's word on the client's, which has the same code.
func (s socket) clientCloses() {
	for _, code := range []websocket.StatusCode{websocket.StatusNormalClosure, websocket.StatusGoingAway, 4001} {
		c := s.dial("", websocket.DialOptions{})
		s.wantEcho(c, []byte("x"))
		s.wantClosed(c.Close(code, "the client closes"))
	}
}

func (s socket) serverCloses() {
	for _, code := range []websocket.StatusCode{websocket.StatusNormalClosure, websocket.StatusInternalError, 4999} {
		c := s.dial(fmt.Sprintf("?close=%d", code), websocket.DialOptions{})
		_, _, err := c.Read(s.ctx)
		closed, ok := errors.AsType[websocket.CloseError](err)
		if !ok || closed.Code != code || closed.Reason != "the server closes" {
			s.t.Errorf("code %d: got %v", code, err)
		}
	}
}

// clientGone goes without a word, while the server waits and while it writes.
func (s socket) clientGone() {
	s.dial("", websocket.DialOptions{}).CloseNow()
	c := s.dial("", websocket.DialOptions{})
	if err := c.Write(s.ctx, websocket.MessageBinary, bodyOf(0, 4<<20)); err != nil {
		s.t.Error(err)
	}
	c.CloseNow()
}

func (s socket) serverGone() {
	c := s.dial("?drop=1", websocket.DialOptions{})
	s.wantEcho(c, []byte("x"))
	if _, _, err := c.Read(s.ctx); err == nil || s.ctx.Err() != nil {
		s.t.Errorf("got %v", err)
	}
}

// refused asks where there are no sockets.
func (s socket) refused() {
	_, resp, err := websocket.Dial(s.ctx, s.url+"/nowhere", &websocket.DialOptions{HTTPClient: s.client})
	if err == nil || resp == nil || resp.StatusCode != http.StatusNotFound {
		s.t.Errorf("got %v, %v", resp, err)
	}
}

func (s socket) many() {
	var all sync.WaitGroup
	for i := range 50 {
		c := s.dial("", websocket.DialOptions{})
		all.Go(func() {
			for j := range 10 {
				s.wantEcho(c, bodyOf(int64(i), int64(1+j*7000)))
			}
			s.wantClosed(c.Close(websocket.StatusNormalClosure, ""))
		})
	}
	all.Wait()
}
