package scenario

import (
	"encoding/json"
	"math"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/sim"
)

// Seconds is a time that may be infinite: never. In JSON that is null.
type Seconds float64

// MarshalJSON writes a number or null.
func (s Seconds) MarshalJSON() ([]byte, error) {
	if math.IsInf(float64(s), 0) {
		return []byte("null"), nil
	}
	return json.Marshal(float64(s))
}

// recovered is the part of the requests that succeed once a service has recovered.
const recovered = 0.99

// recovery returns how long after the last passing fault the service was back for good: from then on, of the requests that
// ended in any bucket of the series, at least 99 % had succeeded. It is 0 if there was nothing to recover from.
func recovery(c sim.Config, series []sim.Bucket) Seconds {
	over, any := faultsOver(c)
	if !any {
		return 0
	}
	end := c.Warmup + c.Duration
	back := over
	for i, b := range series {
		if b.Start < over || b.Start >= end || float64(b.Requests-b.Errors) >= recovered*float64(b.Requests) {
			continue
		}
		if i+1 == len(series) || series[i+1].Start >= end {
			return Seconds(math.Inf(1))
		}
		back = series[i+1].Start
	}
	return Seconds((back - over).Seconds())
}

// faultsOver returns when the last fault that passes has passed, if any does.
func faultsOver(c sim.Config) (at time.Duration, any bool) {
	for _, f := range c.Faults {
		if f.Lasts > 0 {
			at, any = max(at, c.Over(f)), true
		}
	}
	return at, any
}
