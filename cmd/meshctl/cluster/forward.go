package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/portforward"
	clientportforward "k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/transport/spdy"
	"k8s.io/client-go/transport/websocket"
	"k8s.io/streaming/pkg/httpstream"
	httpstreamspdy "k8s.io/streaming/pkg/httpstream/spdy"
)

// DialAgent connects to the admin API of one agent, through the API server and the node's kubelet, without a port on this
// machine.
func (c *Cluster) DialAgent(ctx context.Context, agent Agent) (net.Conn, error) {
	streams, err := c.streams(ctx, c.base.JoinPath("/api/v1/namespaces", agent.Namespace, "pods", agent.Pod, "portforward"))
	if err != nil {
		return nil, c.noStreams(agent, err)
	}
	conn, err := open(streams, agent)
	if _, silent := errors.AsType[Silent](err); err != nil && !silent {
		return nil, fmt.Errorf("open a connection to %s: %w", agent, err)
	}
	return conn, err
}

// streams prefers WebSockets, which pass what stands between better, to SPDY, which all servers know.
func (c *Cluster) streams(ctx context.Context, u *url.URL) (httpstream.Connection, error) {
	streams, err := c.overWebSocket(ctx, u)
	if !httpstream.IsUpgradeFailure(err) && !httpstream.IsHTTPSProxyError(err) {
		return streams, err
	}
	streams, second := c.overSPDY(ctx, u)
	if second != nil {
		return nil, noUpgrade{err, second}
	}
	return streams, nil
}

// noUpgrade says that the API server would open streams in neither way. The second says it better, but only as a text; the
// first has the kind of the error.
type noUpgrade struct{ first, second error }

func (e noUpgrade) Error() string { return e.second.Error() }

func (e noUpgrade) Unwrap() error {
	if failure, ok := errors.AsType[*httpstream.UpgradeFailureError](e.first); ok {
		return failure.Cause
	}
	return e.first
}

func (c *Cluster) overWebSocket(ctx context.Context, u *url.URL) (httpstream.Connection, error) {
	transport, holder, err := websocket.RoundTripperFor(c.config)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, err
	}
	conn, err := websocket.Negotiate(transport, holder, req, portforward.WebsocketsSPDYTunnelingPortForwardV1)
	if err != nil {
		return nil, err
	}
	tunnel := clientportforward.NewTunnelingConnection("meshctl", conn)
	return httpstreamspdy.NewClientConnectionWithPings(tunnel, clientportforward.PingPeriod)
}

func (c *Cluster) overSPDY(ctx context.Context, u *url.URL) (httpstream.Connection, error) {
	transport, upgrader, err := spdy.RoundTripperFor(c.config)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, u.String(), nil)
	if err != nil {
		return nil, err
	}
	streams, _, err := spdy.NegotiateStreaming(upgrader, &http.Client{Transport: transport}, req,
		clientportforward.PortForwardProtocolV1Name)
	return streams, err
}

// noStreams says why the API server opened none.
func (c *Cluster) noStreams(agent Agent, err error) error {
	switch {
	case apierrors.IsForbidden(err):
		return Refused{"create pods/portforward in namespace " + agent.Namespace, err.Error()}
	case apierrors.IsUnauthorized(err):
		return c.unknownUser()
	case apierrors.IsNotFound(err):
		return fmt.Errorf("%s has gone meanwhile: try again", agent)
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%s: the API server of %s can't connect to it in time: is its node up?", agent, c.name)
	}
	return fmt.Errorf("%s: forward its port %d: %w", agent, agentPort, err)
}

// conn is a connection to an agent: a pair of streams, of which one carries only what goes wrong.
type conn struct {
	httpstream.Stream
	streams   httpstream.Connection
	agent     Agent
	listening sync.WaitGroup
	told      chan struct{} // closed when all was said of what went wrong
	said      string        // that, after told
}

func open(streams httpstream.Connection, agent Agent) (net.Conn, error) {
	headers := http.Header{}
	headers.Set(corev1.PortHeader, strconv.Itoa(agentPort))
	headers.Set(corev1.PortForwardRequestIDHeader, "0")
	headers.Set(corev1.StreamType, corev1.StreamTypeError)
	trouble, err := streams.CreateStream(headers)
	if err != nil {
		streams.Close()
		return nil, err
	}
	trouble.Close() // nothing is said on it
	c := &conn{streams: streams, agent: agent, told: make(chan struct{})}
	c.listening.Go(func() { c.listen(trouble) })
	headers.Set(corev1.StreamType, corev1.StreamTypeData)
	if c.Stream, err = streams.CreateStream(headers); err != nil {
		err = c.explain(err)
		streams.Close()
		c.listening.Wait()
		return nil, err
	}
	return c, nil
}

// Silent says that an agent doesn't answer, though its pod runs.
type Silent struct {
	Agent Agent
	Says  string // what the node said
}

func (s Silent) Error() string {
	return fmt.Sprintf("%s does not answer at its port %d: %s", s.Agent, agentPort, s.Says)
}

// listen ends with the connection.
func (c *conn) listen(trouble io.Reader) {
	const most = 4 << 10
	text, _ := io.ReadAll(io.LimitReader(trouble, most))
	c.said = strings.TrimSpace(string(text))
	close(c.told)
	io.Copy(io.Discard, trouble)
}

// Read and Write say why the connection ended, where that is known.
func (c *conn) Read(p []byte) (int, error) {
	n, err := c.Stream.Read(p)
	return n, c.explain(err)
}

func (c *conn) Write(p []byte) (int, error) {
	n, err := c.Stream.Write(p)
	return n, c.explain(err)
}

func (c *conn) explain(err error) error {
	const patience = time.Second
	if err == nil {
		return nil
	}
	select {
	case <-c.told:
		if c.said != "" {
			return Silent{c.agent, c.said}
		}
	case <-time.After(patience):
	}
	return err
}

// Close waits for what was started.
func (c *conn) Close() error {
	c.Stream.Reset()
	err := c.streams.Close()
	c.listening.Wait()
	return err
}

// address is one end of a connection that has no address on this machine's network.
type address string

func (address) Network() string  { return "kubernetes" }
func (a address) String() string { return string(a) }

func (c *conn) LocalAddr() net.Addr { return address("meshctl") }
func (c *conn) RemoteAddr() net.Addr {
	return address("pod " + c.agent.Namespace + "/" + c.agent.Pod + " of node " + c.agent.Node)
}
func (c *conn) SetDeadline(time.Time) error      { return os.ErrNoDeadline }
func (c *conn) SetReadDeadline(time.Time) error  { return os.ErrNoDeadline }
func (c *conn) SetWriteDeadline(time.Time) error { return os.ErrNoDeadline }
