package local

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc"
	grpchealth "google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/registry"
)

// buffer is a log that is written and read at the same time.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) count(s string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return strings.Count(b.b.String(), s)
}

// node is a Local that runs.
type node struct {
	*Local
	log  *buffer
	sets chan []registry.Endpoint
	last []registry.Endpoint
	stop func()
}

func config(t *testing.T) Config {
	return Config{
		Node: "n1", Zone: "z", Mesh: netip.MustParseAddrPort("10.0.0.1:15001"),
		Services: t.TempDir(), Registered: filepath.Join(t.TempDir(), "registered"),
	}
}

func start(t *testing.T, cfg Config) *node {
	t.Helper()
	log := &buffer{}
	cfg.Log = slog.New(slog.NewTextHandler(io.MultiWriter(log, t.Output()), nil))
	l, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	n := &node{Local: l, log: log, sets: make(chan []registry.Endpoint, 1000)}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := l.Run(ctx, func(e []registry.Endpoint) { n.sets <- e }); err != nil {
			t.Error(err)
		}
	})
	n.stop = sync.OnceFunc(func() { cancel(); wg.Wait() })
	t.Cleanup(n.stop)
	return n
}

func render(endpoints []registry.Endpoint) string {
	var words []string
	for _, e := range endpoints {
		word := fmt.Sprintf("%s@%s:%s", e.Service, e.At(), e.State)
		if e.Protocol != "" {
			word += "/" + string(e.Protocol)
		}
		if e.Weight != 1 {
			word += fmt.Sprintf("*%d", e.Weight)
		}
		words = append(words, word)
	}
	return strings.Join(words, " ")
}

// want waits until the published set is as given.
func (n *node) want(t *testing.T, set string) {
	t.Helper()
	deadline := time.After(10 * time.Second)
	for n.last == nil || render(n.last) != set {
		select {
		case n.last = <-n.sets:
			if n.last == nil {
				n.last = []registry.Endpoint{}
			}
		case <-deadline:
			t.Fatalf("published %q, want %q", render(n.last), set)
		}
	}
}

// until waits for something that no set tells of.
func until(t *testing.T, what string, done func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(10 * time.Second)
	for !done() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("never: %s", what)
		}
	}
}

func put(t *testing.T, dir, name, text string) {
	t.Helper()
	if err := writeFile(dir, name, []byte(text)); err != nil {
		t.Fatal(err)
	}
}

func document(service string, check string, addresses ...string) string {
	var text strings.Builder
	text.WriteString("apiVersion: headroom.dev/v1\nkind: LocalService\nmetadata: {name: " + service + "}\nspec:\n  endpoints:\n")
	for _, a := range addresses {
		text.WriteString("  - address: \"" + a + "\"\n")
	}
	if check != "" {
		text.WriteString("  check: {" + check + "}\n")
	}
	return text.String()
}

func TestFilesAreFollowed(t *testing.T) {
	cfg := config(t)
	put(t, cfg.Services, "a.yaml", document("web", "", "127.0.0.1:1", "127.0.0.1:2"))
	put(t, cfg.Services, "notes.txt", "not for us")
	n := start(t, cfg)
	n.want(t, "web@127.0.0.1:1:ready web@127.0.0.1:2:ready")
	e := n.last[0]
	if e.ID() != "web/n1/127.0.0.1:1" || e.Zone != "z" || e.Agent != cfg.Mesh {
		t.Errorf("endpoint %+v", e)
	}
	put(t, cfg.Services, "b.yml", document("web", "", "127.0.0.1:3")+"---\n"+document("api", "", "[::1]:4"))
	put(t, cfg.Services, "c.json", `{"apiVersion":"headroom.dev/v1","kind":"LocalService","metadata":{"name":"json"},"spec":{"endpoints":[{"address":"127.0.0.1:5"}]}}`)
	put(t, cfg.Services, "a.yaml", document("web", "", "127.0.0.1:2"))
	n.want(t, "api@[::1]:4:ready json@127.0.0.1:5:ready web@127.0.0.1:2:ready web@127.0.0.1:3:ready")
	for _, name := range []string{"a.yaml", "b.yml", "c.json"} {
		if err := os.Remove(filepath.Join(cfg.Services, name)); err != nil {
			t.Fatal(err)
		}
	}
	n.want(t, "")
}

