package load

import (
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func byMedian() *Tracker {
	tr := new(Tracker)
	tr.ByMedian(true)
	return tr
}

func TestTrackerReportsWhatItBears(t *testing.T) {
	now := time.Unix(1000, 0)
	tr := byMedian()
	wantReport(t, "idle and new", tr.Report(now), "rif=0")
	wantReport(t, "idle and new, leaving", tr.ReportLeaving(now), "rif=0")

	first, second := tr.Begin(now), tr.Begin(now)
	wantReport(t, "two in flight", tr.Report(now), "rif=2")
	wantReport(t, "without the one that leaves", tr.ReportLeaving(now), "rif=1")

	now = now.Add(20 * ms)
	tr.End(now, first, OK)
	wantReport(t, "one answered", tr.Report(now), "rif=1 latency=20000us")
	now = now.Add(20 * ms)
	tr.End(now, second, OK)
	wantReport(t, "both answered: as the one that found none in flight", tr.Report(now), "rif=0 latency=20000us")

	if requests, errors := tr.Totals(); requests != 2 || errors != 0 {
		t.Errorf("totals: got %d requests, %d errors; want 2, 0", requests, errors)
	}
}

func wantReport(t *testing.T, when string, got Report, want string) {
	t.Helper()
	if got.String() != want {
		t.Errorf("%s: got %q; want %q", when, got, want)
	}
}

// serve lets a request take its time and end in some way.
func serve(tr *Tracker, now time.Time, took time.Duration, outcome Outcome) time.Time {
	token := tr.Begin(now)
	now = now.Add(took)
	tr.End(now, token, outcome)
	return now
}

func TestTrackerOutcomes(t *testing.T) {
	for _, tt := range []struct {
		name    string
		before  time.Duration // latency known before, 0 if none
		took    time.Duration
		outcome Outcome
		want    time.Duration // 0: unknown
	}{
		{"a fast failure counts as slow", 0, ms, Failed, FailurePenalty},
		{"a slow failure counts as it is", 0, 3 * time.Second, Failed, 3 * time.Second},
		{"canceled before its time: no news", 100 * ms, ms, Canceled, 100 * ms},
		{"canceled after its time: at least that long", 100 * ms, 400 * ms, Canceled, 400 * ms},
		{"canceled, and nothing known: at least that long", 0, 400 * ms, Canceled, 400 * ms},
		{"longer than any report may say", 0, 3 * time.Hour, OK, MaxLatency},
	} {
		t.Run(tt.name, func(t *testing.T) {
			now := time.Unix(1000, 0)
			tr := byMedian()
			if tt.before != 0 {
				now = serve(tr, now, tt.before, OK)
			}
			for range 3 {
				now = serve(tr, now, tt.took, tt.outcome)
			}
			got := tr.Report(now)
			if got.RIF != 0 || got.Latency != tt.want || got.Known != (tt.want != 0) || !got.Valid() {
				t.Errorf("got %v; want rif 0 and latency %v", got, tt.want)
			}
		})
	}
}

// The latency reported is that of requests that found as many others in flight as the next one will.
func TestTrackerLatencyDependsOnRIF(t *testing.T) {
	tr, now := byMedian(), time.Unix(1000, 0)
	for range 3 {
		now = serve(tr, now, ms, OK)
	}
	wantReport(t, "idle", tr.Report(now), "rif=0 latency=1000us")
	other := tr.Begin(now)
	for range 3 {
		now = serve(tr, now, 3*ms, OK)
	}
	wantReport(t, "one in flight", tr.Report(now), "rif=1 latency=3000us")
	tr.End(now, other, Canceled)
	wantReport(t, "idle again", tr.Report(now), "rif=0 latency=1000us")
}

func TestTrackerCountsFailures(t *testing.T) {
	tr, now := new(Tracker), time.Unix(1000, 0)
	for _, outcome := range []Outcome{OK, Failed, Canceled, Failed} {
		now = serve(tr, now, ms, outcome)
	}
	if requests, errors := tr.Totals(); requests != 4 || errors != 2 {
		t.Errorf("totals: got %d requests, %d errors; want 4, 2", requests, errors)
	}
}

// However requests overlap and end, the RIF is the number of those begun and not ended.
func TestTrackerRIFFollowsRequests(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tr, now := new(Tracker), time.Unix(1000, 0)
		var open []Token
		t.Repeat(map[string]func(*rapid.T){
			"begin": func(*rapid.T) { open = append(open, tr.Begin(now)) },
			"end": func(t *rapid.T) {
				if len(open) == 0 {
					t.Skip("none in flight")
				}
				i := rapid.IntRange(0, len(open)-1).Draw(t, "which")
				tr.End(now, open[i], Outcome(rapid.IntRange(0, 2).Draw(t, "outcome")))
				open = append(open[:i], open[i+1:]...)
			},
			"wait": func(t *rapid.T) {
				now = now.Add(time.Duration(rapid.IntRange(1, 5000).Draw(t, "ms")) * ms)
			},
			"": func(t *rapid.T) {
				r := tr.Report(now)
				if int(r.RIF) != len(open) || !r.Valid() {
					t.Fatalf("got %v; %d are in flight", r, len(open))
				}
			},
		})
	})
}

func TestTrackerIsSafeForConcurrentUse(t *testing.T) {
	const workers, each = 8, 500
	tr := new(Tracker)
	var wg sync.WaitGroup
	for w := range workers {
		rng := rand.New(rand.NewPCG(1, uint64(w)))
		wg.Go(func() {
			for range each {
				token := tr.Begin(time.Now())
				if r := tr.Report(time.Now()); r.RIF < 1 || r.RIF > workers {
					t.Errorf("RIF out of bounds: %v", r)
				}
				tr.ReportLeaving(time.Now())
				tr.End(time.Now(), token, Outcome(rng.IntN(3)))
			}
		})
	}
	wg.Wait()
	if r := tr.Report(time.Now()); r.RIF != 0 {
		t.Errorf("RIF after all have ended: got %d; want 0", r.RIF)
	}
	if requests, _ := tr.Totals(); requests != workers*each {
		t.Errorf("requests: got %d; want %d", requests, workers*each)
	}
}

func TestTrackerAllocatesNothing(t *testing.T) {
	tr, now := new(Tracker), time.Unix(1000, 0)
	request := func() {
		now = serve(tr, now, ms, OK)
		tr.Report(now)
	}
	request() // the first request at a RIF makes room for samples
	if n := testing.AllocsPerRun(1000, request); n != 0 {
		t.Errorf("got %v allocations a request; want none", n)
	}
}
