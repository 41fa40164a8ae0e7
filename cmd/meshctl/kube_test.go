package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/headroom-mesh/headroom/cmd/meshctl/cluster"
	"github.com/rogpeppe/go-internal/testscript"
	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"
	"sigs.k8s.io/yaml"
)

// fakeCluster answers as the API server of a Kubernetes cluster would, and forwards ports of pods to an agent.
type fakeCluster struct {
	agent  string            // where ports are forwarded to
	agents map[string]string // where else those of some pods are

	mu sync.Mutex
	// mu guards the fields below

	objects  []map[string]any
	refused  []string // what nobody may do: "list nodes"
	silent   string   // a pod with an agent that listens nowhere
	spdyOnly bool
	stranger bool     // whether nobody is known
	forwards []string // the pods whose ports were forwarded, and how
}

// start serves until the test ends, and writes a kubeconfig for it.
func (f *fakeCluster) start(dir string) (stop func(), err error) {
	server := httptest.NewServer(f)
	config := fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: lab,
clusters: [{name: lab, cluster: {server: "%s"}}, {name: away, cluster: {server: "http://127.0.0.1:1"}}],
contexts: [{name: lab, context: {cluster: lab}}, {name: away, context: {cluster: away}}]}`, server.URL)
	return server.Close, os.WriteFile(filepath.Join(dir, "kubeconfig"), []byte(config), 0o600)
}

// set changes what the cluster does; ts reads files.
func (f *fakeCluster) set(ts *testscript.TestScript, args []string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch what := strings.Join(args, " "); {
	case args[0] == "has":
		for doc := range strings.SplitSeq(ts.ReadFile(args[1]), "---\n") {
			var object map[string]any
			if err := yaml.UnmarshalStrict([]byte(doc), &object); err != nil {
				return err
			}
			f.objects = append(f.objects, object)
		}
	case args[0] == "refuses":
		f.refused = append(f.refused, strings.Join(args[1:], " "))
	case args[0] == "silences":
		f.silent = args[1]
	case what == "allows all":
		f.refused = nil
	case what == "knows nobody":
		f.stranger = true
	case what == "speaks SPDY only":
		f.spdyOnly = true
	case args[0] == "forwarded":
		if last := f.forwards[len(f.forwards)-1]; last != strings.Join(args[1:], " ") {
			return fmt.Errorf("the last port was forwarded to %s", last)
		}
	default:
		return fmt.Errorf("cluster: what is %q?", what)
	}
	return nil
}

func (f *fakeCluster) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	parts := strings.Split(strings.TrimPrefix(r.URL.Path, "/apis/networking.k8s.io"), "/")[2:]
	if parts[0] == "v1" {
		parts = parts[1:]
	}
	namespace := ""
	if len(parts) > 1 && parts[0] == "namespaces" {
		namespace, parts = parts[1], parts[2:]
	}
	f.mu.Lock()
	stranger := f.stranger
	f.mu.Unlock()
	switch forward := len(parts) == 3 && parts[2] == "portforward"; {
	case stranger:
		f.fail(w, http.StatusUnauthorized, "Unauthorized")
	case forward && f.may(w, map[string]string{"GET": "get", "POST": "create"}[r.Method], "pods/portforward", namespace):
		f.forward(w, r, parts[1])
	case !forward && f.may(w, "list", parts[0], namespace):
		f.list(w, r, parts[0], namespace)
	}
}

func (f *fakeCluster) fail(w http.ResponseWriter, code int, message string) {
	reasons := map[int]metav1.StatusReason{403: metav1.StatusReasonForbidden, 401: metav1.StatusReasonUnauthorized}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
		Status: "Failure", Code: int32(code), Reason: reasons[code], Message: message})
}

// may answers for itself if it is refused: everywhere, or beyond a namespace.
func (f *fakeCluster) may(w http.ResponseWriter, verb, what, namespace string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	whole := verb + " " + what
	if !slices.Contains(f.refused, whole) && (namespace != "" || !slices.Contains(f.refused, whole+" everywhere")) {
		return true
	}
	f.fail(w, http.StatusForbidden, fmt.Sprintf("%s is forbidden: User \"kim\" cannot %s resource %q", what, verb, what))
	return false
}

func (f *fakeCluster) list(w http.ResponseWriter, r *http.Request, plural, namespace string) {
	selector, err := labels.Parse(r.URL.Query().Get("labelSelector"))
	if err != nil {
		f.fail(w, http.StatusBadRequest, err.Error())
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	items := []map[string]any{}
	for _, o := range f.objects {
		var meta struct {
			Kind     string
			Metadata metav1.ObjectMeta
		}
		text, _ := json.Marshal(o)
		if err := json.Unmarshal(text, &meta); err != nil {
			f.fail(w, http.StatusInternalServerError, err.Error())
			return
		}
		if strings.TrimSuffix(strings.ToLower(meta.Kind), "y") == strings.TrimSuffix(strings.TrimSuffix(plural, "s"), "ie") &&
			(namespace == "" || namespace == meta.Metadata.Namespace) && selector.Matches(labels.Set(meta.Metadata.Labels)) {
			items = append(items, o)
		}
	}
	json.NewEncoder(w).Encode(map[string]any{"items": items})
}

// forward forwards one port of a pod, as long as the connection lasts.
func (f *fakeCluster) forward(w http.ResponseWriter, r *http.Request, pod string) {
	f.mu.Lock()
	way, spdyOnly := "SPDY", f.spdyOnly
	if r.Method == http.MethodGet {
		way = "WebSocket"
	}
	f.forwards = append(f.forwards, pod+" by "+way)
	f.mu.Unlock()
	if way == "WebSocket" && spdyOnly {
		http.Error(w, "you must specify at least 1 of the port forwarding protocols", http.StatusBadRequest)
		return
	}
	streams := make(chan httpstream.Stream, 2)
	handle := func(s httpstream.Stream, _ <-chan struct{}) error {
		streams <- s
		return nil
	}
	connection, err := upgrade(w, r, way, handle)
	if err != nil {
		return
	}
	defer connection.Close()
	trouble, data := <-streams, <-streams
	if kind := trouble.Headers().Get(corev1.StreamType); kind != corev1.StreamTypeError {
		fmt.Fprintf(trouble, "the first stream is for %s", kind)
		return
	}
	f.relay(trouble, data, pod)
}

func upgrade(w http.ResponseWriter, r *http.Request, way string, handle httpstream.NewStreamHandler) (httpstream.Connection, error) {
	const protocol = "portforward.k8s.io"
	if way == "WebSocket" {
		c, err := websocket.Accept(w, r, &websocket.AcceptOptions{Subprotocols: []string{"SPDY/3.1+" + protocol}})
		if err != nil {
			return nil, err
		}
		return spdy.NewServerConnection(websocket.NetConn(r.Context(), c, websocket.MessageBinary), handle)
	}
	if _, err := httpstream.Handshake(r, w, []string{protocol}); err != nil {
		return nil, err
	}
	c := spdy.NewResponseUpgrader().UpgradeResponse(w, r, handle)
	if c == nil {
		return nil, errors.New("no upgrade")
	}
	return c, nil
}

// relay carries bytes between a stream and the agent until either ends.
func (f *fakeCluster) relay(trouble, data httpstream.Stream, pod string) {
	defer data.Reset()
	defer trouble.Close()
	agent := cmp.Or(f.agents[pod], f.agent)
	f.mu.Lock()
	if f.silent == pod {
		agent = "127.0.0.1:1"
	}
	f.mu.Unlock()
	c, err := net.Dial("tcp", agent)
	if err != nil {
		fmt.Fprintf(trouble, "error forwarding port %s: %v", data.Headers().Get(corev1.PortHeader), err)
		return
	}
	var relaying sync.WaitGroup
	relaying.Go(func() { io.Copy(c, data); c.Close() })
	io.Copy(data, c)
	data.Reset()
	relaying.Wait()
}

// TestLocalAgentComesFirst reads no kubeconfig while an agent answers on this machine.
func TestLocalAgentComesFirst(t *testing.T) {
	server, address, err := newFakeAgent().listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	dir := t.TempDir()
	k := &fakeCluster{agent: address, objects: []map[string]any{agentPod("headroom-1", "n1")}}
	stop, err := k.start(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	t.Setenv("KUBECONFIG", filepath.Join(dir, "kubeconfig"))
	for _, test := range []struct {
		agent string
		given bool
		want  string
	}{
		{address, false, address},
		{"127.0.0.1:1", false, "of node n1"},
		{"127.0.0.1:1", true, "no agent answers at 127.0.0.1:1"},
	} {
		c, err := (&target{agent: test.agent, given: test.given}).reach(t.Context())
		got := fmt.Sprint(err)
		if err == nil {
			got = c.at()
			c.conn.Close()
		}
		if !strings.Contains(got, test.want) {
			t.Errorf("agent %s: got %s, want %s", test.agent, got, test.want)
		}
	}
}

// twoAgents are a cluster with the agents of the nodes n1, which is asked first, and n2.
type twoAgents struct {
	first      *fakeAgent
	server     *grpc.Server // of the first
	kubeconfig string
}

func newTwoAgents(t *testing.T) *twoAgents {
	t.Helper()
	k := &fakeCluster{agents: map[string]string{}}
	two := &twoAgents{}
	for _, n := range []string{"2", "1"} {
		two.first = newFakeAgent()
		server, address, err := two.first.listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(server.Stop)
		two.server = server
		k.agents["headroom-"+n] = address
		k.objects = append(k.objects, agentPod("headroom-"+n, "n"+n))
	}
	dir := t.TempDir()
	stop, err := k.start(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	two.kubeconfig = filepath.Join(dir, "kubeconfig")
	return two
}

// TestTopMovesToAnotherAgent has the agent that is asked end, or answer no more.
func TestTopMovesToAnotherAgent(t *testing.T) {
	for name, tt := range map[string]struct {
		lose func(*twoAgents)
		says string
	}{
		"ends":         {func(two *twoAgents) { two.server.Stop() }, "the agent at pod headroom-system/headroom-1 of node n1 has ended the connection"},
		"falls silent": {func(two *twoAgents) { two.first.set("mute") }, "the agent at pod headroom-system/headroom-1 of node n1 took too long"},
	} {
		t.Run(name, func(t *testing.T) {
			two := newTwoAgents(t)
			c, err := (&target{cluster: cluster.Options{Kubeconfig: two.kubeconfig}}).reach(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer c.conn.Close()
			top := &topper{client: c}
			sample := func(patience time.Duration) error {
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				_, err := top.sample(ctx)
				return err
			}
			if err := sample(topTimeout); err != nil || !strings.HasSuffix(c.at(), "of node n1") {
				t.Fatalf("at first: %v, from %s", err, c.at())
			}
			tt.lose(two)
			if err := sample(time.Second); err != nil && !strings.Contains(err.Error(), tt.says) {
				t.Errorf("got %v, want %q", err, tt.says)
			}
			for began := time.Now(); time.Since(began) < 10*time.Second; {
				if err = sample(topTimeout); err == nil {
					break
				}
			}
			if err != nil || !strings.HasSuffix(c.at(), "of node n2") {
				t.Errorf("in the end: %v, from %s, want an answer of the other agent", err, c.at())
			}
		})
	}
}

func agentPod(name, node string) map[string]any {
	return map[string]any{"kind": "Pod",
		"metadata": map[string]any{"name": name, "namespace": "headroom-system",
			"labels": map[string]any{"app.kubernetes.io/name": "headroom", "app.kubernetes.io/component": "agent"}},
		"spec": map[string]any{"nodeName": node},
		"status": map[string]any{"phase": "Running",
			"conditions": []any{map[string]any{"type": "Ready", "status": "True"}}}}
}