func TestBadFileKeepsWhatItDeclared(t *testing.T) {
	cfg := config(t)
	put(t, cfg.Services, "a.yaml", document("web", "", "127.0.0.1:1"))
	put(t, cfg.Services, "b.yaml", document("api", "", "127.0.0.1:2"))
	n := start(t, cfg)
	n.want(t, "api@127.0.0.1:2:ready web@127.0.0.1:1:ready")

	put(t, cfg.Services, "a.yaml", document("web", "http: nopath, tcp: true", "nowhere", "127.0.0.1:9"))
	put(t, cfg.Services, "b.yaml", document("api", "", "127.0.0.1:3"))
	n.want(t, "api@127.0.0.1:3:ready web@127.0.0.1:1:ready")
	put(t, cfg.Services, "b.yaml", "")
	until(t, "empty file refused", func() bool { return n.log.count("no document in it") == 1 })
	for range 3 {
		signal(n.rescan)
	}
	put(t, cfg.Services, "c.yaml", document("new", "", "127.0.0.1:4"))
	n.want(t, "api@127.0.0.1:3:ready new@127.0.0.1:4:ready web@127.0.0.1:1:ready")
	if got := n.log.count("file of services refused"); got != 2 {
		t.Errorf("%d errors for 2 bad files, want one each", got)
	}
	for _, text := range []string{"a.yaml", "spec.endpoints[0].address", "spec.check.http", "exactly one of"} {
		if n.log.count(text) == 0 {
			t.Errorf("the error does not say %q", text)
		}
	}
	if got := promValue(t, n.metrics.badFiles); got != 2 {
		t.Errorf("bad files %v, want 2", got)
	}
	put(t, cfg.Services, "a.yaml", document("web", "", "127.0.0.1:9"))
	n.want(t, "api@127.0.0.1:3:ready new@127.0.0.1:4:ready web@127.0.0.1:9:ready")
}

func TestLinkThatLeadsNowhereIsABadFile(t *testing.T) {
	cfg := config(t)
	put(t, cfg.Services, "a.yaml", document("web", "", "127.0.0.1:1"))
	n := start(t, cfg)
	n.want(t, "web@127.0.0.1:1:ready")
	link := filepath.Join(cfg.Services, "b.yaml")
	if err := os.Symlink("target", link); err != nil {
		t.Fatal(err)
	}
	until(t, "the link refused", func() bool { return n.log.count("file of services refused") == 1 && n.log.count(link) > 0 })
	until(t, "a bad file", func() bool { return promValue(t, n.metrics.badFiles) == 1 })
	put(t, cfg.Services, "target", document("api", "", "127.0.0.1:2"))
	n.want(t, "api@127.0.0.1:2:ready web@127.0.0.1:1:ready")
}

func TestReplacedFolderIsNoticed(t *testing.T) {
	cfg := config(t)
	put(t, cfg.Services, "a.yaml", document("web", "", "127.0.0.1:1"))
	n := start(t, cfg)
	n.want(t, "web@127.0.0.1:1:ready")
	for i, away := range []func() error{
		func() error { return os.Rename(cfg.Services, cfg.Services+".old") },
		func() error { return os.RemoveAll(cfg.Services) },
	} {
		if err := away(); err != nil {
			t.Fatal(err)
		}
		if err := os.Mkdir(cfg.Services, 0o755); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		for version := range 2 { // the second one needs the folder to be watched
			address := fmt.Sprintf("127.0.0.1:%d%d", i+1, version)
			put(t, cfg.Services, "a.yaml", document("web", "", address))
			n.want(t, "web@"+address+":ready")
		}
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("noticed only after %v", took)
		}
	}
}

func promValue(t *testing.T, c prometheus.Collector) float64 {
	t.Helper()
	return testutil.ToFloat64(c)
}

