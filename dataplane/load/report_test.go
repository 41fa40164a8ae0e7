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
	} {
		got, err := ParseReport(tt.in)
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
		"rif=3 latency=-9223372036854775808us", // times 1000, it wraps around to 0
		"rif=3 latency=-9223372036854775us",
		"rif=3 latency=-18446744073709551us",
	} {
		if got, err := ParseReport(in); err == nil {
			t.Errorf("ParseReport(%q): got %+v; want an error", in, got)
		}
	}
}

func TestReportRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := Report{RIF: rapid.Int32Range(0, MaxRIF).Draw(t, "rif"), Known: rapid.Bool().Draw(t, "known")}
		if want.Known {
			us := rapid.Int64Range(0, MaxLatency.Microseconds()).Draw(t, "us")
			want.Latency = time.Duration(us) * time.Microsecond
		}
		if got, err := ParseReport(want.String()); err != nil || got != want {
			t.Fatalf("%q: got %+v, %v; want %+v", want, got, err, want)
		}
	})
}

// FuzzParseReport: a header of another agent is either refused, or means what it says.
func FuzzParseReport(f *testing.F) {
	for _, seed := range []string{"rif=0", "rif=3 latency=1200us", "rif=3 latency=-9223372036854775808us", "rif=+3", "rif=3 latency"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, in string) {
		got, err := ParseReport(in)
		if err != nil {
			return
		}
		if !got.Valid() {
			t.Fatalf("%q: accepted %+v", in, got)
		}
		if again, err := ParseReport(got.String()); err != nil || again != got {
			t.Fatalf("%q: got %+v, and from %q %+v, %v", in, got, got, again, err)
		}
	})
}
