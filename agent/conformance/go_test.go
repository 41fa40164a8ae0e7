//go:build linux

package conformance

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// gopher is the client of net/http, with one version of HTTP.
type gopher struct {
	t    *testing.T
	base string // URL of the service web
	*http.Client
}

func testGo(t *testing.T, at target) {
	gopherOf(t, at, serviceWeb, "h1", http1)
	gopherOf(t, at, serviceWeb, "h2", http2)
	t.Run("proxy", func(t *testing.T) {
		if at.proxy == "" {
			t.Skip("no agent, no proxy")
		}
		transport := at.transport(t)
		transport.Proxy = http.ProxyURL(&url.URL{Scheme: "http", Host: at.proxy})
		gopher{t, "http://" + serviceWeb + ".mesh", &http.Client{Transport: transport}}.run()
	})
}

// testConverted has callers speak another version of HTTP than replicas.
func testConverted(t *testing.T, at target) {
	if at.proxy == "" {
		t.Skip("no agent, no conversion")
	}
	gopherOf(t, at, serviceHTTP2, "h1 to h2", http1)
	gopherOf(t, at, serviceHTTP1, "h2 to h1", http2)
}

func gopherOf(t *testing.T, at target, service, name string, v versions) {
	t.Run(name, func(t *testing.T) {
		transport := at.transport(t)
		transport.Protocols = v.protocols()
		gopher{t, at.url(service, ""), &http.Client{Transport: transport}}.run()
	})
}

func (at target) transport(t *testing.T) *http.Transport {
	transport := &http.Transport{
		DialContext: at.node.DialContext, DisableCompression: true, ExpectContinueTimeout: patience, MaxIdleConnsPerHost: 100,
	}
	t.Cleanup(transport.CloseIdleConnections)
	return transport
}

func (g gopher) run() {
	for name, f := range map[string]func(gopher){
		"bodies": gopher.bodies, "trailers": gopher.trailers, "informational": gopher.informational, "expect": gopher.expect,
		"early": gopher.early, "duplex": gopher.duplex, "events": gopher.events, "cancel": gopher.cancel, "broken": gopher.broken,
		"slow reader": gopher.slowReader, "methods": gopher.methods, "fields": gopher.fields, "many": gopher.many,
	} {
		g.t.Run(name, func(t *testing.T) {
			f(gopher{t, g.base, g.Client})
		})
	}
}

// request makes a request that ends with the test.
func (g gopher) request(method, path string, body io.Reader) *http.Request {
	g.t.Helper()
	ctx, cancel := context.WithTimeout(g.t.Context(), patience)
	g.t.Cleanup(cancel)
	r, err := http.NewRequestWithContext(ctx, method, g.base+path, body)
	if err != nil {
		g.t.Fatal(err)
	}
	return r
}

func (g gopher) send(r *http.Request) *http.Response {
	g.t.Helper()
	resp, err := g.Do(r)
	if err != nil {
		g.t.Fatalf("%s %s: %v", r.Method, r.URL, err)
	}
	g.t.Cleanup(func() { resp.Body.Close() })
	return resp
}

// describe sends a request to /describe and returns what came there.
func (g gopher) describe(r *http.Request) (d description) {
	g.t.Helper()
	if err := json.NewDecoder(g.send(r).Body).Decode(&d); err != nil {
		g.t.Fatal(err)
	}
	return d
}

// unsized hides the length of a body.
func unsized(r io.Reader) io.Reader { return struct{ io.Reader }{r} }

func (g gopher) bodies() {
	for _, n := range []int64{0, 1, 4095, 1 << 16, 5 << 20} {
		want := sumOf(body(n))
		for _, path := range []string{"/bytes/", "/stream/"} {
			if got := sumOf(g.send(g.request("GET", path+fmt.Sprint(n), nil)).Body); got != want {
				g.t.Errorf("download: got %s, want %s", got, want)
			}
		}
		sized := g.request("POST", "/describe", bytes.NewReader(bodyOf(0, n)))
		if d := g.describe(sized); d.Sum != want || d.Length != n {
			g.t.Errorf("upload: got %s and length %d, want %s", d.Sum, d.Length, want)
		}
		if d := g.describe(g.request("POST", "/describe", unsized(body(n)))); d.Sum != want {
			g.t.Errorf("upload without a length: got %s, want %s", d.Sum, want)
		}
		if got := sumOf(g.send(g.request("POST", "/echo", unsized(body(n)))).Body); got != want {
			g.t.Errorf("echo: got %s, want %s", got, want)
		}
	}
}

