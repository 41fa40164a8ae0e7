package scenario_test

import (
	"context"
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/google/go-cmp/cmp"

	"github.com/headroom-mesh/headroom/dataplane/sim"
	"github.com/headroom-mesh/headroom/dataplane/sim/scenario"
	"github.com/headroom-mesh/headroom/policy"
)

// TestDocuments shows what each document in testdata means, or all that is wrong with it.
func TestDocuments(t *testing.T) {
	datadriven.Walk(t, "testdata/documents", func(t *testing.T, path string) {
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			s, err := scenario.Parse([]byte(d.Input))
			if err != nil {
				return err.Error() + "\n"
			}
			return describe(t, s)
		})
	})
}

func describe(t *testing.T, s scenario.Scenario) string {
	t.Helper()
	cases, err := s.Plan(nil)
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	for _, c := range cases {
		cfg := c.Config
		fmt.Fprintf(&out, "%q %q: load %v, %s, pool %d, Q %v, key %v, %d replicas, %v after %v", c.Point, c.Rule, c.Load,
			cfg.Policy.Balancer, cfg.Policy.Prequal.PoolSize, cfg.Policy.Prequal.QRIF, cfg.Policy.Hash.Key, cfg.Replicas[0].Count,
			cfg.Duration, cfg.Warmup)
		if cfg.Oracle {
			out.WriteString(", oracle")
		}
		if cfg.Without.Reports {
			out.WriteString(", without reports")
		}
		if caller := cfg.Caller; caller != (sim.Caller{}) {
			fmt.Fprintf(&out, ", %v, %d retries", caller.Timeout, caller.Retries)
		}
		if cfg.Threshold > 0 {
			fmt.Fprintf(&out, ", late after %v", cfg.Threshold)
		}
		out.WriteString("\n")
	}
	return out.String()
}

const small = `
apiVersion: headroom.dev/v1
kind: Scenario
metadata: {name: small}
spec:
  replicas: [{count: 5, serve: slots}]
  work: {distribution: exponential, mean: 10ms}
  load: {utilization: 0.5}
  duration: 2s
`

