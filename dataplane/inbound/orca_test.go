package inbound

import (
	"math"
	"strings"
	"testing"
)

func TestParseORCA(t *testing.T) {
	tests := []struct {
		report string
		want   float64 // -1: an error
	}{
		{"TEXT application_utilization=0.4,cpu_utilization=0.3", 0.4},
		{"TEXT cpu_utilization=0.3,mem_utilization=0.9,named_metrics.cpu_utilization=0.7", 0.3},
		{"TEXT application_utilization=0, cpu_utilization=0.3", 0.3},
		{"TEXT application_utilization=1.5", 1.5},
		{"TEXT mem_utilization=0.9", 0},
		{"TEXT ", 0},
		{`JSON {"application_utilization": 0.4, "cpu_utilization": 0.3}`, 0.4},
		{`JSON {"cpuUtilization": "0.3", "namedMetrics": {"a": 1}}`, 0.3},
		{`JSON {}`, 0},
		{"TEXT cpu_utilization=much", -1},
		{"TEXT cpu_utilization", -1},
		{"TEXT cpu_utilization=-1", -1},
		{"TEXT cpu_utilization=NaN", -1},
		{"TEXT cpu_utilization=Inf", -1},
		{`JSON {"cpu_utilization": {}}`, -1},
		{`JSON {"cpu_utilization": 1`, -1},
		{"cpu_utilization=0.3", -1},
		{"", -1},
	}
	for _, tt := range tests {
		got, err := parseORCA(tt.report)
		if (err != nil) != (tt.want < 0) || err == nil && got != tt.want {
			t.Errorf("%q: %v, %v, want %v", tt.report, got, err, tt.want)
		}
	}
}

// header is a relay.Fields.
type header map[string]string

func (h header) Field(dst []byte, name string) ([]byte, bool) {
	value, ok := h[name]
	return append(dst, value...), ok
}

func TestReportedUtilization(t *testing.T) {
	tests := []struct {
		fields header
		want   float64
	}{
		{header{"endpoint-load-metrics": "TEXT cpu_utilization=0.3", "x-own": "1"}, 0.3},
		{header{"endpoint-load-metrics": "TEXT cpu_utilization=much"}, 0},
		{header{"endpoint-load-metrics-bin": "CQAAAAAAAPA/"}, 0},
	}
	for _, tt := range tests {
		if got := reportedUtilization(tt.fields, nil); got != tt.want {
			t.Errorf("%v: got %v, want %v", tt.fields, got, tt.want)
		}
	}
}

func FuzzParseORCA(f *testing.F) {
	f.Add("TEXT application_utilization=0.4,cpu_utilization=0.3")
	f.Add(`JSON {"application_utilization": 0.4}`)
	f.Fuzz(func(t *testing.T, report string) {
		u, err := parseORCA(report)
		if err == nil && (math.IsNaN(u) || math.IsInf(u, 0) || u < 0) {
			t.Errorf("%q: believed %v", report, u)
		}
		if err != nil && !strings.Contains(err.Error(), "want TEXT") {
			t.Errorf("%q: %v does not say what is wanted", report, err)
		}
	})
}
