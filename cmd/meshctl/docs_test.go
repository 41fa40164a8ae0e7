package main

import (
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestReferenceIsUpToDate(t *testing.T) {
	committed, err := os.ReadFile("../../docs/reference/meshctl.md")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(reference(new(app).root()), string(committed)); diff != "" {
		t.Errorf("docs/reference/meshctl.md is out of date, run go run ./docs/gen:\n%s", diff)
	}
}
