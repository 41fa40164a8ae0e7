package balancer

import (
	"math"
	"slices"
	"testing"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/policy"
	"pgregory.net/rapid"
)

func c3Of(p policy.Policy, n int) (*Balancer, []*Endpoint, *c3) {
	p.Balancer = policy.BalancerC3
	b, es := ruled(p, replicas(n))
	return b, es, b.shards[0].picker.(*c3)
}

// responded notes a response of a replica without a report.
func responded(b *Balancer, now time.Time, e *Endpoint, took time.Duration) {
	Picked{Endpoint: e, shard: b.shards[0], balancer: b}.Responded(now, took, nil)
}

func TestC3Scores(t *testing.T) {
	type replica struct {
		own      int // this agent's requests in flight
		queue    int32
		service  time.Duration
		response time.Duration // 0: unknown
	}
	for _, tt := range []struct {
		name    string
		clients int
		a, b    replica
		want    int // 0: a
	}{
		{"equal queues: 8·10 against 8·20 ms", 1, replica{0, 1, 10 * ms, 0}, replica{0, 1, 20 * ms, 0}, 0},
		{"cubes: 27·10 against 8·30 ms", 1, replica{0, 2, 10 * ms, 0}, replica{0, 1, 30 * ms, 0}, 1},
		{"cubes: 27·10 against 8·34 ms", 1, replica{0, 2, 10 * ms, 0}, replica{0, 1, 34 * ms, 0}, 0},
		{"the way there counts once: 10+70 against 90 ms", 1, replica{0, 0, 10 * ms, 80 * ms}, replica{0, 0, 90 * ms, 90 * ms}, 0},
		{"the way there: 10+85 against 90 ms", 1, replica{0, 0, 10 * ms, 95 * ms}, replica{0, 0, 90 * ms, 90 * ms}, 1},
		{"no way takes less than no time: 30 against 27 ms", 1, replica{0, 0, 30 * ms, 10 * ms}, replica{0, 0, 27 * ms, 27 * ms}, 1},
		{"own in flight stand for those of all clients: 216·10 against 64·30 ms", 5, replica{1, 0, 10 * ms, 0}, replica{0, 3, 30 * ms, 0}, 1},
		{"of fewer clients: 27·10 against 64·30 ms", 2, replica{1, 0, 10 * ms, 0}, replica{0, 3, 30 * ms, 0}, 0},
	} {
		p := policy.Default()
		p.C3.Clients = tt.clients
		b, es, _ := c3Of(p, 100)
		for i, r := range []replica{tt.a, tt.b} {
			hold(es[i], r.own)
			b.Probed(start, 0, es[i], known(r.queue, r.service))
			if r.response > 0 {
				responded(b, start, es[i], r.response)
			}
		}
		if got := pick(t, b, start); got.Endpoint != es[tt.want] || got.Class != Ruled {
			t.Errorf("%s: picked %s, class %v; want %s", tt.name, got.Endpoint.ID, got.Class, es[tt.want].ID)
		}
	}
}

const ms = time.Millisecond

// Whatever an agent hears, the score is that of the formula over plain averages.
func TestC3AgreesWithModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := policy.Default()
		p.C3.Clients = rapid.IntRange(1, 200).Draw(t, "n")
		p.C3.Smoothing = rapid.SampledFrom([]float64{0, 0.5, 0.9, 0.999}).Draw(t, "smoothing")
		b, es, c := c3Of(p, 100)
		var response, service, queue []float64
		e := es[0]
		for range rapid.IntRange(1, 60).Draw(t, "events") {
			v := rapid.IntRange(0, 200).Draw(t, "value")
			took := time.Duration(v) * ms
			switch rapid.IntRange(0, 4).Draw(t, "event") {
			case 0:
				b.Probed(start, 0, e, known(int32(v), took))
				queue, service = append(queue, float64(v)), append(service, float64(took))
			case 1:
				b.Probed(start, 0, e, load.Report{RIF: int32(v)})
				queue = append(queue, float64(v))
			case 2:
				responded(b, start, e, took)
				response = append(response, float64(took))
			case 3:
				Picked{Endpoint: e, shard: b.shards[0], balancer: b}.Responded(start, took, new(known(int32(v), took)))
				response, queue, service = append(response, float64(took)), append(queue, float64(v)), append(service, float64(took))
			case 4:
				hold(e, 1)
			}
		}
		const assumed = 123
		s, known := plainAverage(service, p.C3.Smoothing)
		if !known {
			s = assumed
		}
		r, _ := plainAverage(response, p.C3.Smoothing)
		q, _ := plainAverage(queue, p.C3.Smoothing)
		q += 1 + float64(e.RIF()*p.C3.Clients)
		want := math.Max(r-s, 0) + math.Pow(q, 3)*s
		if got := c.psi(c.pooled(seat{e, 0, 1}), 7, assumed); math.Abs(got-want) > 1e-9*want {
			t.Fatalf("got Ψ %v; want %v", got, want)
		}
	})
}

