package document_test

import (
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/policy/document"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"
	"pgregory.net/rapid"
)

func TestDecodeRefusesInputThatIsNoDocument(t *testing.T) {
	for _, test := range []struct{ name, input, want string }{
		{"nothing", "", "empty"},
		{"only a comment", "# nothing here\n", "empty"},
		{"null", "null", "empty"},
		{"two documents", "kind: ServicePolicy\n---\nkind: ServicePolicy\n", "want one document, got 2"},
		{"two documents, one end of line of old", "kind: ServicePolicy\r---\rkind: ServicePolicy\r", "want one document, got 2"},
		{"text after the end", "kind: ServicePolicy\n...\nkind: ServicePolicy\n", "want one document, got 2"},
		{"too large", "kind: ServicePolicy\n#" + strings.Repeat("x", document.MaxSize), "1 MiB at most"},
		{"not UTF-8", "kind: \xff", "UTF-8"},
		{"UTF-16", "\xff\xfek\x00:\x00", "UTF-8"},
		{"a duplicate in JSON", `{"kind": "ServicePolicy", "kind": "ServicePolicy"}`, "duplicate"},
		{"an alias of itself", "a: &a [*a]", "contains itself"},
		{"a laugh", "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\n" +
			"d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d]\nf: &f [*e,*e,*e,*e,*e,*e,*e,*e,*e]\n" +
			"g: &g [*f,*f,*f,*f,*f,*f,*f,*f,*f]\n", "excessive aliasing"},
		{"deep", strings.Repeat("[", 100_000), "YAML"},
		{"deep JSON", strings.Repeat("[", 100_000) + strings.Repeat("]", 100_000), "depth"},
		{"a huge number", "spec: {prequal: {poolSize: 1" + strings.Repeat("0", 1000) + "}}", "poolSize: want a whole number"},
		{"a huge exponent", `{"spec": {"prequal": {"poolSize": 1e999999999}}}`, "poolSize: want a whole number"},
	} {
		t.Run(test.name, func(t *testing.T) {
			err := document.Decode([]byte(test.input), new(meshv1.ServicePolicy))
			if _, ok := errors.AsType[document.Problems](err); !ok || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %T %.300v, want Problems with %q", err, err, test.want)
			}
		})
	}
}

func TestDecodeChecksAllTypes(t *testing.T) {
	err := document.Decode([]byte(`
time: 5
started: now
outbound:
- requests: -1
  errors: "7"
  retryBalance: lots
  policyRevision: 1.5
  hotThreshold: 3000000000
  endpoints:
  - {state: GREEN, probe: {hot: 1}}
  - {state: 1, picks: 18446744073709551615}
inbound: {}
`), new(meshv1.Observation))
	want := strings.Join([]string{
		`inbound: want a list, got a group of fields`,
		`outbound[0].endpoints[0].probe.hot: want true or false, got a number 1`,
		`outbound[0].endpoints[0].state: want one of UNKNOWN, READY, UNHEALTHY, DRAINING, got a string "GREEN"`,
		`outbound[0].endpoints[1].state: want one of UNKNOWN, READY, UNHEALTHY, DRAINING, got a number 1`,
		`outbound[0].hotThreshold: want a whole number of 32 bits, got a number 3000000000`,
		`outbound[0].policyRevision: want a whole number of 64 bits, got a number 1.5`,
		`outbound[0].requests: want a whole number, 0 or above, of 64 bits, got a number -1`,
		`outbound[0].retryBalance: want a number, got a string "lots"`,
	}, "\n")
	if err == nil {
		t.Fatal("no error")
	}
	if diff := cmp.Diff(want, err.Error()); diff != "" {
		t.Error(diff)
	}
}

func TestDecodeAllKeepsTheOrder(t *testing.T) {
	docs, err := document.DecodeAll([]byte("---\nname: a\n--- {name: b}\n---\n# nothing\n---\nname: \"---\"\n"), newMetadata)
	if err != nil {
		t.Fatal(err)
	}
	want := []*meshv1.Metadata{{Name: "a"}, {Name: "b"}, {Name: "---"}}
	if diff := cmp.Diff(want, docs, protocmp.Transform()); diff != "" {
		t.Error(diff)
	}
}

