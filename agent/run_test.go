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

func TestNodeNameReadiness(t *testing.T) {
	for _, tt := range []struct{ connected, claimed, ready bool }{
		{true, true, true}, {true, false, false}, {false, true, true}, {false, false, true},
	} {
		err := nameReady("n1", tt.connected, tt.claimed)
		if (err == nil) != tt.ready || err != nil && !strings.Contains(err.Error(), `another agent holds the name "n1"`) {
			t.Errorf("%+v: got %v", tt, err)
		}
	}
}
