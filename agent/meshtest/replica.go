//go:build linux

package meshtest

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// Headers between the load and the replicas.
const (
	headerRequest = "X-Request" // the number of the request
	headerReplica = "X-Replica" // who answered
)

// Replica answers requests on a node: after 10 to 30 ms, or after the time that the query asks for, as in ?take=2s.
type Replica struct {
	Node    string
	Address netip.AddrPort

	server  *http.Server
	journal *journal
	healthy atomic.Bool
	slower  atomic.Int64 // time.Duration
	report  atomic.Pointer[string]

	now, most atomic.Int64 // requests at once
}

// journal notes which request came to which replica.
type journal struct {
	inFlight atomic.Int64 // at all replicas

	// mu guards the fields below
	mu       sync.Mutex
	arrivals map[int][]arrival // by request
}

type arrival struct {
	replica *Replica
	at      time.Time
}

func (j *journal) note(request int, r *Replica) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.arrivals[request] = append(j.arrivals[request], arrival{r, time.Now()})
}

func (j *journal) of(request int) []arrival {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.arrivals[request]
}

func (j *journal) count(counts func(request int, a arrival) bool) int {
	j.mu.Lock()
	defer j.mu.Unlock()
	n := 0
	for request, arrivals := range j.arrivals {
		for _, a := range arrivals {
			if counts(request, a) {
				n++
			}
		}
	}
	return n
}

// String returns the name that the replica signs its answers with, NODE/PORT.
func (r *Replica) String() string { return fmt.Sprintf("%s/%d", r.Node, r.Address.Port()) }

// SetHealthy decides what the replica answers to health checks.
func (r *Replica) SetHealthy(healthy bool) { r.healthy.Store(healthy) }

// SetSlower makes answers take so much longer, unless their request says how long they take.
func (r *Replica) SetSlower(by time.Duration) { r.slower.Store(int64(by)) }

// SetReport makes the replica say of its load, in every answer, what an ORCA report does, such as "TEXT cpu_utilization=0.3".
func (r *Replica) SetReport(report string) { r.report.Store(&report) }

// Most returns how many requests the replica has had at once since it was last asked.
func (r *Replica) Most() int64 { return r.most.Swap(r.now.Load()) }

// Kill ends the replica, and with it the requests that it has.
func (r *Replica) Kill() { _ = r.server.Close() } // closes listeners and connections whatever it returns

func (r *Replica) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) {
		if !r.healthy.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	})
	mux.HandleFunc("/", r.answer)
	return mux
}

func (r *Replica) answer(w http.ResponseWriter, req *http.Request) {
	if number, err := strconv.Atoi(req.Header.Get(headerRequest)); err == nil {
		r.journal.note(number, r)
	}
	body, err := io.ReadAll(req.Body)
	if err != nil {
		return // the caller is gone
	}
	takes, err := time.ParseDuration(req.URL.Query().Get("take"))
	if err != nil {
		takes = 10*time.Millisecond + rand.N(20*time.Millisecond) + time.Duration(r.slower.Load())
	}
	defer r.count()()
	select {
	case <-req.Context().Done():
		return
	case <-time.After(takes):
	}
	w.Header().Set(headerReplica, r.String())
	if report := r.report.Load(); report != nil {
		w.Header().Set("endpoint-load-metrics", *report)
	}
	fmt.Fprintln(w, string(body)+"ok")
}

// count counts a request in. It returns what counts it out.
func (r *Replica) count() (out func()) {
	r.journal.inFlight.Add(1)
	now := r.now.Add(1)
	for most := r.most.Load(); now > most && !r.most.CompareAndSwap(most, now); most = r.most.Load() {
	}
	return func() {
		r.now.Add(-1)
		r.journal.inFlight.Add(-1)
	}
}
