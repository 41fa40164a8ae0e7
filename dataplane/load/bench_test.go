package load

import (
	"testing"
	"time"
)

// BenchmarkRequest measures what a request and a probe cost the tracker of a replica with ten in flight.
func BenchmarkRequest(b *testing.B) {
	for _, bench := range []struct {
		name     string
		rate     int
		byMedian bool
	}{{"mean", 1000, false}, {"few", 30, false}, {"median", 1000, true}} {
		b.Run(bench.name, func(b *testing.B) {
			tr, now := new(Tracker), time.Unix(1000, 0)
			tr.ByMedian(bench.byMedian)
			var open [10]Token
			for i := range open {
				open[i] = tr.Begin(now)
			}
			i := 0
			b.ReportAllocs()
			for b.Loop() {
				now = now.Add(time.Second / time.Duration(bench.rate))
				tr.Report(now)
				tr.End(now, open[i%len(open)], OK)
				open[i%len(open)] = tr.Begin(now)
				i++
			}
		})
	}
}
