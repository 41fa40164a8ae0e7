//go:build linux

package conformance

import (
	"bufio"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/big"
	mathrand "math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"sync"
	"testing"
	"time"
)

// Services of the mesh.
const (
	serviceWeb     = "web"     // HTTP/1 and HTTP/2, see webHandler
	serviceHTTP1   = "http1"   // the same by HTTP/1 only, which is declared
	serviceHTTP2   = "http2"   // the same by HTTP/2 only, which is declared
	serviceGRPC    = "grpc"    // the server of gRPC's interop tests
	serviceEcho    = "echo"    // TCP: bytes come back
	serviceGreeter = "greeter" // TCP: the server speaks first, as that of SMTP does
	serviceSink    = "sink"    // TCP: see serveSink
	serviceSecret  = "secret"  // TLS, HTTP within
)

// service is what the replicas of one name do with what comes to them.
type service struct {
	name     string
	protocol string                         // as declared; empty if it is not
	serve    func(*testing.T, net.Listener) // until the test ends
}

func services() []service {
	return []service{
		{serviceWeb, "", serveWeb(http1 | http2)},
		{serviceHTTP1, "http", serveWeb(http1)},
		{serviceHTTP2, "http2", serveWeb(http2)},
		{serviceGRPC, "", serveGRPC},
		{serviceEcho, "", serveTCP(echo)},
		{serviceGreeter, "", serveTCP(greet)},
		{serviceSink, "", serveTCP(sink)},
		{serviceSecret, "", serveSecret},
	}
}

// serveTCP serves each connection by a function, which may end before the connection.
func serveTCP(serve func(*net.TCPConn)) func(*testing.T, net.Listener) {
	return func(t *testing.T, l net.Listener) {
		var all sync.WaitGroup
		all.Go(func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				all.Go(func() {
					defer c.Close()
					serve(c.(*net.TCPConn))
				})
			}
		})
		t.Cleanup(func() {
			l.Close()
			all.Wait()
		})
	}
}

func echo(c *net.TCPConn) {
	if _, err := io.Copy(struct{ io.Writer }{c}, c); err == nil {
		c.CloseWrite()
	}
}

// greet speaks a little of SMTP.
func greet(c *net.TCPConn) {
	fmt.Fprint(c, "220 greeter ready\r\n")
	lines := bufio.NewScanner(c)
	for lines.Scan() {
		switch lines.Text() {
		case "QUIT":
			fmt.Fprint(c, "221 bye\r\n")
			return
		default:
			fmt.Fprintf(c, "250 %s\r\n", lines.Text())
		}
	}
}

// sink reads all there is and then answers with its sum, while another stream of known bytes goes the other way: the
// number of its bytes is the first line of what comes.
func sink(c *net.TCPConn) {
	in := bufio.NewReader(c)
	line, err := in.ReadString('\n')
	if err != nil {
		return
	}
	n, err := strconv.ParseInt(line[:len(line)-1], 10, 64)
	if err != nil {
		return
	}
	var sending sync.WaitGroup
	sending.Go(func() { io.Copy(c, body(n)) })
	sum := sumOf(in)
	sending.Wait()
	fmt.Fprintln(c, sum)
	c.CloseWrite()
}

// versions of HTTP.
type versions int

const (
	http1 versions = 1 << iota
	http2
)

func (v versions) protocols() *http.Protocols {
	p := new(http.Protocols)
	p.SetHTTP1(v&http1 != 0)
	p.SetUnencryptedHTTP2(v&http2 != 0)
	return p
}

func serveWeb(v versions) func(*testing.T, net.Listener) {
	return func(t *testing.T, l net.Listener) {
		s := &http.Server{Handler: webHandler(), Protocols: v.protocols()}
		var serving sync.WaitGroup
		serving.Go(func() {
			if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
				t.Errorf("serve %s: %v", l.Addr(), err)
			}
		})
		t.Cleanup(func() {
			s.Close()
			serving.Wait()
		})
	}
}

// secretName is whom the certificate of the service secret is for: a name of the mesh, by which its proxy knows where to
// take a connection.
const secretName = serviceSecret + ".mesh"

func serveSecret(t *testing.T, l net.Listener) {
	certificate, err := selfSigned(secretName)
	if err != nil {
		t.Fatal(err)
	}
	cfg := &tls.Config{Certificates: []tls.Certificate{certificate}}
	serveWeb(http1)(t, tls.NewListener(l, cfg))
}

func selfSigned(name string) (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{name}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}

