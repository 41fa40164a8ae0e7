package h1

import (
	"bytes"
	"strings"
	"testing"
)

// TestTables compares the tables with the words of the standards.
func TestTables(t *testing.T) {
	const alphanumeric = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
	const above = "\x80\xff"
	for _, test := range []struct{ name, table, has, lacks string }{
		{"tokens", tokens, alphanumeric + "!#$%&'*+-.^_`|~", " \t\r\n\x00\x7f\"(),/:;<=>?@[\\]{}" + above},
		{"target", target, alphanumeric + "-._~:/?[]@!$&'()*+,;=%\"<>\\^`{|}" + high(), "# \t\r\n\x00\x1f\x7f"},
		{"hosts", hosts, alphanumeric + "-._~!$&'()*+;=", ",%:/?#[]@ \t\r\n\x00\x7f\"<>\\^`{|}" + above},
	} {
		if len(test.table) != 256 {
			t.Fatalf("%s: has %d places", test.name, len(test.table))
		}
		if !all([]byte(test.has), test.table) {
			t.Errorf("%s: lacks one of %q", test.name, test.has)
		}
		for _, c := range []byte(test.lacks) {
			if test.table[c] == 'x' {
				t.Errorf("%s: has %q", test.name, c)
			}
		}
		if n := strings.Count(test.table, "x"); n != len(test.has) {
			t.Errorf("%s: has %d characters, want %d", test.name, n, len(test.has))
		}
	}
}

// high returns the bytes above ASCII.
func high() string {
	b := make([]byte, 128)
	for i := range b {
		b[i] = byte(128 + i)
	}
	return string(b)
}

// TestPrintable compares the check of eight bytes at once with that of each.
func TestPrintable(t *testing.T) {
	for c := range 256 {
		for at := range 17 {
			b := bytes.Repeat([]byte("a\xffz"), 6)[:17]
			b[at] = byte(c)
			if at > 0 {
				b[at-1] = '\t'
			}
			if got, want := printable(b), printableSlow(b); got != want {
				t.Errorf("%q: %v", b, got)
			}
		}
	}
}
