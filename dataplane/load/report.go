// Package load measures what a replica bears: its requests in flight, and the latency to expect at that number.
package load

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Bounds on what a report may claim. A larger value is not believed.
const (
	MaxRIF     = 1 << 20
	MaxLatency = time.Hour
)

// Report is a replica's load at one moment, as its own agent counts it.
type Report struct {
	RIF     int32         // requests in flight
	Latency time.Duration // to expect at this RIF; only if Known
	Known   bool          // whether a latency is known: none is never taken for a latency of 0

	// What the replica achieves, smoothed. Only reports on responses tell it.

	Rate        float64 // requests answered well, a second
	ErrorRate   float64 // requests failed, a second
	Utilization float64 // share of its capacity in use; more than 1 is possible; 0: not told
}

// Valid reports whether the values are within bounds.
func (r Report) Valid() bool {
	return r.RIF >= 0 && r.RIF <= MaxRIF && (!r.Known || r.Latency >= 0 && r.Latency <= MaxLatency)
}

// String renders the report as the header between agents carries it: "rif=3 latency=1200us", without the latency where
// none is known.
func (r Report) String() string {
	b := make([]byte, 0, 48)
	b = append(b, "rif="...)
	b = strconv.AppendInt(b, int64(r.RIF), 10)
	if r.Known {
		b = append(b, " latency="...)
		b = strconv.AppendInt(b, r.Latency.Microseconds(), 10)
		b = append(b, "us"...)
	}
	return string(b)
}

var errReport = errors.New("load report: want rif=N [latency=Nus] within bounds")

// ParseReport reads what String renders.
func ParseReport(s string) (Report, error) {
	rif, latency, known := strings.Cut(s, " ")
	n, ok := strings.CutPrefix(rif, "rif=")
	if !ok {
		return Report{}, fmt.Errorf("%q: %w", s, errReport)
	}
	v, err := strconv.ParseInt(n, 10, 32)
	if err != nil {
		return Report{}, fmt.Errorf("%q: %w", s, errReport)
	}
	r := Report{RIF: int32(v), Known: known}
	if known {
		us, ok := strings.CutPrefix(latency, "latency=")
		us, ok2 := strings.CutSuffix(us, "us")
		v, err := strconv.ParseInt(us, 10, 64)
		if !ok || !ok2 || err != nil || v < 0 || v > MaxLatency.Microseconds() {
			return Report{}, fmt.Errorf("%q: %w", s, errReport)
		}
		r.Latency = time.Duration(v) * time.Microsecond
	}
	if !r.Valid() {
		return Report{}, fmt.Errorf("%q: %w", s, errReport)
	}
	return r, nil
}