func parse(t *testing.T, text string) scenario.Scenario {
	t.Helper()
	s, err := scenario.Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestWith(t *testing.T) {
	const swept = small + "  sweep: {path: load.utilization, values: [0.5, 0.6]}\n"
	for _, test := range []struct {
		name, text string
		settings   []scenario.Setting
		want       string // in what describe says, or in the error
	}{
		{"a number", small, []scenario.Setting{{"load.utilization", "0.7"}}, "load 0.7"},
		{"a path from the top", small, []scenario.Setting{{"spec.load.utilization", "0.7"}}, "load 0.7"},
		{"a duration", small, []scenario.Setting{{"duration", "7s"}}, "7s after"},
		{"an element", small, []scenario.Setting{{"replicas[0].count", "7"}}, "7 replicas"},
		{"a list that grows", small, []scenario.Setting{{"replicas[1].name", "b"}, {"replicas[0].name", "a"}}, "5 replicas"},
		{"a policy", small, []scenario.Setting{{"policy.prequal.qRIF", "0.5"}}, "Q 0.5"},
		{"another kind of load", small, []scenario.Setting{{"load.rate", "70"}}, "load 70"},
		{"structure", small, []scenario.Setting{{"rules", `[{"name": "c3"}]`}}, `"c3"`},
		{"nothing", small, []scenario.Setting{{"duration", "null"}}, "spec.duration: required"},
		{"what is swept", swept, []scenario.Setting{{"load.utilization", "0.7"}}, "load 0.7"},
		{"instead of what is swept", swept, []scenario.Setting{{"load.rate", "7"}}, "load 7"},
		{"the sweep", swept, []scenario.Setting{{"sweep.values", "[0.9]"}}, "load 0.9"},
		{"beside the sweep", swept, []scenario.Setting{{"duration", "7s"}}, "load 0.6"},
		{"what points set", small + "  sweep: {points: [{name: a, set: {load.rate: 5}}]}\n", []scenario.Setting{{"load.rate", "7"}}, "sweep=null"},
		{"instead of the points", small + "  sweep: {points: [{name: a, set: {load.rate: 5}}]}\n", []scenario.Setting{{"load.rate", "7"}, {"sweep", "null"}}, "load 7"},
		{"what a rule sets", small + "  rules: [{name: c3, set: {load.rate: 5}}]\n", []scenario.Setting{{"load.rate", "7"}}, "rules[0].set=null"},
		{"instead of what a rule sets", small + "  rules: [{name: c3, set: {load.rate: 5}}]\n", []scenario.Setting{{"load.rate", "7"}, {"rules[0].set", "null"}}, "load 7"},
		{"no such field", small, []scenario.Setting{{"load.rat", "1"}}, "spec.load.rat: no such field; did you mean rate?"},
		{"no path", small, []scenario.Setting{{"load..rate", "1"}}, "load..rate: want the path of a field"},
		{"beyond a list", small, []scenario.Setting{{"replicas[2].count", "1"}}, "replicas[2].count: there is no [2]: the list has 1, counted from 0"},
		{"into a number", small, []scenario.Setting{{"load.utilization.x", "1"}}, "load.utilization.x: there is no x inside"},
		{"an index into a group", small, []scenario.Setting{{"load[0]", "1"}}, "load[0]: there is no [0]"},
		{"out of bounds", small, []scenario.Setting{{"replicas[0].count", "1000000"}}, "want a whole number from 1 to 100000, got 1000000"},
	} {
		t.Run(test.name, func(t *testing.T) {
			before := parse(t, test.text)
			was := describe(t, before)
			got := ""
			if s, err := before.With(test.settings); err != nil {
				got = err.Error()
			} else {
				got = describe(t, s)
			}
			if !strings.Contains(got, test.want) {
				t.Errorf("got %s\nwant %q in it", got, test.want)
			}
			if describe(t, before) != was {
				t.Error("the scenario itself has changed")
			}
		})
	}
}

func TestRules(t *testing.T) {
	s := parse(t, small+"  rules: [{name: mine, policy: {balancer: p2c}}]\n")
	for _, name := range []string{"mine", "prequal", "oracle", "late_binding"} {
		rule, err := s.Rule(name)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Plan([]scenario.Rule{rule}); err != nil {
			t.Error(err)
		}
	}
	if _, err := s.Rule("prequel"); err == nil || !strings.Contains(err.Error(), "did you mean prequal?") {
		t.Errorf("got %v", err)
	}
	p := policy.Default()
	p.Balancer = policy.BalancerC3
	cases, err := s.Plan([]scenario.Rule{{Name: "file.yaml", Policy: &p}})
	if err != nil || cases[0].Config.Policy != p || cases[0].Rule != "file.yaml" {
		t.Errorf("got %+v, %v", cases, err)
	}
}

func TestRunIsReproducible(t *testing.T) {
	cases, err := parse(t, small).Plan(nil)
	if err != nil {
		t.Fatal(err)
	}
	play := func(o scenario.Options) []scenario.Row {
		rows, err := scenario.Run(t.Context(), cases, o)
		if err != nil {
			t.Fatal(err)
		}
		return rows
	}
	told := 0
	first := play(scenario.Options{Seed: 7, Runs: 3, Progress: func(done, all int) {
		if told++; done != told || all != 9 {
			t.Errorf("told %d of %d as number %d", done, all, told)
		}
	}})
	if diff := cmp.Diff(first, play(scenario.Options{Seed: 7, Runs: 3})); diff != "" {
		t.Error(diff)
	}
	for i, row := range first {
		if row.Rule != cases[i].Rule || row.Runs != 3 || row.Seed != 7 {
			t.Errorf("row %d is %s of %d runs from seed %d", i, row.Rule, row.Runs, row.Seed)
		}
		if row.Low.P99MS > row.P99MS || row.P99MS > row.High.P99MS || row.Low.Requests >= row.High.Requests {
			t.Errorf("%s: p99 %v is not from %v to %v", row.Rule, row.P99MS, row.Low.P99MS, row.High.P99MS)
		}
	}
	second := play(scenario.Options{Seed: 8, Runs: 1})
	if got, want := second[0].P99MS, first[0].Results[1].Latency.P99; got < want.Seconds()*999 || got > want.Seconds()*1001 {
		t.Errorf("the second run from seed 7 is not the first from seed 8: %v, %v", got, want)
	}
	if told != 9 || second[0].Low != nil {
		t.Errorf("told %d times; a single run has a spread of %v", told, second[0].Low)
	}
}

func TestRunStops(t *testing.T) {
	cases, err := parse(t, small).Plan(nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	_, err = scenario.Run(ctx, cases, scenario.Options{Runs: 1000, Progress: func(int, int) { cancel() }})
	if err == nil {
		t.Error("it went on after the context had ended")
	}
}

func TestTimedOut(t *testing.T) {
	s := parse(t, strings.Replace(small, "utilization: 0.5", "utilization: 3", 1)+"  caller: {timeout: 200ms}\n  rules: [{name: random}]\n")
	cases, err := s.Plan(nil)
	if err != nil {
		t.Fatal(err)
	}
	rows, err := scenario.Run(t.Context(), cases, scenario.Options{Seed: 1})
	if err != nil {
		t.Fatal(err)
	}
	if r := rows[0]; !r.TimedOut(r.P99MS) || r.TimedOut(150) || r.TimeoutMS != 200 {
		t.Errorf("p99 %v of limit %v: timed out is %v", r.P99MS, r.TimeoutMS, r.TimedOut(r.P99MS))
	}
}

// TestScenariosCanSayAll sets every field of a document, and looks for fields of the simulator that nothing sets.
func TestScenariosCanSayAll(t *testing.T) {
	s := parse(t, `
apiVersion: headroom.dev/v1
kind: Scenario
metadata: {name: all}
spec:
  replicas:
  - {name: a, count: 2, weight: 2, zone: z, speed: 2, serve: slots, slots: 2, queue: 2, cache: 2, absent: true}
  - {name: b}
  machines:
    cores: 32
    allocation: 2
    most: 3
    hobble: 0.5
    hobbleLoses: 0.5
    hobbleAfter: 1s
    interference: 0.2
    interferenceFrom: 0.5
    antagonists: {levels: [{share: 0.9, demand: {min: 0.1, max: 0.2}}, {share: 0.1, demand: {min: 1, max: 2}}], lasts: 1s, stay: true}
  work: {mix: [{share: 1, distribution: normal, mean: 1s, spread: 0.5}]}
  load: {users: 2, think: {distribution: normal, mean: 1s, spread: 0.5}, even: true}
  keys: {items: 10, zipf: 1, cacheHit: 4}
  agents: [{count: 2, shards: 2, zone: z}]
  network: {delay: 2ms, jitter: 2ms, zoneDelay: 3ms}
  registry: {delay: 1s, spread: 1s}
  caller: {timeout: 1s, finishAbandoned: true, retries: 1, budgeted: true}
  probes: {idleEvery: 1s, cost: 1ms, requestCost: 1ms}
  faults:
  - {kind: slow, at: 1s, lasts: 1s, group: a, first: 1, count: 1, factor: 0.5}
  - {kind: fail, share: 0.5, latency: 1ms, every: 1s}
  warmup: 1s
  duration: 1s
  threshold: 1s
  rules:
  - {name: a, without: {reports: true, errorAversion: true, utilization: true, ejection: true}}
  - {name: oracle}
  sweep:
    points:
    - {name: closed}
    - {name: open, set: {load: {stages: [{lasts: 1s, utilization: 0.5, toUtilization: 1}]}, work: {distribution: normal, mean: 1s, spread: 0.5}}}
`)
	cases, err := s.Plan(nil)
	if err != nil {
		t.Fatal(err)
	}
	set := map[string]bool{}
	for _, c := range cases {
		note("Config", reflect.ValueOf(c.Config), set)
	}
	for path, isSet := range set {
		notSaid := path == "Config.Seed" || path == "Config.SampleEvery" || path == "Config.Bucket" || strings.HasPrefix(path, "Config.Policy.") ||
			strings.Contains(path, ".Think.Mix") || strings.Contains(path, ".Work.Mix[].Work.Mix") // of no use, or not allowed
		if !isSet && !notSaid {
			t.Errorf("no document can set %s", path)
		}
	}
}

// note notes which fields of v are set, somewhere.
func note(path string, v reflect.Value, set map[string]bool) {
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			note(path+"."+v.Type().Field(i).Name, v.Field(i), set)
		}
	case reflect.Slice:
		set[path] = set[path] || v.Len() > 0
		for i := range v.Len() {
			note(path+"[]", v.Index(i), set)
		}
	default:
		set[path] = set[path] || !v.IsZero()
	}
}

func FuzzParse(f *testing.F) {
	for _, name := range scenario.Names() {
		text, err := scenario.Text(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Add([]byte(small + "  sweep: {points: [{name: a, set: {\"replicas[0].count\": 3, load.rate: 1e3, keys: {items: 4}}}]}\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		s, err := scenario.Parse(data)
		if err != nil {
			return
		}
		again, err := s.With([]scenario.Setting{{"description", `"played again"`}})
		if err != nil {
			t.Fatalf("setting what means nothing: %v", err)
		}
		if diff := cmp.Diff(describe(t, s), describe(t, again)); diff != "" {
			t.Error(diff)
		}
	})
}

// TestGuideIsRight plays a moment of the example in the guide.
func TestGuideIsRight(t *testing.T) {
	guide, err := os.ReadFile("../../../docs/guides/simulate.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(guide), "```yaml\n")
	text, _, _ := strings.Cut(rest, "```")
	cases, err := parse(t, text).Plan(nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := range cases {
		cases[i].Config.Warmup, cases[i].Config.Duration = 0, time.Second
	}
	if _, err := scenario.Run(t.Context(), cases, scenario.Options{}); err != nil {
		t.Error(err)
	}
}
