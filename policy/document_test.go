package policy_test

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/google/go-cmp/cmp"
	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/policy/document"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"pgregory.net/rapid"
)

// TestDocuments shows what each document in testdata means, or all that is wrong with it.
func TestDocuments(t *testing.T) {
	datadriven.Walk(t, "testdata/documents", func(t *testing.T, path string) {
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			docs, err := policy.ParseAll([]byte(d.Input))
			if err != nil {
				return err.Error() + "\n"
			}
			var out []string
			for _, doc := range docs {
				if d.Cmd == "effective" {
					doc = policy.Effective(doc)
				}
				text, err := document.EncodeYAML(doc)
				if err != nil {
					t.Fatal(err)
				}
				out = append(out, string(text))
			}
			return strings.Join(out, "---\n")
		})
	})
}

func TestDefaultIsWhatAnEmptySpecMeans(t *testing.T) {
	got, err := policy.Parse([]byte("{apiVersion: headroom.dev/v1, kind: ServicePolicy, metadata: {name: a}}"))
	if err != nil {
		t.Fatal(err)
	}
	compiled, err := policy.Compile(got)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(policy.Default(), compiled); diff != "" {
		t.Error(diff)
	}
}

func TestCompileRefusesNumbersThatAreNone(t *testing.T) {
	for _, x := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
		_, err := policy.Compile(&meshv1.ServicePolicy{
			ApiVersion: policy.APIVersion,
			Kind:       policy.Kind,
			Metadata:   &meshv1.Metadata{Name: "a"},
			Spec:       &meshv1.ServicePolicySpec{Prequal: &meshv1.PrequalSpec{QRif: &x}},
		})
		if err == nil || !strings.Contains(err.Error(), "spec.prequal.qRIF: want a number from 0 to 1") {
			t.Errorf("with %v: %v", x, err)
		}
	}
}

func TestCompileOfNothing(t *testing.T) {
	if _, err := policy.Compile(nil); err == nil {
		t.Error("no error")
	}
	if got, err := policy.Compile(policy.Effective(&meshv1.ServicePolicy{Metadata: &meshv1.Metadata{Name: "a"}})); err != nil || got != policy.Default() {
		t.Errorf("got %+v, %v", got, err)
	}
	policy.Effective(nil)
}

func optional[T any](g *rapid.Generator[T]) *rapid.Generator[*T] { return rapid.Ptr(g, true) }

func duration(least, most time.Duration) *rapid.Generator[string] {
	return rapid.Custom(func(t *rapid.T) string {
		if rapid.Bool().Draw(t, "left out") {
			return ""
		}
		return document.FormatDuration(time.Duration(rapid.Int64Range(int64(least), int64(most)).Draw(t, "duration")))
	})
}

