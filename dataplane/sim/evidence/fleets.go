package evidence

import (
	"github.com/headroom-mesh/headroom/dataplane/sim/scenario"
)

func fastSlow() Evidence {
	return Evidence{
		Scenario: "fast-slow",
		Quick:    []scenario.Setting{{Path: "duration", Value: "40s"}},
		Claims: append(beyond("prequal", "as published", ""),
			near(p50().under("prequal"), 53, 2),
			near(p99().under("round_robin"), 807.3, 5),
			near(p99().under("least_loaded"), 802.8, 5),
			atMost(p99().under("prequal"), 94.2, "94.2"),
			atLeast(p99().under("round_robin").over(p99().under("prequal")), 8.57, "8.57"),
			near(share(1, "the slow pair").under("round_robin"), 12.5, 1),
			between(share(1, "the slow pair").under("least_loaded"), 1, 1.7, ""),
			atMost(share(1, "the slow pair").under("prequal"), 0.04, "below 0.04"),
		),
	}
}

func fastSlowRamp() Evidence {
	return Evidence{
		Scenario: "fast-slow-ramp",
		Quick:    []scenario.Setting{{Path: "load.stages[0].lasts", Value: "40s"}},
		Claims: []Claim{
			near(p99().under("round_robin"), 831.6, 5),
			atMost(p99().under("prequal"), 123.4, "123"),
			atLeast(p99().under("round_robin").over(p99().under("prequal")), 6.74, "6.74"),
		},
	}
}

func stall() Evidence {
	return Evidence{
		Scenario: "stall",
		Claims: []Claim{
			between(failures().under("round_robin"), 4, 6, "5"),
			between(failures().under("least_loaded"), 0.5, 1.5, "1"),
			between(failures().under("p2c"), 0.5, 1.5, ""),
			between(failures().under("peak_ewma"), 0.05, 0.2, "0.1"),
			atMost(failures().under("prequal").over(failures().under("peak_ewma")), 1.3, ""),
		},
	}
}

func sinkhole() Evidence {
	return Evidence{
		Scenario: "sinkhole",
		Quick:    []scenario.Setting{{Path: "duration", Value: "20s"}},
		Claims: []Claim{
			atMost(failures().under("prequal").over(failures().under("prequal without aversion")), 0.15, "0.15"),
		},
	}
}
