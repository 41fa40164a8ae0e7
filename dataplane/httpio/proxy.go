package httpio

import (
	"bufio"
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"strings"
	"sync"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/fault"
)

// Proxy answers each request by what a round trip makes of it. It streams both ways at once, passes trailers,
// informational responses and upgrades, and turns errors into faults. Callers and replicas see each other as if no proxy
// were between them.
type Proxy struct{ reverse *httputil.ReverseProxy }

// NewProxy returns a Proxy. The request that rt gets is rt's own, to change as it likes. The body of the response that
// it returns is closed by the time that ServeHTTP returns, whatever happens.
func NewProxy(rt RoundTripper, log *slog.Logger) *Proxy {
	return &Proxy{&httputil.ReverseProxy{
		Rewrite: passThrough,
		Transport: RoundTripper(func(r *http.Request) (*http.Response, error) {
			resp, err := rt(r)
			if err == nil {
				r.Context().Value(passageKey{}).(*passage).response = resp.Body
			}
			return resp, err
		}),
		FlushInterval: -1,
		BufferPool:    &buffers{},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			FaultOf(r.Context(), err).Write(w)
		},
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}}
}

// ServeHTTP answers one request.
func (p *Proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	g := &passage{ResponseWriter: w, control: http.NewResponseController(w)}
	in := r.WithContext(context.WithValue(r.Context(), passageKey{}, g))
	if r.Body != nil && r.Body != http.NoBody {
		StripHeaders(r.Trailer) // the announcement
		g.request = &requestBody{ReadCloser: r.Body, trailer: r.Trailer, control: g.control}
		in.Body = g.request
	}
	completed := false
	defer func() { g.end(completed) }()
	p.reverse.ServeHTTP(g, in)
	completed = true
}

// passThrough restores what ReverseProxy takes away on the assumption that it faces the open internet.
func passThrough(pr *httputil.ProxyRequest) {
	pr.Out.URL.RawQuery = pr.In.URL.RawQuery
	pr.Out.URL.Opaque = rawPath(pr.In.RequestURI)
	pr.Out.Trailer = pr.In.Trailer // filled in when the body has been read
	for _, name := range []string{"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"} {
		if v, ok := pr.In.Header[name]; ok {
			pr.Out.Header[name] = v
		}
	}
}

// rawPath returns the path of a request's target byte for byte, for url.URL.Opaque: what net/url makes of it may mean
// something else to the replica. It returns "" where that is not possible.
func rawPath(target string) string {
	target, _, _ = strings.Cut(target, "?")
	if _, rest, absolute := strings.Cut(target, "://"); absolute && !strings.HasPrefix(target, "/") {
		slash := strings.IndexByte(rest, '/')
		if slash < 0 {
			return ""
		}
		target = rest[slash:]
	}
	if strings.HasPrefix(target, "//") { // would be taken for a host
		return ""
	}
	return target
}

type passageKey struct{}

// passage is one request on its way through a Proxy, and the writer of its response.
type passage struct {
	http.ResponseWriter
	control  *http.ResponseController
	request  *requestBody // nil if there is none
	response io.Closer    // nil if there is none yet
}

// Unwrap is for http.ResponseController.
func (g *passage) Unwrap() http.ResponseWriter { return g.ResponseWriter }

// WriteHeader keeps net/http from adding to the response what the replica did not say.
func (g *passage) WriteHeader(code int) {
	h := g.Header()
	switch {
	case code == http.StatusContinue && g.request != nil:
		return // net/http says so itself when the body is read, which is now
	case code < http.StatusOK:
		StripHeaders(h)
	case g.request.unfinished():
		// The answer comes early. Pass it on at once, where net/http would wait for the rest of the request. Nobody will know
		// then where on the connection that ends.
		g.control.EnableFullDuplex()
		h.Set("Connection", "close")
	}
	if _, ok := h["Content-Type"]; !ok && code >= http.StatusOK {
		h["Content-Type"] = nil // don't guess
	}
	g.ResponseWriter.WriteHeader(code)
}

// Hijack returns the caller's connection with what was read of it already. What is left of the request's body is not read
// any more: nobody could tell it from what comes after it.
func (g *passage) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	if g.request.unfinished() {
		g.request.interrupt()
		g.request.wait()
	}
	c, rw, err := g.control.Hijack()
	if err != nil {
		return nil, nil, err
	}
	return &upgradedConn{Conn: c, early: rw.Reader}, rw, nil
}

// end makes sure that nothing of the request goes on. A caller that has its answer before it has sent all is read a
// little longer, as closing its connection with bytes unread might take the answer away from it; one whose answer is cut
// off shall know now.
func (g *passage) end(completed bool) {
	if g.response != nil {
		g.response.Close()
	}
	if g.request.unfinished() {
		g.request.interrupt()
		g.request.wait()
		if completed {
			g.control.SetReadDeadline(time.Now().Add(linger))
		}
	}
}

const linger = 500 * time.Millisecond

// buffers is a httputil.BufferPool.
type buffers struct{ pool sync.Pool }

type buffer [32 << 10]byte

func (b *buffers) Get() []byte {
	if p, ok := b.pool.Get().(*buffer); ok {
		return p[:]
	}
	return new(buffer)[:]
}

func (b *buffers) Put(p []byte) { b.pool.Put((*buffer)(p)) }

// CheckResponse says what is wrong with a response that can't be passed on.
func CheckResponse(r *http.Request, resp *http.Response) *fault.Error {
	if resp.StatusCode < 100 {
		return fault.New(fault.Reset, "the replica answered with the status %q", resp.Status)
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		return nil
	}
	_, switched := resp.Body.(io.ReadWriteCloser)
	asked, got := r.Header.Get("Upgrade"), resp.Header.Get("Upgrade")
	if !switched || !strings.EqualFold(asked, got) {
		return fault.New(fault.Reset, "the replica switched to protocol %q when %q was asked for", got, asked)
	}
	return nil
}
