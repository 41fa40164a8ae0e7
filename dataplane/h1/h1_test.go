package h1

import "testing"

func TestTables(t *testing.T) {
	for _, table := range []string{tokens, targets, values, hostChars} {
		if len(table) != 256 {
			t.Errorf("a table of %d", len(table))
		}
	}
}
