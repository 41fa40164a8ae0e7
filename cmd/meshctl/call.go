package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
)

// echoed is what an echo tells of itself and of a request.
type echoed struct {
	Replica string   `json:"replica"`
	Node    string   `json:"node"`
	Path    string   `json:"path"`
	Via     []string `json:"via"` // the field of this name, line by line
}

// throughMesh reports whether an agent has carried the request.
func (e echoed) throughMesh() bool {
	for element := range strings.SplitSeq(strings.Join(e.Via, ","), ",") {
		if strings.HasSuffix(strings.TrimSpace(element), " headroom") {
			return true
		}
	}
	return false
}

func (a *app) echo() *cobra.Command {
	var listen string
	var delay time.Duration
	host, _ := os.Hostname()
	e := echoed{}
	cmd := &cobra.Command{
		Use:   "echo",
		Short: "Be a replica that tells who it is, to try the mesh with",
		Long: `Be a replica that answers every HTTP request with JSON: which replica it is, on which node, and the path and the field Via
of the request. 'meshctl call' reads that.`,
		Example: `  meshctl echo --listen :8080 --name checkout-1`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if delay < 0 {
				return misused("--delay %s: want 0s or more", delay)
			}
			l, err := net.Listen("tcp", listen)
			if err != nil {
				return fmt.Errorf("%w; choose another address with --listen", err)
			}
			cmd.PrintErrf("%s answers at %s\n", e.Replica, l.Addr())
			return serveEcho(cmd.Context(), l, e, delay)
		},
	}
	cmd.Flags().StringVar(&listen, "listen", ":8080", "`[IP]:PORT` to answer at")
	cmd.Flags().StringVar(&e.Replica, "name", host, "`NAME` of the replica")
	cmd.Flags().Lookup("name").DefValue = "the machine's"
	cmd.Flags().StringVar(&e.Node, "on", os.Getenv("NODE_NAME"), "`NODE` that it tells it is on; the environment variable NODE_NAME changes the default")
	cmd.Flags().Lookup("on").DefValue = ""
	cmd.Flags().DurationVar(&delay, "delay", 0, "time that each answer takes")
	return cmd
}

// serveEcho answers until ctx ends, and finishes what it has begun.
func serveEcho(ctx context.Context, l net.Listener, e echoed, delay time.Duration) error {
	server := &http.Server{
		Handler:           http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { e.answer(w, r, delay) }),
		ReadHeaderTimeout: 10 * time.Second,
		Protocols:         new(http.Protocols),
	}
	server.Protocols.SetHTTP1(true)
	server.Protocols.SetUnencryptedHTTP2(true)
	var stopping sync.WaitGroup
	defer stopping.Wait()
	ended, end := context.WithCancel(ctx)
	defer end()
	var stopped error
	stopping.Go(func() {
		<-ended.Done()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), callTimeout)
		defer cancel()
		stopped = server.Shutdown(ctx)
	})
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	stopping.Wait()
	return stopped
}

func (e echoed) answer(w http.ResponseWriter, r *http.Request, delay time.Duration) {
	if delay > 0 {
		select {
		case <-time.After(delay):
		case <-r.Context().Done():
			return
		}
	}
	e.Path, e.Via = r.URL.Path, r.Header.Values("Via")
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(e) // who asked may be gone
}

// callWants is what must come of calls.
type callWants struct {
	requests int
	atOnce   int
	mesh     bool
	replicas int
	wait     time.Duration
}

func (w callWants) check() error {
	switch {
	case w.requests < 1:
		return misused("--requests %d: want one at least", w.requests)
	case w.atOnce < 1:
		return misused("--at-once %d: want one at least", w.atOnce)
	case w.replicas < 0:
		return misused("--replicas %d: want a number of replicas", w.replicas)
	case w.wait < 0:
		return misused("--wait %s: want 0s or more", w.wait)
	}
	return nil
}