// valid draws documents that Validate accepts.
func valid() *rapid.Generator[*meshv1.ServicePolicy] {
	return rapid.Custom(func(t *rapid.T) *meshv1.ServicePolicy {
		number := func(least, most float64, name string) *float64 {
			return optional(rapid.Float64Range(least, most)).Draw(t, name)
		}
		count := func(least, most uint32, name string) *uint32 {
			return optional(rapid.Uint32Range(least, most)).Draw(t, name)
		}
		key := rapid.SampledFrom([]*meshv1.HashKey{
			{Header: "X-User"}, {Cookie: "session"}, {Path: true}, {Source: true},
		}).Draw(t, "key")
		return &meshv1.ServicePolicy{
			ApiVersion: policy.APIVersion,
			Kind:       policy.Kind,
			Metadata:   &meshv1.Metadata{Name: "checkout", ResourceVersion: "7"},
			Spec: &meshv1.ServicePolicySpec{
				Balancer: string(rapid.SampledFrom(append(policy.Balancers(), "")).Draw(t, "balancer")),
				Prequal: &meshv1.PrequalSpec{
					PoolSize:           optional(rapid.Uint32Range(2, 256)).Draw(t, "pool size"),
					ProbesPerRequest:   number(0, 16, "probes"),
					RemovalsPerRequest: number(0, 16, "removals"),
					Delta:              number(math.SmallestNonzeroFloat64, 100, "delta"),
					MaxAge:             duration(10*time.Millisecond, time.Minute).Draw(t, "max age"),
					ProbeTimeout:       duration(time.Millisecond, 10*time.Second).Draw(t, "probe timeout"),
					QRif:               number(0, 1, "qRIF"),
					IdleProbeInterval:  duration(10*time.Millisecond, time.Minute).Draw(t, "idle"),
					Latency:            rapid.SampledFrom([]string{"", string(policy.LatencyMean), string(policy.LatencyMedian)}).Draw(t, "latency"),
					ProbeTargets:       rapid.SampledFrom([]string{"", string(policy.ProbeBetterOfTwo), string(policy.ProbeRandom)}).Draw(t, "targets"),
				},
				Timeout: duration(time.Millisecond, 24*time.Hour).Draw(t, "timeout"),

				Forwarded:      rapid.SampledFrom([]string{"", string(policy.ForwardedNone), string(policy.ForwardedXFF), string(policy.ForwardedRFC)}).Draw(t, "forwarded"),
				ProxyProtocol:  optional(rapid.Bool()).Draw(t, "PROXY"),
				CaptureReal:    optional(rapid.Bool()).Draw(t, "real"),
				CaptureInbound: optional(rapid.Bool()).Draw(t, "inbound"),
				DetectTimeout:  duration(time.Millisecond, time.Minute).Draw(t, "detect"),
				RetryBudget: &meshv1.RetryBudget{
					Ratio:        number(0, 1, "ratio"),
					MinPerSecond: number(0, 1000, "min"),
					Window:       duration(time.Second, time.Minute).Draw(t, "window"),
				},
				ConsistentHash: &meshv1.ConsistentHash{
					Key:        key,
					LoadFactor: optional(rapid.OneOf(rapid.Just(0.0), rapid.Float64Range(1.0000001, 100))).Draw(t, "load factor"),
				},
				PrequalSync: &meshv1.PrequalSyncSpec{
					Probes:   count(2, 16, "sync probes"),
					HitScale: number(0, 1, "hit scale"),
					Keys:     count(1, 1<<20, "keys"),
				},
				WeightedRoundRobin: &meshv1.WeightedRoundRobinSpec{
					Blackout:       duration(10*time.Millisecond, 10*time.Minute).Draw(t, "blackout"),
					Expiry:         duration(time.Second, 24*time.Hour).Draw(t, "expiry"),
					UpdateInterval: duration(100*time.Millisecond, time.Minute).Draw(t, "update interval"),
					ErrorPenalty:   number(0, 1000, "error penalty"),
				},
				Yarp:   &meshv1.YARPSpec{PollInterval: duration(10*time.Millisecond, time.Minute).Draw(t, "poll interval")},
				Linear: &meshv1.LinearSpec{RifWeight: number(0, 1, "λ"), Alpha: duration(time.Microsecond, time.Minute).Draw(t, "α")},
				C3:     &meshv1.C3Spec{Smoothing: number(0, 0.999, "smoothing"), Clients: count(0, 100_000, "clients")},
				PeakEwma: &meshv1.PeakEWMASpec{
					Decay:          duration(10*time.Millisecond, 10*time.Minute).Draw(t, "decay"),
					DefaultLatency: duration(time.Microsecond, time.Minute).Draw(t, "default latency"),
					FailurePenalty: duration(time.Millisecond, 5*time.Minute).Draw(t, "failure penalty"),
				},
				LateBinding: &meshv1.LateBindingSpec{Reservations: count(1, 16, "reservations")},
				Slots:       count(1, 10_000, "slots"),
				Scope: &meshv1.ScopeSpec{
					Subset: count(0, 10_000, "subset"),
					Zone:   rapid.SampledFrom([]string{"", string(policy.ZoneAny), string(policy.ZonePrefer)}).Draw(t, "zone"),
				},
			},
		}
	})
}

func TestWritingOutDefaultsChangesNothing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		doc := valid().Draw(t, "document")
		want, err := policy.Compile(doc)
		if err != nil {
			t.Fatal(err)
		}
		got, err := policy.Compile(policy.Effective(doc))
		if err != nil || got != want {
			t.Fatalf("got %+v, %v; want %+v", got, err, want)
		}
	})
}

func TestWhatIsWrittenIsReadBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		doc := valid().Draw(t, "document")
		text, err := document.EncodeYAML(doc)
		if err != nil {
			t.Fatal(err)
		}
		got, err := policy.Parse(text)
		if err != nil {
			t.Fatalf("%v in\n%s", err, text)
		}
		if diff := cmp.Diff(doc, got, protocmp.Transform()); diff != "" {
			t.Fatal(diff)
		}
	})
}

func FuzzParse(f *testing.F) {
	f.Add([]byte("apiVersion: headroom.dev/v1\nkind: ServicePolicy\nmetadata: {name: a}\nspec: {balancer: p2c, timeout: 3s}\n"))
	f.Add([]byte(`{"apiVersion":"headroom.dev/v1","kind":"ServicePolicy","metadata":{"name":"a"},"spec":{"prequal":{"qRIF":.5}}}`))
	f.Add([]byte("---\n# nothing\n---\nspec: {consistentHash: {key: {path: true}}}\n...\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		doc, err := policy.Parse(data)
		if err != nil {
			if err.Error() == "" {
				t.Error("an error without a word")
			}
			return
		}
		meaning, err := policy.Compile(doc)
		if err != nil {
			t.Fatalf("parsed, but not compiled: %v", err)
		}
		text, err := document.EncodeYAML(doc)
		if err != nil {
			t.Fatal(err)
		}
		again, err := policy.Parse(text)
		if err != nil || !proto.Equal(doc, again) {
			t.Fatalf("written as\n%s\nit reads as %v, %v; want %v", text, again, err, doc)
		}
		if got, err := policy.Compile(policy.Effective(doc)); err != nil || got != meaning {
			t.Fatalf("with defaults written out: %+v, %v; want %+v", got, err, meaning)
		}
	})
}
