package transport

import (
	"bytes"
	"io"
	"testing"
	"testing/iotest"
)

func FuzzReadPreface(f *testing.F) {
	for _, p := range protocols() {
		f.Add([]byte(preface(p)+"payload"), false)
	}
	f.Add([]byte("HEADROOM headroom-http/11\n"), true)
	f.Add([]byte("GET / HTTP/1.1\r\n"), false)
	f.Fuzz(func(t *testing.T, sent []byte, slow bool) {
		rest := bytes.NewReader(sent)
		var r io.Reader = rest
		if slow {
			r = iotest.OneByteReader(rest)
		}
		p, err := readPreface(r)
		read := sent[:len(sent)-rest.Len()]
		if len(read) > len(preface(Probe)) {
			t.Errorf("read %d bytes", len(read))
		}
		if err == nil && string(read) != preface(p) {
			t.Errorf("took %q for %s", read, p)
		}
		for _, known := range protocols() {
			if bytes.HasPrefix(sent, []byte(preface(known))) && (err != nil || p != known) {
				t.Errorf("%q: %s, %v", sent, p, err)
			}
		}
	})
}
