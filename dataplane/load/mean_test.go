package load

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// play is a replica at work.
type play struct {
	tr   *Tracker
	rng  *rand.Rand
	now  time.Time
	open []flight
}

type flight struct {
	token   Token
	ends    time.Time
	outcome Outcome
}

func newPlay() *play {
	return &play{tr: new(Tracker), rng: rand.New(rand.NewPCG(1, 2)), now: time.Unix(1000, 0)}
}

// until lets time pass, and requests end.
func (p *play) until(at time.Time) {
	slices.SortStableFunc(p.open, func(a, b flight) int { return a.ends.Compare(b.ends) })
	for len(p.open) > 0 && !p.open[0].ends.After(at) {
		p.tr.End(p.open[0].ends, p.open[0].token, p.open[0].outcome)
		p.open = p.open[1:]
	}
	p.now = at
}

func (p *play) after(d time.Duration) { p.until(p.now.Add(d)) }

func (p *play) request(took time.Duration, outcome Outcome) {
	p.open = append(p.open, flight{p.tr.Begin(p.now), p.now.Add(took), outcome})
}

// steady plays requests at a rate a second, at random times, that take as long as draw says.
func (p *play) steady(rate float64, lasts time.Duration, draw func() time.Duration) {
	end := p.now.Add(lasts)
	for {
		next := p.now.Add(time.Duration(p.rng.ExpFloat64() / rate * float64(time.Second)))
		if next.After(end) {
			p.until(end)
			return
		}
		p.until(next)
		p.request(draw(), OK)
	}
}

// typical returns the mean of what a replica says that goes on like that.
func (p *play) typical(t *testing.T, rate float64, draw func() time.Duration) time.Duration {
	t.Helper()
	const times = 300
	var sum time.Duration
	for range times {
		p.steady(rate, 40*ms, draw)
		sum += p.latency(t)
	}
	return sum / times
}

func (p *play) latency(t *testing.T) time.Duration {
	t.Helper()
	r := p.tr.Report(p.now)
	if !r.Known || !r.Valid() {
		t.Fatalf("got %+v; want a latency", r)
	}
	return r.Latency
}

func wantAbout(t *testing.T, what string, got, want time.Duration, part float64) {
	t.Helper()
	if math.Abs(float64(got-want)) > part*float64(want) {
		t.Errorf("%s: got %v; want %v, within %.0f %%", what, got, want, 100*part)
	}
}

func always(d time.Duration) func() time.Duration { return func() time.Duration { return d } }

func TestMeanOfASteadyStream(t *testing.T) {
	for _, tt := range []struct {
		rate float64
		took time.Duration
	}{
		{1000, ms}, {1000, 100 * ms}, {100, 5 * ms}, {100, 300 * ms}, {30, 2 * time.Second}, {2, 50 * ms}, {0.2, 50 * ms}, {0.5, 20 * time.Second},
	} {
		p := newPlay()
		p.steady(tt.rate, 60*time.Second, always(tt.took))
		wantAbout(t, fmt.Sprintf("%v a second", tt.rate), p.typical(t, tt.rate, always(tt.took)), tt.took, 0.2)
	}
}

// What is expected is what a request takes that comes now: in proportion to those in flight, compared with how many there
// were on average.
func TestMeanFollowsTheCrowd(t *testing.T) {
	p := newPlay()
	p.steady(100, 5*time.Second, always(100*ms))
	alone := p.latency(t) / time.Duration(p.tr.rif+1)
	for n := p.tr.rif + 1; n < 40; n++ {
		wantAbout(t, fmt.Sprintf("%d in flight", n-1), p.latency(t), time.Duration(n)*alone, 0.001)
		if got := p.tr.ReportLeaving(p.now).Latency; n > 1 {
			wantAbout(t, fmt.Sprintf("%d in flight without one", n-1), got, time.Duration(n-1)*alone, 0.001)
		}
		p.request(time.Second, OK)
	}
}

// A replica that stops to answer looks slow at once; a median would show the last, quick answers for as long as it stands.
func TestMeanNoticesAStall(t *testing.T) {
	for _, rate := range []float64{20, 100, 1000} {
		p := newPlay()
		p.steady(rate, 5*time.Second, always(50*ms))
		p.steady(rate, 300*ms, always(time.Hour))
		if got := p.latency(t); got < 150*ms {
			t.Errorf("%v a second: got %v, 300 ms after it was stuck; want three times the 50 ms before or more", rate, got)
		}
		p.after(5 * time.Second)
		if got := p.latency(t); got < 500*ms {
			t.Errorf("%v a second: got %v, 5 s later; want it to be slow still", rate, got)
		}
	}
}

