package sim

import (
	"time"

	"github.com/headroom-mesh/headroom/dataplane/balancer"
)

// measurements is what is seen of a simulation.
type measurements struct {
	outcomes [outcomes]int // of requests that count
	latency  histogram     // of requests that count
	rif, cpu histogram     // of replicas, cpu in thousandths of what is allocated
	births   int           // of requests that count
	tries    int           // of requests that count
	unwanted int           // those of them that went to a replica that took none
	overdue  int64         // how long, at most, after it had stopped to
	retries  int           // of those
	late     int           // requests that count
	classes  [balancer.Overflow + 1]int

	// From the end of the warm-up to the end of the simulation.

	probes, lost           int
	probesAt               []int     // that came to each replica
	ages                   histogram // of some of the probes that choices went by
	choices                int
	groups                 []groupMeasurements
	samples                int
	cpuSeen, cpuSeenBucket []float64 // used by each replica when last looked at

	bucket  Bucket
	latest  histogram // latencies of the bucket
	levels  histogram // RIF of the bucket
	series  []Bucket
	started int64 // of the bucket
	peakP99 time.Duration
	peakRIF int
}

type groupMeasurements struct {
	picks, hits int
	blind       int     // before an answer of the replica
	peak        float64 // part of the tries of a bucket, at most
	rif         int     // over all samples
	used        float64
}

func newMeasurements(s *simulation) measurements {
	m := measurements{groups: make([]groupMeasurements, len(s.cfg.Replicas))}
	m.probesAt = make([]int, len(s.replicas))
	m.cpuSeen = make([]float64, len(s.replicas))
	m.cpuSeenBucket = make([]float64, len(s.replicas))
	m.beginBucket(s)
	return m
}

// counts reports whether what happens now counts.
func (s *simulation) counts() bool { return s.now >= s.warm && s.now < s.end }

func (m *measurements) born(s *simulation) {
	m.bucket.Arrivals++
	if s.counts() {
		m.births++
	}
}

func (m *measurements) placed(s *simulation, t *try) {
	r := t.replica
	m.bucket.Picks[r.group]++
	if !t.counts {
		return
	}
	m.tries++
	m.classes[t.picked.Class]++
	m.groups[r.group].picks++
	if !r.heard {
		m.groups[r.group].blind++
	}
	if !r.takesRequests() {
		m.unwanted++
		m.overdue = max(m.overdue, s.now-r.stopped)
	}
}

func (m *measurements) retried(s *simulation, q *request) {
	m.bucket.Retries++
	if q.born >= s.warm {
		m.retries++
	}
}

func (m *measurements) hit(t *try) {
	if t.counts {
		m.groups[t.replica.group].hits++
	}
}

func (m *measurements) probeSent(s *simulation) {
	if s.counts() {
		m.probes++
	}
}

// probed counts a probe that has come to its replica.
func (m *measurements) probed(s *simulation, r *replica) {
	if s.counts() {
		m.probesAt[r.index]++
	}
}

// looks reports whether to look at what the next choice goes by: one in some is enough.
func (m *measurements) looks(s *simulation) bool {
	const every = 128
	m.choices++
	return m.choices%every == 0 && s.counts()
}

func (m *measurements) probeLost(s *simulation) {
	if s.counts() {
		m.lost++
	}
}

// ended counts a request that has ended.
func (m *measurements) ended(s *simulation, q *request, o outcome) {
	took := s.now - q.born
	m.bucket.Requests++
	m.latest.add(took)
	if o != succeeded {
		m.bucket.Errors++
	}
	if q.born >= s.warm {
		m.outcomes[o]++
		m.latency.add(took)
		if o != succeeded || took > int64(s.cfg.Threshold) {
			m.late++
		}
	}
}

// sample looks at all replicas.
func (m *measurements) sample(s *simulation) {
	for i := range s.replicas {
		m.levels.add(int64(s.replicas[i].rif()))
	}
	if s.now <= s.warm || s.now > s.end {
		return
	}
	m.samples++
	for i := range s.replicas {
		r := &s.replicas[i]
		r.advance(s.now)
		g := &m.groups[r.group]
		if m.samples > 1 {
			g.used += r.used - m.cpuSeen[i]
		}
		m.cpuSeen[i] = r.used
		g.rif += r.rif()
		m.rif.add(int64(r.rif()))
	}
}

func (m *measurements) beginBucket(s *simulation) {
	m.bucket = Bucket{Start: time.Duration(s.now), Picks: make([]int, len(m.groups))}
	m.latest.reset()
	m.levels.reset()
	m.started = s.now
}

