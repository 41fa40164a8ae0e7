package agent

import (
	"strings"
	"testing"
)

func TestRegistryReadiness(t *testing.T) {
	for _, tt := range []struct {
		revision  int64
		connected bool
		note, err string
	}{
		{0, false, "", "no snapshot"},
		{0, true, "", "no snapshot"},
		{5, false, "not connected: serving the last snapshot", ""},
		{5, true, "", ""},
	} {
		note, err := registryReady(tt.revision, tt.connected)
		if note != tt.note || (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) {
			t.Errorf("%+v: got %q, %v", tt, note, err)
		}
	}
}
