package prequal

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/policy"
)

// model is the pool as the paper describes it, in its plainest form. Where chance decides it accepts whatever chance
// may do.
type model struct {
	cfg      policy.Prequal
	entries  []modelEntry
	rifs     []int32 // of all probes ever answered
	capacity int
	whole    bool // it has room for all replicas
	reuse    float64
	requests int // placed by the rule
	removed  int // the removals so far, to tell whose turn it is
}

type modelEntry struct {
	key      string
	rif      int32
	latency  float64 // NaN: unknown
	received time.Time
	uses     int // left
	granted  float64
}

func (m *model) resize(n int, gone []string) {
	m.capacity = m.cfg.PoolSize
	m.whole = n < 2*m.capacity
	if m.whole {
		m.capacity = n
	}
	if m.capacity < 2 {
		m.capacity = 2
	}
	m.reuse = (1 + m.cfg.Delta) / ((1-float64(m.capacity)/float64(n))*m.cfg.ProbesPerRequest - m.cfg.RemovalsPerRequest)
	if m.reuse < 0 || m.reuse > 16 || math.IsInf(m.reuse, 0) || math.IsNaN(m.reuse) {
		m.reuse = 16
	}
	if m.reuse < 1 {
		m.reuse = 1
	}
	for _, k := range gone {
		m.entries = without(m.entries, k)
	}
	m.trim()
}

func (m *model) trim() {
	for len(m.entries) > m.capacity {
		m.entries = without(m.entries, m.oldest())
	}
}

func (m *model) add(now time.Time, key string, r load.Report, uses int) {
	m.rifs = append(m.rifs, r.RIF)
	m.entries = without(m.entries, key)
	m.entries = append(m.entries, m.entry(now, key, r, uses))
	m.trim()
}

func (m *model) refresh(now time.Time, key string, r load.Report, uses int) {
	m.expire(now)
	if m.whole {
		m.add(now, key, r, uses)
	} else if i := m.index(key); i >= 0 {
		e := m.entry(now, key, r, m.entries[i].uses)
		e.granted = m.entries[i].granted
		m.entries[i] = e
	} else if len(m.entries) < 2 {
		m.entries = append(m.entries, m.entry(now, key, r, uses))
	}
}

func (m *model) entry(now time.Time, key string, r load.Report, uses int) modelEntry {
	e := modelEntry{key, r.RIF, math.NaN(), now, uses, m.reuse}
	if r.Known {
		e.latency = float64(r.Latency)
	}
	return e
}

func (m *model) expire(now time.Time) {
	m.entries = slices.DeleteFunc(m.entries, func(e modelEntry) bool { return now.Sub(e.received) >= m.cfg.MaxAge })
}

// selected follows a choice of the pool, which left the given replicas in it. It returns what is wrong with the choice.
func (m *model) selected(now time.Time, key string, class Class, ok bool, left []string) string {
	m.expire(now)
	if ok != (len(m.entries) >= 2) {
		return "a choice needs two probes, and no more"
	}
	if !ok {
		return ""
	}
	i := m.index(key)
	if i < 0 {
		return "chose a replica that is not in the pool"
	}
	for _, e := range m.entries {
		if m.better(e, m.entries[i]) {
			return fmt.Sprintf("%s is better", e.key)
		}
	}
	if (class == Hot) != m.hot(m.entries[i]) {
		return "wrong class"
	}
	m.entries[i].rif++
	m.entries[i].uses--
	if m.entries[i].uses == 0 {
		m.entries = without(m.entries, key)
	}
	if m.whole {
		return ""
	}
	m.requests++
	due := int(m.cfg.RemovalsPerRequest*float64(m.requests)) - int(m.cfg.RemovalsPerRequest*float64(m.requests-1))
	after, removed, ok := m.removals(m.entries, due, m.removed, left)
	if !ok {
		return fmt.Sprintf("%d removals, of which %s is next, cannot leave these", due, [...]string{"the oldest", "the worst"}[m.removed%2])
	}
	m.entries, m.removed = after, removed
	return ""
}