func TestDuplicatesFirstFileWins(t *testing.T) {
	cfg := config(t)
	put(t, cfg.Services, "b.yaml", document("web", "tcp: true", "127.0.0.1:1"))
	put(t, cfg.Services, "a.yaml", document("web", "", "127.0.0.1:1"))
	n := start(t, cfg)
	n.want(t, "web@127.0.0.1:1:ready")
	put(t, cfg.Services, "c.yaml", document("x", "", "127.0.0.1:2"))
	n.want(t, "web@127.0.0.1:1:ready x@127.0.0.1:2:ready")
	if got := n.log.count("declared twice"); got != 1 {
		t.Errorf("%d warnings, want 1", got)
	}
}

func TestMissingFolderFailsTheStart(t *testing.T) {
	cfg := config(t)
	cfg.Services = filepath.Join(cfg.Services, "missing")
	if _, err := New(cfg); err == nil || !strings.Contains(err.Error(), cfg.Services) {
		t.Errorf("error %v, want one that names the folder", err)
	}
}

func TestFolderThatGoesAwayChangesNothing(t *testing.T) {
	cfg := config(t)
	put(t, cfg.Services, "a.yaml", document("web", "", "127.0.0.1:1"))
	n := start(t, cfg)
	n.want(t, "web@127.0.0.1:1:ready")
	if err := os.RemoveAll(cfg.Services); err != nil {
		t.Fatal(err)
	}
	// The removal of the file may be seen before that of the folder; what counts is that nothing hangs.
	until(t, "an error", func() bool { signal(n.rescan); return n.log.count("folder of services can't be read") == 1 })
	if err := os.Mkdir(cfg.Services, 0o755); err != nil {
		t.Fatal(err)
	}
	put(t, cfg.Services, "a.yaml", document("web", "", "127.0.0.1:7"))
	signal(n.rescan)
	n.want(t, "web@127.0.0.1:7:ready")
}

func local(service string, check *meshv1.HealthCheck, addresses ...string) *meshv1.LocalService {
	doc := &meshv1.LocalService{
		ApiVersion: "headroom.dev/v1", Kind: "LocalService", Metadata: &meshv1.Metadata{Name: service},
		Spec: &meshv1.LocalServiceSpec{Check: check},
	}
	for _, a := range addresses {
		doc.Spec.Endpoints = append(doc.Spec.Endpoints, &meshv1.LocalEndpoint{Address: a})
	}
	return doc
}

func TestRegistrationsSurviveRestarts(t *testing.T) {
	cfg := config(t)
	n := start(t, cfg)
	if err := n.Register(t.Context(), local("web", nil, "127.0.0.1:1", "[::1]:2")); err != nil {
		t.Fatal(err)
	}
	n.want(t, "web@127.0.0.1:1:ready web@[::1]:2:ready")
	if err := n.Register(t.Context(), local("web", nil, "127.0.0.1:1")); err != nil {
		t.Errorf("again: %v", err)
	}
	n.stop()

	again := start(t, cfg)
	again.want(t, "web@127.0.0.1:1:ready web@[::1]:2:ready")
	removed, err := again.Deregister(t.Context(), "web", "[::1]:2")
	if err != nil || len(removed) != 1 || removed[0].String() != "[::1]:2" {
		t.Errorf("deregister one: %v, %v", removed, err)
	}
	again.want(t, "web@127.0.0.1:1:ready")
	if err := again.Register(t.Context(), local("web", nil, "127.0.0.1:3")); err != nil {
		t.Fatal(err)
	}
	removed, err = again.Deregister(t.Context(), "web", "")
	if err != nil || fmt.Sprint(removed) != "[127.0.0.1:1 127.0.0.1:3]" {
		t.Errorf("deregister all: %v, %v", removed, err)
	}
	again.want(t, "")
}

