package main

import (
	"context"
	"io"
	"iter"
	"math/rand/v2"
	"net/http"
	"sync"
	"time"
)

// sample is one request as the client saw it.
type sample struct {
	latency time.Duration // from the moment it was due
	failed  bool
	slow    bool // answered by one of the slow replicas
}

// openLoop sends requests at random moments (Poisson), rate a second on average, for the given time, and never waits for
// an answer before it sends the next. It yields those that were due after the warm-up, once all are answered or as they
// are. atStart is called when the warm-up ends. The same seed gives the same moments.
func openLoop(ctx context.Context, client *http.Client, url string, rate float64, lasts time.Duration, seed int64, atStart func(), warmUp time.Duration) iter.Seq[sample] {
	return func(yield func(sample) bool) {
		samples := make(chan sample, 4096)
		var sending sync.WaitGroup
		sending.Go(func() {
			defer close(samples)
			var inFlight sync.WaitGroup
			defer inFlight.Wait()
			rng := rand.New(rand.NewPCG(uint64(seed), 7))
			begin := time.Now()
			warm := false
			for due := time.Duration(0); due < lasts && ctx.Err() == nil; due += time.Duration(rng.ExpFloat64() / rate * float64(time.Second)) {
				if !wait(ctx, time.Until(begin.Add(due))) {
					return
				}
				if !warm && due >= warmUp {
					warm = true
					inFlight.Go(atStart)
				}
				counts, at := due >= warmUp, begin.Add(due)
				inFlight.Go(func() {
					s := send(ctx, client, url, at)
					if counts && ctx.Err() == nil {
						samples <- s
					}
				})
			}
		})
		for s := range samples {
			if !yield(s) {
				break
			}
		}
		sending.Wait()
	}
}

func wait(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return true
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// send sends one request and times it from the moment it was due, so that a late start counts too.
func send(ctx context.Context, client *http.Client, url string, due time.Time) sample {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return sample{failed: true}
	}
	resp, err := client.Do(req)
	if err != nil {
		return sample{latency: time.Since(due), failed: true}
	}
	_, err = io.Copy(io.Discard, resp.Body)
	resp.Body.Close()
	return sample{
		latency: time.Since(due),
		failed:  err != nil || resp.StatusCode != http.StatusOK,
		slow:    resp.Header.Get(slowHeader) != "",
	}
}
