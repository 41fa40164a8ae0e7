package load

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestParseReport(t *testing.T) {
	for _, tt := range []struct {
		in   string
		want Report
	}{
		{"rif=0", Report{}},
		{"rif=3 latency=1200us", Report{RIF: 3, Latency: 1200 * time.Microsecond, Known: true}},
		{"rif=3 latency=0us", Report{RIF: 3, Known: true}},
		{"rif=1048576 latency=3600000000us", Report{RIF: MaxRIF, Latency: MaxLatency, Known: true}},
		{"rif=3 latency=1200us rate=120.5 errors=1.2 util=0.43",
			Report{RIF: 3, Latency: 1200 * time.Microsecond, Known: true, Rate: 120.5, ErrorRate: 1.2, Utilization: 0.43}},
		{"rif=3 rate=120.5", Report{RIF: 3, Rate: 120.5}},
		{"rif=3 errors=1e-3 util=1.5", Report{RIF: 3, ErrorRate: 0.001, Utilization: 1.5}},
		{"rif=3 latency=5us util=0", Report{RIF: 3, Latency: 5 * time.Microsecond, Known: true}},
		{"rif=0 rate=1e9 errors=1e9 util=1e6", Report{Rate: MaxRate, ErrorRate: MaxRate, Utilization: MaxUtilization}},
	} {
		got, err := ParseReport([]byte(tt.in))
		if err != nil || got != tt.want {
			t.Errorf("ParseReport(%q): got %+v, %v; want %+v", tt.in, got, err, tt.want)
		}
	}
}

func TestParseReportRejects(t *testing.T) {
	for _, in := range []string{
		"", "rif", "rif=", "rif=x", "rif=-1", "rif=1048577", "rif=99999999999", "3", "RIF=3",
		"rif=3 ", "rif=3 latency", "rif=3 latency=", "rif=3 latency=us", "rif=3 latency=5", "rif=3 latency=5ms",
		"rif=3 latency=-1us", "rif=3 latency=3600000001us", "rif=3 latency=99999999999999999999us",
		"rif=3  latency=5us", "rif=3 latency=5us ", "rif=3 latency=5us x", "latency=5us rif=3", "rif=3 rif=3",
		"rif=3 rate=", "rif=3 rate=x", "rif=3 rate=-1", "rif=3 rate=NaN", "rif=3 rate=Inf", "rif=3 rate=1.1e9", "rif=3 rate=1e999",
		"rif=3 errors=-0.5", "rif=3 errors=nan", "rif=3 util=+Inf", "rif=3 util=1000001", "rif=3 util=0.5 rate=1", "rate=1",
		"rif=3 rate=1 latency=5us", "rif=3 rate=1 rate=1", "rif=3 rate=1 ", "rif=3 rate=1  util=1", "rif=3 speed=1",
		"rif=3 latency=-9223372036854775808us", // times 1000, it wraps around to 0
		"rif=3 latency=-9223372036854775us",
		"rif=3 latency=-18446744073709551us",
	} {
		if got, err := ParseReport([]byte(in)); err == nil {
			t.Errorf("ParseReport(%q): got %+v; want an error", in, got)
		}
	}
}

func TestReportRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		number := func(name string, most float64) float64 {
			return rapid.OneOf(rapid.Just(0.0), rapid.Float64Range(0, 100), rapid.Float64Range(0, most)).Draw(t, name)
		}
		want := Report{RIF: rapid.Int32Range(0, MaxRIF).Draw(t, "rif"), Known: rapid.Bool().Draw(t, "known"),
			Rate: number("rate", MaxRate), ErrorRate: number("errors", MaxRate), Utilization: number("util", MaxUtilization)}
		if want.Known {
			us := rapid.Int64Range(0, MaxLatency.Microseconds()).Draw(t, "us")
			want.Latency = time.Duration(us) * time.Microsecond
		}
		if got, err := ParseReport([]byte(want.String())); err != nil || !same(got, want) {
			t.Fatalf("%q: got %+v, %v; want %+v", want, got, err, want)
		}
	})
}

// same reports whether two reports differ in nothing but the rounding of rates.
func same(a, b Report) bool {
	rounded := about(a.Rate, b.Rate, 1e-3) && about(a.ErrorRate, b.ErrorRate, 1e-3) && about(a.Utilization, b.Utilization, 1e-3)
	a.Rate, a.ErrorRate, a.Utilization = b.Rate, b.ErrorRate, b.Utilization
	return rounded && a == b
}

// FuzzParseReport: a header of another agent is either refused, or means what it says.
func FuzzParseReport(f *testing.F) {
	for _, seed := range []string{
		"rif=0", "rif=3 latency=1200us", "rif=3 latency=-9223372036854775808us", "rif=+3", "rif=3 latency",
		"rif=3 latency=1200us rate=120.5 errors=1.2 util=0.43", "rif=3 rate=1e-320", "rif=3 util=NaN", "rif=3 rate=0x1p-2", "rif=3 util=-0",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, in string) {
		got, err := ParseReport([]byte(in))
		if err != nil {
			return
		}
		if !got.Valid() {
			t.Fatalf("%q: accepted %+v", in, got)
		}
		again, err := ParseReport([]byte(got.String()))
		if err != nil || !same(again, got) || again.String() != got.String() {
			t.Fatalf("%q: got %+v, and from %q %+v, %v", in, got, got, again, err)
		}
	})
}
