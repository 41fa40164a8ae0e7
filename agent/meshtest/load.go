//go:build linux

package meshtest

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

const (
	// giveUp is how long a caller waits for an answer.
	giveUp = 4 * time.Second
	// Every postEvery-th request is a POST, which must not be delivered twice.
	postEvery = 5
)

// Caller sends requests to the proxy of a node's agent, as an application on that node does.
type Caller struct {
	client *http.Client
}

// Caller returns an application on the node that uses the proxy at an address.
func (n *Node) Caller(proxy string) *Caller {
	transport := &http.Transport{
		Proxy:               http.ProxyURL(&url.URL{Scheme: "http", Host: proxy}),
		DialContext:         n.DialContext,
		MaxIdleConnsPerHost: 1000,
	}
	n.network.t.Cleanup(transport.CloseIdleConnections)
	return &Caller{client: &http.Client{Transport: transport}}
}

// Get sends one request and returns who answered, or the error with what came instead of an answer.
func (c *Caller) Get(ctx context.Context, target string) (replica string, err error) {
	return c.send(ctx, http.MethodGet, target, "", -1)
}

// GetAll sends so many requests at once. It returns what waits for the answers.
func (c *Caller) GetAll(n int, target string) (answers func() []Sample) {
	samples := make([]Sample, n)
	var sending sync.WaitGroup
	for i := range samples {
		sending.Go(func() {
			samples[i] = Sample{Number: i, Sent: time.Now()}
			samples[i].Replica, samples[i].Err = c.Get(context.Background(), target)
			samples[i].Took = time.Since(samples[i].Sent)
		})
	}
	return func() []Sample {
		sending.Wait()
		return samples
	}
}

func (c *Caller) send(ctx context.Context, method, target, body string, number int) (replica string, err error) {
	ctx, cancel := context.WithTimeout(ctx, giveUp)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, target, strings.NewReader(body))
	if err != nil {
		return "", err
	}
	if number >= 0 {
		req.Header.Set(headerRequest, strconv.Itoa(number))
	}
	resp, err := c.client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		return "", fmt.Errorf("read the answer: %w", err)
	}
	if got := string(answer); resp.StatusCode != http.StatusOK || got != body+"ok\n" {
		return "", fmt.Errorf("%s: %q", resp.Status, got)
	}
	return resp.Header.Get(headerReplica), nil
}

// Sample is one request as its caller saw it.
type Sample struct {
	Number  int
	Post    bool
	Sent    time.Time
	Took    time.Duration
	Replica string // that answered
	Err     error  // nil if the answer was as it should be
}

// Load is a stream of requests at a steady rate, whatever comes back.
type Load struct {
	t       testing.TB
	agent   *Agent
	first   int // number of the first request
	sending sync.WaitGroup
	stop    context.CancelFunc
	done    atomic.Int64

	// mu guards the fields below
	mu      sync.Mutex
	samples []Sample
}

// numbersPerLoad tells the requests of one load from those of another.
const numbersPerLoad = 1_000_000

// Load starts requests for the service through the agent's proxy, so many a second. They end with the test at the latest.
func (a *Agent) Load(rate int) *Load {
	ctx, cancel := context.WithCancel(context.Background())
	l := &Load{t: a.mesh.t, agent: a, stop: cancel, first: int(a.mesh.loads.Add(1)) * numbersPerLoad}
	caller := a.Caller()
	l.sending.Go(func() {
		tick := time.NewTicker(time.Second / time.Duration(rate))
		defer tick.Stop()
		for number := l.first; ; number++ {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				l.sending.Go(func() { l.send(caller, number) })
			}
		}
	})
	l.t.Cleanup(func() {
		cancel()
		l.sending.Wait()
	})
	return l
}