// removals tries all ways to remove the oldest and the worst in turn, and returns one that leaves what is left.
func (m *model) removals(entries []modelEntry, due, removed int, left []string) ([]modelEntry, int, bool) {
	if due == 0 || len(entries) <= 2 {
		return entries, removed, len(entries) == len(left)
	}
	was := m.entries
	defer func() { m.entries = was }()
	m.entries = entries
	for _, e := range entries {
		turn := e.key == m.oldest()
		if removed%2 == 1 {
			turn = m.isWorst(e)
		}
		if !turn || in(e.key, left) {
			continue
		}
		if after, n, ok := m.removals(without(entries, e.key), due-1, removed+1, left); ok {
			return after, n, true
		}
	}
	return nil, 0, false
}

func (m *model) oldest() string {
	oldest := m.entries[0]
	for _, e := range m.entries {
		if e.received.Before(oldest.received) {
			oldest = e
		}
	}
	return oldest.key
}

func (m *model) isWorst(e modelEntry) bool {
	for _, o := range m.entries {
		if m.better(e, o) {
			return false
		}
	}
	return true
}

func (m *model) hot(e modelEntry) bool {
	switch {
	case m.cfg.QRIF == 0:
		return true
	case m.cfg.QRIF == 1 || len(m.rifs) == 0:
		return false
	}
	threshold, _ := plainQuantile(m.rifs[max(0, len(m.rifs)-128):], m.cfg.QRIF)
	return e.rif > threshold
}

// better reports whether the rule prefers a to b.
func (m *model) better(a, b modelEntry) bool {
	la, lb := m.latency(a), m.latency(b)
	switch {
	case m.hot(a) != m.hot(b):
		return m.hot(b)
	case m.hot(a):
		return a.rif < b.rif || a.rif == b.rif && la < lb
	default:
		return la < lb || la == lb && a.rif < b.rif
	}
}

// latency is what to reckon with where none is known: idle, as fast as the fastest; busy, slower than all.
func (m *model) latency(e modelEntry) float64 {
	if !math.IsNaN(e.latency) {
		return e.latency
	}
	if e.rif > 0 {
		return math.Inf(1)
	}
	fastest := math.Inf(1)
	for _, o := range m.entries {
		if o.latency < fastest {
			fastest = o.latency
		}
	}
	if math.IsInf(fastest, 1) {
		return 0
	}
	return fastest
}

// compare returns in what the pool differs from the model.
func (m *model) compare(p *Pool[string]) string {
	if len(p.entries) > p.Capacity() || p.Capacity() != m.capacity {
		return fmt.Sprintf("%d entries of %d; the model has room for %d", len(p.entries), p.Capacity(), m.capacity)
	}
	if len(p.entries) != len(m.entries) {
		return "different numbers of entries"
	}
	for _, e := range m.entries {
		i := p.find(e.key)
		if i < 0 {
			return fmt.Sprintf("%s is missing", e.key)
		}
		got := p.entries[i]
		known := got.latency != unknown
		if got.rif != e.rif || int(got.uses) != e.uses || known == math.IsNaN(e.latency) || known && float64(got.latency) != e.latency ||
			!p.epoch.Add(time.Duration(got.received)).Equal(e.received) {
			return fmt.Sprintf("%s differs", e.key)
		}
		if e.uses < 1 || float64(e.uses) > math.Ceil(e.granted) {
			return fmt.Sprintf("%s has %d uses left of %.2f", e.key, e.uses, e.granted)
		}
	}
	return ""
}

func (m *model) index(key string) int {
	return slices.IndexFunc(m.entries, func(e modelEntry) bool { return e.key == key })
}

func without(entries []modelEntry, key string) (rest []modelEntry) {
	for _, e := range entries {
		if e.key != key {
			rest = append(rest, e)
		}
	}
	return rest
}

func in(key string, keys []string) bool { return slices.Contains(keys, key) }