func (g gopher) trailers() {
	r := g.request("POST", "/describe", unsized(body(100_000)))
	r.Trailer = http.Header{"X-Last": {"word"}, "X-More": {"a", "b"}}
	if d := g.describe(r); d.Trailer.Get("X-Last") != "word" || !slices.Equal(d.Trailer["X-More"], []string{"a", "b"}) {
		g.t.Errorf("trailers of the request: %v", d.Trailer)
	}
	resp := g.send(g.request("GET", "/stream/70000", nil))
	if sum := sumOf(resp.Body); resp.Trailer.Get("X-Sum") != sum {
		g.t.Errorf("trailers of the response: %v, want %s", resp.Trailer, sum)
	}
	r = g.request("POST", "/echo", unsized(body(10)))
	r.Trailer = http.Header{"X-Echo": {"echo"}}
	resp = g.send(r)
	if io.Copy(io.Discard, resp.Body); resp.Trailer.Get("X-Echo") != "echo" {
		g.t.Errorf("trailers there and back: %v", resp.Trailer)
	}
}

func (g gopher) informational() {
	var codes []int
	var link string
	r := g.request("GET", "/hints", nil)
	r = r.WithContext(httptrace.WithClientTrace(r.Context(), &httptrace.ClientTrace{
		Got1xxResponse: func(code int, header textproto.MIMEHeader) error {
			codes = append(codes, code)
			if code == http.StatusEarlyHints {
				link = header.Get("Link")
			}
			return nil
		},
	}))
	resp := g.send(r)
	if text, _ := io.ReadAll(resp.Body); string(text) != "hinted\n" || resp.StatusCode != http.StatusOK {
		g.t.Errorf("got %s %q", resp.Status, text)
	}
	if !slices.Equal(codes, []int{103, 102}) || link != "</style.css>; rel=preload" {
		g.t.Errorf("got %v and link %q before the response", codes, link)
	}
}

func (g gopher) expect() {
	r := g.request("PUT", "/describe", body(1<<20))
	r.Header.Set("Expect", "100-continue")
	began := time.Now()
	if d := g.describe(r); d.Sum != sumOf(body(1<<20)) {
		g.t.Errorf("got %s", d.Sum)
	}
	r = g.request("PUT", "/early", body(1<<20))
	r.Header.Set("Expect", "100-continue")
	if resp := g.send(r); resp.StatusCode != http.StatusRequestEntityTooLarge {
		g.t.Errorf("got %s", resp.Status)
	}
	if took := time.Since(began); took > patience/2 {
		g.t.Errorf("took %v: no word came", took)
	}
}

// endless is a body that goes on until it is closed.
type endless struct {
	once sync.Once
	done chan struct{}
}

func newEndless() *endless { return &endless{done: make(chan struct{})} }

func (e *endless) Read(p []byte) (int, error) {
	select {
	case <-e.done:
		return 0, io.ErrClosedPipe
	case <-time.After(time.Millisecond):
		return len(p), nil
	}
}

func (e *endless) Close() error {
	e.once.Do(func() { close(e.done) })
	return nil
}

// early wants the answer though the body has not ended.
func (g gopher) early() {
	sent := newEndless()
	defer sent.Close()
	resp := g.send(g.request("POST", "/early", sent))
	if text, err := io.ReadAll(resp.Body); resp.StatusCode != http.StatusRequestEntityTooLarge || string(text) != "no\n" || err != nil {
		g.t.Errorf("got %s %q, %v", resp.Status, text, err)
	}
}

// duplex says something, and goes on only when it has been answered.
func (g gopher) duplex() {
	in, out := io.Pipe()
	resp := make(chan *http.Response, 1)
	var sending sync.WaitGroup
	defer sending.Wait()
	defer out.Close()
	r := g.request("POST", "/echo", in)
	sending.Go(func() {
		got, err := g.Do(r)
		if err != nil {
			g.t.Error(err)
		}
		resp <- got
	})
	var answers *bufio.Reader
	for i := range 50 {
		if _, err := fmt.Fprintf(out, "line %d\n", i); err != nil {
			g.t.Fatal(err)
		}
		if answers == nil {
			got := <-resp
			if got == nil {
				return
			}
			defer got.Body.Close()
			answers = bufio.NewReader(got.Body)
		}
		if line, err := answers.ReadString('\n'); line != fmt.Sprintf("line %d\n", i) {
			g.t.Fatalf("got %q, %v", line, err)
		}
	}
	out.Close()
	if rest, err := io.ReadAll(answers); len(rest) > 0 || err != nil {
		g.t.Errorf("at the end: %q, %v", rest, err)
	}
}

// events wants each server-sent event as soon as it is there.
func (g gopher) events() {
	in, out := io.Pipe()
	defer out.Close()
	resp := g.send(g.request("POST", "/events", in))
	if got := resp.Header.Get("Content-Type"); got != "text/event-stream" {
		g.t.Errorf("content type %q", got)
	}
	events := bufio.NewReader(resp.Body)
	for i := range 20 {
		fmt.Fprintln(out, i)
		for _, want := range []string{fmt.Sprintf("data: %d\n", i), "\n"} {
			if line, err := events.ReadString('\n'); line != want {
				g.t.Fatalf("got %q, %v; want %q", line, err, want)
			}
		}
	}
}

