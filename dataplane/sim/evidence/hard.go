package evidence

import "math"

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