func (l *Load) send(caller *Caller, number int) {
	s := Sample{Number: number, Post: number%postEvery == 0, Sent: time.Now()}
	method, body := http.MethodGet, ""
	if s.Post {
		method, body = http.MethodPost, strings.Repeat("x", 2000)
	}
	target := fmt.Sprintf("http://%s.mesh/%d", Service, number)
	s.Replica, s.Err = caller.send(context.Background(), method, target, body, number)
	s.Took = time.Since(s.Sent)
	l.mu.Lock()
	l.samples = append(l.samples, s)
	l.mu.Unlock()
	l.done.Add(1)
}

// More waits until so many more requests have come to an end.
func (l *Load) More(n int) {
	l.t.Helper()
	until := l.done.Load() + int64(n)
	Eventually(l.t, time.Minute, fmt.Sprintf("%d more requests end", n), func() bool { return l.done.Load() >= until })
}

// Stop ends the load, waits for the answers, and says what became of the requests.
func (l *Load) Stop() *Outcome {
	l.t.Helper()
	l.stop()
	l.sending.Wait()
	o := &Outcome{Requests: len(l.samples)}
	access := l.agent.access()
	for _, s := range l.samples {
		o.Slowest = max(o.Slowest, s.Took)
		if s.Err != nil {
			o.Lost = append(o.Lost, Loss{Sample: s, Entry: access[s.Number]})
		}
		if n := len(l.agent.mesh.journal.of(s.Number)); s.Post && n > 1 {
			l.t.Errorf("POST %d was delivered %d times", s.Number, n)
		}
	}
	return o
}

// Outcome is what became of the requests of a load.
type Outcome struct {
	Requests int
	Slowest  time.Duration
	Lost     []Loss
}

// Loss is a request without the answer that it should have had.
type Loss struct {
	Sample
	Entry // of the agent's access log
}

// Entry is a line of an agent's access log.
type Entry struct {
	Message  string `json:"msg"`
	Path     string `json:"path"`
	Endpoint string `json:"endpoint"`
	Status   int    `json:"status"`
	Reason   string `json:"reason"`
	Tries    int    `json:"tries"`
}

// Node returns the node that the request was last sent to.
func (e Entry) Node() string {
	part := strings.SplitN(e.Endpoint, "/", 3)
	if len(part) != 3 {
		return ""
	}
	return part[1]
}

func (l Loss) String() string {
	return fmt.Sprintf("request %d, sent %s, to %s, took %v: %v (%s, try %d)",
		l.Number, l.Sent.Format("15:04:05.000"), l.Endpoint, l.Took.Round(time.Millisecond), l.Err, l.Reason, l.Tries)
}

// String tells how much was lost.
func (o *Outcome) String() string {
	return fmt.Sprintf("lost %d of %d requests, slowest %v", len(o.Lost), o.Requests, o.Slowest.Round(time.Millisecond))
}

// WantNoLoss fails the test if a request was lost.
func (o *Outcome) WantNoLoss(t testing.TB) {
	t.Helper()
	for i, l := range o.Lost {
		if i == 10 {
			t.Errorf("... and %d more", len(o.Lost)-i)
			return
		}
		t.Errorf("lost: %s", l)
	}
}

// access reads the agent's access log, by number of request.
func (a *Agent) access() map[int]Entry {
	entries := map[int]Entry{}
	for line := range strings.Lines(a.Output()) {
		var e Entry
		if json.Unmarshal([]byte(line), &e) != nil {
			continue // cut off by the end of the agent
		}
		if e.Message != "request" {
			continue // the same request, as the replica's agent sees it
		}
		if number, err := strconv.Atoi(strings.TrimPrefix(e.Path, "/")); err == nil {
			entries[number] = e
		}
	}
	return entries
}

// Arrived counts the requests of this load that reached a replica, or any on a node, since a moment.
func (l *Load) Arrived(where string, since time.Time) int {
	return l.agent.mesh.journal.count(func(number int, a arrival) bool {
		return number/numbersPerLoad == l.first/numbersPerLoad && !a.at.Before(since) &&
			(a.replica.Node == where || a.replica.String() == where)
	})
}
