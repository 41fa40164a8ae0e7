package scenario

import (
	"encoding/json"
	"math"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/sim"
)

// TestRecovery plays a fault from 2 s to 4 s, in a scenario of 10 s.
func TestRecovery(t *testing.T) {
	never := math.Inf(1)
	for _, test := range []struct {
		name     string
		failed   []int // of 100 requests in each second
		want     float64
		lastsFor time.Duration
	}{
		{"before the fault nothing counts", []int{100, 100, 100, 100, 0, 0, 0, 0, 0, 0}, 0, 2 * time.Second},
		{"at once", []int{0, 0, 90, 90, 0, 0, 0, 0, 0, 0}, 0, 2 * time.Second},
		{"one in a hundred may fail", []int{0, 0, 90, 90, 1, 1, 1, 1, 1, 1}, 0, 2 * time.Second},
		{"two in a hundred may not", []int{0, 0, 90, 90, 2, 2, 2, 1, 1, 1}, 3, 2 * time.Second},
		{"not if it comes back", []int{0, 0, 90, 90, 0, 0, 0, 50, 0, 0}, 4, 2 * time.Second},
		{"never", []int{0, 0, 90, 90, 90, 90, 90, 90, 90, 90}, never, 2 * time.Second},
		{"the end is not the service's", []int{0, 0, 90, 90, 0, 0, 0, 0, 0, 0, 90}, 0, 2 * time.Second},
		{"nor does it bring recovery", []int{0, 0, 90, 90, 0, 0, 0, 0, 0, 90, 0}, never, 2 * time.Second},
		{"a fault that stays leaves nothing to recover", []int{0, 0, 90, 90, 90, 90, 90, 90, 90, 90}, 0, 0},
	} {
		var series []sim.Bucket
		for i, n := range test.failed {
			series = append(series, sim.Bucket{Start: time.Duration(i) * time.Second, Requests: 100, Errors: n})
		}
		c := sim.Config{Warmup: time.Second, Duration: 9 * time.Second, Faults: []sim.Fault{{At: 2 * time.Second, Lasts: test.lastsFor}}}
		if got := recovery(c, series); float64(got) != test.want {
			t.Errorf("%s: got %v s, want %v s", test.name, got, test.want)
		}
	}
}

func TestSecondsInJSON(t *testing.T) {
	got, err := json.Marshal([]Seconds{0, 2.5, Seconds(math.Inf(1))})
	if err != nil || string(got) != "[0,2.5,null]" {
		t.Errorf("got %s, %v", got, err)
	}
}