// plainAverage weighs what was before by smoothing; among the first, all weigh the same.
func plainAverage(values []float64, smoothing float64) (average float64, known bool) {
	for i, v := range values {
		kept := min(float64(i)/float64(i+1), smoothing)
		average = kept*average + (1-kept)*v
	}
	return average, len(values) > 0
}

// A replica that has not told a latency is tried by one request at a time, as under Prequal.
func TestC3TriesNewReplicas(t *testing.T) {
	b, es, _ := c3Of(policy.Default(), 100)
	b.Probed(start, 0, es[0], known(0, 10*ms))
	b.Probed(start, 0, es[1], known(0, 20*ms))
	b.Probed(start, 0, es[2], load.Report{RIF: 1}) // new, and busy
	if got := b.mustPick(start); got != es[0] {
		t.Errorf("picked %s; want the fast one", got.ID)
	}
	b.Probed(start, 0, es[3], load.Report{}) // new, and idle
	b.Probed(start, 0, es[4], known(0, 10*ms))
	b.Probed(start, 0, es[4], known(1, 10*ms))
	if got := b.mustPick(start); got != es[3] {
		t.Errorf("picked %s; want the new one", got.ID)
	}
}

// A replica of weight 2 bears twice the requests.
func TestC3HeedsWeights(t *testing.T) {
	for heavy, want := range map[int32]int{3: 1, 5: 0} {
		records := replicas(100)
		records[1].Weight = 2
		b, es := ruled(defaults(policy.BalancerC3), records)
		at := slices.IndexFunc(es, func(e *Endpoint) bool { return e.ID == records[1].ID() })
		light := es[(at+1)%100]
		b.Probed(start, 0, light, known(2, 10*ms))
		b.Probed(start, 0, es[at], known(heavy, 10*ms))
		if got := b.mustPick(start); got != []*Endpoint{light, es[at]}[want] {
			t.Errorf("RIF 2 at weight 1, %d at weight 2: picked %s", heavy, got.ID)
		}
	}
}

// Replicas that fail at once look idle. Failures count as slow responses, whether the report says so or the agent saw it.
func TestC3AvoidsFailingReplicas(t *testing.T) {
	for _, reports := range []bool{true, false} {
		b, es, _ := c3Of(policy.Default(), 100)
		latency := func(i int) time.Duration { return time.Duration(40+i) * ms } // the first is the fastest
		for i := range 3 {
			b.Probed(start, 0, es[i], known(0, latency(i)))
			responded(b, start, es[i], latency(i))
		}
		told := latency(0)
		if reports {
			told = load.FailurePenalty
		}
		for range 3 {
			responded(b, start, es[0], ms)
			reported(b, start, es[0], known(0, told))
			if !reports {
				Picked{Endpoint: es[0], shard: b.shards[0], balancer: b}.Done(start, Failed)
				hold(es[0], 1) // Done counted out one that was never counted in
			}
		}
		for i := range 3 {
			b.Probed(start, 0, es[i], known(0, told))
			told = latency(i + 1)
		}
		if got := b.mustPick(start); got == es[0] {
			t.Errorf("reports tell: %v: picked the one that fails", reports)
		}
	}
}

// n is estimated from all requests in flight and this agent's own.
func TestC3EstimatesTheClients(t *testing.T) {
	for _, clients := range []float64{0.1, 1, 10, 250} {
		b, es, c := c3Of(policy.Default(), 50)
		const own = 8
		total := clients * own
		b.shards[0].inFlight.Add(own)
		for i := range 1000 {
			now := after(time.Duration(i) * 100 * ms)
			b.Idle(now, 0, nil)
			rif := math.Floor(total/50 + float64(i*37%100)/100) // on average total/50, in whole numbers
			b.Probed(now, 0, es[i%50], known(int32(rif), 10*ms))
		}
		if want := max(clients, 1); c.clients < 1 || math.Abs(c.clients-want) > want/10 {
			t.Errorf("got n = %.2f; want %v", c.clients, want)
		}
	}
	b, _, c := c3Of(policy.Default(), 50)
	b.Idle(after(time.Hour), 0, nil)
	if c.clients != 1 {
		t.Errorf("nothing known: got n = %v; want 1", c.clients)
	}
}

// An agent may be told of replicas that have left.
func TestC3IgnoresStrangers(t *testing.T) {
	b, es, c := c3Of(policy.Default(), 3)
	b.fleet.Update(start, replicas(2), policy.Scope{})
	pick(t, b, start) // sees the new fleet
	reported(b, start, es[2], known(0, ms))
	responded(b, start, es[2], ms)
	Picked{Endpoint: es[2], shard: b.shards[0], balancer: b}.Done(start, Failed)
	if len(c.estimates) != 2 {
		t.Errorf("knows %d replicas; want the two that are there", len(c.estimates))
	}
}
