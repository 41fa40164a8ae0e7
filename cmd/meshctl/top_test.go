package main

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"
	"github.com/google/go-cmp/cmp"
	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	"pgregory.net/rapid"
)

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", "top", name)
	if os.Getenv("UPDATE_SCRIPTS") != "" {
		if err := os.WriteFile(path, []byte(got), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", path, diff)
	}
}

func find(t *testing.T, v topView, id string) replicaView {
	t.Helper()
	for _, s := range v.Services {
		for _, r := range s.Replicas {
			if r.ID == id {
				return r
			}
		}
	}
	t.Fatalf("there is no %s in %+v", id, v)
	return replicaView{}
}

const first, second = "checkout/a/10.0.0.1:8080", "checkout/b/10.0.0.2:8080"

func TestRatesComeFromTwoSamples(t *testing.T) {
	v := merge(sample(10), sample(12))
	if v.Interval != 2 {
		t.Errorf("the interval is %v, want 2", v.Interval)
	}
	s := v.Services[0]
	if s.Requests != 500 || s.Errors != 3 || s.Retries != 1 || *s.ProbesPerRequest != 3 {
		t.Errorf("got %v requests, %v errors, %v retries a second and %v probes a request, want 500, 3, 1 and 3",
			s.Requests, s.Errors, s.Retries, *s.ProbesPerRequest)
	}
	r := find(t, v, first)
	if r.Requests != 350 || *r.Share != 0.7 || *r.RIF != 3 || *r.Latency != 0.012 || *r.Hot || *r.ProbeAge != 0.04 {
		t.Errorf("got %+v", r)
	}
	if r := find(t, v, second); r.Errors != 3 || !*r.Hot {
		t.Errorf("got %+v", r)
	}
}

func TestOneSampleGivesAveragesSinceTheStart(t *testing.T) {
	v := merge(nil, sample(10))
	if v.Interval != 0 || v.Services[0].Requests != 500 || *find(t, v, first).Share != 0.7 {
		t.Errorf("got %+v", v)
	}
}

func TestCountersOfARestartedAgentBeginAtNothing(t *testing.T) {
	now := sample(102)
	now.Agents[1].Started = timestamppb.New(now.Agents[1].Time.AsTime().Add(-time.Second))
	now.Agents[1].Outbound[0].Requests = 7
	v := merge(sample(100), now)
	if got := v.Services[0].Requests; got != 400+7 {
		t.Errorf("got %v requests a second, want 400 of one agent and 7 of the other", got)
	}
}

func TestAnAgentThatWasMissingBeforeHasNoRate(t *testing.T) {
	before := sample(100)
	before.Agents = before.Agents[:1]
	if got := merge(before, sample(101)).Services[0].Requests; got != 400 {
		t.Errorf("got %v requests a second, want those of the other agent, 400", got)
	}
}

func TestAReplicaThatComesBackCountsFromNothing(t *testing.T) {
	now := sample(101)
	now.Agents[0].Outbound[0].Endpoints[0].Picks = 5
	if got := find(t, merge(sample(100), now), first).Requests; got != 50+5 {
		t.Errorf("got %v requests a second, want 55", got)
	}
}

func TestAnotherAgentsViewServesIfTheAskedOneDoesNotCall(t *testing.T) {
	now := sample(10)
	now.Agents[0].Outbound = nil
	if v := merge(nil, now); v.Services[0].Seen.By != "b" {
		t.Errorf("seen by %q, want b", v.Services[0].Seen.By)
	}
}

func TestNothingIsMerged(t *testing.T) {
	v := merge(nil, &meshv1.TopResponse{})
	if len(v.Services) != 0 || v.Asked != "" {
		t.Errorf("got %+v", v)
	}
	merge(&meshv1.TopResponse{}, &meshv1.TopResponse{Agents: []*meshv1.Observation{{Node: "a"}}})
}

