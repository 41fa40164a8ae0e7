package evidence

import (
	"math"

	"github.com/headroom-mesh/headroom/dataplane/sim/scenario"
)

func smallFleet() Evidence {
	robin, prequal, published := "round_robin", "prequal", "prequal as published"
	loss := func(rule, point string) Cell {
		return goodput().under(rule).at(point).over(goodput().under(robin).at(point))
	}
	return Evidence{
		Scenario: "small-fleet",
		Quick:    []scenario.Setting{{Path: "duration", Value: "15s"}},
		Claims: []Claim{
			near(goodput().under(robin).at("normal work"), 5366, 2),
			near(p99().under(robin).at("normal work"), 20.2, 5),
			atLeast(loss(prequal, "normal work"), 0.99, ""),
			atLeast(loss(prequal, "fixed work"), 0.99, ""),
			atLeast(loss(prequal, "exponential work"), 0.99, ""),
			atMost(p99().under(prequal).at("normal work").over(p99().under(robin).at("normal work")), 1, ""),
			atMost(p99().under(prequal).at("exponential work").over(p99().under(robin).at("exponential work")), 1, ""),
			atMost(p99().under(prequal).at("fixed work").over(p99().under(robin).at("fixed work")), 1.1, ""),
			between(loss(published, "fixed work"), 0.75, 0.85, "0.78"),
		},
		Remark: "Where load reports tell of all replicas there is little to probe for: of a hundred requests, one to ten send a probe, " +
			"where each sends three as published. If no request differs from another there is no better order than taking turns; " +
			"only then is the tail of round robin the shorter one.",
	}
}

func hugeRequests() Evidence {
	return Evidence{
		Scenario: "huge-requests",
		Claims: []Claim{
			near(late().under("yarp_p2c"), 17, 15),
			atMost(late().under("late_binding"), 5, "5"),
			between(mean().under("late_binding").over(mean().under("yarp_p2c")), 0.45, 0.6, "almost halved"),
		},
	}
}

func hotCache() Evidence {
	home, bounded := late().under("always home"), late().under("home unless busy")
	return Evidence{
		Scenario: "hot-cache",
		Claims: []Claim{
			atMost(home.at("100"), 1, "keeps up"),
			atLeast(home.at("120"), 20, "does not keep up"),
			atLeast(home.at("140"), 20, "does not keep up"),
			atLeast(late().under("p2c").at("140"), 20, "does not keep up"),
			atMost(bounded.at("120"), 0.1, "keeps up"),
			atMost(bounded.at("140"), 0.1, "keeps up"),
			atMost(late().under("maglev").at("140"), 0.1, ""),
			atMost(late().under("prequal_sync asks all").at("140"), 0.1, ""),
			atLeast(hits().under("prequal_sync asks all").at("140").over(hits().under("home unless busy").at("140")), 1, ""),
		},
		Remark: "Prequal in its synchronous mode finds what replicas have in their caches only if it asks those that have it: three of " +
			"ten, chosen at random, are too few here. Asking all, it has more hits than hashing, as it goes where an item is rather " +
			"than where it should be.",
	}
}

func hiccup() Evidence {
	never := func(c Cell) Claim { return between(c, math.Inf(1), math.Inf(1), "never") }
	naive, budget := recovery().under("naive retries"), recovery().under("budget")
	return Evidence{
		Scenario: "hiccup",
		Claims: []Claim{
			never(naive.at("70 a second 2 s")),
			never(naive.at("70 a second 5 s")),
			never(naive.at("70 a second 10 s")),
			never(naive.at("60 a second 10 s")),
			atMost(naive.at("45 a second 10 s"), 120, "recovers"),
			atMost(budget.at("70 a second 2 s"), 10, "seconds"),
			atMost(budget.at("70 a second 5 s"), 20, "seconds"),
			atMost(budget.at("70 a second 10 s"), 40, "seconds"),
			atMost(recovery().under("prequal").at("70 a second 10 s"), 10, ""),
		},
		Remark: "How long recovery takes with a budget is the backlog over what is left of the capacity: after a stop of 10 s a backlog of " +
			"770 requests, of which 23 a second go. Agents drop requests that nobody waits for any more; then there is none.",
	}
}
