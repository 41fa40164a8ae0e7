package inbound

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/headroom-mesh/headroom/dataplane/relay"
)

// A replica may say in a response, or in its trailers, how much of its capacity it uses: an ORCA load report, in the text
// or JSON form that Envoy reads too ("TEXT cpu_utilization=0.3", `JSON {"cpu_utilization": 0.3}`). Callers don't see it.
// The binary form is for gRPC's own balancers; it is not read.
const orcaField = "endpoint-load-metrics"

// reportedUtilization returns the utilization that an ORCA report among the fields tells, 0 if none.
func reportedUtilization(f relay.Fields, scratch []byte) float64 {
	report, ok := f.Field(scratch, orcaField)
	if !ok {
		return 0
	}
	u, err := parseORCA(string(report))
	if err != nil {
		return 0 // nobody is there to be told
	}
	return u
}

var errORCA = errors.New("ORCA report: want TEXT name=number,... or JSON {...}")

// parseORCA returns the utilization that a report tells: that of the application where it has one, else that of the CPU.
func parseORCA(s string) (float64, error) {
	var metric func(name, camel string) (float64, error)
	if text, ok := strings.CutPrefix(s, "TEXT "); ok {
		metric = textMetrics(text)
	} else if text, ok := strings.CutPrefix(s, "JSON "); ok {
		metric = jsonMetrics(text)
	} else {
		return 0, fmt.Errorf("%.80q: %w", s, errORCA)
	}
	u, err := metric("application_utilization", "applicationUtilization")
	if u == 0 && err == nil {
		u, err = metric("cpu_utilization", "cpuUtilization")
	}
	if err != nil || !(u >= 0) || math.IsInf(u, 1) {
		return 0, fmt.Errorf("%.80q: %w", s, errORCA)
	}
	return u, nil
}

// textMetrics reads name=number pairs, separated by commas. A metric that is missing is 0.
func textMetrics(text string) func(name, camel string) (float64, error) {
	return func(name, _ string) (float64, error) {
		for pair := range strings.SplitSeq(text, ",") {
			if key, value, _ := strings.Cut(pair, "="); strings.TrimSpace(key) == name {
				return strconv.ParseFloat(strings.TrimSpace(value), 64)
			}
		}
		return 0, nil
	}
}

// jsonMetrics reads the JSON form of a protobuf message: fields have two spellings, and numbers may be strings.
func jsonMetrics(text string) func(name, camel string) (float64, error) {
	var fields map[string]json.RawMessage
	err := json.Unmarshal([]byte(text), &fields)
	return func(name, camel string) (float64, error) {
		for _, key := range []string{name, camel} {
			if value, ok := fields[key]; ok && err == nil {
				return strconv.ParseFloat(strings.Trim(string(value), `"`), 64)
			}
		}
		return 0, err
	}
}