// observed draws any observation, those that no agent should make included.
func observed() *rapid.Generator[*meshv1.TopResponse] {
	return rapid.Custom(func(t *rapid.T) *meshv1.TopResponse {
		answer := &meshv1.TopResponse{}
		for _, node := range rapid.SliceOfNDistinct(rapid.SampledFrom([]string{"a", "b", "c"}), 0, 3, rapid.ID).Draw(t, "nodes") {
			second := func(name string) *timestamppb.Timestamp {
				return &timestamppb.Timestamp{Seconds: rapid.Int64Range(0, 5).Draw(t, name)}
			}
			agent := &meshv1.Observation{Node: node, Time: second("time"), Started: second("started")}
			for _, service := range rapid.SliceOfNDistinct(rapid.SampledFrom([]string{"s", "t"}), 0, 2, rapid.ID).Draw(t, "services") {
				o := &meshv1.OutboundView{Service: service, Requests: rapid.Uint64().Draw(t, "requests"), Probes: rapid.Uint64().Draw(t, "probes")}
				for _, host := range rapid.SliceOfDistinct(rapid.SampledFrom([]string{"a", "b"}), rapid.ID).Draw(t, "replicas") {
					o.Endpoints = append(o.Endpoints, &meshv1.EndpointView{Id: service + "/" + host + "/1.1.1.1:1", Node: host,
						Picks: rapid.Uint64().Draw(t, "picks")})
				}
				agent.Outbound = append(agent.Outbound, o)
			}
			answer.Agents = append(answer.Agents, agent)
		}
		return answer
	})
}

func TestSharesAddUpAndNothingIsNegative(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v := merge(observed().Draw(t, "before"), observed().Draw(t, "now"))
		for _, s := range v.Services {
			sum, known := 0.0, 0
			for _, r := range s.Replicas {
				if r.Requests < 0 || math.IsNaN(r.Requests) || math.IsInf(r.Requests, 0) {
					t.Fatalf("%s has %v requests a second", r.ID, r.Requests)
				}
				if r.Share != nil {
					sum, known = sum+*r.Share, known+1
				}
			}
			if known > 0 && math.Abs(sum-1) > 1e-9 {
				t.Fatalf("the shares of %s add up to %v", s.Service, sum)
			}
		}
		for _, width := range []int{1, 20, 80} {
			var out bytes.Buffer
			if err := writeTopText(&out, v, sheet{width: width}); err != nil {
				t.Fatal(err)
			}
			wantFitting(t, out.String(), width)
		}
	})
}

func wantFitting(t interface{ Errorf(string, ...any) }, text string, width int) {
	for line := range strings.Lines(text) {
		if got := ansi.StringWidth(strings.TrimSuffix(line, "\n")); got > width {
			t.Errorf("a line of %d columns where %d have room: %q", got, width, line)
		}
	}
}

func TestLayoutFitsTheWidth(t *testing.T) {
	for _, width := range []int{40, 80, 120} {
		var out bytes.Buffer
		if err := writeTopText(&out, merge(sample(10), sample(11)), sheet{width: width}); err != nil {
			t.Fatal(err)
		}
		wantFitting(t, out.String(), width)
		golden(t, fmt.Sprintf("text%d", width), out.String())
	}
}