func TestWeights(t *testing.T) {
	cfg := config(t)
	file := func(weight string) string {
		return "{apiVersion: headroom.dev/v1, kind: LocalService, metadata: {name: web}, " +
			"spec: {endpoints: [{address: 127.0.0.1:1" + weight + "}]}}"
	}
	put(t, cfg.Services, "a.yaml", file(", weight: 4"))
	n := start(t, cfg)
	n.want(t, "web@127.0.0.1:1:ready*4")
	put(t, cfg.Services, "a.yaml", file(", weight: 7"))
	n.want(t, "web@127.0.0.1:1:ready*7")
	put(t, cfg.Services, "a.yaml", file(""))
	n.want(t, "web@127.0.0.1:1:ready")

	doc := local("api", nil, "127.0.0.1:2")
	doc.Spec.Endpoints[0].Weight = new(uint32(100))
	if err := n.Register(t.Context(), doc); err != nil {
		t.Fatal(err)
	}
	n.want(t, "api@127.0.0.1:2:ready*100 web@127.0.0.1:1:ready")
	n.stop()
	again := start(t, cfg)
	again.want(t, "api@127.0.0.1:2:ready*100 web@127.0.0.1:1:ready")
	if err := again.Register(t.Context(), local("api", nil, "127.0.0.1:2")); err != nil {
		t.Fatal(err)
	}
	again.want(t, "api@127.0.0.1:2:ready web@127.0.0.1:1:ready")
}

func TestProtocols(t *testing.T) {
	cfg := config(t)
	put(t, cfg.Services, "a.yaml", "{apiVersion: headroom.dev/v1, kind: LocalService, metadata: {name: web}, "+
		"spec: {protocol: kubernetes.io/h2c, endpoints: [{address: 127.0.0.1:1}]}}")
	n := start(t, cfg)
	n.want(t, "web@127.0.0.1:1:ready/http2")
	doc := local("db", nil, "127.0.0.1:2")
	doc.Spec.Protocol = "mysql"
	if err := n.Register(t.Context(), doc); err != nil {
		t.Fatal(err)
	}
	n.want(t, "db@127.0.0.1:2:ready/tcp web@127.0.0.1:1:ready/http2")
	n.stop()
	again := start(t, cfg)
	again.want(t, "db@127.0.0.1:2:ready/tcp web@127.0.0.1:1:ready/http2")
	if err := again.Register(t.Context(), local("db", nil, "127.0.0.1:2")); err != nil {
		t.Fatal(err)
	}
	put(t, cfg.Services, "a.yaml", document("web", "", "127.0.0.1:1"))
	again.want(t, "db@127.0.0.1:2:ready web@127.0.0.1:1:ready")
}

// TestSockets registers replicas on Unix sockets, whose checks go there, too.
func TestSockets(t *testing.T) {
	dir, err := os.MkdirTemp("", "sock") // whose path is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	listen := func(name string) (net.Listener, string) {
		path := filepath.Join(dir, name)
		l, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		return l, "unix:" + path
	}
	web, webAt := listen("web.sock")
	pages := &http.Server{Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})}
	rpc, rpcAt := listen("rpc,a%2C.sock")
	calls := grpc.NewServer()
	healthv1.RegisterHealthServer(calls, grpchealth.NewServer())
	var wg sync.WaitGroup
	wg.Go(func() { _ = pages.Serve(web) })
	wg.Go(func() { _ = calls.Serve(rpc) })
	t.Cleanup(func() { pages.Close(); calls.Stop(); wg.Wait() })

	n := start(t, config(t))
	check := func(c *meshv1.HealthCheck) *meshv1.HealthCheck {
		c.Interval, c.Rise, c.Fall = "10ms", 1, 1
		return c
	}
	for _, doc := range []*meshv1.LocalService{
		local("gone", check(&meshv1.HealthCheck{Tcp: true}), "unix:"+dir+"/none.sock"), local("rpc", check(&meshv1.HealthCheck{Grpc: "*"}), rpcAt),
		local("tcp", check(&meshv1.HealthCheck{Tcp: true}), webAt), local("web", check(&meshv1.HealthCheck{Http: "/"}), webAt),
	} {
		if err := n.Register(t.Context(), doc); err != nil {
			t.Fatal(err)
		}
	}
	n.want(t, fmt.Sprintf("gone@unix:%s/none.sock:unhealthy rpc@%s:ready tcp@%s:ready web@%s:ready", dir, rpcAt, webAt, webAt))
	if removed, err := n.Deregister(t.Context(), "rpc", rpcAt); err != nil || fmt.Sprint(removed) != "["+rpcAt+"]" {
		t.Errorf("deregister: %v, %v", removed, err)
	}
	n.want(t, fmt.Sprintf("gone@unix:%s/none.sock:unhealthy tcp@%s:ready web@%s:ready", dir, webAt, webAt))
}

