package sim

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

func source() *rand.Rand { return rand.New(rand.NewPCG(7, 7)) }

func TestMeansOfWork(t *testing.T) {
	const ms = time.Millisecond
	for name, w := range map[string]Work{
		"fixed":       {Mean: 10 * ms},
		"exponential": {Distribution: Exponential, Mean: 10 * ms},
		"normal":      {Distribution: Normal, Mean: 80 * ms, Spread: 1},
		"wide normal": {Distribution: Normal, Mean: 80 * ms, Spread: 3},
		"no spread":   {Distribution: Normal, Mean: 80 * ms},
		"uniform":     {Distribution: Uniform, Mean: 50 * ms, Spread: 0.1},
		"lognormal":   {Distribution: LogNormal, Mean: 50 * ms, Spread: 1},
		"mixture": {Mix: []Class{{Share: 9, Work: Work{Distribution: Exponential, Mean: 50 * ms}},
			{Share: 1, Work: Work{Mean: 500 * ms}}}},
	} {
		rng, sum := source(), 0.0
		const n = 200_000
		for range n {
			sum += w.draw(rng)
		}
		if got, want := sum/n, w.mean(); math.Abs(got-want) > 0.015*want {
			t.Errorf("%s: drawn %v on average, the mean is said to be %v", name, time.Duration(got), time.Duration(want))
		}
	}
}

// The latencies that the paper shows below allocation are those of a normal distribution clipped at 0.
func TestNormalWorkIsClipped(t *testing.T) {
	w, rng := Work{Distribution: Normal, Mean: 80 * time.Millisecond, Spread: 1}, source()
	drawn := make([]float64, 500_000)
	for i := range drawn {
		drawn[i] = w.draw(rng) / 1e6
	}
	slices.Sort(drawn)
	for _, tt := range []struct{ q, want float64 }{{0, 0}, {0.5, 80}, {0.9, 182.5}, {0.99, 266}, {0.999, 327}} {
		if got := drawn[int(tt.q*float64(len(drawn)-1))]; math.Abs(got-tt.want) > 0.01*tt.want {
			t.Errorf("quantile %v: got %.1f ms, want %v", tt.q, got, tt.want)
		}
	}
	if got := time.Duration(w.mean()).Round(100 * time.Microsecond); got != 86700*time.Microsecond {
		t.Errorf("mean: got %v, want 86.7ms", got)
	}
}

func TestZipf(t *testing.T) {
	z, rng := newZipf(4, 1), source()
	var seen [4]float64
	const n = 100_000
	for range n {
		seen[z.draw(rng)]++
	}
	for i, got := range seen {
		if want := n / float64(i+1) / (1 + 1./2 + 1./3 + 1./4); math.Abs(got-want) > 0.03*want {
			t.Errorf("item %d: drawn %v times, want about %.0f", i, got, want)
		}
	}
}

// Requests come at the rates of the stages.
func TestArrivalsFollowTheStages(t *testing.T) {
	const sec = time.Second
	stages := []Stage{{Lasts: 10 * sec, Rate: 100}, {Lasts: 10 * sec, Rate: 100, To: 500}, {Lasts: 5 * sec}, {Lasts: 10 * sec, Rate: 400, To: 200}, {Rate: 50}}
	for _, even := range []bool{false, true} {
		a := newArrivals(Load{Stages: stages, Even: even}, 0, source())
		counts := make([]float64, 40) // a second
		for at := a.after(0); at < int64(40*sec); at = a.after(at) {
			counts[at/int64(sec)]++
		}
		for second, got := range counts {
			want := 0.0
			switch at := float64(second) + 0.5; {
			case second < 10:
				want = 100
			case second < 20:
				want = 100 + 40*(at-10)
			case second < 25:
			case second < 35:
				want = 400 - 20*(at-25)
			default:
				want = 50
			}
			within := 1.0
			if !even {
				within = 5 * math.Sqrt(want)
			}
			if math.Abs(got-want) > within {
				t.Errorf("even %v, second %d: got %v requests, want %v", even, second, got, want)
			}
		}
	}
}

func TestArrivalsAsPartOfCapacity(t *testing.T) {
	a := newArrivals(Load{Stages: []Stage{{Rate: 0.5}}, OfCapacity: true, Even: true}, 200, source())
	if got := a.after(0); got != int64(10*time.Millisecond) {
		t.Errorf("got the first after %v, want 10ms", time.Duration(got))
	}
	if got := (&arrivals{even: true, spans: []span{{end: math.Inf(1)}}}).after(5); got != never {
		t.Errorf("at rate 0: got a request at %d", got)
	}
}
