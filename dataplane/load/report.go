// Package load measures what a replica bears: its requests in flight, and the latency to expect at that number.
package load

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"time"
)

// Bounds on what a report may claim. A larger value is not believed.
const (
	MaxRIF         = 1 << 20
	MaxLatency     = time.Hour
	MaxRate        = 1e9
	MaxUtilization = 1e6
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
	return r.RIF >= 0 && r.RIF <= MaxRIF && (!r.Known || r.Latency >= 0 && r.Latency <= MaxLatency) &&
		within(r.Rate, MaxRate) && within(r.ErrorRate, MaxRate) && within(r.Utilization, MaxUtilization)
}

// within reports whether v is a number from 0 to most.
func within(v, most float64) bool { return v >= 0 && v <= most }

// Append renders the report as the field between agents carries it, "rif=3 latency=1200us rate=120.5 errors=1.2 util=0.43",
// without what is not known or 0. Rates are rounded to four digits.
func (r Report) Append(b []byte) []byte {
	b = append(b, "rif="...)
	b = strconv.AppendInt(b, int64(r.RIF), 10)
	if r.Known {
		b = append(b, " latency="...)
		b = strconv.AppendInt(b, r.Latency.Microseconds(), 10)
		b = append(b, "us"...)
	}
	b = appendNumber(b, " rate=", r.Rate)
	b = appendNumber(b, " errors=", r.ErrorRate)
	return appendNumber(b, " util=", r.Utilization)
}

// String returns what Append appends.
func (r Report) String() string { return string(r.Append(nil)) }

func appendNumber(b []byte, name string, v float64) []byte {
	if v == 0 {
		return b
	}
	return strconv.AppendFloat(append(b, name...), v, 'g', 4, 64)
}

var errReport = errors.New("load report: want rif=N [latency=Nus] [rate=X] [errors=X] [util=X] within bounds")

// ParseReport reads what Append renders.
func ParseReport(b []byte) (Report, error) {
	r, ok := parseReport(b)
	if !ok || !r.Valid() {
		return Report{}, fmt.Errorf("%q: %w", b, errReport)
	}
	return r, nil
}

func parseReport(b []byte) (r Report, ok bool) {
	left := fields{b}
	r.RIF, ok = left.rif()
	if !ok {
		return r, false
	}
	r.Latency, r.Known, ok = left.latency()
	return r, ok && left.number("rate=", &r.Rate) && left.number("errors=", &r.ErrorRate) &&
		left.number("util=", &r.Utilization) && len(left.bytes) == 0
}

// fields is what is left to read of a report.
type fields struct{ bytes []byte }

// next takes a field off the front if it has the name. A space must be followed by a field.
func (f *fields) next(name string) (value []byte, found bool) {
	if len(f.bytes) < len(name) || string(f.bytes[:len(name)]) != name {
		return nil, false
	}
	value, rest, more := bytes.Cut(f.bytes[len(name):], []byte(" "))
	if more && len(rest) == 0 {
		return nil, false
	}
	f.bytes = rest
	return value, true
}

func (f *fields) rif() (rif int32, ok bool) {
	value, _ := f.next("rif=")
	v, err := strconv.ParseInt(string(value), 10, 32)
	return int32(v), err == nil
}

func (f *fields) latency() (latency time.Duration, known, ok bool) {
	value, known := f.next("latency=")
	if !known {
		return 0, false, true
	}
	value, ok = bytes.CutSuffix(value, []byte("us"))
	us, err := strconv.ParseInt(string(value), 10, 64)
	if !ok || err != nil || us < 0 || us > MaxLatency.Microseconds() {
		return 0, true, false
	}
	return time.Duration(us) * time.Microsecond, true, true
}

// number reads a field that may be missing.
func (f *fields) number(name string, into *float64) (ok bool) {
	value, found := f.next(name)
	if !found {
		return true
	}
	v, err := strconv.ParseFloat(string(value), 64)
	*into = v
	return err == nil
}
