package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptrace"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"
)

// Fields of answers: who answered, and the field Via of the request.
const replicaField, sawField = "Replica", "Saw-Via"

// tally is what came of requests.
type tally struct {
	Until    time.Time      `json:"until"`
	Requests int            `json:"requests"`
	Meshed   int            `json:"meshed"` // that an agent carried
	Reused   int            `json:"reused"` // over a connection that had carried others
	P50      float64        `json:"p50_ms"`
	P99      float64        `json:"p99_ms"`
	By       map[string]int `json:"by"`     // replica
	Errors   map[string]int `json:"errors"` // text

	latencies []time.Duration
}

func (t *tally) add(s sample) {
	t.Requests++
	t.latencies = append(t.latencies, s.latency)
	if s.err != nil {
		t.Errors[s.err.Error()]++
		return
	}
	t.By[s.replica]++
	if s.meshed {
		t.Meshed++
	}
	if s.reused {
		t.Reused++
	}
}

func (t *tally) print() error {
	t.Until = time.Now()
	slices.Sort(t.latencies)
	t.P50, t.P99 = t.quantile(0.5), t.quantile(0.99)
	return json.NewEncoder(os.Stdout).Encode(t)
}

func (t *tally) quantile(q float64) float64 {
	if len(t.latencies) == 0 {
		return 0
	}
	return float64(t.latencies[int(q*float64(len(t.latencies)-1))].Microseconds()) / 1000
}

func newTally() *tally { return &tally{By: map[string]int{}, Errors: map[string]int{}} }

// sample is one request as the caller saw it.
type sample struct {
	latency        time.Duration
	replica        string
	meshed, reused bool
	err            error
}

func load(url, rate, duration string) error {
	perSecond, err := strconv.ParseFloat(rate, 64)
	if err != nil {
		return err
	}
	lasts, err := time.ParseDuration(duration)
	if err != nil {
		return err
	}
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 1000}, Timeout: 10 * time.Second}
	samples := make(chan sample, 4096)
	var sending sync.WaitGroup
	sending.Go(func() {
		defer close(samples)
		openLoop(client, url, perSecond, lasts, samples)
	})
	t := newTally()
	for s := range samples {
		t.add(s)
	}
	sending.Wait()
	return t.print()
}

// openLoop sends requests at random moments, and waits for no answer before it sends the next.
func openLoop(client *http.Client, url string, rate float64, lasts time.Duration, to chan<- sample) {
	var inFlight sync.WaitGroup
	defer inFlight.Wait()
	begin := time.Now()
	for due := time.Duration(0); due < lasts; due += time.Duration(rand.ExpFloat64() / rate * float64(time.Second)) {
		at := begin.Add(due)
		time.Sleep(time.Until(at))
		inFlight.Go(func() { to <- send(client, url, at) })
	}
}

func calls(url, rate, connections string) error {
	perSecond, err := strconv.ParseFloat(rate, 64)
	if err != nil {
		return err
	}
	if connections != "new" && connections != "kept" {
		return fmt.Errorf("connections are new or kept, not %s", connections)
	}
	transport := &http.Transport{DisableKeepAlives: connections == "new"}
	client := &http.Client{Transport: transport, Timeout: 10 * time.Second}
	next, second := time.NewTicker(time.Duration(float64(time.Second)/perSecond)), time.NewTicker(time.Second)
	for t := newTally(); ; {
		t.add(send(client, url, time.Now()))
		select {
		case <-second.C:
			if err := t.print(); err != nil {
				return err
			}
			t = newTally()
		default:
		}
		<-next.C
	}
}

func send(client *http.Client, url string, due time.Time) (s sample) {
	defer func() { s.latency = time.Since(due) }()
	trace := &httptrace.ClientTrace{GotConn: func(i httptrace.GotConnInfo) { s.reused = i.Reused }}
	r, err := http.NewRequestWithContext(httptrace.WithClientTrace(context.Background(), trace), http.MethodGet, url, nil)
	if err != nil {
		return sample{err: err}
	}
	response, err := client.Do(r)
	if err != nil {
		return sample{err: err}
	}
	defer response.Body.Close()
	if _, err := io.Copy(io.Discard, response.Body); err != nil {
		return sample{err: err}
	}
	if response.StatusCode != http.StatusOK {
		return sample{err: fmt.Errorf("%s %s", response.Status, response.Header.Get("Headroom-Reason"))}
	}
	s.replica, s.meshed = response.Header.Get(replicaField), response.Header.Get(sawField) != ""
	return s
}
