package outbound

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"testing"

	"pgregory.net/rapid"
)

// TestReplay reads a body in several tries that break off anywhere. Each try must see the body from its beginning, or be
// refused, which happens only once more than the limit was read.
func TestReplay(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.OneOf(rapid.IntRange(0, 100), rapid.IntRange(replayLimit-3, replayLimit+3), rapid.IntRange(0, 3*replayLimit)).Draw(t, "size")
		content := make([]byte, size)
		for i := range content {
			content[i] = byte(i * 7 >> 3)
		}
		b := replayable(&http.Request{Body: io.NopCloser(bytes.NewReader(content))})
		var earlier []io.Reader
		furthest := 0
		for {
			body, ok := b.next()
			if mayFail := furthest > replayLimit; ok == mayFail {
				t.Fatalf("%d bytes were read: next says %v", furthest, ok)
			}
			if !ok {
				return
			}
			for _, e := range earlier {
				if n, err := e.Read(make([]byte, 10)); n > 0 || !errors.Is(err, errTryOver) {
					t.Fatalf("a try that is over reads %d bytes, %v", n, err)
				}
			}
			earlier = append(earlier, body)
			want := rapid.IntRange(0, 2*size+10).Draw(t, "bytes to read")
			got, err := io.ReadAll(io.LimitReader(body, int64(want)))
			if err != nil || !bytes.Equal(got, content[:min(want, size)]) {
				t.Fatalf("got %d bytes, %v, want the first %d of %d", len(got), err, want, size)
			}
			body.Close()
			furthest = max(furthest, len(got))
			if len(earlier) > 4 {
				return
			}
		}
	})
}

// TestReplayWaitsForNobody asks for another try while the one before waits for the caller.
func TestReplayWaitsForNobody(t *testing.T) {
	source, caller := io.Pipe()
	b := replayable(&http.Request{Body: source})
	first, _ := b.next()
	reading, read := make(chan bool), make(chan error)
	go func() {
		buf := make([]byte, 1)
		first.Read(buf)
		close(reading)
		_, err := first.Read(buf)
		read <- err
	}()
	caller.Write([]byte("a"))
	<-reading
	for { // until the second read has begun
		if _, ok := b.next(); !ok {
			break
		}
	}
	caller.Close()
	if err := <-read; err != io.EOF && !errors.Is(err, errTryOver) {
		t.Error(err)
	}
}

func TestNoBodyIsSentAgain(t *testing.T) {
	b := replayable(&http.Request{Body: http.NoBody})
	for range 3 {
		if body, ok := b.next(); !ok || body != http.NoBody {
			t.Errorf("got %v, %v", body, ok)
		}
	}
}

func FuzzServiceOf(f *testing.F) {
	for _, s := range []string{"web.mesh", "WEB.mesh.:80", "[::1]:80", "", ".mesh", "mesh", "a.b.mesh:", ":80", "web.mesh:80:90"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, host string) {
		name, ok := serviceOf(host)
		if !ok {
			return
		}
		if name == "" {
			t.Errorf("%q names a service without a name", host)
		}
		if again, ok := serviceOf(string(name) + "." + Domain + "."); !ok || again != name {
			t.Errorf("%q names %q, but that names %q", host, name, again)
		}
	})
}