// cancel goes away, in each phase of a call.
func (g gopher) cancel() {
	for _, path := range []string{"/hang", "/bytes/1000000000"} {
		r := g.request("GET", path, nil)
		ctx, cancel := context.WithTimeout(r.Context(), 100*time.Millisecond)
		resp, err := g.Do(r.WithContext(ctx))
		if err == nil {
			_, err = io.Copy(&slow{ctx}, resp.Body)
			resp.Body.Close()
		}
		if !errors.Is(err, context.DeadlineExceeded) {
			g.t.Errorf("%s: got %v", path, err)
		}
		cancel()
	}
	sent := newEndless()
	defer sent.Close()
	r := g.request("POST", "/describe", sent)
	ctx, cancel := context.WithTimeout(r.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := g.Do(r.WithContext(ctx)); !errors.Is(err, context.DeadlineExceeded) {
		g.t.Errorf("upload: got %v", err)
	}
}

// slow takes a long time for everything, until its context ends.
type slow struct{ ctx context.Context }

func (s *slow) Write(p []byte) (int, error) {
	select {
	case <-s.ctx.Done():
		return 0, s.ctx.Err()
	case <-time.After(time.Millisecond):
		return len(p), nil
	}
}

// broken wants a response that was cut off to be seen as that.
func (g gopher) broken() {
	resp := g.send(g.request("GET", "/break", nil))
	if text, err := io.ReadAll(resp.Body); err == nil || string(text) != "the beginning" {
		g.t.Errorf("got %q, %v", text, err)
	}
}

func (g gopher) slowReader() {
	const n = 3 << 20
	resp := g.send(g.request("GET", fmt.Sprintf("/stream/%d", n), nil))
	var got bytes.Buffer
	if _, err := io.CopyBuffer(io.MultiWriter(&got, &slow{g.t.Context()}), struct{ io.Reader }{resp.Body}, make([]byte, 32<<10)); err != nil {
		g.t.Error(err)
	}
	if sum := sumOf(&got); sum != sumOf(body(n)) {
		g.t.Errorf("got %s", sum)
	}
}

func (g gopher) methods() {
	for _, method := range []string{"GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND", "X-OWN"} {
		resp := g.send(g.request(method, "/describe", nil))
		var d description
		if method == "HEAD" {
			if text, _ := io.ReadAll(resp.Body); len(text) > 0 {
				g.t.Errorf("HEAD with a body: %q", text)
			}
		} else if err := json.NewDecoder(resp.Body).Decode(&d); err != nil || d.Method != method {
			g.t.Errorf("%s: came as %s, %v", method, d.Method, err)
		}
	}
}

// fields sends what must pass, and what must not.
func (g gopher) fields() {
	r := g.request("GET", "/describe?q=%C3%A4+%2f", nil)
	r.Header = http.Header{
		"X-Many": {"1", "2", "3"}, "X-Obs": {"caf\xe9"}, "X-Long": {strings.Repeat("x", 8000)}, "Accept-Encoding": {"br"},
		"Keep-Alive": {"5"}, "Proxy-Authorization": {"secret"}, "Headroom-Endpoint": {"forged"}, "Te": {"trailers"},
	}
	for i := range 80 {
		r.Header.Set(fmt.Sprintf("X-Field-%d", i), "v")
	}
	d := g.describe(r)
	if d.URI != "/describe?q=%C3%A4+%2f" {
		g.t.Errorf("URI %q", d.URI)
	}
	if !slices.Equal(d.Header["X-Many"], []string{"1", "2", "3"}) || len(d.Header.Get("X-Long")) != 8000 || d.Header.Get("X-Field-79") != "v" {
		g.t.Errorf("got %v", d.Header)
	}
	if strings.HasPrefix(g.base, "http://"+serviceWeb) || d.Header.Get("Via") != "" { // agents are on the way
		for _, name := range []string{"Headroom-Endpoint", "Keep-Alive"} {
			if d.Header[name] != nil {
				g.t.Errorf("%s came through: %v", name, d.Header[name])
			}
		}
	}
}

// many are calls at once that must not be mixed up.
func (g gopher) many() {
	var calls sync.WaitGroup
	for i := range 40 {
		calls.Go(func() {
			for j := range 10 {
				n := int64(1000*i + j)
				resp, err := g.Do(g.request("POST", "/echo", body(n)))
				if err != nil {
					g.t.Error(err)
					return
				}
				if got := sumOf(resp.Body); got != sumOf(body(n)) {
					g.t.Errorf("got %s, want %d bytes", got, n)
				}
				resp.Body.Close()
			}
		})
	}
	calls.Wait()
}
