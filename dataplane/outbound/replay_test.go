package outbound

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"

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

// TestReplayWhileWaiting asks for another try while the one before waits for the caller to send more. What comes then is
// for the new one.
func TestReplayWhileWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source, caller := io.Pipe()
		b := replayable(&http.Request{Body: source})
		first, _ := b.next()
		over := make(chan error)
		go func() {
			buf := make([]byte, 100<<10)
			first.Read(buf)
			_, err := first.Read(buf)
			over <- err
		}()
		caller.Write([]byte("abc"))
		synctest.Wait()
		second, ok := b.next()
		if !ok {
			t.Error("no further try, though little was read")
		}
		buf := make([]byte, 3)
		if _, err := io.ReadFull(second, buf); err != nil || string(buf) != "abc" { // without waiting
			t.Errorf("got %q, %v", buf, err)
		}
		long := strings.Repeat("d", replayLimit) // comes in one read, and must not be lost to the limit
		go func() {
			io.WriteString(caller, long)
			io.WriteString(caller, "efg")
			caller.Close()
		}()
		if got, err := io.ReadAll(second); err != nil || string(got) != long+"efg" {
			t.Errorf("the second try gets %d bytes, %v", len(got), err)
		}
		if err := <-over; err != errTryOver {
			t.Errorf("the first try gets %v", err)
		}
		if _, ok := b.next(); ok {
			t.Error("a third try, though too much was read")
		}
	})
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
