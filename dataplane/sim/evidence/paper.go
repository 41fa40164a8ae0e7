package evidence

import (
	"github.com/headroom-mesh/headroom/dataplane/sim/scenario"
)

// limit is the time limit of the paper's testbed, in milliseconds.
const limit = 5000

// quick are settings that make a scenario of the paper faster to play.
func quick(warmup, duration string) []scenario.Setting {
	return []scenario.Setting{{Path: "warmup", Value: warmup}, {Path: "duration", Value: duration}}
}

// ramp is figure 6 of the paper.
func ramp() Evidence {
	wrr, prequal := "weighted_round_robin", "prequal"
	var claims []Claim
	for _, load := range []string{"0.75", "0.83", "0.93"} {
		for _, rule := range []string{wrr, prequal} {
			claims = append(claims, near(p50().under(rule).at(load), 80, 5), near(p90().under(rule).at(load), 182, 5),
				near(p99().under(rule).at(load), 265, 12))
		}
	}
	claims = append(claims, near(p999().under(wrr).at("0.75"), 325, 5), near(p999().under(prequal).at("0.93"), 325, 12))
	for _, load := range []string{"1.03", "1.14", "1.27", "1.41", "1.57", "1.74"} {
		claims = append(claims, timesOut(p999().under(wrr).at(load), limit))
	}
	for _, load := range []string{"0.75", "0.83", "0.93", "1.03", "1.14", "1.27", "1.41", "1.57", "1.74"} {
		claims = append(claims, between(failures().under(prequal).at(load), 0, 0, "0"))
		claims = append(claims, between(failures().under("headroom").at(load), 0, 0, ""))
	}
	claims = append(claims,
		timesOut(p99().under(wrr).at("1.27"), limit),
		timesOut(p90().under(wrr).at("1.57"), limit),
		atLeast(failures().under(wrr).at("1.74"), 25, "over 25"),
		near(p99().under(wrr).at("1.03"), 335, 20).missed(missedStuck),
		near(p90().under(wrr).at("1.27"), 203, 20).missed(missedStuck),
		near(p50().under(wrr).at("1.57"), 111, 20).missed(missedStuck),
		near(p50().under(wrr).at("1.74"), 150, 20).missed(missedStuck),
		near(p999().under(prequal).at("1.03"), 325, 20),
		near(p999().under(prequal).at("1.14"), 325, 20),
		near(p999().under(prequal).at("1.27"), 350, 30),
		near(p999().under(prequal).at("1.74"), 700, 20),
		atMost(p999().under("headroom").at("1.74"), 700, ""),
	)
	return Evidence{Scenario: "ramp", Quick: quick("40s", "15s"), Claims: claims}
}

const missedStuck = "Under weighted round robin more of the requests are stuck here than in the source once replicas are short of " +
	"capacity, and the quantile falls among those. The machines are calibrated to where the time limit is first hit."

// nineRules is figure 7 of the paper.
func nineRules() Evidence {
	var claims []Claim
	for _, rule := range nineRulesTable() {
		for i, point := range []string{"70%", "90%"} {
			claims = append(claims, rule.cell(p90(), point, 2*i), rule.cell(p99(), point, 2*i+1))
		}
	}
	claims = append(claims, inOrder("70%", missedOrder70, "prequal", "c3", "weighted_round_robin", "p2c", "linear", "least_loaded")...)
	claims = append(claims, inOrder("90%", "", "prequal", "c3", "linear", "yarp_p2c", "p2c", "least_loaded", "weighted_round_robin")...)
	return Evidence{
		Scenario: "nine-rules",
		Quick:    quick("40s", "20s"),
		Claims:   append(claims, beyond("headroom", "prequal", "90%")...),
		Remark: "Cells of a second and more in the source are queues on their way to the time limit. How long they have got depends on how " +
			"long antagonists stay; only the order of the rules is held against the source there.",
	}
}

// published is a row of figure 7: p90 and p99 at 70 %, then at 90 %, in milliseconds.
type published struct {
	rule   string
	ms     [4]float64
	missed [4]string
}

func nineRulesTable() []published {
	return []published{
		{rule: "round_robin", ms: [4]float64{4984, limit, limit, limit}},
		{rule: "random", ms: [4]float64{294, limit, limit, limit}, missed: [4]string{"Round robin and random send every replica as much, " +
			"and differ here by little. In the source they differ by 17 times (4984 and 294 ms), as they met other antagonists. Here " +
			"both lie between."}},
		{rule: "weighted_round_robin", ms: [4]float64{173, 314, 1667, limit}},
		{rule: "least_loaded", ms: [4]float64{343, 1804, 940, 2654}},
		{rule: "p2c", ms: [4]float64{224, 569, 623, 1918}},
		{rule: "yarp_p2c", ms: [4]float64{210, 2642, 213, 1169}},
		{rule: "linear", ms: [4]float64{206, 698, 245, 1036}, missed: [4]string{1: missedLinear, 2: missedLinear}},
		{rule: "c3", ms: [4]float64{161, 299, 164, 304}},
		{rule: "prequal", ms: [4]float64{149, 281, 152, 286}},
	}
}

const (
	missedLinear = "With α = 75 ms and some eight requests in flight the term of RIF is six times that of latency, so that the rule goes by " +
		"RIF, and does as well as that. Why latency hurts more in the source it does not say."
	missedOrder70 = "See linear."
)