// webHandler serves what clients try.
func webHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/{$}", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "hello\n") })
	mux.HandleFunc("/bytes/{n}", serveBytes)
	mux.HandleFunc("/stream/{n}", serveStream)
	mux.HandleFunc("/echo", serveEcho)
	mux.HandleFunc("/describe", serveDescription)
	mux.HandleFunc("/form", serveForm)
	mux.HandleFunc("/status/{code}", serveStatus)
	mux.HandleFunc("/early", serveEarly)
	mux.HandleFunc("/hints", serveHints)
	mux.HandleFunc("/events", serveEvents)
	mux.HandleFunc("/hang", func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	mux.HandleFunc("/break", serveBreak)
	mux.HandleFunc("/redirect", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/", http.StatusFound) })
	mux.HandleFunc("/socket", serveSocket)
	return mux
}

// pattern is what all bodies are made of. Its length is no multiple of any buffer's.
var pattern = sync.OnceValue(func() []byte {
	b := make([]byte, 1<<20+7)
	mathrand.NewChaCha8([32]byte{}).Read(b)
	return b
})

// bodyBytes are the bytes of a body of any length.
type bodyBytes struct{}

func (bodyBytes) ReadAt(p []byte, off int64) (int, error) {
	source := pattern()
	for n := 0; n < len(p); {
		n += copy(p[n:], source[(off+int64(n))%int64(len(source)):])
	}
	return len(p), nil
}

func body(n int64) *io.SectionReader { return io.NewSectionReader(bodyBytes{}, 0, n) }

// bodyOf returns n bytes of a body, from first on.
func bodyOf(first, n int64) []byte {
	b := make([]byte, n)
	bodyBytes{}.ReadAt(b, first)
	return b
}

// sumOf reads everything. The sum tells bytes and their number.
func sumOf(r io.Reader) string {
	h := sha256.New()
	n, err := io.Copy(h, r)
	if err != nil {
		return fmt.Sprintf("%d bytes, then %v", n, err)
	}
	return fmt.Sprintf("%d bytes %s", n, hex.EncodeToString(h.Sum(nil)[:8]))
}

func serveBytes(w http.ResponseWriter, r *http.Request) {
	io.Copy(io.Discard, r.Body) // an answer before its end would hide what is wrong with it
	n, err := strconv.ParseInt(r.PathValue("n"), 10, 64)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("ETag", `"`+r.PathValue("n")+`"`)
	w.Header().Set("Content-Type", "application/octet-stream")
	http.ServeContent(w, r, "", time.Time{}, body(n))
}

// serveStream sends a body whose length it does not tell, with its sum as a trailer.
func serveStream(w http.ResponseWriter, r *http.Request) {
	n, err := strconv.ParseInt(r.PathValue("n"), 10, 64)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Trailer", "X-Sum")
	w.WriteHeader(http.StatusOK)
	io.Copy(w, body(n))
	w.Header().Set("X-Sum", sumOf(body(n)))
}

// serveEcho sends back the body while it comes, and its trailers.
func serveEcho(w http.ResponseWriter, r *http.Request) {
	_ = http.NewResponseController(w).EnableFullDuplex() // HTTP/2 always is
	w.Header().Set("Content-Type", r.Header.Get("Content-Type"))
	buffer := make([]byte, 32<<10)
	for {
		n, err := r.Body.Read(buffer)
		if _, failed := w.Write(buffer[:n]); failed != nil {
			panic(http.ErrAbortHandler)
		}
		_ = http.NewResponseController(w).Flush()
		if err == io.EOF {
			break
		} else if err != nil {
			panic(http.ErrAbortHandler)
		}
	}
	for name, values := range r.Trailer {
		w.Header()[http.TrailerPrefix+name] = values
	}
}

// description is what came to a replica.
type description struct {
	Method, Proto, Host, URI string
	Header, Trailer          http.Header
	Length                   int64 // as told; -1 if it was not
	Sum                      string
}

func serveDescription(w http.ResponseWriter, r *http.Request) {
	d := description{Method: r.Method, Proto: r.Proto, Host: r.Host, URI: r.RequestURI, Header: r.Header, Length: r.ContentLength}
	d.Sum = sumOf(r.Body)
	d.Trailer = r.Trailer
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(d)
}

// serveForm tells what files a form brought.
func serveForm(w http.ResponseWriter, r *http.Request) {
	form, err := r.MultipartReader()
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	for {
		part, err := form.NextPart()
		if err == io.EOF {
			return
		} else if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		fmt.Fprintf(w, "%s %s\n", part.FormName(), sumOf(part))
	}
}

func serveStatus(w http.ResponseWriter, r *http.Request) {
	code, err := strconv.Atoi(r.PathValue("code"))
	if err != nil {
		code = http.StatusBadRequest
	}
	w.WriteHeader(code)
}

// serveEarly answers without a look at the body.
func serveEarly(w http.ResponseWriter, _ *http.Request) {
	http.Error(w, "no", http.StatusRequestEntityTooLarge)
}

func serveHints(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Link", "</style.css>; rel=preload")
	w.WriteHeader(http.StatusEarlyHints)
	w.WriteHeader(http.StatusProcessing)
	io.WriteString(w, "hinted\n")
}

// serveEvents sends an event for each line that comes.
func serveEvents(w http.ResponseWriter, r *http.Request) {
	_ = http.NewResponseController(w).EnableFullDuplex()
	w.Header().Set("Content-Type", "text/event-stream")
	w.WriteHeader(http.StatusOK)
	_ = http.NewResponseController(w).Flush()
	for lines := bufio.NewScanner(r.Body); lines.Scan(); {
		fmt.Fprintf(w, "data: %s\n\n", lines.Text())
		_ = http.NewResponseController(w).Flush()
	}
}

// serveBreak breaks off in the middle of a body.
func serveBreak(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Length", "1000")
	io.WriteString(w, "the beginning")
	_ = http.NewResponseController(w).Flush()
	panic(http.ErrAbortHandler)
}
