//go:build linux

package load

import (
	"testing"
	"time"
)

// BenchmarkDirect is what callers and origin can do without a proxy: none that is measured with them can be faster.
func BenchmarkDirect(b *testing.B) {
	l, ip := origin(b, "127.79.1.3")
	for _, k := range Kinds() {
		b.Run(k.Name, func(b *testing.B) {
			s := open(b, l, k, ip)
			calls, took := 0, time.Duration(0)
			for b.Loop() {
				rate, err := s.Saturate(10*time.Millisecond, 100*time.Millisecond, func() time.Duration { return 0 })
				if err != nil {
					b.Fatal(err)
				}
				calls, took = calls+rate.Calls, took+rate.Took
			}
			b.ReportMetric(float64(took.Microseconds())/float64(calls), "µs/call")
		})
	}
}
