package evidence

import "github.com/headroom-mesh/headroom/dataplane/sim/scenario"

func thousands() Evidence {
	const small, large, rest = "100 x 200", "5000 x 10000", "5000 x 10000 at rest"
	return Evidence{
		Scenario: "thousands",
		Quick: []scenario.Setting{
			{Path: "rules", Value: `[{"name": "prequal"}]`},
			{Path: "warmup", Value: "1500ms"},
			{Path: "sweep", Value: `{"points": [
				{"name": "100 x 200", "set": {"duration": "10s"}},
				{"name": "5000 x 10000", "set": {"agents[0].count": 5000, "replicas[0].count": 10000, "duration": "500ms"}},
				{"name": "5000 x 10000 at rest", "set": {"agents[0].count": 5000, "replicas[0].count": 10000, "duration": "500ms", "load.utilization": 0.01}}
			]}`},
		},
		Claims: []Claim{
			between(p99().under("prequal").at(large).over(p99().under("prequal").at(small)), 0.9, 1.1, ""),
			between(probesPerReplica().under("prequal").at(small), 6.5, 7.5, ""),
			between(probesPerReplica().under("prequal").at(large), 6.5, 7.5, ""),
			atMost(probesPerReplica().under("prequal").at(rest), 3, ""),
			between(probeAge().under("prequal").at(large).over(probeAge().under("prequal").at(small)), 0.7, 1.4, ""),
		},
		Remark: "Probes are sent on account of requests, so a replica gets as many as it gets requests, however many agents there are. " +
			"At rest it is the idle probes of the agents that use it.",
	}
}

// probesPerReplica is the probes that come to a replica in a second.
func probesPerReplica() Figure {
	return Figure{"probes of a replica", "a second", func(r scenario.Row) float64 { return r.ProbesPerReplica }}
}

// probeAge is how old the probes are that choices go by.
func probeAge() Figure {
	return Figure{"age of the probes that choices go by", "ms", func(r scenario.Row) float64 { return r.ProbeAgeMeanMS }}
}
