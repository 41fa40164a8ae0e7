package load

import (
	"math"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func about(got, want, part float64) bool { return math.Abs(got-want) <= part*math.Abs(want) }

// steady serves requests at regular times, each of which takes the same time, and returns what the last response carries.
func steady(tr *Tracker, now time.Time, rate int, took, lasts time.Duration, outcome Outcome) (Report, time.Time) {
	every := time.Second / time.Duration(rate)
	var open []Token
	var begun []time.Time
	var last Report
	for end := now.Add(lasts); now.Before(end); now = now.Add(every) {
		for len(open) > 0 && !begun[0].Add(took).After(now) {
			last = tr.ReportLeaving(begun[0].Add(took))
			tr.End(begun[0].Add(took), open[0], outcome)
			open, begun = open[1:], begun[1:]
		}
		open, begun = append(open, tr.Begin(now)), append(begun, now)
	}
	for i := range open {
		tr.End(now, open[i], Canceled)
	}
	return last, now
}

func TestRatesOfASteadyStream(t *testing.T) {
	for _, tt := range []struct {
		name    string
		outcome Outcome
		lasts   time.Duration
		want    Report
	}{
		{"soon", OK, 3 * time.Second, Report{Rate: 100, Utilization: 4}},
		{"in the long run", OK, 5 * time.Minute, Report{Rate: 100, Utilization: 4}},
		{"failures", Failed, time.Minute, Report{ErrorRate: 100, Utilization: 4}},
		{"callers that give up count as neither", Canceled, time.Minute, Report{Utilization: 4}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, _ := steady(new(Tracker), time.Unix(1000, 0), 100, 40*ms, tt.lasts, tt.outcome)
			if !about(got.Rate, tt.want.Rate, 0.03) || !about(got.ErrorRate, tt.want.ErrorRate, 0.03) || !about(got.Utilization, tt.want.Utilization, 0.03) {
				t.Errorf("got %v; want %v", got, tt.want)
			}
		})
	}
}

// After a half-life, half of a change has been noticed, and three quarters after two.
func TestRatesHaveAHalfLife(t *testing.T) {
	tr := new(Tracker)
	_, now := steady(tr, time.Unix(1000, 0), 100, 10*ms, 2*time.Minute, OK)
	for _, want := range []float64{200, 250, 275} {
		var r Report
		if r, now = steady(tr, now, 300, 10*ms, halfLife, OK); !about(r.Rate, want, 0.03) {
			t.Errorf("a while after the rate went from 100 to 300: got %.1f; want %v", r.Rate, want)
		}
	}
}

// The rate divided by the mean number in flight is 1/latency from the first requests on (Little's law): what is smoothed
// is smoothed alike.
func TestUtilizationObeysLittlesLaw(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		took := time.Duration(rapid.IntRange(5, 200).Draw(t, "ms")) * ms
		rate := rapid.IntRange(5, 100).Draw(t, "rate")
		r, _ := steady(new(Tracker), time.Unix(1000, 0), rate, took, 5*time.Second, OK)
		// The requests in flight weigh on one side only: at the start all the time that is not yet an answer.
		if got := r.Utilization / r.Rate; !about(got, took.Seconds(), 0.15) {
			t.Fatalf("%d a second, %v each: got %.1f ms; want %v", rate, took, 1000*got, took)
		}
	})
}

// The mean in flight is one over time, not over requests: ten seconds of one in flight and ten of none, of which the latter
// weigh more as they are younger, (1/4-1/16)/(1-1/16).
func TestMeanInFlightIsOverTime(t *testing.T) {
	tr, now := new(Tracker), time.Unix(1000, 0)
	now = serve(tr, now, 2*halfLife, OK).Add(2 * halfLife)
	tr.Begin(now)
	if r := tr.ReportLeaving(now); !about(r.Utilization, 0.2, 1e-9) {
		t.Errorf("got a mean of %v in flight; want 0.2", r.Utilization)
	}
}

func TestOneRequestIsNoHighRate(t *testing.T) {
	tr, now := new(Tracker), time.Unix(1000, 0)
	now = serve(tr, now, time.Microsecond, OK)
	tr.Begin(now)
	if r := tr.ReportLeaving(now); r.Rate <= 0 || r.Rate > 1.1 {
		t.Errorf("got %v requests a second; want about 1", r.Rate)
	}
}

func TestProbesCarryNoRates(t *testing.T) {
	tr := new(Tracker)
	_, now := steady(tr, time.Unix(1000, 0), 100, 10*ms, time.Minute, OK)
	tr.Utilize(now, 0.5)
	if r := tr.Report(now); r.Rate != 0 || r.ErrorRate != 0 || r.Utilization != 0 {
		t.Errorf("got %v; want no rates", r)
	}
}

func TestUtilizationAsTheReplicaSays(t *testing.T) {
	tr, now := new(Tracker), time.Unix(1000, 0)
	want := func(when string, u float64) {
		t.Helper()
		if got := tr.ReportLeaving(now).Utilization; !about(got, u, 1e-9) {
			t.Errorf("%s: got %v; want %v", when, got, u)
		}
	}
	tr.Begin(now)
	now = now.Add(time.Minute)
	want("nothing said: the mean in flight", 1)
	tr.Utilize(now, 0.4)
	want("said once", 0.4)
	now = now.Add(halfLife)
	tr.Utilize(now, 0.8)
	want("said again after a half-life", 0.6)
	for _, u := range []float64{math.NaN(), math.Inf(1), -1, MaxUtilization + 1} {
		tr.Utilize(now, u)
		want("nonsense", 0.6)
	}
	now = now.Add(utilizationLasts)
	want("still fresh", 0.6)
	now = now.Add(1)
	want("too old: the mean in flight", 1)
	tr.Utilize(now, 0)
	want("nothing to do", 0)
}

// Whatever happens, also where clocks go back, a report is one that can be sent.
func TestReportsAreAlwaysValid(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tr, now := new(Tracker), time.Unix(1000, 0)
		var open []Token
		for range rapid.IntRange(1, 50).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.OneOf(rapid.Int64Range(-1e9, 1e9), rapid.Int64Range(0, 1e15)).Draw(t, "later")))
			switch rapid.IntRange(0, 2).Draw(t, "step") {
			case 0:
				open = append(open, tr.Begin(now))
			case 1:
				if len(open) > 0 {
					tr.End(now, open[0], Outcome(rapid.IntRange(0, 2).Draw(t, "outcome")))
					open = open[1:]
				}
			case 2:
				tr.Utilize(now, rapid.Float64().Draw(t, "utilization"))
			}
			r := tr.ReportLeaving(now)
			if again, err := ParseReport([]byte(r.String())); err != nil || !r.Valid() {
				t.Fatalf("%+v: sent as %q, understood as %v, %v", r, r, again, err)
			}
		}
	})
}