func TestRegisterAndDeregisterRefuse(t *testing.T) {
	cfg := config(t)
	put(t, cfg.Services, "web.yaml", document("web", "", "127.0.0.1:1"))
	n := start(t, cfg)
	n.want(t, "web@127.0.0.1:1:ready")
	file := filepath.Join(cfg.Services, "web.yaml")

	if err := n.Register(t.Context(), local("web", nil, "127.0.0.1:1")); !errors.Is(err, ErrDeclared) || !strings.Contains(err.Error(), file) {
		t.Errorf("register what a file declares: %v", err)
	}
	if err := n.Register(t.Context(), local("No Name", nil)); err == nil || strings.Count(err.Error(), "\n") < 1 {
		t.Errorf("register nonsense: %v, want all problems", err)
	}
	for _, address := range []string{"", "127.0.0.1:1"} {
		if _, err := n.Deregister(t.Context(), "web", address); !errors.Is(err, ErrDeclared) || !strings.Contains(err.Error(), file) {
			t.Errorf("deregister %q, which a file declares: %v", address, err)
		}
	}
	if _, err := n.Deregister(t.Context(), "none", ""); !errors.Is(err, ErrNotRegistered) {
		t.Errorf("deregister the unknown: %v", err)
	}
	if _, err := n.Deregister(t.Context(), "web", "nonsense"); err == nil || !strings.Contains(err.Error(), "want IP:PORT") {
		t.Errorf("deregister nonsense: %v", err)
	}
	put(t, cfg.Registered, "mine.yaml", document("two", "", "127.0.0.1:7", "127.0.0.1:8"))
	if _, err := n.Deregister(t.Context(), "two", "127.0.0.1:7"); !errors.Is(err, ErrDeclared) {
		t.Errorf("deregister half of a foreign file: %v", err)
	}
	cfg.Registered = ""
	if err := start(t, cfg).Register(t.Context(), local("x", nil, "127.0.0.1:5")); err == nil {
		t.Error("registered without a folder")
	}
}

func TestDrain(t *testing.T) {
	cfg := config(t)
	put(t, cfg.Services, "a.yaml", document("web", "", "127.0.0.1:1"))
	n := start(t, cfg)
	n.want(t, "web@127.0.0.1:1:ready")
	n.Drain()
	n.want(t, "web@127.0.0.1:1:draining")
	put(t, cfg.Services, "b.yaml", document("api", "", "127.0.0.1:2"))
	n.want(t, "api@127.0.0.1:2:draining web@127.0.0.1:1:draining")

	if err := n.Register(t.Context(), local("late", nil, "127.0.0.1:3")); !errors.Is(err, ErrDraining) {
		t.Errorf("register while draining: %v", err)
	}
	if files, err := os.ReadDir(cfg.Registered); err != nil || len(files) > 0 {
		t.Errorf("what was refused is kept: %v, %v", files, err)
	}
}

// closedPort returns an address at which nobody listens.
func closedPort(t *testing.T) string {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().String()
}

const fast = "interval: 10ms, timeout: 2s, rise: 2, fall: 2"

func TestHTTPCheckDecidesTheState(t *testing.T) {
	var status, hits atomic.Int32
	status.Store(http.StatusFound)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.String() != "/ready?x=1" {
			t.Errorf("asked for %s", r.URL)
		}
		hits.Add(1)
		w.WriteHeader(int(status.Load()))
	}))
	defer s.Close()
	cfg := config(t)
	address := s.Listener.Addr().String()
	put(t, cfg.Services, "a.yaml", document("web", `http: "/ready?x=1", `+fast, address))
	n := start(t, cfg)
	n.want(t, "web@"+address+":ready")
	status.Store(503)
	n.want(t, "web@"+address+":unhealthy")
	id := registry.EndpointID("web/n1/" + address)
	if got := n.CheckErrors()[id]; got != "http check: GET /ready?x=1: status 503, want 200 to 399" {
		t.Errorf("check error %q", got)
	}
	status.Store(204)
	n.want(t, "web@"+address+":ready")
	if got := n.CheckErrors(); len(got) != 0 {
		t.Errorf("check errors %v of a healthy replica", got)
	}

	if err := os.Remove(filepath.Join(cfg.Services, "a.yaml")); err != nil {
		t.Fatal(err)
	}
	n.want(t, "")
	before := hits.Load()
	put(t, cfg.Services, "b.yaml", document("other", "tcp: true, "+fast, address))
	n.want(t, "other@"+address+":ready")
	if got := hits.Load(); got > before+1 {
		t.Errorf("%d checks of a replica that is gone", got-before)
	}
}

