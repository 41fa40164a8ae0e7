package load

import (
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// lineModel is a line in its plainest form.
type lineModel struct {
	slots            int
	holding, waiting []int
}

func (m *lineModel) grant() (granted []int) {
	for len(m.holding) < m.slots && len(m.waiting) > 0 {
		granted = append(granted, m.waiting[0])
		m.holding = append(m.holding, m.waiting[0])
		m.waiting = m.waiting[1:]
	}
	return granted
}

func (m *lineModel) drop(id int) {
	is := func(other int) bool { return other == id }
	m.holding, m.waiting = slices.DeleteFunc(m.holding, is), slices.DeleteFunc(m.waiting, is)
}

// No more hold a slot than there are, no slot is free while one waits, and the first to come is the first to go.
func TestLineAgreesWithModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		slots := rapid.IntRange(0, 4)
		m := &lineModel{slots: slots.Draw(t, "slots")}
		l := NewLine[int](m.slots)
		ids := rapid.IntRange(1, 12)
		t.Repeat(map[string]func(*rapid.T){
			"join": func(t *rapid.T) {
				id := ids.Draw(t, "id")
				if !slices.Contains(m.holding, id) && !slices.Contains(m.waiting, id) {
					m.waiting = append(m.waiting, id)
					m.grant()
				}
				if got, want := l.Join(id), slices.Contains(m.holding, id); got != want {
					t.Fatalf("join %d: granted %v; want %v", id, got, want)
				}
			},
			"enter": func(t *rapid.T) {
				id := ids.Draw(t, "id")
				l.Enter(id)
				if !slices.Contains(m.holding, id) {
					m.drop(id)
					m.holding = append(m.holding, id)
				}
			},
			"leave": func(t *rapid.T) {
				id := ids.Draw(t, "id")
				m.drop(id)
				want := m.grant()
				if got, ok := l.Leave(id); ok != (len(want) == 1) || ok && got != want[0] {
					t.Fatalf("leave %d: granted %d, %v; want %v", id, got, ok, want)
				}
			},
			"resize": func(t *rapid.T) {
				m.slots = slots.Draw(t, "slots")
				if got, want := l.Resize(m.slots, nil), m.grant(); !slices.Equal(got, want) {
					t.Fatalf("resize to %d: granted %v; want %v", m.slots, got, want)
				}
			},
			"": func(t *rapid.T) {
				if holding, waiting := l.Len(); holding != len(m.holding) || waiting != len(m.waiting) {
					t.Fatalf("%d hold, %d wait; want %v and %v", holding, waiting, m.holding, m.waiting)
				}
			},
		})
	})
}

// Requests that come and go leave nothing behind, whether they had a slot or not.
func TestLineReusesItsMemory(t *testing.T) {
	l := NewLine[int](2)
	request := func() {
		for id := range 10 {
			l.Join(id)
		}
		for _, id := range []int{7, 0, 9, 1, 2, 3, 8, 4, 6, 5} {
			l.Leave(id)
		}
	}
	request()
	if n := testing.AllocsPerRun(100, request); n != 0 || len(l.ring) > 11 {
		t.Errorf("got %v allocations, %d spots for ten requests at a time", n, len(l.ring))
	}
}