func (m *measurements) endBucket(s *simulation) {
	m.bucket.P50 = time.Duration(m.latest.quantile(0.5))
	m.bucket.P99 = time.Duration(m.latest.quantile(0.99))
	m.bucket.RIFP99 = int(m.levels.quantile(0.99))
	m.notePeaks(s)
	m.series = append(m.series, m.bucket)
	for i := range s.replicas {
		r := &s.replicas[i]
		r.advance(s.now)
		if r.serve == CPU && m.started >= s.warm && s.now <= s.end {
			m.cpu.add(int64(1000 * (r.used - m.cpuSeenBucket[i]) / (float64(s.now-m.started) * r.allocated)))
		}
		m.cpuSeenBucket[i] = r.used
	}
	m.beginBucket(s)
}

// notePeaks keeps the worst of the buckets that count.
func (m *measurements) notePeaks(s *simulation) {
	if m.started < s.warm || m.started >= s.end {
		return
	}
	m.peakP99 = max(m.peakP99, m.bucket.P99)
	m.peakRIF = max(m.peakRIF, m.bucket.RIFP99)
	picks := 0
	for _, n := range m.bucket.Picks {
		picks += n
	}
	for g := range m.groups {
		m.groups[g].peak = max(m.groups[g].peak, ratio(float64(m.bucket.Picks[g]), float64(picks)))
	}
}

// result sums up.
func (m *measurements) result(s *simulation) Result {
	if m.bucket.Arrivals+m.bucket.Requests > 0 {
		m.endBucket(s)
	}
	seconds := s.cfg.Duration.Seconds()
	requests := int(m.latency.total)
	res := Result{
		Requests: requests,
		Errors: Errors{
			Timeout: m.outcomes[timedOut], Failed: m.outcomes[failed], Refused: m.outcomes[refused],
			Unconnected: m.outcomes[unconnected], Unplaced: m.outcomes[unplaced], Unended: m.outcomes[unended],
		},
		Throughput: float64(requests) / seconds,
		Goodput:    float64(m.outcomes[succeeded]) / seconds,
		Retries:    m.retries,
		Latency:    latencyOf(&m.latency),
		RIF:        levelsOf(&m.rif, 1),
		CPU:        levelsOf(&m.cpu, 1000),
		ProbesLost: m.lost,
		ProbeAge:   latencyOf(&m.ages),
		ProbeLoad:  m.probeLoad(seconds),
		Unwanted:   m.unwanted,
		Overdue:    time.Duration(m.overdue),
		PeakP99:    m.peakP99,
		PeakRIF:    m.peakRIF,
		Choices:    map[string]int{},
		Series:     m.series,
	}
	res.ErrorRate = ratio(float64(res.Errors.Total()), float64(requests))
	if s.cfg.Threshold > 0 {
		res.Late = ratio(float64(m.late), float64(requests))
	}
	res.ProbesPerRequest = ratio(float64(m.probes), float64(m.births))
	for class, n := range m.classes {
		if n > 0 {
			res.Choices[balancer.Class(class).String()] = n
		}
	}
	for g := range m.groups {
		res.Groups = append(res.Groups, m.group(s, g))
	}
	return res
}

// probeLoad returns how many probes come to replicas in a second.
func (m *measurements) probeLoad(seconds float64) Levels {
	const unit = 1000
	var h histogram
	for _, n := range m.probesAt {
		h.add(int64(unit * float64(n) / seconds))
	}
	return levelsOf(&h, unit)
}

func (m *measurements) group(s *simulation, g int) GroupResult {
	seen, c := m.groups[g], s.cfg.Replicas[g]
	allocated := s.replicas[s.groups[g]].allocated * float64(c.Count)
	sampled := float64(max(m.samples-1, 0)) * float64(s.cfg.SampleEvery)
	return GroupResult{
		Name:  c.Name,
		Picks: seen.picks,
		Share: ratio(float64(seen.picks), float64(m.tries)),
		CPU:   ratio(seen.used, sampled*allocated),
		RIF:   ratio(float64(seen.rif), float64(m.samples*c.Count)),
		Hits:  seen.hits,
		Blind: seen.blind,
		Peak:  seen.peak,
	}
}

// ratio returns a/b, and 0 if there is nothing to compare with.
func ratio(a, b float64) float64 {
	if b == 0 {
		return 0
	}
	return a / b
}

func latencyOf(h *histogram) Latency {
	at := func(q float64) time.Duration { return time.Duration(h.quantile(q)) }
	return Latency{P50: at(0.5), P90: at(0.9), P99: at(0.99), P999: at(0.999), Max: time.Duration(h.max), Mean: time.Duration(h.mean())}
}

func levelsOf(h *histogram, unit float64) Levels {
	at := func(q float64) float64 { return float64(h.quantile(q)) / unit }
	return Levels{P50: at(0.5), P90: at(0.9), P99: at(0.99), Mean: h.mean() / unit}
}
