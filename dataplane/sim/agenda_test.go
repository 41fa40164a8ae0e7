package sim

import (
	"testing"

	"pgregory.net/rapid"
)

// Events come in the order of their times, and those of one time in the order in which they were put down.
func TestAgendaIsInOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var a agenda
		for _, delay := range rapid.SliceOfN(rapid.Int64Range(0, 5), 0, 3).Draw(t, "lanes") {
			a.addLane(delay)
		}
		now, put := int64(0), int32(0)
		at := map[int32]int64{} // of the events to come
		first := func() int32 {
			best := int32(-1)
			for id := range at {
				if best < 0 || at[id] < at[best] || at[id] == at[best] && id < best {
					best = id
				}
			}
			return best
		}
		take := func() {
			want := first()
			e, ok := a.next()
			if ok != (want >= 0) || ok && (e.id != want || e.at != at[want] || e.kind() != sample) {
				t.Fatalf("got %+v, %v; want event %d at %d", e, ok, want, at[want])
			}
			if ok {
				now = e.at
				delete(at, e.id)
			}
		}
		for range rapid.IntRange(0, 200).Draw(t, "steps") {
			if rapid.IntRange(0, 2).Draw(t, "step") == 0 {
				take()
				continue
			}
			delay := rapid.Int64Range(0, 10).Draw(t, "delay")
			a.put(now, delay, sample, put, 0)
			at[put] = now + delay
			put++
		}
		for len(at) > 0 {
			take()
		}
		take()
	})
}