func newMetadata() *meshv1.Metadata { return new(meshv1.Metadata) }

func TestEncodeRefusesWhatNoDocumentCanHold(t *testing.T) {
	nan := math.NaN()
	for _, m := range []proto.Message{
		&meshv1.PrequalSpec{QRif: &nan},
		&meshv1.EndpointRecord{State: 77},
	} {
		if text, err := document.EncodeYAML(m); err == nil {
			t.Errorf("%v was written as %s", m, text)
		}
	}
}

func TestAnyStringIsReadBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := &meshv1.ListEndpointsResponse{Endpoints: []*meshv1.EndpointRecord{
			{Service: rapid.String().Draw(t, "service"), Node: rapid.StringMatching(`[0-9a-zA-Z:._~+-]*`).Draw(t, "node")},
			{},
			{Zone: rapid.SampledFrom([]string{"yes", "no", "null", "~", "1e3", "0x1f", "1:20", "2026-01-01", "<<", "="}).Draw(t, "zone"), State: 1},
		}}
		text, err := document.EncodeYAML(want)
		if err != nil {
			t.Fatal(err)
		}
		got := new(meshv1.ListEndpointsResponse)
		if err := document.Decode(text, got); err != nil {
			t.Fatalf("%v in\n%s", err, text)
		}
		if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
			t.Fatalf("%s in\n%s", diff, text)
		}
	})
}

func TestDurationsAreReadBack(t *testing.T) {
	for want, d := range map[string]time.Duration{
		"0s": 0, "0.0015ms": 1500, "1.5ms": 1500 * time.Microsecond, "300ms": 300 * time.Millisecond,
		"1m": time.Minute, "1h": time.Hour, "1h0m1s": time.Hour + time.Second, "20m": 20 * time.Minute,
		"10h": 10 * time.Hour, "1m30s": 90 * time.Second,
	} {
		text := document.FormatDuration(d)
		if text != want {
			t.Errorf("%v is written as %q, want %q", d, text, want)
		}
		var problems document.Problems
		if got := problems.Duration("d", text, -1, document.Span{Max: time.Hour * 24}); got != d {
			t.Errorf("%q is read as %v, want %v: %v", text, got, d, problems)
		}
	}
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte("node: a\noutbound:\n- service: b\n  hotThreshold: 3\n  endpoints: [{id: c, state: READY, probe: {rif: 1}}]\n"))
	f.Add([]byte(`{"node": "a", "outbound": [{"requests": "18446744073709551615", "retryBalance": 1e-7}, {}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		want := new(meshv1.Observation)
		if document.Decode(data, want) != nil {
			return
		}
		want.Time, want.Started = nil, nil // no document has times of that kind
		for _, o := range want.Outbound {
			for _, e := range o.GetEndpoints() {
				e.Probe = nil
			}
		}
		for _, i := range want.Inbound {
			i.Latency = nil
		}
		text, err := document.EncodeYAML(want)
		if err != nil {
			t.Fatal(err)
		}
		got := new(meshv1.Observation)
		if isEmpty := proto.Equal(want, got); isEmpty {
			return
		}
		if err := document.Decode(text, got); err != nil || !proto.Equal(want, got) {
			t.Fatalf("written as\n%s\nit reads as %v, %v; want %v", text, got, err, want)
		}
	})
}

func TestProblemsOfForeignMessagesComeFromTheirOwnDecoder(t *testing.T) {
	if err := document.Decode([]byte(`{latency: 5}`), new(meshv1.ProbeView)); err == nil {
		t.Error("5 was taken for a duration")
	}
	got := new(meshv1.ProbeView)
	if err := document.Decode([]byte(`{latency: 0.5s}`), got); err != nil || got.GetLatency().AsDuration() != 500*time.Millisecond {
		t.Errorf("got %v, %v; want %v", got, err, durationpb.New(500*time.Millisecond))
	}
}