// TestFirstSetIsComplete wants an agent that restarts to announce at once all that it announced before. The first check
// of each replica decides alone.
func TestFirstSetIsComplete(t *testing.T) {
	cfg := config(t)
	address := closedPort(t)
	open, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	put(t, cfg.Services, "a.yaml", document("web", "tcp: true, interval: 1h, fall: 100", address, open.Addr().String()))
	put(t, cfg.Services, "b.yaml", document("plain", "", "127.0.0.1:1"))
	n := start(t, cfg)
	first := render(<-n.sets)
	for _, want := range []string{"plain@127.0.0.1:1:ready", "web@" + address + ":unhealthy", "web@" + open.Addr().String() + ":ready"} {
		if !strings.Contains(first, want) {
			t.Errorf("first set %q, want %s in it", first, want)
		}
	}
}

// TestFirstSetWaitsNotForLong has a replica whose check gets no answer.
func TestFirstSetWaitsNotForLong(t *testing.T) {
	t.Parallel()
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	cfg := config(t)
	put(t, cfg.Services, "a.yaml", document("web", "http: /, interval: 1m, timeout: 50s", silent.Addr().String()))
	put(t, cfg.Services, "b.yaml", document("plain", "", "127.0.0.1:1"))
	began := time.Now()
	n := start(t, cfg)
	if first := <-n.sets; render(first) != "plain@127.0.0.1:1:ready" {
		t.Errorf("first set %q: a replica that is not checked yet must not be in it", render(first))
	}
	if took := time.Since(began); took > 3*time.Second {
		t.Errorf("first set after %v", took)
	}
}

// TestEndBeforeTheFirstSet ends an agent that still waits for checks: it must not announce a part of its replicas.
func TestEndBeforeTheFirstSet(t *testing.T) {
	cfg := config(t)
	put(t, cfg.Services, "a.yaml", document("web", "tcp: true, interval: 1h", closedPort(t)))
	put(t, cfg.Services, "b.yaml", document("plain", "", "127.0.0.1:1"))
	n := start(t, cfg)
	n.stop()
	close(n.sets)
	for set := range n.sets {
		if len(set) != 2 {
			t.Errorf("published %q", render(set))
		}
	}
}

func TestChangeOfCheckKeepsTheReplica(t *testing.T) {
	s := httptest.NewServer(http.NotFoundHandler())
	defer s.Close()
	cfg := config(t)
	address := s.Listener.Addr().String()
	put(t, cfg.Services, "a.yaml", document("web", "", address))
	n := start(t, cfg)
	n.want(t, "web@"+address+":ready")
	put(t, cfg.Services, "a.yaml", document("web", "http: /, "+fast, address))
	n.want(t, "web@"+address+":unhealthy")
	put(t, cfg.Services, "a.yaml", document("web", "tcp: true, "+fast, address))
	n.want(t, "web@"+address+":ready")
	put(t, cfg.Services, "a.yaml", document("web", "http: /, "+fast, address))
	n.want(t, "web@"+address+":unhealthy")
	put(t, cfg.Services, "a.yaml", document("web", "", address))
	n.want(t, "web@"+address+":ready")
	n.stop()
	close(n.sets)
	for set := range n.sets {
		if len(set) != 1 {
			t.Errorf("the set was %v in between", set)
		}
	}
}

