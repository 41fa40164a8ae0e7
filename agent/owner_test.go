package agent

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

func TestOwner(t *testing.T) {
	dir := t.TempDir()
	first, err := owner(dir, "")
	if err != nil || !regexp.MustCompile(`^[0-9a-f]{32}$`).MatchString(first) {
		t.Fatalf("identity %q, %v", first, err)
	}
	if again, err := owner(dir, ""); again != first || err != nil {
		t.Errorf("at the next start %q, %v; want %q", again, err, first)
	}
	if other, err := owner(t.TempDir(), ""); other == first || err != nil {
		t.Errorf("another agent has %q, %v", other, err)
	}
	if files, err := os.ReadDir(dir); err != nil || len(files) != 1 {
		t.Errorf("left over: %v, %v", files, err)
	}
	file := filepath.Join(dir, "identity")
	for _, damaged := range []string{"", "abcd", strings.Repeat("x", 32)} {
		if err := os.WriteFile(file, []byte(damaged), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := owner(dir, ""); err == nil || !strings.Contains(err.Error(), file) {
			t.Errorf("identity %q: error %v, want one that names the file", damaged, err)
		}
	}
}

// TestOwnerInCluster wants the next pod on a node to be the same agent, without its predecessor's folder, and that of another
// node, or of one that has taken its name, to be another.
func TestOwnerInCluster(t *testing.T) {
	first, err := owner(t.TempDir(), "6f1d")
	if err != nil || !regexp.MustCompile(`^[0-9a-f]{32}$`).MatchString(first) {
		t.Fatalf("identity %q, %v", first, err)
	}
	if next, err := owner(t.TempDir(), "6f1d"); next != first || err != nil {
		t.Errorf("the next pod has %q, %v; want %q", next, err, first)
	}
	if other, err := owner(t.TempDir(), "7a2e"); other == first || err != nil {
		t.Errorf("another node has %q, %v", other, err)
	}
}
