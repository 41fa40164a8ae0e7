package balancer

import (
	"math/rand/v2"
	"slices"
	"time"

	"github.com/headroom-mesh/headroom/policy"
)

// lateBinding lets a request join the lines of d replicas chosen at random, d = 2 by default, and places it on the first
// that has a slot free for it; the caller then leaves the other lines (Ousterhout et al., "Sparrow: Distributed, Low Latency
// Scheduling", SOSP '13, late binding; Dean and Barroso, "The Tail at Scale", CACM 2013, tied requests). The replica, not the
// agent's guess of its load, decides which is free first.
//
// A replica serves Slots requests at once, 1 by default; the number should be what it can work on without slowing down.
// Use it where requests take long and differ much in length, so that one stuck behind another is what makes latency. Not
// for short requests: a free replica idles for a round trip before each.
type lateBinding struct {
	lines int // d
	rng   *rand.Rand
	set   *Set
}

func newLateBinding(p policy.Policy, rng *rand.Rand) *lateBinding {
	return &lateBinding{lines: p.LateBinding.Reservations, rng: rng}
}

func (l *lateBinding) Update(_ time.Time, set *Set) { l.set = set }

// Pick places a request for which no slot got free in time: on the less loaded of two by this agent's own requests.
func (l *lateBinding) Pick(time.Time, Request) (*Endpoint, Class) {
	a, b := l.set.pair(l.rng)
	if b.less(a) {
		return b.Endpoint, Fallback
	}
	return a.Endpoint, Fallback
}

// Ask asks even the only replica: its slots are for the requests of all agents, some of which may have others to choose from.
func (l *lateBinding) Ask(_ time.Time, _ Request, dst []*Endpoint) ([]*Endpoint, int) {
	targets := l.set.sample(l.rng, l.lines, dst)
	return targets[:len(dst)+distinct(targets[len(dst):])], 1
}

func (l *lateBinding) Choose(_ time.Time, _ Request, answers []Answer) (*Endpoint, Class) {
	return answers[0].Endpoint, Ruled
}

// distinct moves the first of each replica to the front, in their order, and returns how many those are.
func distinct(es []*Endpoint) int {
	n := 0
	for _, e := range es {
		if !slices.Contains(es[:n], e) {
			es[n] = e
			n++
		}
	}
	return n
}
