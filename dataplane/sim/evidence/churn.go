package evidence

import "github.com/headroom-mesh/headroom/dataplane/sim/scenario"

func scaleUp() Evidence {
	const fair = 100. / 21
	return Evidence{
		Scenario: "scale-up",
		Quick:    []scenario.Setting{{Path: "rules", Value: `[{"name": "round_robin"}, {"name": "least_loaded"}, {"name": "p2c"}, {"name": "prequal"}]`}},
		Claims: []Claim{
			atMost(peakShare(1, "the new one").under("prequal"), 1.5*fair, ""),
			atMost(blind(1, "the new one").under("prequal"), 50, ""),
			atMost(peakP99().under("prequal").over(p99().under("prequal")), 1.25, ""),
			atLeast(peakP99().under("round_robin").over(peakP99().under("prequal")), 10, ""),
			atLeast(peakP99().under("least_loaded").over(peakP99().under("prequal")), 2, ""),
			atLeast(peakP99().under("p2c").over(peakP99().under("prequal")), 2, ""),
			atMost(failures().under("prequal"), 0, ""),
		},
		Remark: "A fair share of the requests would be 4.76 %. Prequal finds out with one request that the new replica is slow, and " +
			"leaves it alone. It looks again half a minute after the last answer, so a replica that was slow is out of use for a time " +
			"after it has warmed up. One that is as fast as the others from the start has its share after three seconds.",
	}
}

func restart() Evidence {
	e := Evidence{
		Scenario: "restart",
		Quick: []scenario.Setting{
			{Path: "rules", Value: `[{"name": "prequal"}]`}, {Path: "replicas[0].count", Value: "32"}, {Path: "agents[0].count", Value: "32"},
		},
		Remark: "One probe of each of two replicas is knowledge enough to begin with, and no two agents have the same.",
	}
	for _, who := range []string{"all", "one by one", "all every 5s"} {
		e.Claims = append(e.Claims,
			atMost(peakP99().under("prequal").at(who).over(peakP99().under("prequal").at("nobody")), 1.15, ""),
			atMost(peakRIF().under("prequal").at(who).over(peakRIF().under("prequal").at("nobody")), 1.25, ""),
		)
	}
	return e
}

func drain() Evidence {
	const interval, news = 500, 2000 // of idle probes, and until the registry tells
	return Evidence{
		Scenario: "drain",
		Quick:    []scenario.Setting{{Path: "rules", Value: `[{"name": "round_robin"}, {"name": "prequal_sync"}, {"name": "prequal"}]`}},
		Claims: []Claim{
			atMost(overdue().under("prequal").at("0.6"), interval, ""),
			atMost(overdue().under("prequal").at("0.05"), news, ""),
			atMost(overdue().under("prequal_sync").at("0.6"), interval, ""),
			atMost(overdue().under("prequal_sync").at("0.05"), interval, ""),
			atLeast(overdue().under("round_robin").at("0.6"), news, ""),
			atMost(failures().under("prequal").at("0.6"), 0, ""),
			atMost(failures().under("prequal").at("0.05"), 0, ""),
			atMost(failures().under("round_robin").at("0.6"), 0, ""),
		},
		Remark: "At 0.6 an agent has 38 requests a second, and a request comes to a draining replica no later than the interval of " +
			"idle probes after it began to drain. At 0.05 it has 3, and may go by a probe that is up to a second old; then it is the " +
			"age of probes that bounds how late a request may come. None of these requests fails: a draining replica serves what comes.",
	}
}

// peakP99 and peakRIF are those of the worst second.
func peakP99() Figure {
	return Figure{"p99 of the worst second", "ms", func(r scenario.Row) float64 { return r.PeakP99MS }}
}

func peakRIF() Figure {
	return Figure{"RIF p99 of the worst second", "", func(r scenario.Row) float64 { return r.PeakRIFP99 }}
}

// peakShare is the part of the tries that go to a group, in the second with most.
func peakShare(group int, name string) Figure {
	return Figure{"tries sent to " + name + " in a second, at most", "%", func(r scenario.Row) float64 { return 100 * r.Groups[group].Peak }}
}

// blind are the tries that were sent to a group before there was any answer from it.
func blind(group int, name string) Figure {
	return Figure{"tries sent to " + name + " before its first answer", "", func(r scenario.Row) float64 { return r.Groups[group].Blind }}
}

// overdue is how long after a replica stopped taking requests the last one was sent there.
func overdue() Figure {
	return Figure{"last request to a draining replica", "ms", func(r scenario.Row) float64 { return r.OverdueMS }}
}
