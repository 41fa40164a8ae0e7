package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	tea "charm.land/bubbletea/v2"
	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"google.golang.org/grpc/codes"
)

// live shows the view until the user quits.
func (t *topper) live(ctx context.Context) error {
	model := topModel{
		agent: t.client.at(),
		any:   t.client.any,
		sample: func() sampleMsg {
			answer, err := t.sample(ctx)
			return sampleMsg{answer, err, t.client.at()}
		},
		sheet: sheet{live: true, styles: terminalStyles(os.Getenv("NO_COLOR") == "")},
	}
	last, err := tea.NewProgram(model, tea.WithContext(ctx)).Run()
	if ctx.Err() != nil || errors.Is(err, tea.ErrInterrupted) {
		return nil
	}
	if m, ok := last.(topModel); ok && err == nil {
		return m.hopeless
	}
	return err
}

// topModel is the state of the live view.
type topModel struct {
	agent  string
	any    bool // whether another agent does as well
	sample func() sampleMsg

	before, now *meshv1.TopResponse // the last two samples
	view        topView
	lost        error // why the last sample failed; nil if it did not
	hopeless    error // why no sample will ever be taken; nil while one may
	polling     bool

	sheet    sheet
	height   int
	selected string // service
	scroll   int    // replicas above the window
	paused   bool
	help     bool
}

type (
	tickMsg   struct{}
	sampleMsg struct {
		answer *meshv1.TopResponse
		err    error
		at     string // the agent
	}
)

func tick() tea.Cmd {
	return tea.Tick(topPeriod, func(time.Time) tea.Msg { return tickMsg{} })
}

func (m topModel) poll() tea.Msg { return m.sample() }

// Init takes the first sample.
func (m topModel) Init() tea.Cmd { return func() tea.Msg { return tickMsg{} } }

// Update reacts to a key, a sample or the passing of time.
func (m topModel) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		m.sheet.width, m.height = msg.Width, msg.Height
	case tickMsg:
		if m.paused || m.polling {
			return m, tick()
		}
		m.polling = true
		return m, tea.Batch(tick(), m.poll)
	case sampleMsg:
		m.polling = false
		if isHopeless(msg.err) {
			m.hopeless = msg.err
			return m, tea.Quit
		}
		m.take(msg)
	case tea.KeyPressMsg:
		return m.press(msg.String())
	}
	return m, nil
}

// isHopeless tells the answer that there is no such service from the want of an answer.
func isHopeless(err error) bool {
	answer, isAnswer := errors.AsType[answerError](err)
	return isAnswer && (answer.code == codes.NotFound || answer.code == codes.InvalidArgument)
}

func (m *topModel) take(sample sampleMsg) {
	if m.lost = sample.err; m.lost != nil {
		return
	}
	m.before, m.now = m.now, sample.answer
	m.agent = cmp.Or(sample.at, m.agent)
	m.view = merge(m.before, m.now)
	if m.service() == nil && len(m.view.Services) > 0 {
		m.selected = m.view.Services[0].Service
	}
}

func (m topModel) press(key string) (tea.Model, tea.Cmd) {
	switch key {
	case "q", "ctrl+c":
		return m, tea.Quit
	case "s":
		m.sheet.sort = (m.sheet.sort + 1) % len(orders())
	case "up", "shift+tab", "left":
		m.move(-1)
	case "down", "tab", "right":
		m.move(1)
	case "pgup", "k":
		m.scroll = max(0, m.scroll-m.page(key))
	case "pgdown", "j":
		m.scroll = min(m.scroll+m.page(key), m.maxScroll())
	case "p":
		m.paused = !m.paused
	case "?":
		m.help = !m.help
	case "esc":
		m.help = false
	}
	return m, nil
}

// move selects the next service, or the one before.
func (m *topModel) move(by int) {
	services := m.view.Services
	if len(services) == 0 {
		return
	}
	at := slices.IndexFunc(services, func(s serviceView) bool { return s.Service == m.selected })
	m.selected = services[(at+by+len(services))%len(services)].Service
	m.scroll, m.help = 0, false
}

func (m topModel) page(key string) int {
	if key == "j" || key == "k" {
		return 1
	}
	return max(1, m.room()-1)
}

func (m topModel) service() *serviceView {
	for i := range m.view.Services {
		if m.view.Services[i].Service == m.selected {
			return &m.view.Services[i]
		}
	}
	return nil
}

// room is how many replicas the window has room for, once everything above and below them is written.
func (m topModel) room() int {
	const titles, position = 1, 1
	room := m.height - len(m.above()) - len(m.below()) - titles
	if s := m.service(); s != nil && len(s.Replicas) > room {
		room -= position
	}
	return max(1, room)
}

