package probe_test

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/dataplane/probe"
	"github.com/headroom-mesh/headroom/registry"
)

func reader(b []byte) *bufio.Reader { return bufio.NewReaderSize(bytes.NewReader(b), 1<<10) }

// TestFormat pins the bytes that the package documentation describes.
func TestFormat(t *testing.T) {
	request, err := probe.AppendRequest(nil, 0x01020304, probe.Request{Endpoint: "a/n/:1", Key: 0x0a0b0c0d0e0f1011})
	if want := "\x00\x12\x01\x02\x03\x04\x0a\x0b\x0c\x0d\x0e\x0f\x10\x11a/n/:1"; err != nil || string(request) != want {
		t.Errorf("request %q, %v; want %q", request, err, want)
	}
	answer := probe.AppendAnswer(nil, 7, probe.Answer{
		Status: probe.Draining,
		Report: load.Report{RIF: 258, Latency: 3 * time.Millisecond, Known: true},
	})
	if want := "\x00\x0d\x00\x00\x00\x07\x03\x00\x00\x01\x02\x00\x00\x0b\xb8"; string(answer) != want {
		t.Errorf("answer %q; want %q", answer, want)
	}
	unknown := probe.AppendAnswer(nil, 7, probe.Answer{})
	if want := "\x00\x0d\x00\x00\x00\x07\x00\x00\x00\x00\x00\xff\xff\xff\xff"; string(unknown) != want {
		t.Errorf("answer without latency %q; want %q", unknown, want)
	}
}

func TestTooLongEndpoint(t *testing.T) {
	long := registry.EndpointID(strings.Repeat("x", probe.MaxEndpointID))
	b, err := probe.AppendRequest(nil, 1, probe.Request{Endpoint: long})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, got, err := probe.ReadRequest(reader(b)); err != nil || registry.EndpointID(got) != long {
		t.Errorf("longest name: %v", err)
	}
	if b, err := probe.AppendRequest(nil, 1, probe.Request{Endpoint: long + "x"}); err == nil || len(b) > 0 {
		t.Errorf("a name that is too long: %d bytes, no error", len(b))
	}
}

func TestRoundTrips(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		id := rapid.Uint32().Draw(t, "id")
		q := probe.Request{
			Endpoint: registry.EndpointID(rapid.StringN(0, 40, 200).Draw(t, "endpoint")),
			Key:      rapid.Uint64().Draw(t, "key"),
		}
		b, err := probe.AppendRequest(nil, id, q)
		if err != nil {
			t.Fatal(err)
		}
		gotID, key, got, err := probe.ReadRequest(reader(b))
		if err != nil || gotID != id || key != q.Key || registry.EndpointID(got) != q.Endpoint {
			t.Errorf("request %d %d %q, %v", gotID, key, got, err)
		}
		a := probe.Answer{Status: probe.Status(rapid.IntRange(0, 3).Draw(t, "status"))}
		a.Report.RIF = rapid.Int32Range(0, load.MaxRIF).Draw(t, "rif")
		if a.Report.Known = rapid.Bool().Draw(t, "known"); a.Report.Known {
			us := rapid.Int64Range(0, load.MaxLatency.Microseconds()).Draw(t, "us")
			a.Report.Latency = time.Duration(us) * time.Microsecond
		}
		gotID, gotAnswer, err := probe.ReadAnswer(reader(probe.AppendAnswer(nil, id, a)))
		if err != nil || gotID != id || gotAnswer != a {
			t.Errorf("answer %d %+v, %v; want %+v", gotID, gotAnswer, err, a)
		}
	})
}

func TestReadErrors(t *testing.T) {
	good := probe.AppendAnswer(nil, 1, probe.Answer{})
	for n := range good {
		want := io.ErrUnexpectedEOF
		if n == 0 {
			want = io.EOF
		}
		if _, _, err := probe.ReadAnswer(reader(good[:n])); !errors.Is(err, want) {
			t.Errorf("%d bytes of an answer: %v, want %v", n, err, want)
		}
	}
	tests := []struct{ name, frame, want string }{
		{"long", "\x00\x0e", "a frame of 14 bytes, want 13"},
		{"status", "\x00\x0d\x00\x00\x00\x07\x04\x00\x00\x00\x00\x00\x00\x00\x00", "status 4"},
		{"rif", "\x00\x0d\x00\x00\x00\x07\x00\xff\xff\xff\xff\x00\x00\x00\x00", "rif="},
		{"latency", "\x00\x0d\x00\x00\x00\x07\x00\x00\x00\x00\x00\xff\xff\xff\xfe", "latency="},
	}
	for _, tt := range tests {
		if _, _, err := probe.ReadAnswer(reader([]byte(tt.frame))); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q in it", tt.name, err, tt.want)
		}
	}
}

func FuzzReadRequest(f *testing.F) {
	for _, q := range []probe.Request{{}, {Endpoint: "cart/n1/10.0.0.1:80"}, {Endpoint: "cart/n1/10.0.0.1:80", Key: 1 << 60}} {
		b, _ := probe.AppendRequest(nil, 9, q)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		r := reader(b)
		var again []byte
		for {
			id, key, endpoint, err := probe.ReadRequest(r)
			if err != nil {
				break
			}
			if again, err = probe.AppendRequest(again, id, probe.Request{Endpoint: registry.EndpointID(endpoint), Key: key}); err != nil {
				t.Fatalf("read what can't be written: %v", err)
			}
		}
		if !bytes.HasPrefix(b, again) {
			t.Errorf("read %q as %q", b, again)
		}
	})
}

func FuzzReadAnswer(f *testing.F) {
	f.Add(probe.AppendAnswer(nil, 9, probe.Answer{}))
	f.Add(probe.AppendAnswer(nil, 9, probe.Answer{Status: 2, Report: load.Report{RIF: 3, Latency: time.Second, Known: true}}))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := reader(b)
		var again []byte
		for {
			id, a, err := probe.ReadAnswer(r)
			if err != nil {
				break
			}
			if !a.Report.Valid() || a.Status > probe.Draining {
				t.Errorf("believed %+v", a)
			}
			again = probe.AppendAnswer(again, id, a)
		}
		if !bytes.HasPrefix(b, again) {
			t.Errorf("read %q as %q", b, again)
		}
	})
}