func TestGRPCCheck(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s, h := grpc.NewServer(), grpchealth.NewServer()
	healthv1.RegisterHealthServer(s, h)
	var wg sync.WaitGroup
	wg.Go(func() { _ = s.Serve(ln) })
	t.Cleanup(func() { s.Stop(); wg.Wait() })
	h.SetServingStatus("shop.Cart", healthv1.HealthCheckResponse_NOT_SERVING)

	cfg := config(t)
	address := ln.Addr().String()
	put(t, cfg.Services, "a.yaml", document("whole", `grpc: "*", `+fast, address)+"---\n"+
		document("cart", "grpc: shop.Cart, "+fast, address)+"---\n"+document("unknown", "grpc: nothing, "+fast, address))
	n := start(t, cfg)
	n.want(t, "cart@"+address+":unhealthy unknown@"+address+":unhealthy whole@"+address+":ready")
	for service, want := range map[string]string{"cart": "grpc check: status NOT_SERVING", "unknown": "NotFound"} {
		if got := n.CheckErrors()[registry.EndpointID(service+"/n1/"+address)]; !strings.Contains(got, want) {
			t.Errorf("%s: %q, want %q", service, got, want)
		}
	}
	h.SetServingStatus("shop.Cart", healthv1.HealthCheckResponse_SERVING)
	h.SetServingStatus("", healthv1.HealthCheckResponse_NOT_SERVING)
	n.want(t, "cart@"+address+":ready unknown@"+address+":unhealthy whole@"+address+":unhealthy")
}

func TestCheckTimesOut(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close() // connections are accepted by the system, and nobody answers
	for kind, text := range map[string]string{"web": "http: /", "rpc": `grpc: "*"`} {
		cfg := config(t)
		put(t, cfg.Services, "a.yaml", document(kind, text+", interval: 10ms, timeout: 50ms", ln.Addr().String()))
		n := start(t, cfg)
		n.want(t, kind+"@"+ln.Addr().String()+":unhealthy")
		if got := n.CheckErrors()[registry.EndpointID(kind+"/n1/"+ln.Addr().String())]; !strings.HasSuffix(got, "no answer within 50ms") {
			t.Errorf("check error %q", got)
		}
		n.stop()
	}
}

func TestHealth(t *testing.T) {
	for _, test := range []struct {
		rise, fall int
		checks     string // + passed, - failed
		want       string // the verdict after each
	}{
		{2, 3, "+", "+"},
		{2, 3, "-", "-"},
		{2, 3, "---+++", "----++"},
		{2, 3, "+---++", "+++--+"},
		{2, 3, "+--+--+---", "+++++++++-"},
		{2, 3, "-+-+-++", "------+"},
		{1, 1, "+-+-", "+-+-"},
		{3, 2, "+--+++", "++---+"},
	} {
		var h health
		var got strings.Builder
		for _, c := range test.checks {
			h = h.after(c == '+', test.rise, test.fall)
			if h.healthy {
				got.WriteString("+")
			} else {
				got.WriteString("-")
			}
		}
		if got.String() != test.want {
			t.Errorf("rise %d fall %d, checks %s: verdicts %s, want %s", test.rise, test.fall, test.checks, got.String(), test.want)
		}
	}
}

func TestValidate(t *testing.T) {
	err := Config{Mesh: netip.MustParseAddrPort("0.0.0.0:1"), Services: "x", Registered: "x"}.Validate()
	for _, want := range []string{`node ""`, "mesh: want", "registered: x"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error lacks %q: %v", want, err)
		}
	}
}

func TestMetrics(t *testing.T) {
	r := prometheus.NewPedanticRegistry()
	cfg := config(t)
	cfg.Metrics = r
	put(t, cfg.Services, "a.yaml", document("web", "", "127.0.0.1:1"))
	n := start(t, cfg)
	n.want(t, "web@127.0.0.1:1:ready")
	if problems, err := testutil.GatherAndLint(r); err != nil || len(problems) > 0 {
		t.Errorf("%v %v", problems, err)
	}
	if got := promValue(t, n.metrics.endpoints.WithLabelValues("ready")); got != 1 {
		t.Errorf("ready endpoints %v, want 1", got)
	}
}