func (m topModel) maxScroll() int {
	if s := m.service(); s != nil {
		return max(0, len(s.Replicas)-m.room())
	}
	return 0
}

// View draws the window.
func (m topModel) View() tea.View {
	view := tea.NewView(strings.Join(m.lines(), "\n"))
	view.AltScreen = true
	view.WindowTitle = "meshctl top"
	return view
}

func (m topModel) lines() []string {
	if m.sheet.width == 0 {
		return nil // the size of the window is not known yet
	}
	lines := m.above()
	lines = append(lines, m.middle()...)
	below := m.below()
	for len(lines)+len(below) < m.height {
		lines = append(lines, "")
	}
	lines = append(lines[:max(0, min(len(lines), m.height-len(below)))], below...)
	return m.sheet.cut(lines[:min(len(lines), m.height)])
}

func (m topModel) above() []string {
	lines := []string{m.titleLine()}
	if m.lost != nil {
		then := "trying again"
		if m.any {
			then = "trying another"
		}
		lines = append(lines, m.alarm("agent lost, "+then+": "+m.lost.Error()))
	}
	for _, line := range silent(m.view) {
		lines = append(lines, m.alarm(line))
	}
	if len(m.view.Services) > 1 {
		lines = append(lines, m.serviceBar())
	}
	lines = append(lines, "")
	if s := m.service(); s != nil {
		lines = append(lines, m.sheet.head(m.view, *s)...)
	}
	return lines
}

func (m topModel) alarm(text string) string {
	return m.sheet.styles.alarm.Render(printable(text))
}

func (m topModel) titleLine() string {
	texts := []string{"meshctl top", "agent " + m.agent}
	if node := "node " + m.view.Asked; m.view.Asked != "" && !strings.HasSuffix(m.agent, node) { // of a pod that is said
		texts = append(texts, node)
	}
	switch {
	case m.paused:
		texts = append(texts, "PAUSED")
	case m.view.Interval > 0:
		texts = append(texts, fmt.Sprintf("last %.1fs", m.view.Interval))
	case m.now != nil:
		texts = append(texts, "since the agents started")
	}
	return m.sheet.styles.faint.Render(m.sheet.segments(texts))
}

// serviceBar names the services around the one that is selected.
func (m topModel) serviceBar() string {
	at := max(0, slices.IndexFunc(m.view.Services, func(s serviceView) bool { return s.Service == m.selected }))
	position := fmt.Sprintf("%d/%d", at+1, len(m.view.Services))
	texts := []string{position, m.sheet.styles.strong.Render("[" + m.selected + "]")}
	for _, s := range slices.Concat(m.view.Services[at+1:], m.view.Services[:at]) {
		texts = append(texts, s.Service)
	}
	return m.sheet.segments(texts)
}

func (m topModel) middle() []string {
	if m.help {
		return helpLines()
	}
	s := m.service()
	switch {
	case s == nil && m.now == nil:
		return []string{"waiting for the first sample"}
	case s == nil:
		return []string{"No service is known to the agents that answered."}
	}
	table := m.sheet.table(s.Replicas)
	titles, replicas := table[0], table[1:]
	first := min(m.scroll, m.maxScroll())
	last := min(len(replicas), first+m.room())
	lines := append([]string{titles}, replicas[first:last]...)
	if hidden := len(replicas) - (last - first); hidden > 0 {
		lines = append(lines, fmt.Sprintf("%d to %d of %d; pgdn and pgup scroll", first+1, last, len(replicas)))
	}
	return lines
}

func helpLines() []string {
	return strings.Split(`
q            quit
s            sort by the next column; * marks it
↑ ↓ tab      the service before, the next one
pgup pgdown  scroll the replicas; k and j by one
p            pause and go on
?            leave this help

REQ/S ERR/S SHARE  of all callers
RIF LATENCY        as the replica's own agent counts them
HEAT PROBED        hot or cold, and age of the freshest probe,
                   as the agent named in the heading sees them`, "\n")
}

func (m topModel) below() (lines []string) {
	if s := m.service(); s != nil && !m.help {
		lines = notes(*s)
	}
	texts := []string{"q quit", "s sort: " + strings.ToLower(orders()[m.sheet.sort].column), "p pause", "? help"}
	if len(m.view.Services) > 1 {
		texts = slices.Insert(texts, 2, "↑↓ service")
	}
	return append(lines, m.sheet.styles.faint.Render(m.sheet.segments(texts)))
}