// TestFiguresOfOtherRules has those columns only where the rule goes by them.
func TestFiguresOfOtherRules(t *testing.T) {
	tests := []struct {
		name   string
		change func(now *meshv1.TopResponse)
		want   []string
	}{
		{"weights", func(now *meshv1.TopResponse) {
			now.Agents[0].Outbound[0].Endpoints[0].Weight = new(1.5)
		}, []string{"WEIGHT", "×1.50"}},
		{"costs", func(now *meshv1.TopResponse) {
			now.Agents[0].Outbound[0].Endpoints[0].Cost = durationpb.New(42 * time.Millisecond)
		}, []string{"COST", " 42ms"}},
		{"lines", func(now *meshv1.TopResponse) {
			now.Agents[0].Inbound[0].Slots = &meshv1.SlotsView{Slots: 4, InUse: 3}
			now.Agents[1].Inbound[0].Slots = &meshv1.SlotsView{Slots: 1, InUse: 1, Waiting: 7}
		}, []string{"SLOTS", " 3/4 ", " 1/1 +7 "}},
		{"idle slots", func(now *meshv1.TopResponse) {
			now.Agents[0].Outbound[0].IdleSlots = proto.Uint32(0)
		}, []string{"0 idle slots known"}},
	}
	var plain bytes.Buffer
	if err := writeTopText(&plain, merge(sample(10), sample(11)), sheet{}); err != nil {
		t.Fatal(err)
	}
	for _, tt := range tests {
		now := sample(11)
		tt.change(now)
		var out bytes.Buffer
		if err := writeTopText(&out, merge(sample(10), now), sheet{}); err != nil {
			t.Fatal(err)
		}
		for _, want := range tt.want {
			if !strings.Contains(out.String(), want) || strings.Contains(plain.String(), want) {
				t.Errorf("%s: want %q in this, and nowhere else:\n%s", tt.name, want, out.String())
			}
		}
	}
}

// TestOnlyPrequalKnowsHotAndCold keeps the age of other rules' probes.
func TestOnlyPrequalKnowsHotAndCold(t *testing.T) {
	now := sample(11)
	now.Agents[0].Outbound[0].Balancer = "yarp_p2c"
	if r := find(t, merge(sample(10), now), second); r.Hot != nil || r.ProbeAge == nil {
		t.Errorf("hot %v, probed %v", r.Hot, r.ProbeAge)
	}
}

func TestReplicasAreSortedByEachOrder(t *testing.T) {
	replicas := merge(sample(10), sample(11)).Services[0].Replicas
	for i, want := range []string{"1 2 3", "1 2 3", "2 1 3", "1 2 3", "2 1 3", "1 2 3"} {
		var got []string
		for _, r := range (sheet{sort: i}).sorted(replicas) {
			got = append(got, strings.TrimSuffix(strings.TrimPrefix(r.Address, "10.0.0."), ":8080"))
		}
		if strings.Join(got, " ") != want {
			t.Errorf("by %s: got %v, want %s", orders()[i].column, got, want)
		}
	}
}

func TestShortTimesAreReadable(t *testing.T) {
	for x, want := range map[float64]string{0: "0µs", 0.00085: "850µs", 0.0015: "1.5ms", 0.012: "12ms", 0.9994: "999ms", 0.9996: "1.0s", 1.25: "1.2s", 125: "2m"} {
		if got := seconds(x); got != want {
			t.Errorf("%v seconds are %q, want %q", x, got, want)
		}
	}
}

// screen drives the live view as a terminal would.
type screen struct {
	t     *testing.T
	model tea.Model
}

func newScreen(t *testing.T, width, height int) *screen {
	s := &screen{t: t, model: topModel{agent: "127.0.0.1:15010", sheet: sheet{live: true}}}
	s.send(tea.WindowSizeMsg{Width: width, Height: height})
	return s
}

func (s *screen) send(msg tea.Msg) tea.Cmd {
	var cmd tea.Cmd
	s.model, cmd = s.model.Update(msg)
	return cmd
}

func (s *screen) press(keys ...string) (last tea.Cmd) {
	named := map[string]rune{"up": tea.KeyUp, "down": tea.KeyDown, "tab": tea.KeyTab, "pgdown": tea.KeyPgDown, "pgup": tea.KeyPgUp}
	for _, key := range keys {
		press := tea.KeyPressMsg{Code: named[key]}
		if press.Code == 0 {
			press = tea.KeyPressMsg{Code: rune(key[0]), Text: key}
		}
		last = s.send(press)
	}
	return last
}