// cell is a claim of one cell: within a fifth where it is below a second, a timeout where it is one.
func (p published) cell(f Figure, point string, i int) Claim {
	var c Claim
	switch cell := f.under(p.rule).at(point); {
	case p.ms[i] == limit:
		c = timesOut(cell, limit)
	case p.ms[i] < 1000:
		c = near(cell, p.ms[i], 20)
	default:
		c = atLeast(cell, 0, cell.Format(p.ms[i]))
	}
	if p.missed[i] != "" {
		c = c.missed(p.missed[i])
	}
	return c
}

// inOrder wants the p99 of rules to rise in the order of the source. Only linear may be missed.
func inOrder(point, missed string, rules ...string) []Claim {
	var claims []Claim
	for i := 1; i < len(rules); i++ {
		better, worse := p99().under(rules[i-1]).at(point), p99().under(rules[i]).at(point)
		c := atLeast(worse.over(better), 1, "above 1")
		if missed != "" && rules[i] == "linear" {
			c = c.missed(missed)
		}
		claims = append(claims, c)
	}
	return claims
}

// beyond is what the defaults of Headroom must show at a point: no worse than the rule as published, with one probe a
// request instead of three, and near an oracle.
func beyond(defaults, published, point string) []Claim {
	ours := p99().under(defaults).at(point)
	return []Claim{
		atMost(ours.over(p99().under(published).at(point)), 1, ""),
		atMost(ours.over(p99().under("oracle").at(point)), 1.15, ""),
		atMost(probes().under(defaults).at(point), 1, ""),
	}
}

// probeRate is figure 8 of the paper.
func probeRate() Evidence {
	at := func(rate string) Cell { return p99().under("prequal").at(rate) }
	return Evidence{
		Scenario: "probe-rate",
		Quick:    quick("10s", "10s"),
		Claims: []Claim{
			atMost(at("1.414").over(at("4")), 1.1, "1.0"),
			atMost(at("1").over(at("2")), 1.2, "1.03"),
			atLeast(at("0.5").over(at("1")), 1.03, "1.04"),
			atLeast(at("0.5").over(at("2")), 1.06, "1.07"),
			between(failures().under("prequal").at("0.5"), 0, 0, "0"),
		},
		Remark: "The source gives no table; its figures are read off a plot.",
	}
}

// qRIF is figure 9 of the paper.
func qRIF() Evidence {
	at := func(f Figure, q string) Cell { return f.under("prequal").at(q) }
	const early = "The fall comes before 1 here, where hardly any replica is hot. A sixth of the requests are no work at all and end at once " +
		"however busy the replica is, so that the median latency of those that ended makes an overloaded replica look fast. With " +
		"`latency: mean` there is no fall at all."
	return Evidence{
		Scenario: "q-rif",
		Quick:    quick("8s", "8s"),
		Claims: []Claim{
			near(at(p50(), "0"), 34.5, 10), near(at(p90(), "0"), 93, 10), near(at(p99(), "0"), 162, 10), near(at(p999(), "0"), 210, 10),
			between(at(p99(), "0.59").over(at(p99(), "0")), 0.85, 1.02, "about 1"),
			atMost(at(p99(), "0.9").over(at(p99(), "0")), 0.95, "0.9"),
			near(at(p90(), "0.9"), 75, 10),
			near(at(p99(), "0.99"), 142, 20).missed(early),
			atLeast(at(p99(), "1").over(at(p99(), "0")), 1.1, "1.1"),
			atLeast(at(p999(), "1").over(at(p999(), "0")), 1.6, "1.6 to 2.4"),
			atMost(p99().under("prequal mean").at("0.99").over(p99().under("prequal mean").at("0")), 0.88, ""),
			atMost(p99().under("prequal mean").at("1").over(p99().under("prequal mean").at("0")), 0.88, ""),
		},
	}
}

// linear is appendix A of the paper.
func linear() Evidence {
	at := func(lambda string) Cell { return p99().under("linear").at(lambda) }
	var claims []Claim
	for _, lambda := range []string{"0", "0.5", "0.769", "0.785", "0.801", "0.817", "0.834", "0.868", "0.886", "0.904", "0.922", "0.941", "0.96", "0.98"} {
		claims = append(claims, atMost(at("1").over(at(lambda)), 1.03, "below 1"))
	}
	claims = append(claims,
		atLeast(at("0").over(at("1")), 1.1, "poor"),
		atMost(p99().under("prequal").at("1").over(at("1")), 1, "below 1"),
		atMost(p90().under("prequal").at("1").over(p90().under("linear").at("1")), 1, "below 1"),
	)
	return Evidence{
		Scenario: "linear",
		Quick:    quick("10s", "8s"),
		Claims:   claims,
		Remark: "From λ = 0.5 on nothing is left to gain here: with α = 75 ms and some eight requests in flight, RIF outweighs latency by far. " +
			"In the source every step up to 1 gains a little.",
	}
}

// antagonists is the case of the paper's §2.
func antagonists() Evidence {
	claims := []Claim{
		atMost(p999().under("weighted_round_robin").at("40%").over(p999().under("prequal").at("40%")), 1.05, "no difference"),
		atLeast(p99().under("weighted_round_robin").at("110%").over(p99().under("prequal").at("110%")), 2, "2 % of requests suffer"),
		between(failures().under("prequal").at("140%"), 0, 0, ""),
		atLeast(p99().under("weighted_round_robin").at("140%").over(p99().under("headroom").at("140%")), 5, ""),
	}
	for _, load := range []string{"90%", "110%", "140%"} {
		claims = append(claims, beyond("headroom", "prequal", load)...)
	}
	return Evidence{Scenario: "antagonists", Quick: quick("20s", "15s"), Claims: claims}
}