// When a stall is over it is forgotten, however long it took.
func TestMeanForgetsAStall(t *testing.T) {
	p := newPlay()
	p.steady(100, 5*time.Second, always(50*ms))
	for range 50 {
		p.request(3*time.Second, OK)
	}
	p.after(3 * time.Second)
	p.steady(100, 4*memory, always(50*ms))
	wantAbout(t, "afterwards", p.typical(t, 100, always(50*ms)), 50*ms, 0.2)
}

// When a replica falls behind, the requests that have ended lately are the short ones. The mean is that of all.
func TestMeanIsNotBiased(t *testing.T) {
	p := newPlay()
	exponential := func() time.Duration { return time.Duration(p.rng.ExpFloat64() * float64(100*ms)) }
	p.steady(100, time.Second, exponential)
	wantAbout(t, "on average", p.typical(t, 100, exponential), 100*ms, 0.1)
}

func TestMeanOfFailures(t *testing.T) {
	p := newPlay()
	for range 200 {
		p.request(ms, Failed)
		p.after(10 * ms)
	}
	wantAbout(t, "quick failures", p.latency(t), FailurePenalty, 0.1)
	p.steady(100, 10*memory, always(20*ms))
	wantAbout(t, "answers since", p.latency(t), 20*ms, 0.7)
}

// Requests that callers give up say how long others take at least.
func TestMeanOfCanceledRequests(t *testing.T) {
	p := newPlay()
	const readings = 500
	var sum time.Duration
	for i := range 2 * readings {
		p.request(20*ms, Canceled)
		p.request(100*ms, OK)
		p.after(10 * ms)
		if i >= readings {
			sum += p.latency(t)
		}
	}
	// 10 to 12 are in flight, of which 100 a second end: the others would have gone on.
	wantAbout(t, "half given up", sum/readings, 110*ms, 0.1)
}

// Streams stay for hours, and say nothing of how long others take.
func TestMeanTakesNoNoticeOfStreams(t *testing.T) {
	p := newPlay()
	for range 50 {
		p.request(5*time.Hour, OK)
	}
	p.steady(100, 20*time.Second, always(10*ms))
	wantAbout(t, "beside 50 streams", p.typical(t, 100, always(10*ms)), 10*ms, 0.2)
	if r := p.tr.Report(p.now); r.RIF < 50 {
		t.Errorf("RIF: got %d; want the streams to count", r.RIF)
	}
	p.after(4 * time.Hour)
	wantAbout(t, "hours later", p.typical(t, 100, always(10*ms)), 10*ms, 0.2)
	p.after(2 * time.Hour)
	wantAbout(t, "when they have ended", p.typical(t, 100, always(10*ms)), 10*ms, 0.2)
	if r := p.tr.Report(p.now); r.RIF > 10 {
		t.Errorf("RIF: got %d; want none of the streams", r.RIF)
	}
}

// Whatever happens, the requests in flight that count are those of the last seconds, no sum is negative, and a latency is
// known exactly when the median knows one or many have ended.
func TestMeanCountsTheYoung(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tr, now := new(Tracker), time.Unix(1000, 0)
		latest := now // the clock may go back
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
				now = now.Add(time.Duration(rapid.OneOf(rapid.IntRange(-100, 2000), rapid.IntRange(0, 1e8)).Draw(t, "ms")) * ms)
			},
			"": func(t *rapid.T) {
				tr.Report(now)
				if now.After(latest) {
					latest = now
				}
				least, most := 0, 0
				for _, o := range open {
					age := latest.Sub(o.start)
					if age < (oldAfter-1)*time.Second {
						least++
					}
					if age <= (oldAfter+1)*time.Second {
						most++
					}
				}
				m := &tr.mean
				if int(m.young) < least || m.young < 0 || m.flown < 0 || m.ended < 0 || m.penalties < 0 {
					t.Fatalf("%+v; %d to %d of %d are young", m, least, most, len(open))
				}
			},
		})
	})
}