func (s *screen) text() string {
	s.t.Helper()
	m := s.model.(topModel)
	text := m.View().Content
	if n := strings.Count(text, "\n") + 1; n > m.height {
		s.t.Errorf("%d lines in a window of %d", n, m.height)
	}
	wantFitting(s.t, text, m.sheet.width)
	return text + "\n"
}

func (s *screen) wants(texts ...string) {
	s.t.Helper()
	for _, text := range texts {
		if got := s.text(); !strings.Contains(got, text) {
			s.t.Errorf("the screen does not show %q:\n%s", text, got)
		}
	}
}

func TestScreen(t *testing.T) {
	for _, width := range []int{80, 120} {
		s := newScreen(t, width, 16)
		s.send(sampleMsg{answer: sample(10)})
		s.send(sampleMsg{answer: sample(11)})
		golden(t, fmt.Sprintf("screen%d", width), s.text())
	}
}

func TestScreenBeforeAndAfterTheFirstSample(t *testing.T) {
	s := newScreen(t, 80, 16)
	s.wants("waiting for the first sample")
	s.send(sampleMsg{answer: sample(10)})
	s.wants("since the agents started", "checkout")
	s.send(sampleMsg{answer: sample(11)})
	s.wants("last 1.0s")
}

func TestKeys(t *testing.T) {
	s := newScreen(t, 80, 24)
	s.send(sampleMsg{answer: sample(10)})
	s.wants("[checkout]", "ADDRESS*")
	s.press("down")
	s.wants("[ledger]", "2/2", "fails its check: connection refused")
	s.press("tab")
	s.wants("[checkout]")
	s.press("up", "s")
	s.wants("[ledger]", "sort: req/s", "REQ/S*")
	s.press("?")
	s.wants("sort by the next column")
	s.press("?", "p")
	s.wants("PAUSED")
	if cmd := s.press("q"); cmd == nil || cmd() != tea.Quit() {
		t.Error("q does not quit")
	}
}

func TestPauseStopsTheSamples(t *testing.T) {
	s := newScreen(t, 80, 24)
	if s.send(tickMsg{}); !s.model.(topModel).polling {
		t.Error("no sample is taken")
	}
	s.send(sampleMsg{answer: sample(10)})
	s.press("p")
	if s.send(tickMsg{}); s.model.(topModel).polling {
		t.Error("a sample is taken in a pause")
	}
	s.press("p")
	if s.send(tickMsg{}); !s.model.(topModel).polling {
		t.Error("no sample is taken after the pause")
	}
}

func TestLostAgentIsToldAndForgottenOnceItIsBack(t *testing.T) {
	s := newScreen(t, 80, 24)
	s.send(sampleMsg{answer: sample(10)})
	s.send(sampleMsg{err: errors.New("no agent answers at 127.0.0.1:15010 (connection refused):\nis it running?")})
	s.wants("agent lost, trying again: no agent answers", "10.0.0.1:8080")
	s.send(sampleMsg{answer: sample(20)})
	if strings.Contains(s.text(), "agent lost") {
		t.Error("the agent is back, but still called lost")
	}
}

func TestTheAgentThatAnswersIsNamed(t *testing.T) {
	s := newScreen(t, 80, 24)
	m := s.model.(topModel)
	m.any = true
	s.model = m
	s.send(sampleMsg{answer: sample(10), at: "pod mesh/a"})
	s.wants("agent pod mesh/a")
	s.send(sampleMsg{err: errors.New("it has ended"), at: "pod mesh/a"})
	s.wants("agent pod mesh/a", "agent lost, trying another: it has ended")
	s.send(sampleMsg{answer: sample(11), at: "pod mesh/b"})
	s.wants("agent pod mesh/b", "last 1.0s")
}

func TestAServiceThatDoesNotExistEndsTheView(t *testing.T) {
	s := newScreen(t, 80, 24)
	cmd := s.send(sampleMsg{err: answerError{codes.NotFound, "no such service"}})
	if cmd == nil || cmd() != tea.Quit() || s.model.(topModel).hopeless == nil {
		t.Errorf("the view goes on: %+v", s.model)
	}
	if cmd := s.send(sampleMsg{err: answerError{codes.Unavailable, "busy"}}); cmd != nil {
		t.Error("the view ends because an agent is busy")
	}
}

