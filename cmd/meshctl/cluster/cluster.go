// Package cluster is what meshctl does with a Kubernetes cluster: it finds the agents, connects to them through the API
// server, and reads what concerns the mesh. It uses no more of the client library than the kubeconfig, the credentials and
// the streams need, as all types of Kubernetes would make every start of meshctl slower.
package cluster

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// Options say which cluster is meant, and whose agent. All may be empty.
type Options struct {
	Kubeconfig string // the file; else KUBECONFIG and ~/.kube/config, as kubectl does
	Context    string // the current one, if empty
	Namespace  string // of the agents; else DefaultNamespace, or wherever they are
	Node       string // whose agent; any, if empty
}

// DefaultNamespace is where agents are looked for first.
const DefaultNamespace = "headroom-system"

// ErrNone says that no kubeconfig names a cluster.
var ErrNone = errors.New("no kubeconfig names a cluster")

// Cluster is a Kubernetes cluster, as the user's kubeconfig gives it.
type Cluster struct {
	options Options
	name    string // for people
	config  *rest.Config
	client  *http.Client
	base    *url.URL
	dials   atomic.Uint32
}

// Open reads the kubeconfig. It connects to nothing.
func Open(o Options) (*Cluster, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = o.Kubeconfig
	rules.WarnIfAllMissing = false
	loaded := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: o.Context})
	config, err := loaded.ClientConfig()
	if clientcmd.IsEmptyConfig(err) {
		return nil, ErrNone
	}
	if err != nil {
		return nil, fmt.Errorf("read the kubeconfig: %w", err)
	}
	config.UserAgent = "meshctl"
	config.QPS, config.Burst = -1, 0 // the server has limits of its own
	c := &Cluster{options: o, config: config}
	if c.client, err = rest.HTTPClientFor(config); err != nil {
		return nil, fmt.Errorf("prepare requests to %s as the kubeconfig says: %w", config.Host, err)
	}
	if c.base, _, err = rest.DefaultServerUrlFor(config); err != nil {
		return nil, fmt.Errorf("the API server in the kubeconfig: %w", err)
	}
	raw, _ := loaded.RawConfig()
	c.name = describe(o, raw, c.base)
	return c, nil
}

// describe names a cluster by its context, if it has one.
func describe(o Options, raw clientcmdapi.Config, base *url.URL) string {
	if name := cmp.Or(o.Context, raw.CurrentContext); name != "" {
		return fmt.Sprintf("context %s (%s)", name, base)
	}
	return "the cluster at " + base.String()
}

// Name names the cluster for people.
func (c *Cluster) Name() string { return c.name }

// resource is what is listed: "pods" of a namespace, or of all.
type resource struct {
	api       string // as in "/api/v1"
	plural    string
	namespace string // all, if empty
	labels    string // a selector; all, if empty
}

func (r resource) path() string {
	if r.namespace == "" {
		return r.api + "/" + r.plural
	}
	return r.api + "/namespaces/" + r.namespace + "/" + r.plural
}

func (r resource) String() string {
	if r.namespace == "" {
		return r.plural
	}
	return r.plural + " in namespace " + r.namespace
}

// Refused says that the user's role lacks a verb.
type Refused struct {
	What string // as in "list pods in namespace shop"
	Says string // what the API server said
}

func (r Refused) Error() string {
	return fmt.Sprintf("you may not %s: your role in the cluster lacks it (%s)", r.What, r.Says)
}

// list reads all objects of a resource.
func list[T any](ctx context.Context, c *Cluster, r resource) ([]T, error) {
	u := c.base.JoinPath(r.path())
	if r.labels != "" {
		u.RawQuery = url.Values{"labelSelector": {r.labels}}.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", r, err)
	}
	req.Header.Set("Accept", "application/json")
	answer, err := c.client.Do(req)
	if err != nil {
		return nil, c.unreachable(err)
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return nil, c.refusal(answer, r)
	}
	var found struct{ Items []T }
	if err := json.NewDecoder(answer.Body).Decode(&found); err != nil {
		return nil, fmt.Errorf("read the answer of %s to a list of %s: %w", c.name, r, err)
	}
	return found.Items, nil
}

// refusal turns an answer other than 200 into an error.
func (c *Cluster) refusal(answer *http.Response, r resource) error {
	said := c.said(answer)
	switch answer.StatusCode {
	case http.StatusForbidden:
		return Refused{"list " + r.String(), said}
	case http.StatusUnauthorized:
		return c.unknownUser()
	}
	return fmt.Errorf("list %s: %s answers %s", r, c.name, said)
}

func (c *Cluster) unknownUser() error {
	return fmt.Errorf("%s does not know you (401): are the credentials in the kubeconfig still good?", c.name)
}

// said is the message of an error of the API server, which is a Status, unless something stands in between.
func (c *Cluster) said(answer *http.Response) string {
	const most = 64 << 10
	body, _ := io.ReadAll(io.LimitReader(answer.Body, most))
	var s metav1.Status
	if json.Unmarshal(body, &s) == nil && s.Message != "" {
		return s.Message
	}
	return strings.TrimSpace(answer.Status + " " + firstLine(string(body)))
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(s), "\n")
	return line
}

func (c *Cluster) unreachable(err error) error {
	if wrapped, ok := errors.AsType[*url.Error](err); ok {
		err = wrapped.Err
	}
	if errors.Is(err, context.DeadlineExceeded) {
		err = errors.New("nothing heard in time")
	}
	return fmt.Errorf("the API server of %s can't be reached: %w; name an agent with --agent, or another cluster with --context", c.name, err)
}
