package evidence

import "github.com/headroom-mesh/headroom/dataplane/sim/scenario"

// beyondPaper is what the steps from Prequal as published to the defaults of Headroom are good for.
func beyondPaper() Evidence {
	const published, defaults = "published with 3 probes", "defaults"
	against := func(rule, other, point string) Cell {
		return p99().under(rule).at(point).over(p99().under(other).at(point))
	}
	var claims []Claim
	for _, point := range []string{"two speeds", "moving", "overload"} {
		claims = append(claims,
			atMost(against(defaults, published, point), 0.8, ""),
			atMost(against(defaults, "oracle", point), 1.15, ""),
			atMost(against("mean", "published with 1 probe", point), 0.95, ""),
			atMost(probes().under(defaults).at(point), 1, ""),
		)
	}
	return Evidence{
		Scenario: "beyond-paper",
		Quick: append(quick("8s", "10s"),
			scenario.Setting{Path: "replicas[0].count", Value: "25"},
			scenario.Setting{Path: "replicas[1].count", Value: "25"},
			scenario.Setting{Path: "agents[0].count", Value: "50"}),
		Claims: append(claims, atMost(against("mean and better of two", "mean", "two speeds"), 0.9, "")),
		Remark: "The oracle is greedy: it picks the least expected time for the present request, and sees no antagonist come.",
	}
}