func TestALongNameLeavesRoomForTheBalancer(t *testing.T) {
	answer := sample(10)
	name := strings.Repeat("abcdefghi", 7)
	for _, agent := range answer.Agents {
		agent.Outbound[0].Service = name
		agent.Inbound = nil
	}
	s := newScreen(t, 80, 24)
	s.send(sampleMsg{answer: answer})
	s.wants("abcdefghiabc", "…  prequal, policy 16 and 17  500 req/s")
}

func TestHelpClosesWhenTheServiceChanges(t *testing.T) {
	s := newScreen(t, 80, 24)
	s.send(sampleMsg{answer: sample(10)})
	s.press("?")
	s.wants("leave this help")
	s.press("down")
	s.wants("[ledger]", "ADDRESS*")
}

// TestColumnsLeaveInTurn keeps what tells hot from cold longer than the errors.
func TestColumnsLeaveInTurn(t *testing.T) {
	replicas := merge(sample(10), sample(11)).Services[0].Replicas
	for width := 1; width < 120; width++ {
		titles := sheet{width: width}.table(replicas)[0]
		if strings.Contains(titles, "ERR/S") && !strings.Contains(titles, "HEAT") {
			t.Errorf("%d columns have ERR/S without HEAT: %s", width, titles)
		}
	}
}

func TestNoColor(t *testing.T) {
	s := newScreen(t, 80, 24)
	m := s.model.(topModel)
	for colors, want := range map[bool]bool{true: true, false: false} {
		m.sheet.styles = terminalStyles(colors)
		s.model = m
		s.send(sampleMsg{answer: sample(10)})
		if got := colored.MatchString(s.text()); got != want {
			t.Errorf("with colors %v: are there any? %v: %q", colors, got, s.text())
		}
	}
}

// colored finds the sequences that choose a color, or the terminal's own.
var colored = regexp.MustCompile(`\x1b\[([0-9;]*;)?(3[0-9]|4[0-9]|9[0-7]|10[0-7])[;m]`)

func TestManyReplicasScroll(t *testing.T) {
	answer := sample(10)
	o := answer.Agents[0].Outbound[0]
	for i := range 100 {
		e := proto.CloneOf(o.Endpoints[0])
		e.Address = fmt.Sprintf("10.1.0.%d:8080", 100+i)
		e.Id = "checkout/a/" + e.Address
		o.Endpoints = append(o.Endpoints, e)
	}
	s := newScreen(t, 80, 20)
	s.send(sampleMsg{answer: answer})
	s.wants("10.0.0.1:8080", "of 103; pgdn and pgup scroll")
	s.press("j")
	s.wants("2 to ")
	for range 20 {
		s.press("pgdown")
	}
	s.wants("10.1.0.199:8080", "to 103 of 103")
	for range 20 {
		s.press("pgup")
	}
	s.wants("10.0.0.1:8080", "1 to ")
}

func TestManyMissingAgentsLeaveRoomForTheRest(t *testing.T) {
	answer := sample(10)
	for range 100 {
		answer.Missing = append(answer.Missing, "x: connection\x1b refused")
	}
	s := newScreen(t, 80, 16)
	s.send(sampleMsg{answer: answer})
	s.wants("and 99 more", "10.0.0.3:8080", "agents 2/103")
}

func TestTinyWindowsDoNotBreakTheScreen(t *testing.T) {
	for _, size := range [][2]int{{1, 1}, {10, 3}, {200, 2}, {20, 8}} {
		s := newScreen(t, size[0], size[1])
		s.text()
		s.send(sampleMsg{answer: sample(10)})
		s.text()
		s.press("?", "j", "pgdown", "down")
		s.text()
	}
}