func (a *app) call() *cobra.Command {
	var wants callWants
	cmd := &cobra.Command{
		Use:   "call URL",
		Short: "Send requests to 'meshctl echo', and see who answers and whether they came through the mesh",
		Long: `Send requests, one after the other unless --at-once says otherwise, and show which replicas answered and which requests came through the mesh. Only
'meshctl echo' tells that; other services are merely seen to answer. It fails if a request does.`,
		Example: `  meshctl call http://checkout.shop.svc/ --requests 100
  meshctl call http://checkout.shop.svc/ --through-mesh --replicas 2 --wait 1m`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return misused("want one argument, a URL, got %d", len(args))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			u, err := url.Parse(args[0])
			if err != nil || u.Scheme != "http" || u.Host == "" {
				return misused("%q: want a URL such as http://checkout.shop.svc/", args[0])
			}
			if err := wants.check(); err != nil {
				return err
			}
			return callUntil(cmd.Context(), cmd.OutOrStdout(), u.String(), wants)
		},
	}
	cmd.Flags().IntVarP(&wants.requests, "requests", "n", 10, "`NUMBER` of requests")
	cmd.Flags().IntVar(&wants.atOnce, "at-once", 1, "`NUMBER` of requests under way at a time; if it is one, the fastest replica may get them all")
	cmd.Flags().BoolVar(&wants.mesh, "through-mesh", false, "fail unless all came through the mesh")
	cmd.Flags().IntVar(&wants.replicas, "replicas", 0, "fail unless `NUMBER` replicas answered, at least")
	cmd.Flags().DurationVar(&wants.wait, "wait", 0, "how long to try again until all is as wanted")
	return cmd
}

// callUntil repeats calls until what comes of them is as wanted.
func callUntil(ctx context.Context, w io.Writer, url string, wants callWants) error {
	deadline := time.Now().Add(wants.wait)
	again := time.NewTicker(time.Second)
	defer again.Stop()
	for {
		came := callAll(ctx, url, wants.requests, max(wants.atOnce, 1))
		err := came.check(wants)
		if err == nil || ctx.Err() != nil || time.Now().After(deadline) {
			return errors.Join(came.write(w), err)
		}
		select {
		case <-again.C:
		case <-ctx.Done():
		}
	}
}

// outcome is what came of calls.
type outcome struct {
	requests, answered, meshed int
	by                         map[[2]string]int // requests by replica and node
	failures                   map[string]int
}

func callAll(ctx context.Context, url string, requests, atOnce int) outcome {
	came := outcome{requests: requests, by: map[[2]string]int{}, failures: map[string]int{}}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.MaxIdleConnsPerHost = atOnce
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport, Timeout: callTimeout}
	var calls errgroup.Group
	calls.SetLimit(atOnce)
	var mu sync.Mutex // guards came
	for range requests {
		calls.Go(func() error {
			e, err := callOnce(ctx, client, url)
			mu.Lock()
			defer mu.Unlock()
			came.add(e, err)
			return nil
		})
	}
	_ = calls.Wait() // failures are counted
	return came
}

func (o *outcome) add(e echoed, err error) {
	if err != nil {
		o.failures[err.Error()]++
		return
	}
	o.answered++
	o.by[[2]string{e.Replica, e.Node}]++
	if e.throughMesh() {
		o.meshed++
	}
}

func callOnce(ctx context.Context, client *http.Client, url string) (e echoed, err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return e, err
	}
	answer, err := client.Do(r)
	if err != nil {
		return e, err
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(io.LimitReader(answer.Body, 1<<16))
	if err != nil {
		return e, fmt.Errorf("read the answer: %w", err)
	}
	if answer.StatusCode != http.StatusOK {
		return e, fmt.Errorf("status %d, by %s", answer.StatusCode, cmp.Or(answer.Header.Get("Headroom-Reason"), "the replica"))
	}
	if json.Unmarshal(body, &e) != nil {
		return echoed{}, nil // no echo: nobody knows who it was
	}
	return e, nil
}

func (o outcome) check(wants callWants) error {
	var problems []error
	for _, text := range slices.Sorted(maps.Keys(o.failures)) {
		problems = append(problems, fmt.Errorf("%d of %d requests failed: %s", o.failures[text], o.requests, text))
	}
	if wants.mesh && o.meshed < o.answered {
		problems = append(problems, fmt.Errorf("%d of %d requests did not come through the mesh: is there an agent on this node, and is this caller captured? meshctl check tells", o.answered-o.meshed, o.answered))
	}
	if len(o.by) < wants.replicas {
		problems = append(problems, fmt.Errorf("replicas that answered: %d, want %d", len(o.by), wants.replicas))
	}
	return errors.Join(problems...)
}

func (o outcome) write(w io.Writer) error {
	var rows [][]string
	nodes := map[string]bool{}
	for _, who := range slices.SortedFunc(maps.Keys(o.by), func(a, b [2]string) int { return slices.Compare(a[:], b[:]) }) {
		rows = append(rows, []string{who[0], who[1], strconv.Itoa(o.by[who])})
		nodes[who[1]] = true
	}
	fmt.Fprintf(w, "%d requests: %d answered, %d through the mesh; replicas: %d, nodes: %d\n", o.requests, o.answered, o.meshed, len(o.by), len(nodes))
	return writeTable(w, "REPLICA NODE REQUESTS", rows)
}
